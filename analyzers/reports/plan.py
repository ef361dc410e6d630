"""A plan in words, tables and bars: text, Markdown, a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trine.analyzers.reports import plan_certainty
from trine.analyzers.reports.document import Bars, Block, Column, Document, Items, Paragraph, Section, Table
from trine.analyzers.units import count, duration, percent, size
from trine.optim.plan.candidates import Candidate
from trine.optim.plan.cost import Range, RunCost
from trine.optim.plan.limits import Limit, Limits, any_words
from trine.optim.plan.memory import USABLE
from trine.optim.plan.planning import Plan
from trine.optim.plan.problem import pin_words
from trine.optim.plan.reasons import layout_words, part_words
from trine.optim.plan.search import Tally

__all__ = ["compose", "limit_words", "render_html", "render_markdown", "render_text"]

#: Parts below this share of every step are not drawn; the JSON has them.
_SHOWN = 0.002
#: Layouts whose steps are divided: so many have room beside each other.
_MOST_DIVIDED = 7
#: Rows of the front.
_MOST_FRONT = 12

_SIDES = {
    "compute": "computation",
    "recomputation": "weight",
    "tensor_communication": "communication",
    "context_communication": "communication",
    "expert_communication": "communication",
    "exposed_gradients": "communication",
    "gathers": "communication",
    "pipeline_messages": "communication",
    "pipeline_bubble": "idle",
    "offload": "memory",
    "optimizer": "backward",
    "overhead": "fault",
}
_DEGREES = ("tensor", "context", "expert", "pipeline", "data")


def compose(plan: Plan) -> Document:
    """The report before it has a form."""
    problem, best = plan.problem, plan.best
    sections = [
        Section("ranked", "The best layouts", tuple(_ranked(plan))),
        Section("step", "Where the step goes", (_parts(plan),)),
        Section("memory", "Memory of the rank that needs most", (_memory(plan),)),
        Section("splits", "How modules are split", (_splits(plan),)),
        Section("why", "Why not otherwise", tuple(_why(plan))),
        Section("front", "Step time against memory", tuple(_front(plan))),
        Section("limits", "The largest that fits", tuple(_limits(plan))),
        Section("rests", "What this rests on", (Items(tuple(("·", text, "") for text in plan.assumptions)),)),
    ]
    return Document(
        title="Trine: plan",
        subtitle=(
            f"{problem.workload.name}, {count(problem.workload.parameters)} · {problem.global_batch} x "
            f"{problem.workload.sequence} tokens a step · {_devices(plan)} · {problem.stack.name}"
        ),
        verdict=(
            f"{layout_words(best.layout)}: {_seconds(best.step)} a step, MFU {percent(best.mfu.value)}"
            f" ({_interval(best.mfu, percent)})."
        ),
        confidence=plan_certainty.confidence(plan),
        bound="healthy",
        triangle=None,
        hull=(),
        sides=(),
        sections=tuple(sections),
        facts=tuple(_facts(plan)),
        notices=tuple(_notices(plan)),
    )


def _devices(plan: Plan) -> str:
    cluster = plan.problem.cluster
    if cluster.nodes == 1:
        return f"{cluster.devices} x {cluster.device.name}"
    return f"{cluster.nodes} x {cluster.devices_per_node} {cluster.device.name}"


def _notices(plan: Plan) -> Iterator[str]:
    best, room = plan.best, plan.problem.cluster.device.memory_bytes
    yield (
        f"{count(best.tokens_per_s.value)} tokens/s ({_interval(best.tokens_per_s, count)}); {size(best.peak.value)}"
        f" ({_interval(best.peak, size)}) of {size(room)} on stage {best.stage}; bound by {best.bound}."
    )
    if best.peak.high > room * USABLE:
        yield (
            f"It may run out of memory: the device gives {size(room * USABLE)}, and one of twenty needs more than"
            f" {size(best.peak.high)}; --memory-headroom {1 - USABLE / (best.peak.high / best.peak.value):.2f} keeps clear of that."
        )
    if plan.busier is not None:
        yield (
            f"The pipeline is idle {percent(plan.busier.idle)} of the step: with a global batch of {plan.busier.global_batch}"
            f" ({count(plan.busier.global_batch * plan.problem.workload.sequence)} tokens) it is {percent(plan.busier.then)}."
        )
    if best.cost is not None:
        yield _cost_words(best.cost)
    if plan.jitter is not None:
        yield _jitter_words(float(plan.jitter.low_s), float(plan.jitter.high_s))


def _jitter_words(low_s: float, high_s: float) -> str:
    low, high = duration(low_s * 1e9), duration(high_s * 1e9)
    if low != high:
        return f"Steps of one run vary: nine of ten between {low} and {high}."
    return f"Steps of one run hardly vary: nine of ten lie within {max(high_s / low_s - 1, 5e-4):.1%} of each other, at {low}."


def _cost_words(cost: RunCost) -> str:
    hours = f"{count(cost.device_hours.value)} ({_interval(cost.device_hours, count)})"
    words = f"{count(cost.tokens)} tokens take {_days(cost.days.value)} days ({_interval(cost.days, _days)}) and {hours} device-hours"
    if cost.price is None:
        return f"{words}."
    return f"{words}; price {count(cost.price.value)} ({_interval(cost.price, count)})."


def _days(value: float) -> str:
    return f"{value:.3g}"


def _time(seconds: float) -> str:
    return duration(seconds * 1e9)


def _seconds(step: Range) -> str:
    return f"{_time(step.value)} ({_interval(step, _time)})"


def _interval(found: Range, words: Callable[[float], str]) -> str:
    """``"2.97 s to 5.38 s"``; a unit that both ends share is said once."""
    low, high = words(found.low), words(found.high)
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.endswith(' ' + unit) else low} to {high}"


def _degrees(one: Candidate) -> str:
    return (
        " · ".join(f"{name} {one.layout[name]}" for name in _DEGREES if one.layout[name] != 1) or "one device"
    )


def _batches(one: Candidate) -> str:
    """How many micro-batches a rank has of a step, of how many sequences."""
    return f"{one.layout['microbatches']} of {one.layout['micro_batch']}"


def _rest(one: Candidate) -> str:
    """What is chosen beside degrees."""
    degrees = {name: 1 for name in _DEGREES if name != "pipeline"}
    words = layout_words({**one.layout, **degrees}, batch=False)
    parts = [part for part in words.split(" · ") if part != "one device" and not part.startswith("pipeline ")]
    return " · ".join(parts)


def _ranked(plan: Plan) -> Iterator[Block]:
    yield _table(plan.ranked, plan)
    for words in (plan_certainty.order_words(plan), plan_certainty.export_words(plan)):
        if words is not None:
            yield Paragraph(words)
    yield _intervals(plan.ranked, plan)
    columns = (
        Column("", "right"),
        Column("with", flexible=True, wraps=True),
        Column("bound by"),
        Column("lost by"),
    )
    rest = [
        (str(rank), _rest(one), one.bound.partition(",")[0], one.lost_by or "the best")
        for rank, one in enumerate(plan.ranked, 1)
    ]
    yield Table(columns, tuple(rest))


def _table(candidates: Sequence[Candidate], plan: Plan) -> Table:
    columns = (
        Column("", "right"),
        Column("layout", flexible=True, wraps=True),
        Column("micro-batches", "right"),
        *(Column(name, "right") for name in ("step", "MFU", "memory", "tokens/s")),
    )
    rows = [
        (
            str(rank),
            _degrees(one),
            _batches(one),
            _time(one.step.value),
            percent(one.mfu.value),
            size(one.peak.value),
            count(one.tokens_per_s.value),
        )
        for rank, one in enumerate(candidates, 1)
    ]
    note = (
        "micro-batches: how many a rank has of a step, of how many sequences;"
        f" MFU by the convention {plan.convention}, dense peak of {plan.best.mfu_precision}"
    )
    sources = plan_certainty.source_words(plan)
    return Table(columns, tuple(rows), note=f"{note}; {sources}" if sources else note)


def _intervals(candidates: Sequence[Candidate], plan: Plan) -> Table:
    """Of every number of a table of layouts, and of what a run costs, where that is asked for."""
    priced = [one.cost for one in candidates]
    names = ["step", "MFU", "memory", "tokens/s"]
    names += ["days"] * all(priced) + ["price"] * all(
        cost is not None and cost.price is not None for cost in priced
    )
    rows = []
    for rank, one in enumerate(candidates, 1):
        cells = [
            _interval(one.step, _time),
            _interval(one.mfu, percent),
            _interval(one.peak, size),
            _interval(one.tokens_per_s, count),
        ]
        if one.cost is not None:
            cells.append(_interval(one.cost.days, _days))
        if one.cost is not None and one.cost.price is not None:
            cells.append(_interval(one.cost.price, count))
        rows.append((str(rank), *cells))
    columns = (Column("", "right"), *(Column(name, "right") for name in names))
    return Table(columns, tuple(rows), note=plan_certainty.interval_words(plan))


def _parts(plan: Plan) -> Bars:
    ranked = plan.ranked[:_MOST_DIVIDED]
    shown = [
        name
        for name in plan.best.parts_s
        if any(one.parts_s[name] > _SHOWN * one.step.value for one in ranked)
    ]
    rows = tuple(
        (f"{rank}", {name: one.parts_s[name] * 1e9 for name in shown}) for rank, one in enumerate(ranked, 1)
    )
    columns = (
        Column("part", flexible=True, wraps=True),
        *(Column(str(rank), "right") for rank in range(1, len(rows) + 1)),
    )
    table = Table(
        columns,
        tuple((part_words(name), *(duration(one.parts_s[name] * 1e9) for one in ranked)) for name in shown),
    )
    legend = {name: part_words(name) for name in shown}
    more = f" (the best {len(ranked)}; the JSON has all)" if len(ranked) < len(plan.ranked) else ""
    return Bars(f"A step, divided{more}", legend, {name: _SIDES[name] for name in shown}, rows, table)


def _memory(plan: Plan) -> Table:
    best = plan.best
    rows = [
        (name, size(value), percent(value / best.peak.value))
        for name, value in sorted(best.memory_bytes.items(), key=lambda item: -item[1])
        if value > 0
    ]
    rows.append(("peak", size(best.peak.value), ""))
    rows.append(("in nine of ten", _interval(best.peak, size), ""))
    away = {
        "host of a node": best.host_bytes,
        "drives of a node": best.disk_bytes,
        "other nodes": best.remote_bytes,
    }
    rows += [(name, size(value), "") for name, value in away.items() if value > 0]
    return Table(
        (Column("what", flexible=True), Column("bytes", "right"), Column("share", "right")), tuple(rows)
    )


def _splits(plan: Plan) -> Table:
    columns = (Column("module"), Column("split"), Column("each rank has", flexible=True))
    return Table(columns, tuple((split.module, split.kind, split.words) for split in plan.splits))


def _why(plan: Plan) -> Iterator[Block]:
    if plan.alternatives:
        columns = (
            Column("instead"),
            Column("with", flexible=True, wraps=True),
            Column("step", "right"),
            Column("why it lost", flexible=True, wraps=True),
        )
        rows = [
            (
                f"{one.column} {_value(one.column, one.value)}",
                _difference(one.layout, plan.best.layout, one.column),
                _time(one.step.value) if one.fits else "",
                one.reason,
            )
            for one in plan.alternatives
        ]
        step = plan.alternatives[0].step
        factors = f"{step.low / step.value:.2f} to {step.high / step.value:.2f} times as long"
        note = f"by formula, all else as near to the winner as it can be and fit; nine of ten took {factors}"
        yield Table(columns, tuple(rows), note=note)
    tally = plan.tally
    yield Paragraph(
        f"{tally.configurations:,} configurations, {_computed(tally)} computed ({count(tally.per_minute)} a minute)"
        + (
            ", the rest ruled out by bounds on time and memory."
            if tally.computed < tally.configurations
            else "."
        )
    )
    if plan.losers:
        words = ", ".join(f"{number:,} {name}" for name, number in plan.losers.items())
        yield Paragraph(f"Of {tally.shapes:,} shapes, by what most set them back: {words}.")


def _computed(tally: Tally) -> str:
    return f"{tally.computed:,} of them" if tally.computed < tally.configurations else "all of them"


def _value(column: str, value: int | str) -> str:
    return size(value) if column == "bucket_bytes" and isinstance(value, int) else str(value)


def _difference(layout: dict[str, int | str], best: dict[str, int | str], column: str) -> str:
    """What had to change with it."""
    changed = [
        f"{name} {layout[name]}"
        for name in layout
        if name not in (column, "microbatches") and layout[name] != best[name]
    ]
    return ", ".join(changed)


def _front(plan: Plan) -> Iterator[Block]:
    shown = plan.front if len(plan.front) <= _MOST_FRONT else _thinned(plan.front)
    left = len(plan.front) - len(shown)
    columns = (
        Column("", "right"),
        Column("layout", flexible=True, wraps=True),
        Column("micro-batches", "right"),
        Column("with", flexible=True, wraps=True),
        Column("step", "right"),
        Column("memory", "right"),
    )
    rows = [
        (str(rank), _degrees(one), _batches(one), _rest(one), _time(one.step.value), size(one.peak.value))
        for rank, one in enumerate(shown, 1)
    ]
    note = "layouts that no other beats in both; by formula"
    yield Table(columns, tuple(rows), note=f"{note}; {left} between them are in the JSON" if left else note)
    yield _intervals(shown, plan)


def _thinned(front: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    last = len(front) - 1
    return tuple(front[round(place * last / (_MOST_FRONT - 1))] for place in range(_MOST_FRONT))


def _limits(plan: Plan) -> Iterator[Block]:
    items = list(_limit_items("of the best layout", plan.limits))
    if plan.largest is not None:
        items += _limit_items(any_words(plan.problem), plan.largest)
    yield Items(tuple(items))


def _limit_items(of: str, limits: Limits) -> Iterator[tuple[str, str, str]]:
    for what, limit in (
        ("micro-batch in sequences", limits.micro_batch),
        ("context in tokens", limits.context),
    ):
        yield (
            "·",
            f"{what}, {of}: {limit_words(limit)}",
            layout_words(limit.layout, batch=False) if limit else "",
        )


def limit_words(limit: Limit | None) -> str:
    """A limit with its interval; one that may not even be reached says so."""
    if limit is None:
        return "none"
    words = f"{limit.value:,}" if limit.bounded else f"{limit.value:,} or more"
    if limit.low == 0:
        return (
            f"{words} (up to {limit.high:,}, or none)" if limit.high > limit.value else f"{words} (or none)"
        )
    return f"{words} ({limit.low:,} to {limit.high:,})" if limit.low < limit.high else words


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    problem = plan.problem
    yield "software", f"{problem.stack.name}: {problem.abilities.source}"
    yield (
        "memory",
        f"{size(problem.capacity_bytes)} a device to plan with, {percent(problem.headroom)} left free",
    )
    if problem.pins:
        pins = sorted(problem.pins.items())
        yield "pinned", "; ".join(f"{name}={pin_words(name, values)}" for name, values in pins)
    if problem.searched:
        yield "searched, too", ", ".join(problem.searched)


# --- forms ---------------------------------------------------------------------------------------


def render_text(plan: Plan, *, colour: bool = False, width: int = 100) -> str:
    """For a terminal."""
    from trine.analyzers.reports import text

    return text.render_document(compose(plan), colour=colour, width=width)


def render_markdown(plan: Plan) -> str:
    """For a pull request or a page."""
    from trine.analyzers.reports import markdown

    return markdown.render_document(compose(plan))


def render_html(plan: Plan) -> str:
    """One self-contained page."""
    from trine.analyzers.reports import html

    return html.render_document(compose(plan))
