"""What ``test_all_reduce_algorithms.py`` runs on live ranks, and ranks that are made to fail."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import torch
from started_ranks import Failure, SpawnedRanks
from torch import distributed

from trine.optim.runtime.exchange import selection
from trine.optim.runtime.exchange.ring import ring_plan
from trine.optim.runtime.exchange.schedule import Plan
from trine.optim.runtime.exchange.scheduled import ScheduledSum
from trine.optim.runtime.exchange.tree import tree_plan
from trine.optim.runtime.exchange.trial import corrected
from trine.optim.runtime.exchange.two_level import two_level_plan
from trine.optim.topology import Topology

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.int8)
SIZES = (0, 1, 2, 3, 5, 7, 64, 1000, 20011)
#: Relative rounding of one addition.
ROUNDING = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def plan_of(name: str, rank: int, ranks: int) -> Plan:
    kind, _, pieces = name.partition(" ")
    if kind == "ring":
        return ring_plan(rank, ranks)
    if kind == "tree":
        return tree_plan(rank, ranks, int(pieces))
    return two_level_plan(Topology(rank, ranks, 2), int(pieces) if pieces else None)


def sums(rank: int, name: str, ranks: int) -> Any:
    """Worst error against the exact sum in units of rounding, whether all ranks hold the same bits, by dtype.

    Over the first ``ranks`` ranks of the pool, so that odd numbers are met as well; the others return ``None``.
    """
    group = distributed.new_group(list(range(ranks)))
    if rank >= ranks:
        return None
    summed = ScheduledSum(lambda size: plan, group)
    plan = plan_of(name, rank, ranks)
    found = {}
    for dtype in DTYPES:
        worst, same = 0.0, True
        for size in SIZES:
            inputs = [_values(size, dtype, other) for other in range(ranks)]
            exact = torch.stack([each.double() for each in inputs]).sum(0)
            flat = inputs[rank].clone()
            summed(flat)
            worst = max(worst, _error(flat, exact, inputs))
            same = same and _same_bits(flat, group)
        found[str(dtype)] = (worst, same)
    distributed.destroy_process_group(group)
    return found


def _values(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * size + rank)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 5).to(dtype)


def _error(flat: torch.Tensor, exact: torch.Tensor, inputs: list[torch.Tensor]) -> float:
    """In units of rounding of the sum of magnitudes, which bounds every order of summation; whole numbers are exact."""
    apart = (flat.double() - exact).abs()
    if flat.dtype not in ROUNDING:
        return float(apart.max()) if flat.numel() else 0.0
    magnitude = torch.stack([each.double().abs() for each in inputs]).sum(0)
    units = apart / (magnitude * ROUNDING[flat.dtype])
    return float(units.max()) if flat.numel() else 0.0


def _same_bits(flat: torch.Tensor, group: distributed.ProcessGroup) -> bool:
    mine = flat.view(torch.uint8)
    others = [torch.empty_like(mine) for _ in range(group.size())]
    distributed.all_gather(others, mine, group=group)
    return all(torch.equal(mine, other) for other in others)


def counted(rank: int, name: str, ranks: int, elements: int) -> int:
    """Bytes that this rank sent for one float32 tensor."""
    group = distributed.new_group(list(range(ranks)))
    if rank >= ranks:
        return 0
    plan = plan_of(name, rank, ranks)
    summed = ScheduledSum(lambda size: plan, group)
    summed(torch.ones(elements))
    distributed.destroy_process_group(group)
    return summed.sent_bytes


def costs_and_choices(rank: int, ranks: int) -> Any:
    """What ``auto`` measures and chooses on nodes of two, and that what it chose sums by size."""
    topology = Topology(rank, ranks, 2)
    names = selection.candidates("auto", topology)
    costs = corrected(selection.measure_costs(topology, CPU), names, 2**22, CPU)
    chosen = selection.ranges(costs, names, 2**22)
    # Every candidate in turn, by size: the thresholds must lead to the right one on every rank.
    forced = [selection.Range(2 ** (8 + n), name, 0.0) for n, name in enumerate(names)]
    summed = selection.Selected(forced, costs, topology, distributed.group.WORLD)
    exact = True
    for choice in forced:
        flat = torch.full((choice.largest_bytes // 8,), float(rank + 1), dtype=torch.float64)
        assert summed.name_for(flat.numel() * 8) == choice.name
        summed(flat)
        exact = exact and bool((flat == ranks * (ranks + 1) / 2).all())
    return costs, chosen, exact


def trained(rank: int, ranks: int, changes: dict[str, Any], environment: dict[str, str]) -> Any:
    """Effects, bytes sent in the last of three steps as the record is told them, and a checksum of the parameters."""
    import optim_cases

    from trine.record import events

    told: dict[str, float] = {}

    def listen(kind: str, values: Any) -> None:
        if kind == "metric":
            told[values["name"]] = values["value"]

    stop = events.listen(listen)
    try:
        with mock.patch.dict(os.environ, environment):
            _, model, engine = optim_cases.train(changes, steps=3, rank=rank, ranks=ranks)
            effects = [str(effect) for effect in engine.effects]
            engine.close()
    finally:
        stop()
    return effects, told.get("communication/sent_bytes"), _checksum(model)


def _checksum(model: Any) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters())


def straggling(rank: int, ranks: int, name: str, late: int | None, sleep_s: float) -> list[float]:
    """Parameters' checksums after each of four steps, with rank ``late`` late in the middle of its exchanges."""
    import optim_cases

    import trine
    from trine.samples.gpt import loss_of

    with mock.patch.dict(os.environ, {"TRINE_RANKS_PER_NODE": "2"}):
        model = optim_cases.small_gpt()
        engine = trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"communication": {"algorithm": name, "bucket_mib": 0.05}},
            loss_fn=loss_of,
        )
    found = []
    with mock.patch.object(ScheduledSum, "_run", _late(sleep_s) if rank == late else ScheduledSum._run):
        for batch in engine.steps(optim_cases.batches(4, 2, rank, ranks)):
            engine.train_step(batch)
            found.append(_checksum(model))
    engine.close()
    return found


