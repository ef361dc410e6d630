"""Analyses built by hand, a healthy one by default: each test changes the one thing it is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trine.analyzers.results import (
    Analysis,
    Breakdown,
    BusyTime,
    CollectiveResult,
    Communication,
    Hardware,
    HeatCell,
    IdleCauses,
    LateActivity,
    MemorySummary,
    NamedTime,
    RankResult,
    RankSummary,
    Source,
    StepStatistics,
    Verdict,
)
from trine.record.model import PHASES, Strings, Table

MS = 1_000_000
GIB = 2**30

#: Shares of a healthy step.
HEALTHY_PHASES = {
    "data": 0.01,
    "copy": 0.0,
    "forward": 0.32,
    "backward": 0.58,
    "optimizer": 0.05,
    "exposed_communication": 0.03,
    "other": 0.01,
}

METADATA: dict[str, Any] = {
    "model": {
        "class": "GPT",
        "parameters": 12_600_000,
        "parameter_bytes": 50_400_000,
        "gradient_bytes": 50_400_000,
        "optimizer_bytes": 100_800_000,
    },
    "precision": {"parameter_dtype": "float32", "autocast_dtype": "bfloat16", "float32_matmul": "highest"},
    "device": {"type": "cpu", "name": "Test CPU", "count": 2, "threads": 1},
    "backend": "gloo",
    "loader": {"workers": 2, "pin_memory": False, "batch_size": 8},
    "optimizer": {"class": "AdamW", "implementation": "fused"},
    "data_parallel": {"kind": "ddp", "bucket_mib": 25},
    "accumulation": 1,
    "compile": True,
}


def steps_table(
    shares: Mapping[str, float] | Sequence[Mapping[str, float]] = HEALTHY_PHASES,
    *,
    count: int = 20,
    step_ns: int = 100 * MS,
    first: int = 0,
) -> Table:
    """Steps whose phases take these shares: of all steps, or one mapping a step; the rest goes to ``other``."""
    rows = [shares] * count if isinstance(shares, Mapping) else list(shares)
    columns: dict[str, Any] = {f"phase_{name}_ns": [] for name in PHASES}
    for row in rows:
        known = {name: round(row.get(name, 0.0) * step_ns) for name in PHASES if name != "other"}
        for name in PHASES:
            columns[f"phase_{name}_ns"].append(known.get(name, step_ns - sum(known.values())))
    start = np.arange(len(rows), dtype=np.int64) * step_ns
    return Table(
        "steps",
        {
            "index": np.arange(first, first + len(rows)),
            "start_ns": start,
            "end_ns": start + step_ns,
            **columns,
        },
        Strings(),
    )


def statistics(count: int = 20, median_ns: int = 100 * MS, warm_up: tuple[int, ...] = ()) -> StepStatistics:
    return StepStatistics(
        count, median_ns, round(median_ns * 0.99), round(median_ns * 1.01), round(median_ns * 1.05), warm_up
    )


def breakdown(
    *,
    window_ns: int = 300 * MS,
    communication: float = 0.03,
    copy: float = 0.0,
    idle: Mapping[str, float] | None = None,
    overlap: float = 0.05,
    basis: str = "device",
    steps: tuple[int, ...] = (10, 11, 12),
    events: int = 5_000,
) -> Breakdown:
    """A window divided by these shares; compute takes the rest."""
    causes = {name: round(share * window_ns) for name, share in (idle or {"host": 0.02}).items()}
    exposed, copied = round(communication * window_ns), round(copy * window_ns)
    idle_ns = sum(causes.values())
    compute = window_ns - exposed - copied - idle_ns
    hidden = round(overlap * window_ns)
    busy = BusyTime(window_ns - idle_ns, compute, exposed + hidden, copied)
    efficiency = hidden / (exposed + hidden) if exposed + hidden else None
    return Breakdown(
        window_ns,
        compute,
        exposed,
        copied,
        idle_ns,
        IdleCauses(**causes),
        busy,
        hidden,
        efficiency,
        basis,  # type: ignore[arg-type]
        steps,
        events,
    )


def communication(
    *,
    transfer_ns: int = 60 * MS,
    wait_ns: int = 10 * MS,
    caused_wait_ns: int = 10 * MS,
    lateness_ns: int = 8 * MS,
    last_in: int = 30,
    matched: int = 60,
    doing: tuple[LateActivity, ...] = (),
) -> Communication:
    return Communication(transfer_ns, wait_ns, caused_wait_ns, lateness_ns, last_in, matched, doing)


def rank_result(
    rank: int = 0,
    *,
    steps: Table | None = None,
    window: Breakdown | None = None,
    part: Communication | None = None,
    memory: MemorySummary | None = None,
    kernels: tuple[NamedTime, ...] = (),
    operators: tuple[NamedTime, ...] = (),
    metadata: Mapping[str, Any] | None = None,
    format: str = "trine",
    host_name: str | None = "node-a",
    warm_up: tuple[int, ...] = (),
    world_size: int = 2,
    breakdown_missing: str | None = None,
) -> RankResult:
    phases = None
    own = None
    if steps is not None:
        phases = {name: int(steps[f"phase_{name}_ns"].sum()) for name in PHASES}
        spans = steps["end_ns"] - steps["start_ns"]
        own = statistics(len(steps), int(np.median(spans)) if len(spans) else 0, warm_up)
    summary = RankSummary(
        rank=rank,
        source=f"rank-{rank}",
        format=format,
        world_size=world_size,
        host_name=host_name,
        devices=(),
        groups=(),
        steps=steps,
        breakdown=window,
        breakdown_missing=breakdown_missing
        or (None if window is not None else "no device work was recorded"),
        phases_ns=phases,
        step_statistics=own,
        collectives=None,
        memory=memory,
        kernels=kernels,
        operators=operators,
        metadata=METADATA if metadata is None else metadata,
    )
    return RankResult(summary, part, 0)


def all_reduce(**changes: Any) -> CollectiveResult:
    row = CollectiveResult(
        op="all_reduce",
        group="0",
        ranks=(0, 1),
        bytes=20 * 50_400_000,
        calls=60,
        transfer_ns=60 * MS,
        wait_ns=20 * MS,
        algbw_bytes_per_s=16.8e9,
        busbw_bytes_per_s=16.8e9,
        caused_by={0: 10 * MS, 1: 10 * MS},
    )
    return replace(row, **changes)


def build(
    ranks: Sequence[RankResult] | None = None,
    *,
    world_size: int | None = None,
    steps: int = 20,
    step_ns: int = 100 * MS,
    collectives: tuple[CollectiveResult, ...] | None = None,
    hardware: Hardware | None = None,
    step_statistics: StepStatistics | str | None = "default",
    **changes: Any,
) -> Analysis:
    """An analysis of two healthy ranks of a native record, changed as asked."""
    if ranks is None:
        ranks = [rank_result(rank, steps=steps_table(), part=communication()) for rank in (0, 1)]
    size = len(ranks) if world_size is None else world_size
    present = tuple(rank.rank for rank in ranks)
    if collectives is None:
        collectives = (all_reduce(),) if size > 1 else ()
    analysis = Analysis(
        source=Source(
            "runs/test",
            ranks[0].summary.format if ranks else "trine",
            size,
            present,
            tuple(rank for rank in range(size) if rank not in present),
            steps,
            "complete",
        ),
        data_quality=(),
        hardware=hardware or Hardware("Test CPU", 2),
        ranks=tuple(ranks),
        collectives=collectives,
        heatmap=tuple(HeatCell(rank.rank, "all_reduce", 10 * MS, 60 * MS, 60) for rank in ranks),
        step_statistics=statistics(steps, step_ns) if step_statistics == "default" else step_statistics,  # type: ignore[arg-type]
        mfu=None,
        kernels=(),
        operators=(),
        checklist=(),
        not_bound_by=(),
        findings=(),
        verdict=Verdict("", None, "low", None),
    )
    return replace(analysis, **changes)


def shares(**changes: float) -> dict[str, float]:
    """The healthy phases with some shares changed; forward and backward shrink in proportion."""
    picked = {**HEALTHY_PHASES, **changes}
    fixed = sum(value for name, value in picked.items() if name not in ("forward", "backward"))
    picked["forward"], picked["backward"] = (1 - fixed) * 0.36, (1 - fixed) * 0.64
    return picked
