"""What went apart, in one sentence a culprit: the findings, the verdict and the report say it alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .studies.desync import Call, Culprit, Desync
from .units import count, duration, rank_list

__all__ = ["group_words", "healthy_words", "is_hang", "place_of", "statement"]


def is_hang(finding_id: str) -> bool:
    """Whether a finding is of a job that never ends: it has no step to gain a share of."""
    return finding_id == "desync"


def statement(culprit: Culprit) -> str:
    """One sentence that names the rank and the call, without its full stop."""
    return _SENTENCES[culprit.kind](culprit)


def group_words(id: str, description: str | None) -> str:
    """``the default group``, ``group mesh_tp (3)``."""
    if description == "default_pg" or (id in ("0", "") and description is None):
        return "the default group"
    return f"group {description} ({id})" if description and description != id else f"group {id}"


def place_of(call: Call) -> str:
    """The innermost line of the user's own code, ``train.py:29``; empty without a stack."""
    if not call.stack:
        return ""
    path, _, rest = call.stack[0].rpartition("(")
    line = rest.partition(")")[0]
    return f"{path.replace(chr(92), '/').rpartition('/')[2]}:{line}"


def healthy_words(result: Desync) -> str:
    """What was compared and agreed."""
    if len(result.ranks) == 1:
        return (
            f"Rank {result.ranks[0]}'s dump alone was given: who differs shows only beside the other ranks'"
        )
    ranks = f"{len(result.ranks)} ranks"
    if not result.compared:
        return f"No desync seen: the {ranks} share no collective that their dumps still hold"
    if any(culprit.completed for culprit in result.culprits):
        return f"Nothing holds the {ranks} up, and yet they did not call the same everywhere"
    return f"No desync: {ranks} agree on each of the {result.compared:,} collectives that they share"


def _where(culprit: Culprit) -> str:
    group = group_words(culprit.group, culprit.description)
    return f"collective sequence {culprit.sequence} of {group}" if culprit.sequence is not None else group


def _at(calls: Iterable[Call], ranks: Sequence[int]) -> str:
    """`` (train.py:29)``: where those ranks stand, when one line says it for all."""
    places = {place for call in calls if call.rank in ranks and (place := place_of(call))}
    return f" ({places.pop()})" if len(places) == 1 else ""


def _of(culprit: Culprit, ranks: Sequence[int]) -> list[Call]:
    return [call for call in culprit.calls if call.rank in ranks]


def _said(ranks: Sequence[int]) -> str:
    return rank_list(tuple(sorted(ranks)))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


_HINTS = {
    "extra_call": "; it made one call more",
    "skipped_call": "; it left one call out",
    "swapped": "; it made two calls in the other order",
}


def _sides(culprit: Culprit, words: Iterable[str]) -> str:
    """Each rank's own, where none is to blame: ``rank 0 all_gather, rank 1 all_reduce``."""
    by_words: dict[str, list[int]] = {}
    for call, said in zip(culprit.calls, words, strict=True):
        by_words.setdefault(said, []).append(call.rank)
    return ", ".join(f"{_said(ranks)} {said}" for said, ranks in by_words.items())


def _differ(culprit: Culprit, words: list[str], what: str, verb: str) -> str:
    went_through = ", and yet it completed: check what it did to the numbers" if culprit.completed else ""
    if not culprit.waiting or set(culprit.waiting) & set(culprit.ranks):
        return f"Ranks {what} at {_where(culprit)}: {_sides(culprit, words)}; who is right cannot be told{went_through}"
    own = next(said for call, said in zip(culprit.calls, words, strict=True) if call.rank in culprit.ranks)
    others = next(
        (said for call, said in zip(culprit.calls, words, strict=True) if call.rank in culprit.waiting), ""
    )
    at = _at(culprit.calls, culprit.ranks)
    hint = _HINTS.get(culprit.hint or "", "")
    if culprit.hint == "history":
        hint = f"; {_said(culprit.waiting)} did as in earlier steps"
    return (
        f"{_capital(_said(culprit.ranks))} {verb} {own} where {_said(culprit.waiting)} {verb} {others}, "
        f"at {_where(culprit)}{at}{hint}{went_through}"
    )


def _operation(culprit: Culprit) -> str:
    words = [
        f"{call.operation}{f' ({call.parts} of them coalesced)' if call.parts > 1 else ''}"
        for call in culprit.calls
    ]
    return _differ(culprit, words, "called different operations", "called")


def _elements(culprit: Culprit) -> str:
    words = [f"{call.operation} with {_number(call.elements)} elements" for call in culprit.calls]
    return _differ(culprit, words, "gave buffers of different sizes", "called")


def _types(culprit: Culprit) -> str:
    words = [f"{call.operation} of {call.types}" for call in culprit.calls]
    return _differ(culprit, words, "gave different dtypes", "called")


def _number(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}" if value < 10**7 else count(value)


def _stands(culprit: Culprit) -> str:
    """What the ranks that are missing did last."""
    last = culprit.last_calls
    if not last:
        return "; it called nothing that its dump holds"
    call = last[0]
    number = f" (sequence {call.sequence})" if call.sequence is not None else ""
    at = place_of(call)
    where = f" at {at}" if at else ""
    state = "completed" if call.state == "completed" else f"still {call.state}"
    whose = "its" if len(culprit.ranks) == 1 else f"rank {call.rank}'s"
    of = "" if call.group == culprit.group else f" of {group_words(call.group, None)}"
    return f"; {whose} last call, {call.operation}{number}{of}{where}, is {state}"