def _late(sleep_s: float) -> Any:
    run = ScheduledSum._run
    calls = [0]

    def late(self: Any, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] % 7 == 3:
            time.sleep(sleep_s)
        run(self, *arguments)

    return late


# --- ranks that end or hang --------------------------------------------------------------------


def failing(algorithm: str, ranks: int, fault: str | None, timeout_s: float) -> dict[int, tuple[str, float]]:
    """Rank → what it said (an error's line, or ``trained``) and after how many seconds of training.

    ``fault``: the last rank ``dies`` in the middle of its second step's exchange, or ``hangs`` there, or ``None``.
    """
    with SpawnedRanks(ranks, collective_timeout_s=timeout_s, grace_s=0) as spawned:
        left = ranks if fault is None else ranks - 1
        wait = {"timeout_s": 100, "patience_s": 100, "enough": left if fault != "dies" else ranks}
        outcomes = spawned.outcomes(_fail, ranks, algorithm, fault, **wait)
    return {rank: found for rank, found in enumerate(outcomes) if not isinstance(found, Failure)}


def _fail(rank: int, ranks: int, algorithm: str, fault: str | None) -> tuple[str, float]:
    import optim_cases

    import trine
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt()
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"communication": {"algorithm": algorithm}},
        loss_fn=loss_of,
    )
    data = optim_cases.batches(3, 2, rank, ranks)
    engine.train_step(data[0])
    if fault is not None and rank == ranks - 1:
        ScheduledSum._run = _broken(fault)  # type: ignore[method-assign]
    began = time.perf_counter()
    said = "trained"
    try:
        for batch in data[1:]:
            engine.train_step(batch)
    except trine.TrineError as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.perf_counter() - began  # it lives on: only the fault can end the others' waiting


def _broken(fault: str) -> Any:
    run = ScheduledSum._run
    calls = [0]

    def broken(self: Any, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            if fault == "dies":
                os._exit(1)
            time.sleep(600)
        run(self, *arguments)

    return broken


def refused(rank: int, ranks: int, changes: dict[str, Any], environment: dict[str, str]) -> str:
    """Our refusal of these changes."""
    import optim_cases

    with mock.patch.dict(os.environ, environment):
        return optim_cases.refused(rank, ranks, changes)
