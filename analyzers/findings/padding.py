"""``padding``: much of what is computed only fills sequences up, and another batching would leave little of it."""

from __future__ import annotations

from typing import Any, Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.studies import result_of
from trine.analyzers.studies.padding import Padding
from trine.analyzers.units import count, percent

from ._facts import Facts, RankFacts
from ._gain import predict, worth_it

__all__ = ["ID", "KIND", "find", "healthy"]

ID = "padding"
KIND: Literal["opportunity"] = "opportunity"

#: Padding of all tokens below which no other batching is worth its trouble.
WASTE = 0.10
#: Sequences whose lengths must be known before what is left of it can be foretold.
LEAST_SEQUENCES = 32
#: Grouping by length keeps batches as they are; packing must save this much more to be recommended instead.
PACKING_ADVANTAGE = 1.25
#: Of the slots that go away, the share of forward and backward that goes with them. Time falls with slots where products
#: are large; small ones are bound by launches, and attention's cost is not in proportion to slots.
SAVED = (0.4, 0.8, 1.0)


def find(facts: Facts) -> Finding | None:
    """Waste beyond the threshold, of which grouping or packing would save what is worth a change."""
    found = result_of(facts.analysis, "padding", Padding)
    if found is None or found.packed or found.waste < WASTE or found.sampled_sequences < LEAST_SEQUENCES:
        return None
    working = facts.part(_forward_and_backward)
    if working is None:
        return None
    change, left = _change(found)
    if left is None or left >= found.waste:
        return None
    # Of all slots, those that go: real tokens are the same, so slots shrink by (1 − waste) / (1 − left).
    gone = 1 - (1 - found.waste) / (1 - left)
    prediction = predict(
        facts,
        facts.step_part_ns(working.share),
        (SAVED[0] * gone, SAVED[1] * gone, SAVED[2] * gone),
        "(forward + backward) × share of slots that go away × 0.4–0.8–1",
        {
            "waste": round(found.waste, 4),
            "waste_after": round(left, 4),
            "slots_that_go_share": round(gone, 4),
        },
    )
    if not worth_it(facts, prediction):
        return None
    return Finding(
        id=ID,
        kind=KIND,
        title=f"{percent(found.waste)} of the tokens that are computed are padding; "
        f"{'packing' if 'data.packing' in change else 'grouping by length'} would leave {percent(left)}",
        evidence=_evidence(found),
        recommendation=_recommendation(found, change, prediction),
        severity=min(working.share * gone, 1.0),
    )


def _forward_and_backward(rank: RankFacts) -> Any:
    forward, backward = rank.phase("forward"), rank.phase("backward")
    if forward is None or backward is None:
        return None
    return type(forward)(forward.share + backward.share, forward.basis, forward.rank)


def _change(found: Padding) -> tuple[dict[str, bool], float | None]:
    """Grouping, unless packing saves clearly more; each with the waste that it leaves."""
    grouped, packed = found.grouped_waste, found.packed_waste
    if grouped is None or packed is None:
        return {}, None
    if found.waste - packed > PACKING_ADVANTAGE * max(found.waste - grouped, 0.0):
        return {"data.packing": True}, packed
    return {"data.length_grouped": True}, grouped


def _evidence(found: Padding) -> dict[str, Any]:
    return {
        "tokens": found.tokens,
        "padding_tokens": found.padding_tokens,
        "waste_share": round(found.waste, 4),
        "grouped_by_length_waste_share": None
        if found.grouped_waste is None
        else round(found.grouped_waste, 4),
        "packed_waste_share": None if found.packed_waste is None else round(found.packed_waste, 4),
        "every_batch_padded_to": found.width if found.fixed_width else None,
        "sequences_replayed": found.sampled_sequences,
        "known_from": found.source,
    }


def _recommendation(found: Padding, change: dict[str, bool], prediction: Prediction | None) -> Recommendation:
    if "data.packing" in change:
        why = (
            f"Put several sequences in one row of {count(found.width or 0)} tokens, and let attention end at each one's end "
            "(position ids or cu_seqlens that begin anew)."
        )
        numerics = (
            "the same tokens in other batches: losses by step do not compare, and a step holds more sequences (keep tokens "
            "a step for the same learning rate)"
        )
    else:
        why = "Let each batch hold sequences of similar length, and pad to its longest."
        numerics = "the same sequences in another order: losses by step do not compare"
    if found.fixed_width:
        why += f" Now every batch is padded to {count(found.width or 0)}, whatever it holds."
    return Recommendation(change=change, why=why, numerics=numerics, predicted=prediction)


def healthy(facts: Facts) -> str | None:
    """The waste, when it is known and below the threshold."""
    found = result_of(facts.analysis, "padding", Padding)
    if found is None or found.waste >= WASTE:
        return None
    return f"Padding: {percent(found.waste)} of the tokens (an opportunity from {percent(WASTE)})"