def _missing(culprit: Culprit) -> str:
    verb = "is" if len(culprit.ranks) == 1 else "are"
    for_long = f" for {duration(culprit.waited_ns)} or more" if culprit.waited_ns else ""
    at = _at(culprit.calls, culprit.waiting)
    return (
        f"{_capital(_said(culprit.ranks))} {verb} missing from {culprit.operation}, {_where(culprit)}, in which "
        f"{_said(culprit.waiting)}{at} {'waits' if len(culprit.waiting) == 1 else 'wait'}{for_long}{_stands(culprit)}"
    )


def _no_dump(culprit: Culprit) -> str:
    verb = "waits" if len(culprit.waiting) == 1 else "wait"
    dead = (
        "it may have died or hang before it"
        if len(culprit.ranks) == 1
        else "they may have died or hang before it"
    )
    return (
        f"{_capital(_said(culprit.waiting))} {verb} in {culprit.operation}, {_where(culprit)}, and {_said(culprit.ranks)} "
        f"left no dump: {dead}{_for_long(culprit)}"
    )


def _deadlock(culprit: Culprit) -> str:
    parts = [f"rank {call.rank} in {_link(call)}" for call in culprit.calls]
    return f"{_capital(_said(culprit.ranks))} wait for each other: {', '.join(parts)}"


def _link(call: Call) -> str:
    """``all_reduce, sequence 7 of group 1 at train.py:29``; of a message, ``send 0->1 of group 1``."""
    message = " " in str(call.operation)
    number = "" if message or call.sequence is None else f", sequence {call.sequence}"
    at = f" at {place}" if (place := place_of(call)) else ""
    return f"{call.operation}{number} of {group_words(call.group, None)}{at}"


def _peer(culprit: Culprit) -> str:
    sender, receiver = culprit.peers or (-1, -1)
    group = group_words(culprit.group, culprit.description)
    if culprit.waiting == (sender,):
        head = f"Rank {sender} sends to rank {receiver} in {group}, and rank {receiver} never receives it"
    else:
        head = f"Rank {receiver} receives from rank {sender} in {group}, and rank {sender} never sends it"
    return f"{head}{_at(culprit.calls, culprit.waiting)}{_stands(culprit)}"


def _peer_elements(culprit: Culprit) -> str:
    sender, receiver = culprit.peers or (-1, -1)
    given, taken = (_number(call.elements) for call in culprit.calls[:2])
    group = group_words(culprit.group, culprit.description)
    return f"Rank {sender} sends {given} elements to rank {receiver} in {group}, which receives {taken}"


def _not_started(culprit: Culprit) -> str:
    verb = "has" if len(culprit.ranks) == 1 else "have"
    return (
        f"All ranks called {culprit.operation}, {_where(culprit)}, and the device of {_said(culprit.ranks)} {verb} "
        f"not begun it: earlier work holds it up there{_for_long(culprit)}"
    )


def _in_flight(culprit: Culprit) -> str:
    where = f"{culprit.operation}, {_where(culprit)}"
    if culprit.hint == "members_unknown":
        return _in_unknown_company(culprit, where)
    if culprit.hint == "dumps_apart":
        return (
            f"{_capital(_said(culprit.ranks))} {'is' if len(culprit.ranks) == 1 else 'are'} in {where}{_for_long(culprit)}; "
            "the other ranks' dumps were taken before they came to it"
        )
    if culprit.hint == "others_unknown" or len(culprit.ranks) == 1:
        one = len(culprit.ranks) == 1
        return (
            f"{_capital(_said(culprit.ranks))} {'is' if one else 'are'} in {where}, and {'has' if one else 'have'} not left "
            f"it{_for_long(culprit)}: whom {'it waits' if one else 'they wait'} for, the other ranks' dumps would show"
        )
    return (
        f"All {len(culprit.ranks)} ranks are in {where}, and none has left it{_for_long(culprit)}: if the job hangs there, "
        "it is the network or a device, not the program"
    )


def _in_unknown_company(culprit: Culprit, where: str) -> str:
    one = len(culprit.ranks) == 1
    head = (
        f"{_capital(_said(culprit.ranks))} {'is' if one else 'are'} in {where}, and {'has' if one else 'have'} not left it"
        f"{_for_long(culprit)}: the dumps do not say who else belongs to that group"
    )
    others = culprit.last_calls
    if not others:
        return head
    ranks = _said([call.rank for call in others])
    single = len(others) == 1
    groups = " and ".join(dict.fromkeys(group_words(call.group, None) for call in others))
    return (
        f"{head}; if {ranks} {'does' if single else 'do'}, who {'is' if single else 'are'} in {others[0].operation} of "
        f"{groups}, they wait for each other: the groups were entered in different orders"
    )


def _for_long(culprit: Culprit) -> str:
    return f" (for {duration(culprit.waited_ns)} or more)" if culprit.waited_ns else ""


_SENTENCES = {
    "operation": _operation,
    "elements": _elements,
    "types": _types,
    "missing": _missing,
    "no_dump": _no_dump,
    "deadlock": _deadlock,
    "peer_missing": _peer,
    "peer_elements": _peer_elements,
    "not_started": _not_started,
    "in_flight": _in_flight,
}
