"""The address bar is the state: run, page, ranks, steps, range and theme survive reload and history.

Pure: text in, :class:`State` out, and back. Anything malformed falls back to the default, since an
address is typed by people and shortened by chat programs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from trine.dashboard.theme import Theme

__all__ = ["PAGES", "State", "parse"]

#: Page → its title. The first is the list of runs; the others show one run.
PAGES = {
    "runs": "Runs",
    "overview": "Overview",
    "explain": "Explain",
    "timeline": "Timeline",
    "communication": "Communication",
    "memory": "Memory",
    "recommendations": "Recommendations",
}

_STEPS = re.compile(r"complete|all|\d+:\d*|:\d+")


@dataclass(frozen=True, slots=True)
class State:
    """What the address says. ``begin_ns`` and ``end_ns`` are relative to the run's time zero."""

    page: str = "runs"
    run: str | None = None
    ranks: tuple[int, ...] = ()  # empty: as many as fit
    steps: str = "complete"
    begin_ns: float | None = None
    end_ns: float | None = None
    against: str | None = None
    theme: Theme = "light"

    def with_(self, **changes: Any) -> State:
        """The same state with some fields changed."""
        return replace(self, **changes)

    @property
    def address(self) -> str:
        """Path and query, defaults left out, so that addresses stay short."""
        return self.path + self.search

    @property
    def path(self) -> str:
        """``/`` for the list of runs, else ``/page``."""
        return "/" if self.page == "runs" else f"/{self.page}"

    @property
    def search(self) -> str:
        """The query with its question mark, empty when all is default."""
        pairs: list[tuple[str, str]] = []
        if self.run is not None and self.page != "runs":
            pairs.append(("run", self.run))
            if self.steps != "complete":
                pairs.append(("steps", self.steps))
            if self.ranks:
                pairs.append(("rank", ",".join(map(str, self.ranks))))
            if self.begin_ns is not None and self.end_ns is not None:
                pairs += [("from", f"{self.begin_ns:.0f}"), ("to", f"{self.end_ns:.0f}")]
            if self.against is not None:
                pairs.append(("against", self.against))
        if self.theme != "light":
            pairs.append(("theme", self.theme))
        return "?" + urlencode(pairs, quote_via=quote, safe="/:,") if pairs else ""


def parse(path: str | None, search: str | None) -> State:
    """The state of an address. An unknown page, or a page of a run without a run, is the list of runs."""
    values = dict(parse_qsl((search or "").lstrip("?")))
    page = (path or "/").strip("/") or "runs"
    run = values.get("run") or None
    if page not in PAGES or (page != "runs" and run is None):
        page = "runs"
    steps = values.get("steps", "complete")
    begin, end = _number(values.get("from")), _number(values.get("to"))
    if begin is None or end is None or end <= begin:
        begin = end = None
    return State(
        page=page,
        run=run,
        ranks=_ranks(values.get("rank", "")),
        steps=steps if _STEPS.fullmatch(steps) else "complete",
        begin_ns=begin,
        end_ns=end,
        against=values.get("against") or None,
        theme="dark" if values.get("theme") == "dark" else "light",
    )


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and abs(value) < 1e18 else None


def _ranks(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.isascii() and part.isdigit()]
    return tuple(sorted({int(part) for part in parts}))
