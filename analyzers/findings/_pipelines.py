"""What the rules on pipelines share: the result, when it is evidence, and gains by the step."""

from __future__ import annotations

import numpy as np

from trine.analyzers.operations import pattern_of
from trine.analyzers.studies import result_of
from trine.analyzers.studies.pipeline import Pipeline
from trine.record.model import MISSING

from ._facts import Facts

__all__ = ["evident_pipeline", "may_be_bubble", "per_step", "waits_are_bubble"]

#: Of the time in collectives, the share in messages between stages from which on waiting is the pipeline's.
MESSAGES_SHARE = 0.5
#: Micro-batches that must have been seen on each stage.
FEWEST_SEEN = 8


def evident_pipeline(facts: Facts) -> Pipeline | None:
    """The pipeline, when all its stages are here and enough of it was seen."""
    result = result_of(facts.analysis, "pipeline", Pipeline)
    if result is None or result.missing_stages or len(result.stages) < 2:
        return None
    seen = result.iterations * result.microbatches
    return result if seen >= FEWEST_SEEN and result.iteration_ns > 0 else None


def per_step(facts: Facts, result: Pipeline, amount_ns: float) -> float:
    """An amount of each iteration as one of what ``facts`` calls a step: a window may hold several iterations."""
    if not facts.step_ns:
        return amount_ns
    return (
        amount_ns * max(round(facts.step_ns / result.iteration_ns), 1)
        if facts.unit == "window"
        else amount_ns
    )


def waits_are_bubble(facts: Facts) -> bool:
    """Whether ranks wait mostly for the stages beside them: that is bubble, which the rules on pipelines judge, and
    neither a straggler's doing nor a slow link's (a stage waits while the pipeline fills, however fast all are)."""
    return result_of(facts.analysis, "pipeline", Pipeline) is not None and _mostly_messages(facts)


def may_be_bubble(facts: Facts) -> bool:
    """The same, also where the messages do not name their peers, without which a pipeline is not recognised: what may
    be bubble shows nobody late."""
    return waits_are_bubble(facts) or (_peers_unknown(facts) and _mostly_messages(facts))


def _mostly_messages(facts: Facts) -> bool:
    total = messages = 0
    for one in facts.analysis.collectives:
        amount = one.transfer_ns + one.wait_ns
        total += amount
        messages += amount if _is_message(one.op) else 0
    return total > 0 and messages >= MESSAGES_SHARE * total


def _is_message(operation: str | None) -> bool:
    return operation is not None and (pattern_of(operation) == "pair" or operation == "send_recv")


def _peers_unknown(facts: Facts) -> bool:
    """Whether no message of any rank says with whom it was."""
    for rank in facts.ranks:
        table = rank.result.summary.collectives
        if table is None:
            continue
        codes = [code for code, text in enumerate(table.strings.values) if _is_message(text)]
        if (table["peer"][np.isin(table["operation"], codes)] != MISSING).any():
            return False
    return True
