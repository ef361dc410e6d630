"""A configuration, or a layout that the planner chose, in the words of other tools. Imports no torch.

    exported = exported_from("tuned.toml", devices=16)        # or a plan: exported_from("plan.json", row=1)
    written = write("torchtitan", exported)
    written.files                                             # name → text
    written.cannot                                            # what torchtitan cannot say, one line each
    written.elsewhere                                         # what a plan for other software takes there

A dialect is one module here with

    NAME       what ``trine export --to`` calls it
    TOOL       the tool, as its makers spell it, with the release whose words these are
    export(exported)   → :class:`Written`

Adding one is one file here, its software in :data:`~trine.optim.exports._software.STACKS`, one test and one line of documentation;
the registry finds it. This room stands above those
of the dialects, which know what a key is called elsewhere, and of the planner, whose layouts are exported. No key is
dropped without a word: what a dialect does not say of a configuration is named (:class:`Account`).
"""

from __future__ import annotations

import difflib
import pkgutil
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Protocol, cast

from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Batch, Exported
from trine.optim.exports._from_layout import config_of
from trine.optim.exports._reading import exported_from
from trine.optim.exports._software import loss_words, prediction_words
from trine.record.errors import UsageError

__all__ = [
    "Account",
    "Batch",
    "Dialect",
    "Exported",
    "Written",
    "config_of",
    "dialect_names",
    "exported_from",
    "write",
]


class Dialect(Protocol):
    """What every module of a dialect offers."""

    NAME: str
    TOOL: str

    def export(self, exported: Exported) -> Written:
        """The configuration in this dialect. Raises ``UsageError`` where nothing sensible can be written."""


@lru_cache(maxsize=1)
def _dialects() -> dict[str, Dialect]:
    names = (module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    found = [cast(Dialect, import_module(f"{__name__}.{name}")) for name in names]
    return {dialect.NAME: dialect for dialect in found}


def dialect_names() -> tuple[str, ...]:
    """Every dialect, by name."""
    return tuple(sorted(_dialects()))


def write(name: str, exported: Exported) -> Written:
    """``exported`` in the dialect ``name``. Raises ``UsageError`` for one that is not known."""
    found = _dialects().get(name)
    if found is None:
        near = difflib.get_close_matches(str(name), dialect_names(), n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"there is no dialect {name!r}: one of {', '.join(dialect_names())}{guess}")
    written = found.export(exported)
    lost = loss_words(exported, written)
    return replace(
        written,
        cannot=(lost, *written.cannot) if lost else written.cannot,
        elsewhere=prediction_words(name, found.TOOL, exported, written),
    )
