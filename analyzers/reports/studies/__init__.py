"""Sections of the report: each module here says what the study of the same name found.

A module has ``ORDER`` (where its section stands among all of the report's; ``content.py`` has
those of the others) and
``section(result, analysis, most_rows) -> Section | None``. It composes words, tables and figures of
:mod:`trine.analyzers.reports.document` and computes nothing but shares for display.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import Any, Protocol, cast

from trine.analyzers.reports.document import Section
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


def placed_sections(analysis: Analysis, most_rows: int) -> tuple[tuple[int, Section], ...]:
    """The sections of the studies that have a result, in order, each with its place in the report."""
    found = [
        (module.ORDER, module.section(analysis.studies[key], analysis, most_rows))
        for key, module in _modules()
        if key in analysis.studies
    ]
    return tuple((order, section) for order, section in found if section is not None)


def sections(analysis: Analysis, most_rows: int) -> tuple[Section, ...]:
    """The same without their places."""
    return tuple(section for _, section in placed_sections(analysis, most_rows))
