"""Sections of the report: each module here says what the study of the same name found.

A module has ``ORDER`` (where its section stands among all of the report's; ``content.py`` has
those of the others) and
``section(result, analysis, most_rows) -> Section | None``. It composes words, tables and figures of
:mod:`trine.analyzers.reports.document` and computes nothing but shares for display.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from trine.analyzers.reports.document import Paragraph, Section, clean
from trine.analyzers.results import Analysis

__all__ = ["StudySection", "placed_sections", "sections"]


class StudySection(Protocol):
    """What a module of this folder offers."""

    ORDER: int

    def section(self, result: Any, analysis: Analysis, most_rows: int) -> Section | None:
        """The section, None where there is nothing worth a reader's time."""
        ...


@cache
def _modules() -> tuple[tuple[str, StudySection], ...]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found = [(name, cast(StudySection, import_module(f"{__name__}.{name}"))) for name in names]
    return tuple(sorted(found, key=lambda item: (item[1].ORDER, item[0])))


def placed_sections(
    analysis: Analysis, most_rows: int, only: Sequence[str] | None = None
) -> tuple[tuple[int, Section], ...]:
    """The sections of the studies that have a result, in order, each with its place in the report.

    ``only``: of these studies.
    """
    found = [
        (module.ORDER, _section(key, module, analysis, most_rows))
        for key, module in _modules()
        if key in analysis.studies and (only is None or key in only)
    ]
    return tuple((order, section) for order, section in found if section is not None)


def _section(key: str, module: StudySection, analysis: Analysis, most_rows: int) -> Section | None:
    """One study's section; what fails in it must not cost the report."""
    try:
        return module.section(analysis.studies[key], analysis, most_rows)
    except Exception as error:
        if os.environ.get("TRINE_DEBUG"):
            raise
        name = key.replace("_", " ")
        words = (
            f"This section could not be drawn (unexpected {type(error).__name__}: {clean(error)}); its numbers are in "
            "the JSON. Set TRINE_DEBUG=1 to see where, and please report it."
        )
        return Section(key.replace("_", "-"), name[:1].upper() + name[1:], (Paragraph(words),))


def sections(analysis: Analysis, most_rows: int, only: Sequence[str] | None = None) -> tuple[Section, ...]:
    """The same without their places."""
    return tuple(section for _, section in placed_sections(analysis, most_rows, only))
