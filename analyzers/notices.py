"""What belongs right under the verdict: whose it is, what is broken in the data, and who made the others wait."""

from __future__ import annotations

from .planned import headline
from .results import Analysis

__all__ = ["notices"]

#: Notes that say whose verdict it is, where a folder holds more than one run.
_WHOSE = ("mixed-runs", "times-apart")
#: Of these, how many are told in full.
_MOST_WHOSE = 2
#: Errors that are told in full; of the others only how many there are.
_MOST_ERRORS = 2
#: Characters of one of them: they are sentences, and one may name many files.
_MOST_CHARACTERS = 240


def notices(analysis: Analysis) -> tuple[str, ...]:
    """One sentence a line, in the order of their weight; empty where nothing needs to be said beside the verdict."""
    planned = headline(analysis.source.metadata)
    lines = [] if planned is None else [planned]
    notes = analysis.data_quality
    whose = [note.message for note in notes if note.id in _WHOSE]
    messages = [_sentence(message) for message in dict.fromkeys(whose)]
    if len(messages) > _MOST_WHOSE:
        more = len(messages) - 1
        messages = [f"{messages[0]} {more} more notes under data quality say what else is left out."]
    lines += messages
    errors = list(
        dict.fromkeys(note.message for note in notes if note.severity == "error" and note.id not in _WHOSE)
    )
    if errors:
        told = "; ".join(_short(message) for message in errors[:_MOST_ERRORS])
        more = len(errors) - _MOST_ERRORS
        rest = f"; {more} more errors are under data quality" if more > 0 else ""
        lines.append(f"The data is not whole: {told}{rest}.")
    if (late := _late(analysis)) is not None:
        lines.append(late)
    return tuple(lines)


def _late(analysis: Analysis) -> str | None:
    """Who made the others wait, where another fault stands first."""
    found = next((finding for finding in analysis.findings if finding.id == "straggler"), None)
    if found is None or analysis.verdict.bound_by == found.id:
        return None
    return _sentence(found.title)


def _short(message: str) -> str:
    return message if len(message) <= _MOST_CHARACTERS else message[: _MOST_CHARACTERS - 1].rstrip() + "…"


def _sentence(message: str) -> str:
    return f"{message[:1].upper()}{message[1:].rstrip('.')}."
