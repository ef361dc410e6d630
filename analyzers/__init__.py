"""Explains a run: breakdowns, idle causes, collectives and who was late, memory, MFU, step times.

    analysis = analyze(trine.load("runs/a"))

Two layers: :func:`summarize` reduces one rank's tables to a small summary, :func:`conclude` joins the
summaries of all ranks. :func:`analyze` does both, in a pool where it pays, and diagnoses the result.
:func:`to_json` gives the contract that ``trine analyze --format json`` prints.
"""

from .analysis import analyze
from .conclusion import conclude
from .contract import to_json
from .results import Analysis, RankSummary
from .selection import Selection, parse_selection
from .summary import summarize

__all__ = [
    "Analysis",
    "RankSummary",
    "Selection",
    "analyze",
    "conclude",
    "parse_selection",
    "summarize",
    "to_json",
]
