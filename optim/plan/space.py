"""The space of layouts: every one that keeps the constraints, in two steps.

Shapes are all ways to divide the devices (data, context, tensor, expert, pipeline), the batch (micro-batches), the stages
(schedule, chunks) and the state (ZeRO, shard group), with whatever else changes what is exchanged. Each shape can then save
memory at the price of time: recomputation and offload. No saving makes a step shorter, so a shape without them is a lower
bound for all that it can become, and one with all of them for their memory; the search prunes by both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trine.optim.plan.constraints import (
    BATCH,
    CHOICES,
    RANKS,
    STAGES,
    Constraint,
    Rows,
    has_precision,
    kept,
    words_of,
)
from trine.optim.plan.expert_constraints import EXPERTS
from trine.optim.plan.layouts import (
    DEFAULTS,
    OFFLOADED,
    OFFLOADS,
    PRECISIONS,
    RECOMPUTATIONS,
    SCHEDULES,
    Integers,
    Layouts,
)
from trine.optim.plan.memory_traits import memory_traits
from trine.optim.plan.problem import Problem, divisors
from trine.optim.plan.saving_constraints import OFFLOADS_ALONE, SAVINGS, stage_most
from trine.optim.plan.traffic import CODE_BYTES
from trine.optim.plan.waits import WIRE_BYTES

__all__ = ["BUCKETS", "NothingKept", "saving_choices", "savings", "savings_words", "shapes"]

#: Micro-batches are tried up to so many sequences: matmuls gain nothing from more.
_LARGEST_MICRO_BATCH = 64
#: Parts of a stage's layers that a budget of recomputation is tried with.
_BUDGETS = (0.25, 0.5, 0.75)
#: Bytes of buckets that are tried: DistributedDataParallel's own, and larger ones. 0: the software's own, whatever that is.
BUCKETS = tuple(mebibytes * 2**20 for mebibytes in (25, 100, 400))


class NothingKept(Exception):
    """No layout keeps all constraints; the message says which one the nearest breaks."""


def shapes(problem: Problem) -> Layouts:
    """All shapes, without recomputation and offload. Raises :class:`NothingKept`."""
    rows = _kept(RANKS, problem, _ranks(problem))
    experts = problem.choices(
        "expert", divisors(problem.workload.experts) if problem.workload.is_mixture else (1,)
    )
    rows = _kept(EXPERTS, problem, _times(rows, {"expert": experts}))
    rows = _kept(BATCH, problem, _batches(problem, rows))
    rows = _kept(STAGES, problem, _stages(problem, rows))
    rows = _kept(CHOICES, problem, _choices(problem, rows))
    count = len(rows["data"])
    return Layouts(
        {name: rows.get(name, np.full(count, value, dtype=np.int64)) for name, value in DEFAULTS.items()}
    )


def _kept(constraints: Sequence[Constraint], problem: Problem, rows: Rows) -> Rows:
    """Those rows. Raises :class:`NothingKept` where there are none."""
    if len(next(iter(rows.values()))) == 0:
        raise NothingKept("the pins leave nothing to choose from")
    mask = kept(constraints, problem, rows)
    if not mask.any():
        raise NothingKept(words_of(constraints, problem, rows))
    return {name: column[mask] for name, column in rows.items()}


def _times(rows: Rows, choices: Mapping[str, Sequence[int]]) -> Rows:
    """Every row with every combination of further columns' values."""
    count = len(next(iter(rows.values()))) if rows else 1
    grids = np.meshgrid(*(np.asarray(values, dtype=np.int64) for values in choices.values()), indexing="ij")
    width = grids[0].size
    found = {name: np.repeat(column, width) for name, column in rows.items()}
    return {
        **found,
        **{name: np.tile(grid.reshape(-1), count) for name, grid in zip(choices, grids, strict=True)},
    }


