"""Pipeline parallelism: the model in stages on several ranks, the batch in micro-batches that pass through them.

    pipeline       ranks that hold one model between them
    schedule       "gpipe", "1f1b" (where nothing is said), "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv",
                   "dualpipev", or PyTorch's names: what a stage does when
    chunks         stages a rank; left alone, 2 for schedules that want several, else 1
    microbatches   pieces of a batch; left alone, as few as keep the ideal bubble below a fifth
    split          "auto" (stages of equal cost), "layers" (of equal numbers of blocks), or the blocks that begin the second
                   and later stages

Any model works whose blocks are called one after the other with the hidden state first: see
:mod:`trine.optim.runtime.pipelining`. Ranks of one pipeline are given the same batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.pipelining.plan import Plan

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = (
    "parallel.pipeline",
    "parallel.schedule",
    "parallel.chunks",
    "parallel.microbatches",
    "parallel.split",
)
ORDER = 4  # all others see the stage's modules
QUANTITY = "parameter, optimizer and activation bytes a rank; pipeline/bubble"
NUMERICS = "unchanged but for the order of summation: losses within 1e-10 in fp64, 1e-5 relative in fp32"

_SPLITS = ("auto", "layers")


def refusal(config: Config) -> str | None:
    """Keys that mean nothing without ``parallel.pipeline``, and names that nothing has."""
    parallel = config.parallel
    if parallel.split == ():
        return 'parallel.split = [] names no block: name those that begin the second and later stages, or say "auto" or "layers"'
    if parallel.pipeline == 1:
        for key in KEYS[1:]:
            if key in config.changes():
                return f"{key} says how a pipeline runs, and parallel.pipeline is 1: set that as well, or drop it"
        return None
    if isinstance(parallel.split, str) and parallel.split not in _SPLITS:
        return (
            f'parallel.split = "{parallel.split}": it takes "auto", "layers", or a list of the blocks that begin the second '
            "and later stages"
        )
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Gradients of micro-batches are summed in another order."""
    return None if config.parallel.pipeline == 1 else Tolerance(1e-6, 1e-5)


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the model cannot be cut so, or another key forbids it."""
    if config.parallel.pipeline == 1:
        return
    _check_other_keys(config)
    _check_router_loss(facts)
    from trine.optim.runtime.pipelining.plan import plan_of

    plan = plan_of(config, facts)
    if plan.schedule.split and config.compute.compile is not False:
        raise UsageError(
            f'compute.compile and parallel.schedule = "{config.parallel.schedule}" cannot be combined: a compiled block\'s '
            "backward is of one piece, and the schedule computes the gradients of weights apart. Drop one of them, or use "
            '"interleaved"'
        )
    if plan.schedule.split and config.zero.stage == 3 and config.zero.reshard_after_forward is not False:
        raise UsageError(
            f'parallel.schedule = "{config.parallel.schedule}" and zero.stage = 3 cannot be combined: parameters that are '
            "freed between the two halves of a backward lose gradients. Use zero.stage = 2, or set "
            "zero.reshard_after_forward = false"
        )


def apply(assembly: Assembly) -> None:
    """Cut the live model; the optimizer keeps what this rank's stages own, its groups and its schedulers."""
    config = assembly.config
    if config.parallel.pipeline == 1:
        return
    from trine.optim.runtime.pipelining.cutting import cut
    from trine.optim.runtime.pipelining.plan import plan_of

    plan = plan_of(config, assembly.facts, measured=True)
    cut(assembly, plan)
    _tell(assembly, plan)


def _check_other_keys(config: Config) -> None:
    accumulation = config.accumulation
    if accumulation.delayed:
        raise UsageError(
            "accumulation.delayed and parallel.pipeline cannot be combined: a late update averages whole gradients of whole "
            "models. Drop one of them"
        )
    if "auto" in (accumulation.steps, accumulation.micro_batch):
        key = "accumulation.steps" if accumulation.steps == "auto" else "accumulation.micro_batch"
        raise UsageError(
            f'{key} = "auto" and parallel.pipeline cannot be combined: it tries micro-batches on one rank, and here all '
            "stages would have to. Write a number, or parallel.microbatches"
        )
    if config.parallel.microbatches is not None:
        for key in ("accumulation.steps", "accumulation.micro_batch"):
            if config[key] not in (None, 1):
                raise UsageError(
                    f"{key} and parallel.microbatches both say how a batch is cut: keep one of them"
                )
    if config.compute.compile == "model":
        raise UsageError(
            'compute.compile = "model" and parallel.pipeline cannot be combined: a stage leaves the model\'s forward midway. '
            'Use compute.compile = "blocks"'
        )


def _check_router_loss(facts: Facts) -> None:
    """Transformers adds the routers' balance loss of all blocks to the model's where its configuration says so."""
    for module in facts.model.modules():
        settings = getattr(module, "config", None)
        for each in (settings, getattr(settings, "text_config", None)):
            if getattr(each, "output_router_logits", False) is True:
                raise UsageError(
                    "parallel.pipeline and output_router_logits=True of the model's configuration cannot be combined: the "
                    "balance loss is computed on the last stage, and the routers of others would not be in it. Set "
                    "output_router_logits=False, or drop parallel.pipeline"
                )


def _tell(assembly: Assembly, plan: Plan) -> None:
    parallel = assembly.config.parallel
    facts = assembly.facts
    bubble = "" if plan.microbatches is None else f", ideal bubble {plan.ideal(plan.microbatches):.1%}"
    assembly.effects.append(
        Effect(
            "parallel.pipeline",
            "the whole model on each rank",
            f"{plan.stages} stages on {plan.ranks} ranks",
            f"{plan.schedule.name}{bubble}; {facts.layout}",
        )
    )
    assembly.effects.append(Effect("parallel.split", "one part", plan.spelled(), plan.why))
    if parallel.microbatches is not None:
        assembly.effects.append(Effect("parallel.microbatches", "1", str(parallel.microbatches)))
