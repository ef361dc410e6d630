"""Patterns of module names, as ``checkpointing.modules`` and ``parallel.plan`` take them."""

from __future__ import annotations

from fnmatch import fnmatchcase

__all__ = ["matches"]


def matches(pattern: str, name: str) -> bool:
    """Globs by the parts of a name, as of a path: ``*`` stays within one part, ``**`` spans any number."""
    return _parts_match(pattern.split("."), name.split("."))


def _parts_match(pattern: list[str], parts: list[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_parts_match(pattern[1:], parts[start:]) for start in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _parts_match(pattern[1:], parts[1:])
