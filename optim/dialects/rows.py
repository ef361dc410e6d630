"""What a row of a dialect's table says: one key of another tool, and what becomes of it here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Does", "Row", "accepted", "refused", "removed", "told", "translated"]

#: ``translated`` becomes keys of ours; ``told`` is said, as it belongs into the program; ``accepted`` changes nothing
#: here, for the stated reason; ``refused`` is an error unless its value asks for nothing; ``removed`` the tool itself
#: has taken out.
Does = Literal["translated", "told", "accepted", "refused", "removed"]


@dataclass(frozen=True, slots=True)
class Row:
    """One key, by its path in the other tool's file.

    ``words`` is our key for what is translated, the reason for what is accepted, and what to write instead for what is
    refused. ``harmless``: values of a refused key with which it asks for nothing. ``whole``: a table that is dealt with
    as one, whatever stands in it; ``inner`` then names the keys that it may hold (all, where it is empty).
    """

    path: str
    does: Does
    words: str
    harmless: tuple[Any, ...] = ()
    whole: bool = False
    inner: frozenset[str] = frozenset()


def translated(path: str, ours: str, whole: bool = False) -> Row:
    """Becomes ``ours``."""
    return Row(path, "translated", ours, whole=whole)


def told(path: str, how: str, inner: str = "") -> Row:
    """Belongs into the program; ``how`` says where."""
    return Row(path, "told", how, whole=bool(inner), inner=frozenset(inner.split()))


def accepted(path: str, why: str, inner: str = "", whole: bool = False) -> Row:
    """Changes nothing here, because of ``why``."""
    return Row(path, "accepted", why, whole=whole or bool(inner), inner=frozenset(inner.split()))


def refused(path: str, instead: str, *harmless: Any, inner: str = "", whole: bool = False) -> Row:
    """An error that says ``instead``, but for the values that ask for nothing.

    Of a table: harmless where it says ``"enabled": false``, and where all its values are harmless.
    """
    values = harmless or (None, False, 0, "", "none")
    return Row(path, "refused", instead, values, whole or bool(inner), frozenset(inner.split()))


def removed(path: str, words: str) -> Row:
    """Older releases of the tool had it."""
    return Row(path, "removed", words, whole=True)
