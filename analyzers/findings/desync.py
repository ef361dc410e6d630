"""``desync``: ranks went different ways, and the job hangs or will."""

from __future__ import annotations

from typing import Any, Literal

from trine.analyzers.desync_words import healthy_words, place_of, statement
from trine.analyzers.results import Finding, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.desync import Culprit, Desync

from ._facts import Facts

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "desync"
KIND: Literal["fault"] = "fault"

#: A job that stands still loses the whole of its time.
SEVERITY = 1.0
#: Culprits that the evidence names beside the first.
MOST_OTHERS = 4

_WHY = {
    "operation": "Make every rank of the group take the same calls in the same order: look for a branch on the rank, on data "
    "(a batch that is empty on one rank, a loss that is not finite) or on an exception that only this rank handled.",
    "elements": "Give the buffer one size on all ranks, or use a form that allows uneven ones (all_gather of a list, all_to_all); "
    "a last batch that is smaller on some ranks is the usual cause (drop_last=True, or Join).",
    "types": "Give the buffer one dtype on all ranks; a module that only one rank casts is the usual cause.",
    "missing": "Look at where that rank stood: in a long computation, in its loader, writing a checkpoint that the others do not "
    "wait for, in an exception, or in a branch that skips the call.",
    "no_dump": "Look at the logs of the ranks without a dump first: a rank that died (out of memory, an error) leaves none.",
    "deadlock": "Let all ranks enter the groups in one order, and pair blocking sends with receives (batch_isend_irecv posts both).",
    "peer_missing": "Pair each send with a receive on the other side, in one order; for pipelines check the number of micro-batches.",
    "peer_elements": "Send and receive buffers of one size; a last micro-batch that is smaller is the usual cause.",
    "not_started": "Look at what runs on that rank's device before it: a kernel that does not end, or another collective.",
    "in_flight": "Look at the links and NCCL's own log (NCCL_DEBUG=INFO) of these ranks.",
}


def find(facts: Facts) -> Finding | None:
    """A culprit holds others up."""
    result = result_of(facts.analysis, "desync", Desync)
    if result is None or not result.stuck:
        return None
    first = result.culprits[0]
    others = [statement(culprit) for culprit in result.culprits[1 : 1 + MOST_OTHERS]]
    evidence = _evidence(first)
    if others:
        evidence["also"] = others
    return Finding(
        id=ID,
        kind=KIND,
        title=statement(first),
        evidence=evidence,
        recommendation=Recommendation(
            change={}, why=_why(first, result), numerics="unchanged", predicted=None
        ),
        severity=SEVERITY,
    )


def _why(culprit: Culprit, result: Desync) -> str:
    unseen = culprit.kind == "missing" and "gloo" in result.backends
    return _WHY[culprit.kind] + (" Gloo records no sends and receives: it may hang in one." if unseen else "")


def _evidence(culprit: Culprit) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        "ranks": list(culprit.ranks),
        "group": culprit.group,
        "sequence": culprit.sequence,
        "certainty": culprit.certainty,
        "calls": {
            f"rank {call.rank}": f"{call.operation} {call.in_shapes or ''} {call.types or ''} {call.state} {place_of(call)}".split()
            for call in culprit.calls
        },
    }
    evidence["calls"] = {rank: " ".join(words) for rank, words in evidence["calls"].items()}
    if culprit.waited_ns:
        evidence["waited_ns"] = culprit.waited_ns
    return evidence


def healthy(facts: Facts) -> str | None:
    """All ranks agree, where several left a dump."""
    result = result_of(facts.analysis, "desync", Desync)
    if result is None or result.stuck or len(result.ranks) < 2 or not result.compared or result.culprits:
        return None
    return healthy_words(result)
