"""What does fusing a region gain here? Each implementation against PyTorch's operators, forward and backward.

    python benchmarks/fused_regions.py                 every region in fp32 and bf16
    python benchmarks/fused_regions.py norm --rows 512

Both sides run alternately in one process on one thread (``--threads``), and the processor time of each is taken, so
that other work on the machine matters little: medians and their ratio. Kept is what lies between forward and backward, the result included;
peak what both allocate at most; neither counts inputs.
``chosen`` marks the implementation that ``compute.fuse`` takes on this machine; compilation is not in the times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # its profiler tells of each start

import torch
from torch.nn import functional

from trine.optim.runtime import regions
from trine.optim.runtime.regions._cross_entropy import rows_of_a_chunk

__all__ = ["Row", "measured"]

HIDDEN = 256
VOCABULARY = 8192


@dataclass(frozen=True)
class Row:
    """One region, one implementation."""

    region: str
    dtype: str
    implementation: str
    chosen: bool
    plain_s: float
    fused_s: float
    plain_kept_bytes: int
    fused_kept_bytes: int
    plain_peak_bytes: int
    fused_peak_bytes: int

    @property
    def speedup(self) -> float:
        """Above 1: the fused one is faster."""
        return self.plain_s / self.fused_s


Side = Callable[[], Any]


@dataclass(frozen=True)
class _Trial:
    region: str
    implementation: str
    inputs: list[torch.Tensor]  # gradients of these are made
    plain: Callable[..., Any]
    fused: Callable[..., Any]


def measured(words: tuple[str, ...] = (), rows: int = 2048, repeats: int = 15) -> Iterator[Row]:
    """A row for each region whose name holds one of ``words``, in fp32 and bf16, on the CPU."""
    for dtype in (torch.float32, torch.bfloat16):
        for trial in _trials(rows, dtype):
            if words and not any(word in trial.region for word in words):
                continue
            chosen = regions.implementation(_FUNCTIONS[trial.region], trial.inputs[0])
            sides = [_step(function, trial.inputs) for function in (trial.plain, trial.fused)]
            for side in sides:  # compiles, warms up
                side()
                side()
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats):
                for side, found in zip(sides, times, strict=True):
                    began = time.process_time()
                    side()
                    found.append(time.process_time() - began)
            plain, fused = (statistics.median(found) for found in times)
            yield Row(
                trial.region,
                str(dtype).removeprefix("torch."),
                trial.implementation,
                (chosen == "compiled") == (trial.implementation == "compiled"),
                plain,
                fused,
                *(_bytes(function, trial.inputs, True) for function in (trial.plain, trial.fused)),
                *(_bytes(function, trial.inputs, False) for function in (trial.plain, trial.fused)),
            )


_DROP = regions.COMPILED["bias_dropout_residual"]

_FUNCTIONS = {
    "layer norm": "layer_norm",
    "rms norm": "rms_norm",
    "mlp: swiglu": "gated",
    "mlp: gelu": "gelu",
    "dropout 0.1 + residual": "bias_dropout_residual",
    "dropout 0 + residual": "bias_dropout_residual",
    "rotary": "rotary",
    "linear cross-entropy": "linear_cross_entropy",
}


def _trials(rows: int, dtype: torch.dtype) -> Iterator[_Trial]:
    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    def compiled(name: str, *dynamic: int) -> Callable[..., Any]:
        marks = dynamic or (0,)
        return lambda *args: regions.COMPILED[name]([(args[n], (0,)) for n in marks], *args)

    bodies = regions.bodies
    norm = [of(rows, HIDDEN), of(HIDDEN), of(HIDDEN)]
    yield _Trial(
        "layer norm",
        "compiled",
        norm,
        lambda x, w, b: functional.layer_norm(x, (HIDDEN,), w, b),
        lambda x, w, b: compiled("layer_norm")(x, w, b, 1e-5),
    )
    yield _Trial(
        "rms norm",
        "compiled",
        norm[:2],
        lambda x, w: functional.rms_norm(x, (HIDDEN,), w, 1e-6),
        lambda x, w: compiled("rms_norm")(x, w, 1e-6, 0.0),
    )
    wide = [of(rows, 4 * HIDDEN), of(rows, 4 * HIDDEN)]
    yield _Trial("mlp: swiglu", "compiled", wide, bodies.gated, compiled("gated", 0, 1))
    yield _Trial("mlp: gelu", "compiled", wide[:1], bodies.gelu, compiled("gelu"))
    added = [of(rows, HIDDEN), of(rows, HIDDEN)]
    for p in (0.1, 0.0):
        name = f"dropout {p:g} + residual"

        def plain(x: torch.Tensor, r: torch.Tensor, p: float = p) -> torch.Tensor:
            return r + functional.dropout(x, p)

        yield _Trial(
            name,
            "compiled",
            added,
            plain,
            lambda x, r, p=p: _DROP(((x, (0,)), (r, (0,))), x, None, r, p, True),
        )
        if p:
            yield _Trial(
                name,
                "one function",
                added,
                plain,
                lambda x, r, p=p: regions.bias_dropout_residual(x, None, r, p),
            )
    heads = [of(8, 4, rows // 8, HIDDEN // 4), of(8, 4, rows // 8, HIDDEN // 4)]
    tables = regions.rotary_tables(torch.arange(rows // 8), HIDDEN // 4, dtype=dtype)
    yield _Trial(
        "rotary", "compiled", heads, lambda q, k: bodies.rotary(q, k, *tables), _rotary_compiled(tables)
    )
    targets = torch.randint(0, VOCABULARY, (rows,))
    yield _Trial(
        "linear cross-entropy",
        f"chunks of {rows_of_a_chunk(rows, HIDDEN, VOCABULARY)} rows",
        [of(rows, HIDDEN), of(VOCABULARY, HIDDEN)],
        lambda x, w: functional.cross_entropy(functional.linear(x, w).float(), targets),
        lambda x, w: regions.linear_cross_entropy(x, w, targets),
    )


def _rotary_compiled(tables: tuple[torch.Tensor, torch.Tensor]) -> Callable[..., Any]:
    return lambda q, k: regions.COMPILED["rotary"](((q, (0, 2)), (k, (0, 2))), q, k, *tables)


def _step(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Side:
    """Forward and backward, without keeping gradients."""

    def step() -> None:
        found = function(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        torch.autograd.grad(found, inputs, [torch.ones_like(each) for each in found])

    return step


def _bytes(function: Callable[..., Any], inputs: list[torch.Tensor], forward_alone: bool) -> int:
    """Alive after a forward, or at the peak of a forward and backward."""
    step = (lambda: function(*inputs)) if forward_alone else _step(function, inputs)
    with warnings.catch_warnings(), torch.profiler.profile(profile_memory=True) as profile:
        warnings.simplefilter("ignore")
        kept = step()
    results: Any = profile.profiler
    changes = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
    alive = peak = 0
    for each in sorted(changes, key=lambda event: event.start_ns()):
        alive += each.nbytes()
        peak = max(peak, alive)
    del kept
    return alive if forward_alone else peak


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="fused_regions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="only regions whose names contain one")
    parser.add_argument("--rows", type=int, default=2048, metavar="N", help="tokens; a multiple of 8")
    parser.add_argument("--repeats", type=int, default=15, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    print(
        f"{'region':<23} {'dtype':<9} {'implementation':<20} {'plain':>9} {'fused':>9} {'speedup':>8} "
        f"{'kept':>16} {'peak':>16}"
    )
    for row in measured(tuple(arguments.words), arguments.rows, arguments.repeats):
        kept = _change(row.plain_kept_bytes, row.fused_kept_bytes)
        peak = _change(row.plain_peak_bytes, row.fused_peak_bytes)
        print(
            f"{row.region:<23} {row.dtype:<9} {row.implementation:<20} {row.plain_s * 1e3:>6.2f} ms "
            f"{row.fused_s * 1e3:>6.2f} ms {row.speedup:>7.2f}x {kept:>16} {peak:>16}  {'chosen' if row.chosen else ''}",
            flush=True,
        )
    return 0


def _change(before: int, after: int) -> str:
    return f"{before / 2**20:.1f} → {after / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
