"""The section on pipelines: one iteration as it ran, and the bubble of each stage beside the ideal."""

from __future__ import annotations

from trine.analyzers.reports.document import Block, Column, Lanes, Paragraph, Section, Table
from trine.analyzers.results import Analysis
from trine.analyzers.studies.pipeline import Pipeline, StageBubble
from trine.analyzers.units import duration, percent

__all__ = ["ORDER", "section"]

ORDER = 15

#: Stages that are drawn wherever there is room for few rows: half a pipeline is none.
FEWEST_DRAWN = 16

_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward of the input",
    "backward_weight": "backward of the weights",
    "both": "forward and backward",
}
_SIDES = {
    "forward": "computation",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "weight",
    "both": "computation",
}
#: How the source is called.
_SOURCES = {
    "microbatches": "times of micro-batches",
    "annotations": "annotations of micro-batches",
    "messages": "messages between stages",
}


def section(result: Pipeline, analysis: Analysis, most_rows: int) -> Section:
    """What the pipeline ran, then its drawing with the table of stages."""
    most_rows = max(most_rows, FEWEST_DRAWN)
    blocks: list[Block] = [Paragraph(_summary(result)), *_remarks(result)]
    table = _stages(result, most_rows)
    blocks.append(_drawing(result, table, most_rows) if result.spans else table)
    return Section("pipeline", "Pipeline", tuple(blocks))


def _summary(result: Pipeline) -> str:
    ratios = [stage.bubble_ratio for stage in result.stages]
    what = result.schedule or "A schedule of unknown name"
    chunks = f", {result.chunks} chunks a rank" if result.chunks > 1 else ""
    ideal = (
        f"; at best this schedule leaves {percent(result.ideal_ratio) if result.ideal_ratio else 'none'} ({result.ideal_formula})"
        if result.ideal_ratio is not None
        else "; what it would leave at best is not known"
    )
    return (
        f"{what} over {len(result.stages) + len(result.missing_stages)} stages{chunks}, {result.microbatches} micro-batches, "
        f"{duration(result.iteration_ns)} an iteration: {percent(min(ratios))} to {percent(max(ratios))} of it a stage has "
        f"nothing to compute (bubble, {percent(result.bubble_ratio)} on average){ideal}."
    )


def _remarks(result: Pipeline) -> list[Block]:
    said = []
    if result.warm_up:
        one = len(result.warm_up) == 1
        numbers = ", ".join(map(str, result.warm_up[:8]))
        said.append(
            f"Iteration{'' if one else 's'} {numbers} {'is' if one else 'are'} warm-up and left out; medians are over the "
            f"{result.iterations} others."
        )
    if result.replicas > 1:
        said.append(f"{result.replicas} pipelines like this ran side by side; the slowest is shown.")
    return [Paragraph(" ".join(said))] if said else []


def _stages(result: Pipeline, most_rows: int) -> Table:
    split = any(stage.backward_input_ns is not None for stage in result.stages)
    titles = ["rank", "stage", "bubble", "warm-up", "steady", "drain", "computing", "forward"]
    titles += ["input gradient", "weight gradient"] if split else ["backward"]
    rows = tuple(_row(result, stage, split) for stage in result.stages[:most_rows])
    left = len(result.stages) - most_rows
    return Table(
        tuple(Column(title, "right") for title in titles),
        rows,
        note=f"{left} more stages"
        if left > 0
        else f"from {_SOURCES[result.source]}; medians of an iteration",
    )


def _row(result: Pipeline, stage: StageBubble, split: bool) -> tuple[str, ...]:
    named = [number for number in stage.stages if number >= 0]
    each = (
        (stage.forward_ns, stage.backward_input_ns, stage.backward_weight_ns)
        if split
        else (stage.forward_ns, stage.backward_ns)
    )
    return (
        str(stage.rank),
        ", ".join(map(str, named)) or str(result.stages.index(stage)),
        percent(stage.bubble_ratio),
        *(
            percent(part / result.iteration_ns)
            for part in (stage.warm_up_ns, stage.steady_ns, stage.drain_ns)
        ),
        duration(stage.compute_ns),
        *("–" if value is None else duration(value) for value in each),
    )


def _drawing(result: Pipeline, table: Table, most_rows: int) -> Lanes:
    used = [key for key in _LEGEND if any(span.direction == key for span in result.spans)]
    rows = tuple(
        (
            f"rank {stage.rank}",
            tuple(
                (span.start_ns, span.end_ns, span.direction, str(span.index))
                for span in result.spans
                if span.row == row
            ),
        )
        for row, stage in enumerate(result.stages[:most_rows])
    )
    title = f"Iteration {result.drawn} as it ran" + (" (its beginning)" if result.cut else "")
    return Lanes(title, {key: _LEGEND[key] for key in used}, {key: _SIDES[key] for key in used}, rows, table)
