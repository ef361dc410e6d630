"""Gradient accumulation: the ``accumulation`` keys.

A step's samples are run in micro-batches whose gradients add up, so activations of one alone are alive and the numbers
stay those of the whole: each micro-batch weighs as many tokens (or samples) as it has. A mean of means is far off where
counts differ. Ranks synchronise at the last one only.

    steps           cuts what train_step gets into so many
    micro_batch     cuts it into pieces of so many samples
    global_batch    samples of an optimizer step over all ranks; engine.steps gathers or cuts the loader's batches
    "auto"          (steps or micro_batch) the largest micro-batch that fits the measured memory; grows and shrinks
    delayed         gradients are averaged behind the next step and applied one step late, after
                    delayed_warmup_steps (40 unless said) in which they are not
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_plain_layout
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

__all__ = [
    "KEYS",
    "NUMERICS",
    "ORDER",
    "QUANTITY",
    "Plan",
    "apply",
    "check",
    "plan_of",
    "refusal",
    "tolerance",
]

KEYS = (
    "accumulation.steps",
    "accumulation.micro_batch",
    "accumulation.global_batch",
    "accumulation.delayed",
    "accumulation.delayed_warmup_steps",
)
ORDER = 60
QUANTITY = "activation bytes; synchronisations per sample"
NUMERICS = (
    "unchanged but for the order of summation: losses within 1e-6 relative in fp32; batch norms see micro-batches, dropout "
    "draws per micro-batch; delayed applies each gradient one step late"
)

#: What a delayed update cannot be combined with: it averages gradients itself, whole, and once a step.
_NOT_DELAYED = (
    "communication.bucket_mib",
    "communication.first_bucket_mib",
    "communication.gradient_as_view",
    "communication.static_graph",
    "communication.overlap",
    "communication.compression",
    "communication.algorithm",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a rank's step is made up. ``None``: what the batch brings."""

    key: str  # what asks for it, for errors
    share: int | None  # samples of a rank's step
    micro: int | None  # samples of a micro-batch
    steps: int | None  # micro-batches of a step, where that is known beforehand
    automatic: bool
    stated: str = ""  # the beginning of errors about ``share``


def refusal(config: Config) -> str | None:
    """Everything of these keys can be applied."""
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the numbers do not divide, memory cannot be measured, or a late update cannot be."""
    plan = plan_of(config, facts.layout.data_ranks)
    if plan is not None and plan.automatic and facts.device_type not in ("cpu", "cuda"):
        raise UsageError(
            f'{plan.key} = "auto": the memory of {facts.device_type} devices cannot be measured here: write a number'
        )
    if config.accumulation.delayed:
        require_plain_layout(
            "accumulation.delayed", facts, "it averages whole gradients of whole models over all ranks"
        )
        _check_delayed(config, facts)


def plan_of(config: Config, ranks: int) -> Plan | None:
    """What the keys say together; ``None`` where ``steps`` alone says all. Raises ``UsageError`` with their names."""
    accumulation = config.accumulation
    steps, micro, whole = accumulation.steps, accumulation.micro_batch, accumulation.global_batch
    automatic = micro == "auto" or (steps == "auto" and micro is None)
    if micro is None and whole is None and not automatic:
        return None
    key = "accumulation.steps" if steps == "auto" and micro is None else "accumulation.micro_batch"
    size = micro if isinstance(micro, int) else None
    if whole is None:
        return Plan(key, None, size, None, automatic)
    if whole % ranks:
        raise UsageError(
            f"accumulation.global_batch = {whole} does not divide by the {ranks} ranks: use {ranks * max(1, whole // ranks)}"
        )
    share = whole // ranks
    stated = f"accumulation.global_batch = {whole} is {share} samples a rank"
    if isinstance(steps, int) and steps > 1:
        if share % steps:
            raise UsageError(f"{stated}, which accumulation.steps = {steps} does not divide")
        if size not in (None, share // steps):
            raise UsageError(
                f"{stated}: with accumulation.steps = {steps} that is {share // steps} a micro-batch, and "
                f"accumulation.micro_batch = {size}: drop one of the three"
            )
        size = share // steps
    elif size is not None and share % size:
        raise UsageError(f"{stated}, which accumulation.micro_batch = {size} does not divide")
    return Plan(
        key if micro is not None or automatic else "accumulation.global_batch",
        share,
        size,
        share // size if size else None,
        automatic,
        stated,
    )


def apply(assembly: Assembly) -> None:
    """Tell the engine how to cut, and put the late update in the place of DDP's averaging."""
    config = assembly.config
    plan = plan_of(config, assembly.facts.layout.data_ranks)
    if plan is not None:
        _apply_plan(assembly, plan)
    elif isinstance(config.accumulation.steps, int) and config.accumulation.steps > 1:
        assembly.accumulation = config.accumulation.steps
        assembly.effects.append(
            Effect(KEYS[0], "1", str(config.accumulation.steps), "synchronised at the last")
        )
    if config.accumulation.delayed:
        from trine.optim.runtime.delayed import install

        install(assembly)


