"""What a layout has to keep: each constraint with a name, the rows that keep it, and words for one that does not.

Divisibility (heads, keys and values, feed-forward, layers, experts, sequence), topology (tensor ranks inside a node), the
global batch, and what schedules, ZeRO and offload ask for. Memory is weighed apart (:mod:`trine.optim.plan.search`): it needs an
estimate, not a rule; what saves it has rules of its own (:mod:`trine.optim.plan.saving_constraints`), and so have experts
(:mod:`trine.optim.plan.expert_constraints`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from trine.optim.plan.layouts import (
    KINDS,
    OFFLOADED,
    PRECISIONS,
    SCHEDULES,
    Integers,
)
from trine.optim.plan.problem import Problem
from trine.optim.plan.refusals import Rule, broken, broken_words
from trine.optim.plan.schedules import Shape, schedules

__all__ = [
    "BATCH",
    "CHOICES",
    "RANKS",
    "SAVED",
    "STAGES",
    "Constraint",
    "Mask",
    "Rows",
    "divides",
    "has_precision",
    "kept",
    "words_of",
]

#: Columns that a shape has not yet: what saves memory at the price of time.
SAVED = frozenset({"recompute", "recomputed_layers", *OFFLOADED})
#: Columns of layouts that are being made: not all that a layout has.
Rows = Mapping[str, Integers]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Constraint:
    """``holds(problem, rows)``: where it is kept. ``words(problem, row)``: what is wrong with one that does not keep it."""

    name: str
    holds: Callable[[Problem, Rows], Mask]
    words: Callable[[Problem, Mapping[str, int]], str]


def kept(constraints: Sequence[Constraint], problem: Problem, rows: Rows) -> Mask:
    """Where all hold."""
    found = np.ones(len(next(iter(rows.values()))), dtype=bool)
    for constraint in constraints:
        found &= constraint.holds(problem, rows)
    return found


def words_of(constraints: Sequence[Constraint], problem: Problem, rows: Rows) -> str:
    """What is wrong with the row that breaks the fewest, the first where several do; of rows none of which keeps all."""
    broken = np.stack([~constraint.holds(problem, rows) for constraint in constraints])
    row = int(np.argmin(broken.sum(axis=0)))
    values = {name: int(column[row]) for name, column in rows.items()}
    wrong = [
        constraint for constraint, is_broken in zip(constraints, broken[:, row], strict=True) if is_broken
    ]
    return "; ".join(constraint.words(problem, values) for constraint in wrong[:2])


def divides(small: Integers, large: int | Integers) -> Mask:
    """Row by row; what is below 1 counts as 1."""
    return np.asarray(np.asarray(large) % np.maximum(small, 1) == 0)


# --- degrees ------------------------------------------------------------------------------------


def _devices(problem: Problem, rows: Rows) -> Mask:
    return np.asarray(rows["tensor"] * rows["context"] * rows["pipeline"] * rows["data"] == problem.devices)


def _devices_words(problem: Problem, row: Mapping[str, int]) -> str:
    names = [
        name for name in ("data", "context", "tensor", "pipeline") if row[name] != 1 or name in problem.pins
    ]
    degrees = {name: row[name] for name in names if row[name] > 0}
    product = int(np.prod(list(degrees.values()))) if degrees else 1
    spelled = " x ".join(f"{name} {value}" for name, value in degrees.items())
    product_words = f" = {product}" if len(degrees) > 1 else ""
    wrong = "does not divide" if problem.devices % product else "is not"
    return f"{spelled}{product_words} {wrong} the {problem.devices} devices"


def _node(problem: Problem, rows: Rows) -> Mask:
    return divides(rows["tensor"], problem.cluster.devices_per_node)


def _node_words(problem: Problem, row: Mapping[str, int]) -> str:
    return (
        f"tensor {row['tensor']} does not divide a node's {problem.cluster.devices_per_node} devices "
        "(tensor ranks exchange every layer's output: they stay inside a node)"
    )


def _heads(problem: Problem, rows: Rows) -> Mask:
    return divides(rows["tensor"], problem.workload.heads)


def _heads_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"tensor {row['tensor']} does not divide {problem.workload.heads} attention heads"


def _keys(problem: Problem, rows: Rows) -> Mask:
    if problem.workload.latent is not None:
        return np.ones(len(rows["tensor"]), dtype=bool)
    count = problem.workload.kv_heads
    # Fewer key heads than ranks: groups of ranks keep the same ones.
    return np.asarray(divides(rows["tensor"], count) | (rows["tensor"] % count == 0))


def _keys_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"tensor {row['tensor']} and {problem.workload.kv_heads} heads of keys and values do not divide each other"


def _width(problem: Problem, rows: Rows) -> Mask:
    workload = problem.workload
    if workload.mixture_layers == workload.layers:
        return np.ones(len(rows["tensor"]), dtype=bool)
    return divides(rows["tensor"], workload.ffn)


def _width_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"tensor {row['tensor']} does not divide the feed-forward's width {problem.workload.ffn}"


def _sequence(problem: Problem, rows: Rows) -> Mask:
    # Ranks of a causal ring take a block from the front and one from the back, so that all have equal work (Brandon 2023).
    parts = rows["context"] * (2 if problem.workload.causal else 1)
    return np.asarray((rows["context"] == 1) | divides(parts, problem.workload.sequence))


def _sequence_words(problem: Problem, row: Mapping[str, int]) -> str:
    parts = row["context"] * (2 if problem.workload.causal else 1)
    return f"context {row['context']} needs {parts} equal blocks, and the sequence of {problem.workload.sequence} has none"


def _layers(problem: Problem, rows: Rows) -> Mask:
    return np.asarray(rows["pipeline"] <= problem.workload.layers)


def _layers_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"pipeline {row['pipeline']} is more than {problem.workload.layers} layers"


RANKS = (
    Constraint("devices", _devices, _devices_words),
    Constraint("node", _node, _node_words),
    Constraint("heads", _heads, _heads_words),
    Constraint("kv_heads", _keys, _keys_words),
    Constraint("ffn", _width, _width_words),
    Constraint("sequence", _sequence, _sequence_words),
    Constraint("layers", _layers, _layers_words),
)


# --- batch --------------------------------------------------------------------------------------


def _batch(problem: Problem, rows: Rows) -> Mask:
    made = rows["data"] * rows["micro_batch"] * rows["microbatches"]
    return np.asarray(made == problem.global_batch)


def _batch_words(problem: Problem, row: Mapping[str, int]) -> str:
    product = row["data"] * row["micro_batch"]
    if "microbatches" in problem.pins:
        spelled = (
            f"data {row['data']} x micro-batch {row['micro_batch']} x {row['microbatches']} micro-batches"
        )
        return (
            f"{spelled} = {product * row['microbatches']} is not the global batch of {problem.global_batch}"
        )
    spelled = f"data {row['data']} x micro-batch {row['micro_batch']} = {product}"
    return f"{spelled} does not divide the global batch of {problem.global_batch}"


BATCH = (Constraint("global batch", _batch, _batch_words),)


# --- stages -------------------------------------------------------------------------------------


def _even_chunks(problem: Problem, rows: Rows) -> Mask:
    """Several stages a rank are all alike, or the first and the last have a layer less for embedding and head."""
    stages, layers = rows["pipeline"] * rows["chunks"], problem.workload.layers
    return np.asarray((rows["chunks"] == 1) | divides(stages, layers) | divides(stages, layers + 2))


def _even_chunks_words(problem: Problem, row: Mapping[str, int]) -> str:
    stages = row["pipeline"] * row["chunks"]
    return f"{problem.workload.layers} layers do not make {stages} equal stages (pipeline x chunks)"


@cache
def _schedule_problem(code: int, pipeline: int, chunks: int, microbatches: int) -> str | None:
    schedule = schedules()[SCHEDULES[code]]
    if schedule.chunks and chunks != schedule.chunks:
        return f"it runs {schedule.chunks} chunks a rank"
    if not schedule.chunks and chunks < 2:
        return "it needs at least 2 chunks a rank"
    return schedule.problem(Shape(pipeline, chunks, microbatches))


def _schedules(problem: Problem, rows: Rows) -> Mask:
    columns = [rows[name] for name in ("schedule", "pipeline", "chunks", "microbatches")]
    stacked = np.stack(columns, axis=1)
    unique, back = np.unique(stacked, axis=0, return_inverse=True)
    fine = np.asarray([_runs(*map(int, row)) for row in unique], dtype=bool)
    return fine[back.reshape(-1)]


def _runs(code: int, pipeline: int, chunks: int, microbatches: int) -> bool:
    if pipeline == 1:
        return SCHEDULES[code] == "1f1b" and chunks == 1
    return _schedule_problem(code, pipeline, chunks, microbatches) is None


def _schedules_words(problem: Problem, row: Mapping[str, int]) -> str:
    name = SCHEDULES[row["schedule"]]
    if row["pipeline"] == 1:
        return f"schedule {name} with {row['chunks']} chunks needs a pipeline of at least 2 ranks"
    reason = _schedule_problem(row["schedule"], row["pipeline"], row["chunks"], row["microbatches"])
    return (
        f"schedule {name} with {row['chunks']} chunks and {row['microbatches']} micro-batches on {row['pipeline']} "
        f"ranks: {reason}"
    )


STAGES = (
    Constraint("stages", _even_chunks, _even_chunks_words),
    Constraint("schedule", _schedules, _schedules_words),
)


# --- what is chosen for a shape ------------------------------------------------------------------


def _zero_ranks(problem: Problem, rows: Rows) -> Mask:
    return np.asarray((rows["zero_stage"] == 0) | (rows["data"] * rows["context"] > 1))


def _zero_ranks_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"zero_stage {row['zero_stage']} has no ranks to shard over: data and context are 1"


def _zero_pipeline(problem: Problem, rows: Rows) -> Mask:
    if "zero_stage" in problem.pins:
        return np.ones(len(rows["zero_stage"]), dtype=bool)
    return np.asarray(
        (rows["pipeline"] == 1) | np.isin(rows["zero_stage"], problem.abilities.zero_in_pipelines)
    )


def _zero_pipeline_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"{problem.stack.name} has no zero_stage {row['zero_stage']} beside pipeline stages"


def _shard_stage(problem: Problem, rows: Rows) -> Mask:
    return np.asarray((rows["shard"] == 0) | (rows["zero_stage"] > 0))


def _shard_stage_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"shard {row['shard']} needs a zero_stage of 1 or more"


def _shard(problem: Problem, rows: Rows) -> Mask:
    return np.asarray((rows["shard"] == 0) | divides(rows["shard"], rows["data"]))


def _shard_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"shard {row['shard']} does not divide data {row['data']}"


def _split(problem: Problem, rows: Rows) -> Mask:
    tokens = problem.workload.sequence // rows["context"]
    return np.asarray((rows["sequence"] == 0) | ((rows["tensor"] > 1) & divides(rows["tensor"], tokens)))


def _split_words(problem: Problem, row: Mapping[str, int]) -> str:
    if row["tensor"] == 1:
        return "sequence 1 splits over tensor ranks, and tensor is 1"
    tokens = problem.workload.sequence // row["context"]
    return f"sequence parallelism: tensor {row['tensor']} does not divide {tokens} tokens"


def _two_level(problem: Problem, rows: Rows) -> Mask:
    """It is of all-reduces that leave a node which holds several of their ranks."""
    near = np.maximum(problem.cluster.devices_per_node // rows["tensor"], 1)
    spread = (rows["zero_stage"] == 0) & (near > 1) & (rows["data"] * rows["context"] > near)
    return np.asarray((rows["two_level"] == 0) | spread)


def _two_level_words(problem: Problem, row: Mapping[str, int]) -> str:
    return "two_level needs zero_stage 0 and gradients that are reduced over several nodes with several ranks in each"


def _precision(problem: Problem, rows: Rows) -> Mask:
    known = [code for code, name in enumerate(PRECISIONS) if has_precision(problem, name)]
    return np.isin(rows["precision"], known)


def has_precision(problem: Problem, name: str) -> bool:
    """Whether the device has units for it."""
    return name in problem.cluster.device.flops_per_s


def _precision_words(problem: Problem, row: Mapping[str, int]) -> str:
    device = problem.cluster.device
    known = ", ".join(name for name in PRECISIONS if has_precision(problem, name))
    return f"{device.name} has no peak for precision {PRECISIONS[row['precision']]}: it has {known}"


def _compression(problem: Problem, rows: Rows) -> Mask:
    return np.asarray((rows["compression"] == 0) | (rows["data"] * rows["context"] > 1))


def _compression_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"compression {KINDS['compression'][row['compression']]} has nothing to compress: data and context are 1"


def _buckets(problem: Problem, rows: Rows) -> Mask:
    # Under ZeRO 3 a layer is what is reduced at once.
    reduced = (rows["data"] * rows["context"] > 1) & (rows["zero_stage"] < 3)
    settled = "bucket_bytes" in problem.pins
    return np.asarray(reduced | (rows["bucket_bytes"] == 0) | settled)


def _buckets_words(problem: Problem, row: Mapping[str, int]) -> str:
    return "buckets are of gradients that several ranks reduce below zero_stage 3"


def _rules(problem: Problem) -> list[Rule]:
    """Of what a shape has."""
    return problem.refused_unless_pinned(lambda columns: not columns & SAVED)


def _together(problem: Problem, rows: Rows) -> Mask:
    return ~broken(_rules(problem), rows, problem.workload)


def _together_words(problem: Problem, row: Mapping[str, int]) -> str:
    return f"{problem.stack.name} does not run {broken_words(_rules(problem), row, problem.workload)}"


CHOICES = (
    Constraint("zero", _zero_ranks, _zero_ranks_words),
    Constraint("zero in pipelines", _zero_pipeline, _zero_pipeline_words),
    Constraint("shard", _shard, _shard_words),
    Constraint("shard in ZeRO", _shard_stage, _shard_stage_words),
    Constraint("sequence parallelism", _split, _split_words),
    Constraint("two levels", _two_level, _two_level_words),
    Constraint("compression", _compression, _compression_words),
    Constraint("buckets", _buckets, _buckets_words),
    Constraint("precision", _precision, _precision_words),
    Constraint("together", _together, _together_words),
)
