"""What ZeRO and recomputation would free, from this run's own bytes and phases."""

from __future__ import annotations

from trine.analyzers.results import Prediction

from ._facts import Facts
from ._gain import predict
from ._memory import Fill

__all__ = ["ACTIVATIONS_FREED", "activations_bytes", "checkpointing", "evidence_of", "freed_bytes", "zero"]

#: Share of the activations that full recomputation frees. Korthikanti et al. 2022, table 2: 2·s·b·h of
#: 34·s·b·h + 5·a·s²·b stay per layer, so 94 % and more; the head and the block in work keep theirs.
ACTIVATIONS_FREED = 0.7


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
    freed = -round(activations * ACTIVATIONS_FREED)
    if forward is not None:
        forward_ns = facts.step_part_ns(forward.share)
        inputs["forward_ns"] = forward_ns
        return predict(facts, forward_ns, (-1.2, -1.0, -0.8), formula, inputs, freed)
    # Without phases: the forward pass is about a third of compute.
    compute = facts.part(lambda rank: rank.window(lambda breakdown: breakdown.compute_ns))
    if compute is None:
        return Prediction(None, None, freed, formula, inputs)
    compute_ns = facts.step_part_ns(compute.share)
    inputs["compute_ns"] = compute_ns
    return predict(facts, compute_ns, (-0.4, -1 / 3, -0.25), formula, inputs, freed)


def zero(facts: Facts) -> tuple[int, Prediction] | None:
    """(stage, prediction) of sharding what DDP replicates: optimizer state, and gradients with it.

    ZeRO (Rajbhandari et al. 2020): stage 1 frees (1 − 1/N) of the optimizer state, stage 2 of the
    gradients too; both move no more bytes than DDP's all-reduce.
    """
    if facts.world < 2 or facts.about("data_parallel", "kind") != "ddp":
        return None
    state, gradients = facts.about("model", "optimizer_bytes"), facts.about("model", "gradient_bytes")
    if not isinstance(state, int) or state <= 0:
        return None
    if (facts.configuration.get("zero") or {}).get("stage", 0):
        return None
    share = 1 - 1 / facts.world
    both = isinstance(gradients, int) and gradients > 0
    freed = round((state + (gradients if both else 0)) * share)
    inputs: dict[str, float | int | str] = {"optimizer_bytes": state, "ranks": facts.world}
    if both:
        inputs["gradient_bytes"] = gradients
    stage = 2 if both else 1
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
