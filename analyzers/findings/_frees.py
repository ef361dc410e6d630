"""What ZeRO and recomputation would free, from this run's own bytes and phases."""

from __future__ import annotations

from trine.analyzers.results import Prediction
from trine.analyzers.studies import result_of
from trine.analyzers.studies.memory_owners import CHECKPOINTED, MemoryOwners

from ._facts import Facts
from ._gain import predict
from ._memory import Fill

__all__ = [
    "ACTIVATIONS_FREED",
    "activations_bytes",
    "checkpointing",
    "evidence_of",
    "freed_at_peak",
    "freed_bytes",
    "state_bytes",
    "zero",
]

#: Share of the activations that full recomputation frees. Korthikanti et al. 2022, table 2: 2·s·b·h of
#: 34·s·b·h + 5·a·s²·b stay per layer, so 94 % and more; the head and the block in work keep theirs.
ACTIVATIONS_FREED = CHECKPOINTED

#: Category of memory → key of the record's description of the model.
_DESCRIBED = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer_state": "optimizer_bytes",
}


def freed_at_peak(facts: Facts, rank: int, change: str) -> int | None:
    """What a change takes off the peak of a rank whose whole curve is known (study ``memory_owners``)."""
    found = result_of(facts.analysis, "memory_owners", MemoryOwners)
    if found is None or not found.ranks or found.ranks[0].rank != rank:
        return None
    return next((each.freed_bytes for each in found.frees if each.change == change), None)


def state_bytes(facts: Facts, rank: int, category: str) -> int | None:
    """Bytes of parameters, gradients or optimizer state: as the record describes the model, else the most that the
    allocator's events show of it at a time."""
    described = facts.about("model", _DESCRIBED[category])
    if isinstance(described, int) and described > 0:
        return described
    found = result_of(facts.analysis, "memory_owners", MemoryOwners)
    part = next((part for part in found.ranks if part.rank == rank), None) if found is not None else None
    if part is None or category not in part.categories:
        return None
    return max(part.levels[part.categories.index(category)], default=0) or None


def activations_bytes(facts: Facts, rank: int) -> int | None:
    """Activations at the peak: as categorised, else the peak less parameters, gradients and state."""
    result = next((r.result for r in facts.ranks if r.rank == rank), None)
    memory = result.summary.memory if result is not None else None
    if result is None or memory is None:
        return None
    known = memory.at_peak.get("activations")
    if known is not None:
        return known
    if memory.kind == "host" or memory.peak_bytes is None:
        return None  # a process's resident set holds far more than its tensors
    states = [facts.about("model", f"{name}_bytes") for name in ("parameter", "gradient", "optimizer")]
    if not all(isinstance(state, int) for state in states):
        return None
    return max(memory.peak_bytes - sum(states), 0) or None


def checkpointing(facts: Facts, rank: int) -> Prediction | None:
    """Full recomputation: bytes freed, and one more forward pass as a negative gain."""
    activations = activations_bytes(facts, rank)
    if activations is None or facts.about("configuration", "checkpointing", "mode") not in (None, "none"):
        return None
    forward = facts.part(lambda rank: rank.phase("forward"))
    formula = f"activations × {ACTIVATIONS_FREED} freed; cost: one more forward pass (×1.0 to 1.2)"
    inputs: dict[str, float | int | str] = {"activations_bytes": activations}
    drawn = freed_at_peak(facts, rank, "checkpointing")
    freed = -(drawn if drawn is not None else round(activations * ACTIVATIONS_FREED))
    if drawn is not None:
        inputs["freed_of_the_whole_curve_bytes"] = drawn
    if forward is not None:
        forward_ns = facts.step_part_ns(forward.share)
        inputs["forward_ns"] = forward_ns
        change = {"checkpointing.mode": "full"}
        return predict(facts, forward_ns, (-1.2, -1.0, -0.8), formula, inputs, freed, change)
    # Without phases: the forward pass is about a third of compute.
    compute = facts.part(lambda rank: rank.window(lambda breakdown: breakdown.compute_ns))
    if compute is None:
        return Prediction(None, None, freed, formula, inputs)
    compute_ns = facts.step_part_ns(compute.share)
    inputs["compute_ns"] = compute_ns
    change = {"checkpointing.mode": "full"}
    return predict(facts, compute_ns, (-0.4, -1 / 3, -0.25), formula, inputs, freed, change)


def _replicated(facts: Facts) -> bool:
    """Whether ranks hold the same state: said by the record, or DDP's own annotations in a trace."""
    kind = facts.about("data_parallel", "kind")
    if kind is not None:
        return bool(kind == "ddp")
    return any(
        row.name.startswith("DistributedDataParallel.")
        for rank in facts.ranks
        for row in rank.result.summary.operators
    )


def zero(facts: Facts, fill: Fill | None = None) -> tuple[int, Prediction] | None:
    """(stage, prediction) of sharding what DDP replicates: optimizer state, and gradients with it.

    ZeRO (Rajbhandari et al. 2020): stage 1 frees (1 − 1/N) of the optimizer state, stage 2 of the
    gradients too; both move no more bytes than DDP's all-reduce.
    """
    if facts.world < 2 or not _replicated(facts):
        return None
    rank = fill.rank if fill is not None else facts.ranks[0].rank if facts.ranks else 0
    state, gradients = (state_bytes(facts, rank, name) for name in ("optimizer_state", "gradients"))
    if state is None:
        return None
    if (facts.configuration.get("zero") or {}).get("stage", 0):
        return None
    share = 1 - 1 / facts.world
    freed = round((state + (gradients or 0)) * share)
    inputs: dict[str, float | int | str] = {"optimizer_bytes": state, "ranks": facts.world}
    if gradients:
        inputs["gradient_bytes"] = gradients
    stage = 2 if gradients else 1
    drawn = freed_at_peak(facts, rank, f"ZeRO-{stage}")
    if drawn is not None:
        freed = drawn
        inputs["freed_of_the_whole_curve_bytes"] = drawn
    return stage, Prediction(None, None, -freed, "(optimizer state + gradients) × (1 − 1 ÷ ranks)", inputs)


def freed_bytes(prediction: Prediction) -> int:
    """Bytes that the change takes off the peak; negative where it adds."""
    return -(prediction.peak_bytes_change or 0)


def evidence_of(fill: Fill, prediction: Prediction) -> dict[str, float | int | str]:
    """How full the memory is, what would be freed of it, and from which numbers."""
    return {
        "freed_bytes": freed_bytes(prediction),
        "peak_bytes": fill.used_bytes,
        "capacity_bytes": fill.capacity_bytes,
        **prediction.inputs,
    }
