"""What the tests of the one-step-late update run on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accumulation_cases as cases
from refusals import refusal_of

STEPS = 6
LATE = {"accumulation.delayed": True, "accumulation.delayed_warmup_steps": 0}


def engine_of(model: Any, changes: dict[str, Any] | None = None, momentum: float = 0.9, **keys: Any) -> Any:
    import torch

    import trine

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    keys.setdefault("loss_fn", cases.loss_of)
    return trine.optimize(model, optimizer, trine.Config().with_changes({**LATE, **(changes or {})}), **keys)


def share(rank: int, seed: int) -> Any:
    return cases.share_of(cases.samples(16, seed), rank, 2)


def late_steps(rank: int, changes: dict[str, Any], double: bool = True, **keys: Any) -> dict[str, Any]:
    """Parameters after each step and after the flush; whether each step stepped."""
    model = cases.regression(double=double)
    engine = engine_of(model, changes, **keys)
    stepped: list[bool] = []
    engine._assembly.after_update.append(stepped.append)
    seen = [cases.weights(model).tolist()]
    for seed in range(STEPS):
        inputs, targets = share(rank, seed)
        engine.train_step((inputs if double else inputs.float(), targets))
        seen.append(cases.weights(model).tolist())
    before = list(stepped)
    flushed = (engine.flush(), engine.flush())
    seen.append(cases.weights(model).tolist())
    engine.close()
    return {"parameters": seen, "stepped": before, "flushed": flushed}


def counted(model: Any, batch: Any) -> Any:
    """Token counts that differ, over a loss that does not: each rank's mean of all its samples, said with a count."""
    return cases.loss_of(model, batch), len(batch[0])


def ended(rank: int, how: str) -> list[float]:
    model = cases.regression()
    engine = engine_of(model)
    batches = [share(rank, seed) for seed in range(STEPS)]
    for batch in engine.steps(batches) if how == "loader" else batches:
        engine.train_step(batch)
    if how == "closed":
        engine.close()
    found: list[float] = cases.weights(model).tolist()
    engine.close()
    return found


def order_of_events(rank: int) -> list[str]:
    """Forwards, sends and waits in the order in which this thread made them."""
    from torch import distributed

    order: list[str] = []
    real = distributed.all_reduce

    class Work:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            if order[-1] != "wait":
                order.append("wait")
            self._work.wait()

    def sends(tensor: Any, *arguments: Any, **named: Any) -> Any:
        if not named.get("async_op"):
            return real(tensor, *arguments, **named)
        if order[-1] != "send":
            order.append("send")
        return Work(real(tensor, *arguments, **named))

    def loss_of(model: Any, batch: Any) -> Any:
        order.append("forward")
        return cases.loss_of(model, batch)

    model = cases.regression()
    engine = engine_of(model, loss_fn=loss_of)
    distributed.all_reduce = sends
    try:
        for seed in range(3):
            engine.train_step(share(rank, seed))
    finally:
        distributed.all_reduce = real
    engine.close()
    return order


def clipped(rank: int) -> float:
    """How far parameters move in a clipped step of rate 0.1, divided by the rate."""
    model = cases.regression()
    engine = engine_of(model, momentum=0.0, clip_norm=1e-3)
    before = cases.weights(model)
    engine.train_step(share(rank, 0))
    engine.flush()
    engine.close()
    return float((cases.weights(model) - before).norm()) / 0.1


def resumed(rank: int) -> tuple[list[float], list[float]]:
    """Parameters of a run of 6 steps, and of one that is saved after 3 and loaded into another model."""
    through = late_steps(rank, {})["parameters"][-1]
    first = cases.regression()
    engine = engine_of(first)
    for seed in range(3):
        engine.train_step(share(rank, seed))
    saved = {
        "model": {name: value.clone() for name, value in first.state_dict().items()},
        "optimizer": engine.optimizer.state_dict(),
        "late": engine._assembly.state["accumulation.delayed"].state_dict(),
    }
    second = cases.regression(seed=9)
    second.load_state_dict(saved["model"])
    engine = engine_of(second)
    engine.optimizer.load_state_dict(saved["optimizer"])
    engine._assembly.state["accumulation.delayed"].load_state_dict(saved["late"])
    for seed in range(3, STEPS):
        engine.train_step(share(rank, seed))
    engine.flush()
    engine.close()
    return through, cases.weights(second).tolist()


