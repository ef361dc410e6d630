"""Try changes of configuration on the sample GPT: each alone, then together, alternated in one run.

    torchrun --nproc-per-node 2 -m trine.samples.try_changes plan.json result.json

The plan:    {"arguments": [train_gpt's], "seconds": 40, "changes": {name: {key path: value}}}
The result:  {"pieces":   {name: {"what": "", "before_s": [], "after_s": []}},
              "alone":    {"plain": [seconds by round], name: [..]},
              "order":    [name, ..] by what they gained alone,
              "together": [{"change": name, "on_top_of": [], "kept": true, "with": [], "without": []}],
              "final":    {"plain": [..], "together": [..]}}

Together begins with the change that gained most and adds one at a time; a change stays when steps are
no slower with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch

import trine
from trine.optim.trials import Times, alternate, time_piece
from trine.samples.gpt import Attention, GPTConfig, loss_of
from trine.samples.train_gpt import arguments_of, build
from trine.samples.training import place

__all__ = ["NO_SLOWER", "main"]

#: A change stays when the median ratio of its steps to those without it is at most this: within noise, no slower.
NO_SLOWER = 1.005
#: Of the time given, the share for each change alone; the rest is for adding them up.
ALONE = 0.6

Change = Mapping[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Run the plan and write the result, on rank 0."""
    plan_path, result_path = (Path(text) for text in (sys.argv[1:] if argv is None else argv))
    plan = json.loads(plan_path.read_text())
    changes: dict[str, Change] = plan["changes"]
    arguments = arguments_of(plan["arguments"])
    start = time.perf_counter()
    with place() as (rank, ranks, device):
        pieces = {
            name: saved for name, change in changes.items() if (saved := _piece(arguments, change, device))
        }
        steps = {"plain": _stepper(arguments, {}, rank, ranks, device)}
        steps |= {name: _stepper(arguments, change, rank, ranks, device) for name, change in changes.items()}
        alone = alternate(steps, plan["seconds"] * ALONE)
        order = sorted(changes, key=lambda name: alone.ratio(name, "plain"))
        for name in order[1:]:  # their models are not needed any more
            del steps[name]
        left = plan["seconds"] - (time.perf_counter() - start)

        def with_changes(chosen: list[str]) -> Callable[[], Any]:
            merged = {key: value for name in chosen for key, value in changes[name].items()}
            return _stepper(arguments, merged, rank, ranks, device)

        together, tuned = _add_up(order, alone, steps, with_changes, max(left, 1.0) * 0.75)
        final = alternate({"plain": steps["plain"], "together": tuned}, max(left, 1.0) * 0.25)
    if rank == 0:
        result = {
            "pieces": pieces,
            "alone": alone.seconds,
            "order": order,
            "together": together,
            "final": final.seconds,
        }
        result_path.write_text(json.dumps(result))
    return 0


def _add_up(
    order: list[str],
    alone: Times,
    steps: dict[str, Callable[[], Any]],
    with_changes: Callable[[list[str]], Callable[[], Any]],
    seconds: float,
) -> tuple[list[dict[str, Any]], Callable[[], Any]]:
    """Trials of one more change each, in the order of what they gained alone, and the step that came of them.

    Every rank decides alike, since what is compared is the slowest rank's time.
    """
    trials: list[dict[str, Any]] = []
    kept: list[str] = []
    current = steps["plain"]
    for position, name in enumerate(order):
        if not kept:
            # Measured already, against the plain loop itself.
            times = Times({"without": alone.seconds["plain"], "with": alone.seconds[name]})
            candidate = steps.get(name) or with_changes([name])
        else:
            candidate = with_changes([*kept, name])
            share = seconds / max(1, len(order) - 1)
            times = alternate({"without": current, "with": candidate}, share, seed=position)
        stays = times.ratio("with", "without") <= NO_SLOWER
        trials.append({"change": name, "on_top_of": list(kept), "kept": stays, **times.seconds})
        if stays:
            kept.append(name)
            current = candidate
    return trials, current


def _stepper(
    arguments: Any, change: Change, rank: int, ranks: int, device: torch.device
) -> Callable[[], Any]:
    """One training step of a model of its own, with this change."""
    model, optimizer, loader = build(arguments, rank, ranks, device)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(change), loss_fn=loss_of)
    # A loader of some thousand batches ends no trial, but text given by hand may be short: begin anew.
    batches = (batch for _ in count() for batch in engine.steps(loader))

    def step() -> None:
        engine.train_step(next(batches))

    return step


def _piece(arguments: Any, change: Change, device: torch.device) -> dict[str, Any] | None:
    """Seconds a step that replacing one piece saves, timed alone; ``None`` where it is no single piece."""
    if list(change) == ["compute.attention"]:
        return _attention_piece(arguments, device)
    if list(change) == ["compute.fuse"]:
        return _optimizer_piece(arguments, device)
    return None


def _attention_piece(arguments: Any, device: torch.device) -> dict[str, Any]:
    shape = GPTConfig(
        layers=1,
        hidden=arguments.hidden,
        heads=arguments.heads,
        sequence=arguments.sequence,
        dropout=arguments.dropout,
    )
    module = Attention(shape).to(device)
    x = torch.randn(arguments.batch, arguments.sequence, arguments.hidden, device=device, requires_grad=True)

    def work() -> None:
        module(x).sum().backward()
        _wait(device)

    times: dict[str, tuple[float, ...]] = {}
    for implementation in (arguments.attention, "sdpa"):
        module.set_attention(implementation)
        times[implementation] = time_piece(work, 0.6)
    return {
        "what": f"attention's forward and backward, {arguments.layers} layers",
        "before_s": [value * arguments.layers for value in times[arguments.attention]],
        "after_s": [value * arguments.layers for value in times["sdpa"]],
    }


def _optimizer_piece(arguments: Any, device: torch.device) -> dict[str, Any]:
    times: dict[bool, tuple[float, ...]] = {}
    for fused in (False, True):
        model, optimizer, _ = build(arguments, 0, 1, device)
        if fused:
            optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3

        def work(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            _wait(device)

        times[fused] = time_piece(work, 0.3)
    return {"what": "the optimizer's step", "before_s": list(times[False]), "after_s": list(times[True])}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
