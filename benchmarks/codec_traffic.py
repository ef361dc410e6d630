"""Bytes of memory that each code of gradients reads and writes, an element: what the planner takes of codes on devices.

    python benchmarks/codec_traffic.py [--ranks N]

Every operator of a rank's encoding, exchange (with itself), averaging and decoding is counted by the bytes of its inputs and
outputs; views move nothing. Rows hold the second of two means, when residuals exist.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trine.optim.config import CODECS, Communication
from trine.optim.runtime.exchange.break_even import measure_codec

__all__ = ["bytes_an_element", "main"]

#: The gradients are one matrix of so many rows and columns.
SIDE = 1024


#: Views that are not declared as such, and memory that is only asked for.
_MOVE_NOTHING = (
    torch.ops.aten.detach,
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
)


class Counted(TorchDispatchMode):
    """Bytes that operators read and write while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not (func.is_view or func.overloadpacket in _MOVE_NOTHING):
            read = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
            # What is written where it was read is counted twice, as it is moved.
            written = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
            self.moved_bytes += sum(_bytes(each) for each in (*read.values(), *written))
        return found


def _bytes(tensor: torch.Tensor) -> int:
    """Of the elements that it shows, a broadcast one once."""
    shown = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        shown *= size if stride else 1
    return shown * tensor.element_size()


def bytes_an_element(name: str, ranks: int = 8) -> float:
    """Of one mean over ``ranks`` replicas, after the first."""
    sample = {"weight": torch.zeros(SIDE, SIDE)}
    moved = []
    for repeats in (1, 2):
        with Counted() as counted:
            elements = measure_codec(
                Communication(compression=name), sample, ranks, torch.device("cpu"), repeats
            )[2]
        moved.append(counted.moved_bytes / elements)
    # Of both the same: drawing the sample. Of each repetition: its copy, which is not the code's.
    return moved[1] - moved[0] - 8


def main(argv: list[str] | None = None) -> int:
    """Print a line a code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args(argv)
    print(f"{'code':12}bytes an element, {options.ranks} ranks")
    for name in CODECS:
        print(f"{name:12}{bytes_an_element(name, options.ranks):6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
