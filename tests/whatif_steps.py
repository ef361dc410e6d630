"""A training step made by hand, on the host or on a device, and a machine whose calibration is made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from trine.optim.plan.whatif.build import Steady
from trine.optim.plan.whatif.graph import LINK, Graph, RankStep, Step, Task
from trine.optim.plan.whatif.operators import TRANSFER, WAIT, Operator, Product
from trine.optim.plan.whatif.predict import Recorded, replayed
from trine.optim.plan.whatif.replay import replay
from trine.optim.plan.whatif.times import OperationTimes
from trine.record.hardware import Peaks

ALPHA, BETA = 1e-3, 1e9
MIB = 2**20
#: Of the calibrated machine: bf16 products are four times as fast, memory moves 1e9 elements a second (bf16: 2e9).
RATES = {"fp32": 1e9, "bf16": 4e9}
WORKS = (
    "add",
    "add_in_place",
    "multiply",
    "gelu",
    "softmax",
    "copy",
    "cast",
    "masked_fill",
    "layer_norm",
    "sum",
)


def calibration(
    slowdown: float = 0.0, codec_s: float = 1e-10, further: Iterable[dict[str, Any]] = ()
) -> OperationTimes:
    """Its operations by rate; a codec that takes ``codec_s`` a byte; and ``further`` rows."""
    rows: list[dict[str, Any]] = [*further]
    for dtype, rate in RATES.items():
        for side in (64, 256, 1024):
            rows.append(
                {
                    "operation": "product",
                    "dtype": dtype,
                    "shape": [1, side, side, side],
                    "seconds": side**3 / rate,
                }
            )
        for work in WORKS:
            each = (3 if work == "gelu" else 1) / (1e9 if dtype == "fp32" else 2e9)
            rows += [
                {"operation": work, "dtype": dtype, "shape": [size], "seconds": size * each}
                for size in (2**10, 2**24)
            ]
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        rows += [
            {"operation": operation, "bytes": size, "seconds": ALPHA + size / BETA, "ranks": 2}
            for size in (2**10, 2**24)
        ]
    rows.append({"operation": "codec", "dtype": "int8", "bytes": MIB, "seconds": MIB * codec_s, "ratio": 4.0})
    rows.append({"operation": "overlap", "slowdown": slowdown})
    return OperationTimes(Peaks("cpu", {}, None, None, None, "by hand", True, 1, {}, None, rows))


def product(rows: int, columns: int, inner: int, phase: str, sequence: int) -> Task:
    shape = Product(1, rows, columns, inner)
    operator = Operator("product", "product", shape, rows * columns, "fp32")
    return Task(shape.multiplications / 1e9, phase, operator=operator, name="aten::mm", sequence=sequence)


def memory(work: str, elements: int, phase: str, sequence: int, name: str = "") -> Task:
    operator = Operator("memory", work, None, elements, "fp32")
    seconds = elements * (3e-9 if work == "gelu" else 1e-9)
    return Task(seconds, phase, operator=operator, name=name or f"aten::{work}", sequence=sequence)


def gradient(elements: int) -> Task:
    return Task(0.0, "backward", name="torch::autograd::AccumulateGrad", gradient_bytes=4 * elements)


def layer(sequence: int) -> list[Task]:
    """A block's forward: two products, 128 rows, with a function between them that moves memory twice."""
    return [
        product(128, 256, 64, "forward", sequence),
        memory("gelu", 128 * 256, "forward", sequence + 1),
        memory("multiply", 128 * 256, "forward", sequence + 2),
        product(128, 64, 256, "forward", sequence + 3),
        memory("add", 128 * 64, "forward", sequence + 4),
    ]


def backward(sequence: int) -> Iterator[Task]:
    yield memory("multiply", 128 * 64, "backward", sequence + 4)
    yield product(128, 256, 64, "backward", sequence + 3)
    yield product(256, 64, 128, "backward", sequence + 3)
    yield gradient(256 * 64)
    yield memory("multiply", 128 * 256, "backward", sequence + 1)
    yield product(128, 64, 256, "backward", sequence)
    yield product(64, 256, 128, "backward", sequence)
    yield gradient(64 * 256)


