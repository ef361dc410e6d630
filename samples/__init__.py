"""Real training programs that use all of Trine, written as people first write them.

Configurations lie beside them as TOML files; :func:`configuration` finds one wherever the package is installed.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["configuration", "configurations"]


def configurations() -> tuple[str, ...]:
    """Names of the configurations that come with the samples."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.toml")))


def configuration(name: str) -> Path:
    """The TOML file of that name. Raises ``KeyError`` with the names that there are."""
    path = Path(__file__).parent / f"{name}.toml"
    if not path.is_file():
        raise KeyError(f"no configuration {name!r}; there are {', '.join(configurations())}")
    return path
