"""What a plan's layout comes to under the software that it is exported to, where it was planned for other."""

from __future__ import annotations

from math import prod
from typing import Any

from trine.optim.exports._account import Written
from trine.optim.exports._exported import Batch, Exported
from trine.optim.plan.abilities import abilities_of
from trine.optim.plan.candidates import Candidate, Predictor
from trine.optim.plan.constants import Stack, stack_named, stacks
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.problem import Problem
from trine.optim.plan.refusals import broken
from trine.optim.plan.units import spell_bytes, spell_seconds
from trine.optim.plan.workload import Workload
from trine.record.errors import UsageError

__all__ = ["STACKS", "loss_words", "prediction_words"]

#: Dialect, with the kind of its file where it has several → the stacks that are its software; predictions are for the first.
STACKS: dict[str, tuple[str, ...]] = {
    "pytorch": ("trine", "pytorch"),
    "deepspeed": ("deepspeed",),
    "megatron": ("megatron-core",),
    "megatron-deepspeed": ("megatron-deepspeed",),
    "colossalai": (),
    "torchtitan": ("torchtitan",),
    "accelerate MEGATRON_LM": ("megatron-core",),
    "accelerate DEEPSPEED": ("deepspeed",),
    "accelerate FSDP": ("fsdp",),
    "accelerate MULTI_GPU": ("pytorch", "trine"),
    "accelerate NO": ("pytorch", "trine"),
}

#: Column → our own key that says it, and what it is where the export does not.
_PLAIN: dict[str, tuple[str, int | str]] = {
    "sequence": ("parallel.sequence", 0),
    "shard": ("parallel.shard", 0),
    "chunks": ("parallel.chunks", 1),
    "optimizer_offload": ("offload.optimizer", "none"),
    "parameter_offload": ("offload.parameters", "none"),
    "activation_offload": ("offload.activations", "none"),
    "bucket_bytes": ("communication.bucket_mib", 0),
    "two_level": ("communication.algorithm", 0),
}
#: Schedules of one stage a rank.
_ONE_STAGE = ("gpipe", "1f1b", "zb-h1", "zb-h2")
#: Column → what a software that does not have the planned value has instead.
_NEAREST = {"schedule": "1f1b", "precision": "bf16", "compression": "none", "recompute": "full"}


def loss_words(exported: Exported, written: Written) -> str:
    """That whole kinds of parallelism are not in the export of a plan; "" where all are."""
    if exported.layout is None:
        return ""
    parts = []
    for keys, words in (
        (written.lost, "not in the export"),
        (written.left, "the program's, or another file's"),
    ):
        degrees = [f"{key.partition('.')[2]} {exported.config[key]}" for key in keys]
        if degrees:
            parts.append(f"{' and '.join(degrees)} {'is' if len(degrees) == 1 else 'are'} {words}")
    return f"the layout as planned: {', and '.join(parts)}" if parts else ""


def prediction_words(dialect: str, tool: str, exported: Exported, written: Written) -> str:
    """What the exported layout takes under the dialect's software, where the plan is for another; "" where it is for that."""
    software = _software(dialect, written)
    planned = exported.stack
    if exported.layout is None or planned is None or _is_software(planned, software):
        return ""
    if not software:
        return f"planned for {planned.name}: no stack of the planner is {tool}, and what this layout takes there is not known"
    target = stack_named(software[0])
    anew = f"plan with --stack {target.name}"
    if exported.cluster is None or exported.workload is None:
        return f"planned for {planned.name}, and the plan does not hold what a prediction for {target.name} needs: {anew}"
    try:
        before = _candidate(exported, exported.layout, planned)
        row = _as_written(exported, written, target)
        after = _candidate(exported, row, target)
    except UsageError as error:  # a layout, or a device, that it has no numbers for
        return f"planned for {planned.name}, and it cannot be predicted for {target.name} ({error}): {anew}"
    room = exported.cluster.device.memory_bytes * (1 - exported.headroom)
    return f"planned for {planned.name} ({_spelled(before)}); {_words(after, target, room)}: {anew}"


def _words(after: Candidate, target: Stack, room: float) -> str:
    where = f"under {target.name} this layout"
    if not after.hosts_hold:
        return f"{where} does not fit: a node's memory does not hold what is moved there"
    if after.peak.value > room:
        return f"{where} does not fit: {spell_bytes(after.peak.value)}, and {spell_bytes(room)} may be used"
    return f"{where} takes {_spelled(after)}"


def _spelled(one: Candidate) -> str:
    return f"{spell_seconds(one.step.value)} a step, {spell_bytes(one.peak.value)}"


def _software(dialect: str, written: Written) -> tuple[str, ...]:
    return STACKS[f"{dialect} {written.kind}" if written.kind else dialect]


def _is_software(stack: Stack | None, software: tuple[str, ...]) -> bool:
    """Whether a stack is one of these, or a release of one."""
    while stack is not None:
        if stack.name in software:
            return True
        stack = stacks().get(stack.parent)
    return False


def _candidate(exported: Exported, row: Any, stack: Stack) -> Candidate:
    """As a plan predicts it, by simulation where it has a pipeline."""
    assert exported.workload is not None and exported.cluster is not None
    layouts = Layouts.of(**row)
    problem = Problem(
        exported.workload,
        exported.cluster,
        stack,
        int(layouts.global_batch[0]),
        exported.headroom,
    )
    predictor = Predictor(problem, None, None, None)
    return predictor.exact(predictor.candidates(layouts)[0])


def _as_written(exported: Exported, written: Written, target: Stack) -> dict[str, int | str]:
    """The layout as the export has it: without what is not said there, and with the nearest that the software has."""
    assert exported.layout is not None and exported.workload is not None
    row = dict(exported.layout)
    for column, (key, plain) in _PLAIN.items():
        if key not in written.said:
            row[column] = plain
    for key in written.lost:
        row[key.partition(".")[2]] = 1
    times = prod(exported.config[key] for key in written.lost if key != "parallel.expert")
    batch = Batch(int(row["micro_batch"]), int(row["microbatches"]), exported.batch.whole).over(times)
    row |= {"data": int(row["data"]) * times, "micro_batch": batch.micro or 1}
    row["microbatches"] = batch.count or 1
    offers = abilities_of(target).choices
    for column, nearest in _NEAREST.items():
        if row[column] not in offers[column]:
            row[column] = nearest
    if row["schedule"] in _ONE_STAGE:
        row["chunks"] = 1
    elif row["chunks"] == 1:
        row["schedule"] = _NEAREST["schedule"]
    if row["recompute"] != "budget":
        row["recomputed_layers"] = 0
    row["zero_stage"] = _zero_stage(row, target, exported.workload)
    return row


def _zero_stage(row: dict[str, int | str], target: Stack, workload: Workload) -> int:
    """The planned stage, or the next that the software has beside the rest."""
    planned = int(row["zero_stage"])
    abilities = abilities_of(target)
    rules = [rule for rule in abilities.refuses if "zero_stage" in rule.columns]
    for stage in abilities.choices["zero_stage"]:
        codes = Layouts.of(**row | {"zero_stage": stage}).columns
        if stage >= planned and not broken(rules, codes, workload).any():
            return int(stage)
    return planned
