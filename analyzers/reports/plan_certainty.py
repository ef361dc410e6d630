"""How sure a plan is, in words: of its intervals, of the order of its rows, and what to do with them."""

from __future__ import annotations

from trine.analyzers.units import percent
from trine.optim.plan.candidates import is_published
from trine.optim.plan.planning import ORDER_KNOWN_TO, Plan

__all__ = ["confidence", "export_words", "interval_words", "order_words", "source_words"]

_LAY = "where nine of ten published runs lay"
#: What a stack's plans are exported to, by how its name begins; the first that fits.
_DIALECTS = {
    "megatron-deepspeed": "megatron-deepspeed",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "fsdp": "torchtitan",
    "trine": "pytorch",
    "pytorch": "pytorch",
    "mega": "megatron",
    "nemo": "megatron",
    "primus": "megatron",
}


def confidence(plan: Plan) -> str:
    """What an interval is, and that it does not apply where no published run is of the plan's software."""
    # Wide, because it is of software and clusters that the constants were not fitted on.
    if is_published(plan.problem.stack):
        return f"in brackets and intervals: {_LAY} that no constant was fitted on"
    name, device = plan.problem.stack.name, plan.problem.cluster.device
    on = " on this machine" if device.constants else ""
    return f"no published run is of {name}{on}: its intervals are those of other new software"


def interval_words(plan: Plan) -> str:
    """The same under a table."""
    return (
        _LAY
        if is_published(plan.problem.stack)
        else f"no published run is of {plan.problem.stack.name}: borrowed"
    )


def order_words(plan: Plan) -> str | None:
    """Which rows are as good as the first, as far as is known; None where only one was found."""
    if len(plan.ranked) == 1:
        return None
    lost = percent(ORDER_KNOWN_TO)
    if plan.tied == 1:
        return f"The second is further from the first than the {lost} that the planner's pick lost on average among published layouts."
    rows = f"1 {'and' if plan.tied == 2 else 'to'} {plan.tied}"
    return (
        f"Rows {rows} lie within {lost}, what the planner's pick lost on average among published layouts: their order is"
        " not sure, so try these."
    )


def source_words(plan: Plan) -> str | None:
    """Which pipelines of the ranking were simulated; None where no row has any."""
    piped = [(rank, one.source) for rank, one in enumerate(plan.ranked, 1) if one.layout["pipeline"] != 1]
    formula = [str(rank) for rank, source in piped if source == "formula"]
    if not piped:
        return None
    if not formula:
        return "pipelines simulated"
    if len(formula) == len(piped):
        return "pipelines by formula"
    return (
        f"pipelines simulated, but of {'rows' if len(formula) > 1 else 'row'} {', '.join(formula)} by formula"
    )


def export_words(plan: Plan) -> str | None:
    """How the best becomes a run; None for software that nothing is exported to."""
    name = plan.problem.stack.name
    dialect = next((dialect for begin, dialect in _DIALECTS.items() if name.startswith(begin)), None)
    if dialect is None:
        return None
    return f"Next: the same with -o plan.json, then trine export plan.json --to {dialect}; --row K for another row."