def tolerance(config: Config) -> Tolerance | None:
    """Only the order of summation changes; a late update is another path to the same place."""
    accumulation = config.accumulation
    if accumulation.delayed:
        return Tolerance(loss=0.1, gradient=None)
    return Tolerance(loss=1e-6, gradient=1e-5) if accumulation.splits else None


def _apply_plan(assembly: Assembly, plan: Plan) -> None:
    from trine.optim.runtime.micro_batches import FittedMicroBatches, MicroBatches

    if plan.automatic:
        fitted = FittedMicroBatches(assembly, plan)
        assembly.fitting = fitted
        assembly.metrics["accumulation/micro_batch"] = lambda: fitted.size
        assembly.metrics["accumulation/steps"] = lambda: fitted.pieces
        assembly.metrics["accumulation/out_of_memory"] = lambda: fitted.out_of_memory
        batches: MicroBatches = fitted
    else:
        batches = MicroBatches(plan, assembly.facts)
        assembly.cut = batches.cut
    assembly.admit = _admission(assembly, batches)
    assembly.accumulation = plan.steps or 1
    if plan.share is not None and assembly.whole_steps:
        # After all that remakes the loader: they want the loader itself.
        assembly.finish.append(lambda finished: finished.loaders.append(batches.regroup))
    assembly.effects.append(_effect(plan))


def _admission(assembly: Assembly, batches: Any) -> Any:
    """Loops with a body of their own: their batches are micro-batches already."""
    plan: Plan = batches.plan
    counted: list[int] = []

    def admit(arguments: Any) -> None:
        if plan.automatic:
            raise UsageError(
                f'{plan.key} = "auto" needs engine.train_step, which can cut batches: give trine.optimize a loss_fn, or '
                "write a number"
            )
        size = batches.admit(arguments)
        if plan.share is not None and plan.steps is None and not counted:
            if plan.share % size:
                raise UsageError(f"{plan.stated}, and engine(…) got {size}, which does not divide them")
            assembly.accumulation = plan.share // size  # by the first one: the last may be smaller
            counted.append(size)

    return admit


def _effect(plan: Plan) -> Effect:
    if plan.automatic:
        return Effect(plan.key, "the whole batch", "what fits", "measured at the first step")
    shares = "" if plan.share is None else f"{plan.share} samples a rank and step"
    if plan.micro is None:
        return Effect(plan.key, "the loader's batch", shares)
    return Effect(
        plan.key, "the whole batch", f"micro-batches of {plan.micro}", shares or "synchronised at the last"
    )


def _check_delayed(config: Config, facts: Facts) -> None:
    if facts.ranks == 1:
        raise UsageError(
            "accumulation.delayed hides communication between ranks, and this process is alone: take the key out"
        )
    if config.precision.dtype == "fp16":
        raise UsageError(
            'accumulation.delayed and precision.dtype = "fp16" cannot be combined: the loss scale would change between a '
            'gradient and its update. Use "bf16" or drop one of them'
        )
    for key in _NOT_DELAYED:
        if config[key] not in (None, "none"):
            raise UsageError(
                f"accumulation.delayed and {key} cannot be combined: a late update averages all gradients in one piece, "
                "behind the next step. Drop one of them"
            )