def _ranks(problem: Problem) -> Rows:
    """Degrees that divide the devices, or are pinned; data is what they leave."""
    parts = divisors(problem.devices)
    degrees = {name: problem.choices(name, parts) for name in ("tensor", "context", "pipeline")}
    rows = _times({}, degrees)
    if "data" in problem.pins:
        return _times(rows, {"data": problem.pins["data"]})
    product = rows["tensor"] * rows["context"] * rows["pipeline"]
    fits = problem.devices % product == 0
    if fits.any():
        rows, product = {name: column[fits] for name, column in rows.items()}, product[fits]
    return {**rows, "data": np.where(problem.devices % product == 0, problem.devices // product, 0)}


def _batches(problem: Problem, rows: Rows) -> Rows:
    """Micro-batches that divide the batch; how many a step is what follows."""
    sizes = [size for size in divisors(problem.global_batch) if size <= _LARGEST_MICRO_BATCH]
    rows = _times(rows, {"micro_batch": problem.choices("micro_batch", sizes)})
    if "microbatches" in problem.pins:
        return _times(rows, {"microbatches": problem.pins["microbatches"]})
    counts = np.maximum(problem.global_batch // (rows["data"] * rows["micro_batch"]), 1)
    return {**rows, "microbatches": counts}


def _stages(problem: Problem, rows: Rows) -> Rows:
    """Schedules and chunks; alone, a stage has neither."""
    layers = problem.workload.layers
    several = {2, *(value for count in (layers, layers + 2) for value in divisors(count) if value > 1)}
    codes = problem.choices("schedule", SCHEDULES)
    chunks = problem.choices("chunks", [1, *sorted(value for value in several if value <= layers)])
    piped = rows["pipeline"] > 1
    parts = {
        True: {"schedule": codes, "chunks": chunks},
        # One stage runs as 1F1B does, which a pin of something else rules out.
        False: {
            "schedule": problem.pins.get("schedule", (SCHEDULES.index("1f1b"),)),
            "chunks": problem.pins.get("chunks", (1,)),
        },
    }
    pieces = [
        _times({name: column[piped == several] for name, column in rows.items()}, choices)
        for several, choices in parts.items()
    ]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _choices(problem: Problem, rows: Rows) -> Rows:
    """What else is chosen for a shape and changes what ranks exchange."""
    choices: dict[str, Sequence[int]] = {
        "zero_stage": problem.choices("zero_stage", (0, 1, 2, 3)),
        "sequence": problem.choices("sequence", (0, 1)),
        "two_level": problem.choices("two_level", (0, 1)),
        "compression": problem.choices("compression", _compressions(problem)),
        "bucket_bytes": problem.choices("bucket_bytes", _buckets(problem)),
        "precision": problem.choices("precision", _precisions(problem)),
    }
    found = _times(rows, choices)
    return _with_shard_groups(problem, found)


def _compressions(problem: Problem) -> tuple[str, ...]:
    """None; where they are searched, also those of the software's that no other beats in what it sends and in what it moves."""
    if "compression" not in problem.searched:
        return ("none",)
    offered = [name for name in problem.abilities.choices["compression"] if WIRE_BYTES[name] is not None]
    costs = {name: (WIRE_BYTES[name] or 0.0, CODE_BYTES[name]) for name in offered}

    def is_beaten(name: str) -> bool:
        sent, moved = costs[name]
        return any(
            wire <= sent and code <= moved and ((wire, code) != (sent, moved) or other < name)
            for other, (wire, code) in costs.items()
            if other != name
        )

    return ("none", *sorted(name for name in offered if not is_beaten(name)))


def _buckets(problem: Problem) -> tuple[int, ...]:
    """The software's own, which its constants were fitted with and none is faster than; smaller ones where those are large buffers."""
    own = memory_traits(problem.stack).bucket_bytes
    return (0, *(size for size in BUCKETS if 2 * size < own))


def _precisions(problem: Problem) -> tuple[str, ...]:
    """Where they are searched, all that the device has and that are not ever slower (fp32 beside tf32); else the stack's,
    the best half precision, or single; on processors single."""
    offered = problem.abilities.choices["precision"]
    known = tuple(name for name in PRECISIONS if has_precision(problem, name))
    if "precision" in problem.searched:
        both = {"fp32", "tf32"} <= {*known} & {*offered}
        return tuple(name for name in known if not (both and name == "fp32"))
    first = ("fp32",) if problem.cluster.device.is_processor else ()
    usual = (*first, problem.stack.precision, "bf16", "fp16", "fp32")
    # Of a device that has nothing of what the software offers, the constraint says so.
    return (next((name for name in usual if name in known and name in offered), offered[0]),)


def _with_shard_groups(problem: Problem, rows: Rows) -> Rows:
    """ZeRO's group is all data ranks, or those of a node under ZeRO 3 (hybrid sharding)."""
    if "shard" in problem.pins:
        return _times(rows, {"shard": problem.pins["shard"]})
    whole = {**rows, "shard": np.zeros(len(rows["data"]), dtype=np.int64)}
    if not problem.abilities.hybrid_shard:
        return whole
    near = problem.cluster.devices_per_node // (rows["tensor"] * rows["context"])
    fits = (
        (rows["zero_stage"] == 3)
        & (near > 1)
        & (near < rows["data"])
        & (rows["data"] % np.maximum(near, 1) == 0)
    )
    inside = {name: column[fits] for name, column in rows.items()} | {"shard": near[fits]}
    return {name: np.concatenate([whole[name], inside[name]]) for name in whole}


# --- savings -------------------------------------------------------------------------------------


def saving_choices(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Codes to try of recomputation and of each offload. Drives and hosts count only where the cluster has them."""
    found = {"recompute": problem.choices("recompute", RECOMPUTATIONS)}
    cluster = problem.cluster
    # What a processor would move to its host is there already.
    usual = {"none": True, "cpu": not cluster.device.is_processor, "nvme": cluster.nvme is not None}
    words = [word for word, there in usual.items() if there]
    reached = "remote" in problem.searched and cluster.nodes > 1
    far = (OFFLOADS.index("remote"),) if reached else ()
    for column in OFFLOADED:
        settled = column in problem.pins
        found[column] = problem.choices(column, words) + (() if settled else far)
    return found


def savings(
    problem: Problem, chosen: Layouts, columns: Sequence[str], *, settled: bool = True
) -> tuple[Layouts, Integers]:
    """Each layout with every combination of ``columns`` of :func:`saving_choices`, and the row that each came from.

    ``settled`` False: recomputation is still to be chosen, so what asks for it is let through.
    """
    rows = _saving_rows(problem, chosen, columns)
    mask = kept(SAVINGS if settled else OFFLOADS_ALONE, problem, rows)
    rows = {name: column[mask] for name, column in rows.items()}
    return Layouts({name: rows[name] for name in DEFAULTS}), rows["row"]


def savings_words(problem: Problem, chosen: Layouts) -> str:
    """Which constraint leaves these layouts, as they are and with every saving, nothing."""
    rows = _saving_rows(problem, chosen, ("recompute", *OFFLOADED))
    if not len(rows["row"]):
        return "the pins of offload and recomputation leave nothing to choose from"
    return words_of(SAVINGS, problem, rows)


def _saving_rows(problem: Problem, chosen: Layouts, columns: Sequence[str]) -> Rows:
    choices = saving_choices(problem)
    count = len(chosen)
    rows: Rows = {**chosen.columns, "row": np.arange(count)}
    rows = {name: column for name, column in rows.items() if name not in columns}
    rows = _times(rows, {name: choices[name] for name in columns})
    return _budgets(problem, rows) if "recompute" in columns else rows


def _budgets(problem: Problem, rows: Rows) -> Rows:
    """A budget recomputes some of a stage's layers: as many as are pinned, or parts of them."""
    is_budget = rows["recompute"] == RECOMPUTATIONS.index("budget")
    plain = {name: column[~is_budget] for name, column in rows.items()}
    plain["recomputed_layers"] = np.zeros(len(plain["row"]), dtype=np.int64)
    pieces: list[Rows] = [plain]
    some = {name: column[is_budget] for name, column in rows.items()}
    if "recomputed_layers" in problem.pins:
        some.pop("recomputed_layers")
        pieces.append(_times(some, {"recomputed_layers": problem.pins["recomputed_layers"]}))
    else:
        own = stage_most(problem, some["pipeline"])
        last = np.zeros_like(own)
        for part in _BUDGETS:
            layers = np.maximum(np.rint(own * part).astype(np.int64), 1)
            new = (layers > last) & (layers < own)
            pieces.append(
                {name: column[new] for name, column in some.items()} | {"recomputed_layers": layers[new]}
            )
            last = layers
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in plain}
