"""How much faster does the runtime train? The sample GPT on two CPU ranks, the loop that people write first beside it.

    python benchmarks/speed.py                    about eight minutes
    python benchmarks/speed.py --seconds 60       shorter, fewer rounds

12.8 million parameters, 4 documents of real text a rank and step, up to 512 tokens each. The loop that people write first:
fp32, attention by hand, padded batches, PyTorch's default AdamW and buckets, batches made in the training process. The
techniques are added one by one, so that each line's share is what it gains on top of those above it. All variants train
in turn, in an order that is drawn anew each round, on the same documents: each ratio is of steps taken within seconds of each
other, and what is printed is the median over rounds and their quartiles, of the slower rank. A second table does the
same against a loop that has PyTorch's fused attention and no padding already: windows of 512 tokens.

What made steps slower is printed too, and left out of the lines below it. Last: what the engine itself costs, with
a configuration that changes nothing, beside the same loop written by hand.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from spawned_ranks import in_one_line, on_ranks

__all__ = ["main"]

SHAPE = {"layers": 4, "hidden": 512, "heads": 8, "sequence": 512}
DOCUMENTS = 4
#: What is added, in this order, to what has been kept before it.
LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16 autocast", {"precision.dtype": "bf16"}),
    ("fused attention", {"compute.attention": "sdpa"}),
    ("packing", {"data.packing": True, "data.packed_length": 512}),
    ("fused optimizer", {"compute.fuse": ["optimizer"]}),
    ("compiled blocks", {"compute.compile": "blocks"}),
)
#: A technique stays when steps with it are no slower, within noise.
NO_SLOWER = 1.005


def batches(packable: bool, rank: int, ranks: int) -> Any:
    """A loader of documents, padded as people collate them; or of windows that need no padding."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    from trine.samples.text import SourceDocuments, SourceText, pad_documents, standard_library

    if packable:
        data: Any = SourceDocuments(standard_library(), SHAPE["sequence"])
        collate: Any = pad_documents
    else:
        data, collate = SourceText(standard_library(), SHAPE["sequence"]), None
    sampler: Any = DistributedSampler(data, ranks, rank, seed=0)
    return DataLoader(data, batch_size=DOCUMENTS, sampler=sampler, drop_last=True, collate_fn=collate)


def endless(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """One epoch after the other."""
    while True:
        yield from make()


def model_and_optimizer(attention: str) -> tuple[Any, Any]:
    """The same for every variant."""
    import torch

    from trine.samples.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE, attention=attention))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def by_hand(attention: str, packable: bool, rank: int, ranks: int) -> Callable[[], None]:
    """A step of the loop that people write."""
    from torch.nn.parallel import DistributedDataParallel

    from trine.samples.gpt import loss_of

    model, optimizer = model_and_optimizer(attention)
    replica = DistributedDataParallel(model)
    loader = endless(lambda: iter(batches(packable, rank, ranks)))

    def step() -> None:
        result = loss_of(replica, next(loader))
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_engine(
    changes: Mapping[str, Any], attention: str, packable: bool, rank: int, ranks: int
) -> Callable[[], None]:
    """A step of the engine with a configuration."""
    import trine
    from trine.samples.gpt import loss_of

    model, optimizer = model_and_optimizer(attention)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    loader = endless(lambda: engine.steps(batches(packable, rank, ranks)))
    return lambda: engine.train_step(next(loader)) and None


def climb(rank: int, ranks: int, attention: str, packable: bool, seconds: float) -> dict[str, Any]:
    """Add technique after technique; then all that stayed beside the first loop, in one run."""
    from trine.optim.trials import alternate

    plain = by_hand(attention, packable, rank, ranks)
    kept: dict[str, Any] = {}
    before = plain
    lines = []
    ladder = [(name, keys) for name, keys in LADDER if packable or not set(keys) & SKIPPED_ON_WINDOWS]
    for name, keys in ladder:
        variant = by_engine({**kept, **keys}, attention, packable, rank, ranks)
        times = alternate({"before": before, "with": variant}, seconds / (len(ladder) + 2), warm_up=2)
        ratios = _ratios(times.seconds, "before", "with")
        stays = median(ratios) >= 1 / NO_SLOWER
        lines.append({"name": name, "ratios": ratios, "stays": stays})
        if stays:
            kept, before = {**kept, **keys}, variant
    times = alternate({"first": plain, "best": before}, seconds * 2 / (len(ladder) + 2), warm_up=1)
    return {
        "lines": lines,
        "kept": kept,
        "first_s": times.seconds["first"],
        "best_s": times.seconds["best"],
        "ratios": _ratios(times.seconds, "first", "best"),
    }


#: Windows are of one length, and their loop has the fused attention.
SKIPPED_ON_WINDOWS = {"data.packing", "compute.attention"}


def overhead(rank: int, ranks: int, seconds: float) -> list[float]:
    """The engine that changes nothing beside DistributedDataParallel by hand: ratios of step times by round."""
    from trine.optim.trials import alternate

    hand = by_hand("sdpa", False, rank, ranks)
    engine = by_engine({}, "sdpa", False, rank, ranks)
    times = alternate({"hand": hand, "engine": engine}, seconds, warm_up=2, most_rounds=400)
    return _ratios(times.seconds, "engine", "hand")


def products() -> tuple[float, float]:
    """GFLOP/s of one core in fp32 and in bf16, on products of 1024 by 1024: what low precision can gain on this processor."""
    import torch

    from trine.optim.trials import time_piece

    torch.set_num_threads(1)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
        found.append(2 * 1024**3 / median(time_piece(lambda a=a, b=b: a @ b)) / 1e9)  # type: ignore[misc]
    return found[0], found[1]


def _ratios(seconds: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    return [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]


def _measured(rank: int, ranks: int, seconds: float) -> dict[str, Any]:
    return {
        "documents": climb(rank, ranks, "manual", True, seconds * 0.5),
        "windows": climb(rank, ranks, "sdpa", False, seconds * 0.3),
        "overhead": overhead(rank, ranks, seconds * 0.2),
    }


def _spread(ratios: Sequence[float]) -> str:
    if len(ratios) < 4:
        return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _show(title: str, found: Mapping[str, Any]) -> None:
    print(f"\n{title}")
    for line in found["lines"]:
        said = "" if line["stays"] else "   slower: left out"
        print(f"    + {line['name']:<20} {_spread(line['ratios'])} times{said}")
    first, best = median(found["first_s"]), median(found["best_s"])
    print(
        f"    together                {_spread(found['ratios'])} times: {first * 1e3:.0f} ms a step, then {best * 1e3:.0f}"
    )


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=420, metavar="S", help="of measuring (default: 420)")
    arguments = parser.parse_args(argv)
    # A rank takes the other for its node's, as a launcher tells it.
    timeout_s, local = arguments.seconds * 4 + 600, {"LOCAL_WORLD_SIZE": "2"}
    found = on_ranks(2, _measured, 2, arguments.seconds, timeout_s=timeout_s, environment=local)[0]
    full, low = products()
    print(f"a core's products of 1024 x 1024: {full:.0f} GFLOP/s in fp32, {low:.0f} in bf16")
    print("two CPU ranks, one thread each; times: median over rounds (quartiles)")
    _show("against fp32, attention by hand, padded documents, default optimizer:", found["documents"])
    _show("against fp32 with fused attention and no padding:", found["windows"])
    print(
        f"\nthe engine that changes nothing, beside a loop by hand: {_spread(found['overhead'])} of its step time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(in_one_line(main))
