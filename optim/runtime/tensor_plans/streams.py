"""Random numbers under tensor parallelism: the same on all ranks where activations are, different where those are cut.

PyTorch's dropout draws from a device's default generator. Ranks of one tensor group start from the same state, and leave it
alike: a region that is cut draws one number, goes on from that and the rank's own place, and puts the state back (the idea
of Megatron's tracker, Shoeybi et al. 2019, appendix B.2). Nothing is kept between regions, so that whoever restores the
generator, as recomputation and checkpoints do, has the same numbers again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["Streams", "drops", "same_streams"]

_GOLDEN = 0x9E3779B97F4A7C15  # spreads neighbouring places over all seeds
_OF_ATTENTION = ("dropout", "attention_dropout", "attn_pdrop", "dropout_p")


class Streams:
    """The default generators, of the processor and of ``device``, while a region that is cut computes."""

    def __init__(self, device: torch.device, place: int) -> None:
        self._place = place
        self._device: Any = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        )
        self._before: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def begin(self) -> None:
        """From here on numbers are this rank's own. A region that never ended, as recomputation leaves it, is forgotten."""
        seed = int(torch.randint(2**62, ()))
        self._before = (
            torch.get_rng_state(),
            None if self._device is None else self._device.get_state(),
        )
        own = (seed + _GOLDEN * (self._place + 1)) % 2**63
        torch.default_generator.manual_seed(own)
        if self._device is not None:
            self._device.manual_seed(own)

    def end(self) -> None:
        """From here on they are the group's."""
        before, self._before = self._before, None
        if before is None:
            return
        torch.set_rng_state(before[0])
        if before[1] is not None:
            self._device.set_state(before[1])


def drops(model: nn.Module) -> bool:
    """Whether anything in the model says that it drops: a dropout layer, or a number that attention is given."""
    for module in model.modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            return True
        for holder in (module, getattr(module, "config", None)):
            for name in _OF_ATTENTION:
                value = getattr(holder, name, None)
                if isinstance(value, float) and value > 0:
                    return True
    return False


def same_streams(device: torch.device, group: distributed.ProcessGroup) -> None:
    """Every rank of ``group`` goes on with the random numbers of its first. Collective."""
    first = distributed.get_global_rank(group, 0)
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    for state in states:
        carried = state.to(device)
        distributed.broadcast(carried, first, group=group)
        state.copy_(carried.cpu())
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
