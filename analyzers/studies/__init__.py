"""Studies: each module here that does not begin with an underscore answers one question about a job.

A study module has

``KEY``
    its name in the JSON contract (``critical_path``);
``reduce(scope) -> part or None``
    what one rank's tables say; small and picklable, since ranks are reduced in other processes;
``join(parts, whole) -> result or str``
    what all ranks together say: a frozen dataclass, or in words why it cannot be said, which then
    stands under ``data_quality``;
``to_json(result) -> dict``
    the result in the contract's terms.

Both layers are pure. The registry finds a study by its file; its section of the report is the module of
the same name in ``analyzers/reports/studies``, its rules lie in ``analyzers/findings``. Nothing else is
touched to add one, but its test and its page. A study that fails costs its own part and is named under
``data_quality``.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

from trine.analyzers.results import Analysis

from ._scope import Scope, Whole

__all__ = ["Scope", "Study", "Whole", "join_all", "reduce_all", "result_of", "studies"]

Result = TypeVar("Result")


class Study(Protocol):
    """What a module of this folder offers."""

    KEY: str

    def reduce(self, scope: Scope) -> Any:
        """One rank's part, or None where it has nothing to say."""
        ...

    def join(self, parts: Mapping[int, Any], whole: Whole) -> Any:
        """The result, or a sentence that says why there is none."""
        ...

    def to_json(self, result: Any) -> dict[str, Any]:
        """The result as plain values."""
        ...


@cache
def studies() -> tuple[Study, ...]:
    """Every study, by key."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found = [cast(Study, import_module(f"{__name__}.{name}")) for name in names]
    return tuple(sorted(found, key=lambda study: study.KEY))


def reduce_all(scope: Scope) -> dict[str, Any]:
    """The parts of one rank, by key; studies without a part are absent."""
    parts = {}
    for study in studies():
        try:
            part = study.reduce(scope)
        except Exception as error:  # one study's defect must not cost the rank
            if os.environ.get("TRINE_DEBUG"):
                raise
            scope.note(*_failed(study, error))
            continue
        if part is not None:
            parts[study.KEY] = part
    return parts


def join_all(whole: Whole) -> dict[str, Any]:
    """The results by key; of a study without one, the reason goes to ``whole.note``."""
    results = {}
    for study in studies():
        parts = {
            rank: summary.parts[study.KEY]
            for rank, summary in whole.summaries.items()
            if study.KEY in summary.parts
        }
        try:
            result = study.join(parts, whole)
        except Exception as error:  # as above
            if os.environ.get("TRINE_DEBUG"):
                raise
            whole.note(*_failed(study, error))
            continue
        if isinstance(result, str):
            whole.note(f"no-{study.KEY.replace('_', '-')}", "info", f"{study.KEY} is null: {result}")
        else:
            results[study.KEY] = result
    return results


def _failed(study: Study, error: Exception) -> tuple[str, Any, str]:
    message = (
        f"{study.KEY} could not be worked out (unexpected {type(error).__name__}: {error}); "
        "set TRINE_DEBUG=1 to see where, and please report it"
    )
    return "study-failed", "error", message


def result_of(analysis: Analysis, key: str, kind: type[Result]) -> Result | None:
    """A study's result in an analysis, None where it has none."""
    result = analysis.studies.get(key)
    return result if isinstance(result, kind) else None
