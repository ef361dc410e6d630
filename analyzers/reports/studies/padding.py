"""Padding: how much of what is computed fills sequences up, and what other batching would leave of it."""

from __future__ import annotations

from trine.analyzers.reports._cells import left, right
from trine.analyzers.reports.document import Bars, Block, Paragraph, Section, Table
from trine.analyzers.results import Analysis
from trine.analyzers.studies.padding import Padding
from trine.analyzers.units import count, percent

__all__ = ["ORDER", "section"]

ORDER = 75
#: Below this nothing is worth a figure: a line says it.
_NONE = 0.005


def section(result: Padding, analysis: Analysis, most_rows: int) -> Section | None:
    """Waste now, grouped and packed; lengths."""
    said = f"{percent(result.waste)} of {count(result.tokens)} tokens are padding"
    if result.ranks > 1:
        said += f" (rank {result.worst}: {percent(result.worst_waste)}, the most)"
    if result.source:
        said += f", as {result.source} says"
    said += ". Batches are packed." if result.packed else "."
    blocks: list[Block] = [Paragraph(said)]
    if result.waste >= _NONE and result.sampled_waste is not None:
        blocks.append(_bars(result))
    return Section("padding", "Padding", tuple(blocks))


def _bars(result: Padding) -> Bars:
    now = result.sampled_waste or 0.0
    ways = [
        ("as it is", now),
        ("grouped by length", result.grouped_waste),
        ("packed first-fit", result.packed_waste),
    ]
    known = [(label, waste) for label, waste in ways if waste is not None]
    real = float(result.tokens - result.padding_tokens)  # the same in each, so bars compare in length
    rows = tuple(
        (label, {"real": real, "padding": real * waste / (1 - waste)}) for label, waste in known if waste < 1
    )
    cells = tuple((label, percent(waste), f"{1 / (1 - waste):.2f}") for label, waste in known if waste < 1)
    lengths = ", ".join(
        f"{one.first}–{one.last}: {count(one.sequences)}" for one in result.lengths if one.sequences
    )
    note = f"{count(result.sampled_sequences)} recorded sequences replayed. Tokens a sequence: {lengths}."
    table = Table((left("batches"), *right("padding", "slots per token")), cells, note=note)
    return Bars(
        "Slots that are computed for the same tokens",
        {"real": "tokens", "padding": "padding"},
        {"real": "computation", "padding": "idle"},
        rows,
        table,
        "count",
    )
