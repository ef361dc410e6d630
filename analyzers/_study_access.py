"""Studies by name on an analysis: ``analysis.critical_path``, and why there is none."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.record.errors import UsageError
from trine.record.model import Quality

if TYPE_CHECKING:
    from .results import Analysis

__all__ = ["known_key", "reason_in", "reason_of", "study_attribute", "study_keys"]


@cache
def study_keys() -> tuple[str, ...]:
    """Keys of all studies, from the names of their files, so that asking imports none of them."""
    folder = str(Path(__file__).parent / "studies")
    return tuple(
        sorted(each.name for each in pkgutil.iter_modules([folder]) if not each.name.startswith("_"))
    )


def known_key(key: str) -> str:
    """The key itself. Raises ``UsageError`` where no study has it."""
    if key not in study_keys():
        raise UsageError(f"no study is called {key!r}; there are {', '.join(study_keys())}")
    return key


def study_attribute(analysis: Analysis, name: str) -> Any:
    """What ``analysis.name`` is where no field has the name: a study's result, None where it has none.

    Raises ``AttributeError`` for any other name, and says which there are.
    """
    if name in study_keys():
        return analysis.studies.get(name)
    words = f"an analysis has no attribute {name!r}"
    if not name.startswith("_"):
        words += f"; studies are {', '.join(study_keys())}, and dir(analysis) lists the rest"
    raise AttributeError(words, name=name, obj=analysis)


def reason_of(notes: Iterable[Quality], key: str) -> str | None:
    """Why a study has no result, in words; None where nothing says so."""
    for note in notes:
        found = reason_in(note)
        if found is not None and found[0] == key:
            return found[1]
    return None


def reason_in(note: Quality) -> tuple[str, str] | None:
    """(study, why it has no result) of a note that says so, None of any other."""
    key, null, reason = note.message.partition(" is null: ")
    return (key, reason) if null and note.id == f"no-{key.replace('_', '-')}" else None