def a_step(rank: int, buckets: int = 1, slow: float = 1.0) -> RankStep:
    """Three blocks and a head; gradients in ``buckets`` equal all-reduces, waited for before the optimizer."""
    tasks = [Task(0.01, "data")]
    for block in range(3):
        tasks += layer(10 * block)
    tasks.append(product(128, 512, 64, "forward", 40))
    tasks += [
        product(128, 64, 512, "backward", 40),
        product(64, 512, 128, "backward", 40),
        gradient(64 * 512),
    ]
    for block in (2, 1, 0):
        tasks += backward(10 * block)
    size = sum(task.gradient_bytes for task in tasks) // buckets
    sent = [
        Task(ALPHA + size / BETA, "backward", LINK, TRANSFER, "all_reduce", (tasks[-1].number,), issued="all_reduce",
             key=f"all_reduce {number}", of_gradients=True, bytes=size)
        for number in range(buckets)
    ]  # fmt: skip
    tasks += sent
    tasks.append(Task(0.0, "backward", operator=WAIT, after=tuple(task.number for task in sent)))
    tasks += [memory("add_in_place", 128 * 1024, "optimizer", -1), Task(0.001, "other")]
    tasks = [task if task.lane == LINK else task.times(slow) for task in tasks]
    return RankStep(rank, tuple(tasks), sum(task.seconds for task in tasks))


def run(times: OperationTimes | None = None, ranks: int = 2, slow: float = 1.0, **facts: Any) -> Recorded:
    step = Step(5, tuple(a_step(rank, slow=slow if rank else 1.0) for rank in range(ranks)))
    graph = Graph((step,), "operators", ranks, facts, recorded=(step,))
    return replayed(graph, Steady(np.empty(0), {}), times or calibration())


def with_tasks(found: Recorded, change: Callable[[Task], Task]) -> Recorded:
    """The same run with every task as ``change`` makes it, recorded so."""

    def changed(step: Step) -> Step:
        parts = tuple(replace(each, tasks=tuple(map(change, each.tasks))) for each in step.ranks)
        seconds = replay(replace(step, ranks=parts)).seconds
        return replace(step, ranks=tuple(replace(each, measured_s=seconds) for each in parts))

    steps = tuple(changed(step) for step in found.graph.steps)
    return replayed(replace(found.graph, steps=steps, recorded=steps), found.steady, found.times)


#: From one launch to the next, s.
LAUNCH_S = 1e-6


def on_device(step: RankStep) -> RankStep:
    """The same work as kernels of one stream, each after its launch; the host waits for gradients no more."""
    found: list[Task] = []
    last = None
    for task in step.tasks:
        if task.lane == LINK:
            found.append(replace(task, after=(last,) if last is not None else ()))
        elif task.kind == "wait":
            found.append(replace(task, lane="stream 7"))
        elif task.kind in ("product", "memory"):
            launch = Task(LAUNCH_S, task.phase)
            found += [launch, replace(task, lane="stream 7", after=(launch.number,))]
            last = task.number
        elif task.gradient_bytes:
            found[-1] = replace(found[-1], gradient_bytes=task.gradient_bytes)
        else:
            found.append(task)
    return replace(step, tasks=tuple(found))


def run_on_device(ranks: int = 2, **facts: Any) -> Recorded:
    """The step of :func:`run` on devices, each rank's host far ahead of its own."""
    step = Step(5, tuple(on_device(a_step(rank)) for rank in range(ranks)))
    seconds = replay(step).seconds
    step = replace(step, ranks=tuple(replace(each, measured_s=seconds) for each in step.ranks))
    graph = Graph((step,), "kernels", ranks, {"device": {"type": "cuda"}, **facts}, recorded=(step,))
    return replayed(graph, Steady(np.empty(0), {}), calibration())