def buffers(rank: int) -> tuple[list[float], list[float]]:
    """Running means that the last forward of a late and of a plain run used, after a broadcast."""
    found = []
    off = {"accumulation.delayed": False, "accumulation.delayed_warmup_steps": None}
    for changes in (LATE, off):
        model = cases.regression(norm=True)
        engine = engine_of(model, {**changes, "accumulation.steps": 2})
        for seed in range(3):
            engine.train_step(share(rank, seed))
        used: list[float] = []
        model[1].register_forward_pre_hook(
            lambda module, _, used=used: used.extend(module.running_mean.tolist())
        )
        engine.train_step(share(rank, 3))
        engine.close()
        found.append(used[:64])  # of the first micro-batch, before it changes them
    return found[0], found[1]


def unused(rank: int) -> tuple[bool, bool]:
    """Whether a parameter that no rank used, and one that rank 0 alone used, stayed as they were."""
    import torch

    import trine

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.nn.Linear(4, 3)
            self.never = torch.nn.Linear(4, 3)
            self.sometimes = torch.nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            return self.used(x) + (self.sometimes(x) if rank == 0 else 0.0)

    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(LATE), loss_fn=cases.loss_of)
    before = (model.never.weight.detach().clone(), model.sometimes.weight.detach().clone())
    for seed in range(2):
        engine.train_step(share(rank, seed))
    engine.close()
    return (
        torch.equal(model.never.weight, before[0]),
        torch.equal(model.sometimes.weight, before[1]),
    )


def refused() -> dict[str, str]:
    """Key → what is said about it beside ``accumulation.delayed``."""

    found = {}
    for key, value in {
        "zero.stage": 1,
        "precision.dtype": "fp16",
        "communication.bucket_mib": 1.0,
        "communication.static_graph": True,
        "communication.gradient_as_view": True,
        "communication.compression": "int8",
        "communication.algorithm": "ring",
    }.items():
        model = cases.regression(double=False)
        found[key] = refusal_of(lambda model=model, one={key: value}: engine_of(model, one))  # type: ignore[misc]
    return found


def nonfinite(rank: int) -> tuple[list[str], bool]:
    """Rank 1 alone has a NaN in its first step."""
    import torch

    model = cases.regression()
    engine = engine_of(model)
    before = cases.weights(model)
    said = []
    for step in range(2):
        inputs, targets = share(rank, step)
        if rank == 1 and step == 0:
            inputs = inputs * float("nan")
        said.append(refusal_of(lambda batch=(inputs, targets): engine.train_step(batch), ""))  # type: ignore[misc]
    same = torch.equal(cases.weights(model), before)
    engine._assembly.deferred.forget()
    engine.close()
    return said, same


def everything(rank: int) -> dict[str, Any]:
    run: Callable[..., dict[str, Any]] = late_steps
    return {
        "plain": run(rank, {}),
        "accumulated": run(rank, {"accumulation.micro_batch": 3}),
        "fused": run(rank, {"accumulation.steps": 2, "compute.fuse": ["optimizer"]}),
        "masters": run(rank, {"precision.dtype": "bf16", "precision.master_weights": True}, double=False),
        "token counts": run(rank, {"accumulation.micro_batch": 3}, loss_fn=counted),
        "warm": run(rank, {"accumulation.delayed_warmup_steps": 3}),
        "loader": ended(rank, "loader"),
        "closed": ended(rank, "closed"),
        "order": order_of_events(rank),
        "clipped": clipped(rank),
        "resumed": resumed(rank),
        "buffers": buffers(rank),
        "unused": unused(rank),
        "refused": refused(),
        "nonfinite": nonfinite(rank),
    }
