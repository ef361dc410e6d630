"""A comparison in words: text for a terminal, Markdown for a pull request, JSON for a program."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from trine.analyzers.comparison import Cause, Comparison, Difference, MetricChange, Side
from trine.analyzers.run_facts import METRICS
from trine.analyzers.units import count, duration, percent, size

__all__ = ["headline", "render_json", "render_markdown", "render_text", "value_text"]

#: Causes shown of a kind; the JSON has them all.
_MOST_CAUSES = 5

_VERDICTS = {
    "regression": "REGRESSION",
    "improvement": "IMPROVEMENT",
    "no change": "NO CHANGE",
    "inconclusive": "INCONCLUSIVE",
    "one run": "NOTHING CONCLUDED FROM ONE RUN",
}

_KINDS = {
    "phase": "phases of the step",
    "breakdown": "breakdown of the window",
    "idle": "causes of idle time",
    "collective": "collectives",
    "kernel": "kernels",
    "operator": "operators",
}


def value_text(metric: str, value: float) -> str:
    """A metric's value with its unit, which is the ending of its name."""
    if metric.endswith("_ns"):
        return duration(value)
    if metric.endswith("_bytes"):
        return size(value)
    if metric.endswith("_per_s"):
        return f"{count(value)}/s"
    return percent(value)


def headline(comparison: Comparison) -> list[str]:
    """What came out, how sure, and the smallest change that the data could have shown: three lines."""
    ratio = comparison.step_time
    first, second = duration(comparison.first.median_ns), duration(comparison.second.median_ns)
    runs = [f"{number} run{'s' if number > 1 else ''}" for number in ratio.runs]
    seen = f"{ratio.power * 10:.0f} times in 10"
    at_best = "" if ratio.several else "at best, were all runs alike, "
    smallest = f"{percent(ratio.smallest_change)} or more would {at_best}have been seen {seen}"
    sure = f"{ratio.confidence:.0%} interval of the ratio {ratio.low:.3f} to {ratio.high:.3f}"
    rule = f"{runs[0]} against {runs[1]}; a change counts from {percent(ratio.minimum_effect)} on"
    return [
        f"{_VERDICTS[comparison.verdict]}: a step takes {_change_words(ratio.ratio)} ({first} against {second})",
        f"{sure} ({rule})",
        f"A slow-down of {smallest}.",
    ]


def render_text(comparison: Comparison) -> str:
    """Plain text, at most 100 columns wide but for paths."""
    lines = [f"{_names(comparison.first)} against {_names(comparison.second)}", ""]
    lines += headline(comparison)
    lines += [
        *_section("", _cause_lines(comparison.causes)),
        *_section("", _metric_lines(comparison.metrics)),
    ]
    lines += _section("Environment", _difference_lines(comparison.environment))
    lines += _section("Configuration", _difference_lines(comparison.configuration))
    lines += _section("Runs", _run_lines(comparison))
    lines += _section("Notes", _wrapped(comparison.notes))
    return "\n".join(lines) + "\n"


def render_markdown(comparison: Comparison) -> str:
    """Markdown: the headline, then a table each of causes, metrics and differences."""
    head, *rest = headline(comparison)
    verdict, _, what = head.partition(": ")
    lines = [f"**{verdict}**: {what}", "", *rest, ""]
    lines += _table(
        ("where", "what", "first", "second", "change", "of the step"),
        [
            (
                _KINDS[c.kind],
                c.name,
                duration(c.first_ns),
                duration(c.second_ns),
                _signed(c.change_ns, duration),
                _signed(c.share, percent),
            )
            for c in _largest(comparison.causes)
        ],
    )
    lines += _table(
        ("metric", "first", "second", "change"),
        [
            (m.name, value_text(m.name, m.first), value_text(m.name, m.second), _relative(m.ratio))
            for m in comparison.metrics
        ],
    )
    differences = (*comparison.environment, *comparison.configuration)
    lines += _table(
        ("differs", "first", "second"), [(d.name, str(d.first), str(d.second)) for d in differences]
    )
    lines += [f"- {note}" for note in comparison.notes]
    return "\n".join(lines).rstrip() + "\n"


def render_json(comparison: Comparison) -> str:
    """JSON by the schema ``trine.comparison/1``; every name ends in its unit."""
    return json.dumps(comparison_to_dict(comparison), indent=1, default=str) + "\n"


def comparison_to_dict(comparison: Comparison) -> dict[str, object]:
    """The comparison as the JSON contract has it."""
    ratio = comparison.step_time
    return {
        "schema": "trine.comparison/1",
        "verdict": comparison.verdict,
        "step_time": {
            "ratio": ratio.ratio,
            "low": ratio.low,
            "high": ratio.high,
            "confidence": ratio.confidence,
            "minimum_effect": ratio.minimum_effect,
            "smallest_change": ratio.smallest_change,
            "power": ratio.power,
        },
        "first": _side_to_dict(comparison.first),
        "second": _side_to_dict(comparison.second),
        "metrics": [
            {
                "name": m.name,
                "first": m.first,
                "second": m.second,
                "first_values": list(m.first_values),
                "second_values": list(m.second_values),
                "more_is_better": m.more_is_better,
            }
            for m in comparison.metrics
        ],
        "causes": [
            {
                "kind": c.kind,
                "name": c.name,
                "first_ns": c.first_ns,
                "second_ns": c.second_ns,
                "change_ns": c.change_ns,
                "share": c.share,
                "first_calls": c.first_calls,
                "second_calls": c.second_calls,
            }
            for c in comparison.causes
        ],
        "environment": [_difference_to_dict(d) for d in comparison.environment],
        "configuration": [_difference_to_dict(d) for d in comparison.configuration],
        "notes": list(comparison.notes),
    }


def _side_to_dict(side: Side) -> dict[str, object]:
    return {
        "median_ns": side.median_ns,
        "runs": [
            {
                "source": source,
                "steps": steps,
                "warm_up": warm_up,
                "median_ns": m,
                "low_ns": low,
                "high_ns": high,
            }
            for source, steps, warm_up, (m, low, high) in zip(
                side.sources, side.steps, side.warm_up, side.run_medians_ns, strict=True
            )
        ],
    }


def _difference_to_dict(difference: Difference) -> dict[str, object]:
    return {"name": difference.name, "first": difference.first, "second": difference.second}


# --- words and lines ---------------------------------------------------------------------------


def _change_words(ratio: float) -> str:
    if abs(ratio - 1) < 0.0005:
        return "as long as before"
    return f"{percent(abs(ratio - 1))} {'longer' if ratio > 1 else 'less time'}"


def _names(side: Side) -> str:
    more = f" and {len(side.sources) - 1} more" if len(side.sources) > 1 else ""
    return f"{side.sources[0]}{more}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["", *([title] if title else []), *lines]


def _signed(value: float, words: Callable[[float], str]) -> str:
    return f"+{words(value)}" if value > 0 else words(value)


def _relative(ratio: float | None) -> str:
    return "" if ratio is None else _signed(ratio - 1, percent)


def _largest(causes: Sequence[Cause]) -> Iterator[Cause]:
    for _, group in groupby(causes, key=lambda cause: cause.kind):
        yield from list(group)[:_MOST_CAUSES]


def _wrapped(notes: Sequence[str]) -> list[str]:
    return [
        line
        for note in notes
        for line in textwrap.wrap(note, 98, initial_indent="  ", subsequent_indent="  ")
    ]


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _cause_lines(causes: Sequence[Cause]) -> list[str]:
    if not causes:
        return []
    title = "Where the change is (mean of a step and rank)"
    lines = [f"{title:<50}{'first':>11}{'second':>11}{'change':>12}{'of the step':>14}"]
    for kind, group in groupby(_largest(causes), key=lambda cause: cause.kind):
        lines.append(f"  {_KINDS[kind]}")
        lines += [
            f"    {_short(c.name, 45):<46}{duration(c.first_ns):>11}{duration(c.second_ns):>11}"
            f"{_signed(c.change_ns, duration):>12}{_signed(c.share, percent):>14}"
            for c in group
        ]
    return lines


def _metric_lines(metrics: Sequence[MetricChange]) -> list[str]:
    if not metrics:
        return []
    lines = [f"{'Metrics (median of the runs)':<50}{'first':>11}{'second':>11}{'change':>12}"]
    return lines + [
        f"  {m.name:<48}{value_text(m.name, m.first):>11}{value_text(m.name, m.second):>11}{_relative(m.ratio):>12}"
        for m in metrics
        if m.name in METRICS
    ]


def _difference_lines(differences: Sequence[Difference]) -> list[str]:
    return [
        f"  {d.name}: {_short(str(d.first), 30)} against {_short(str(d.second), 30)}" for d in differences
    ]


def _run_lines(comparison: Comparison) -> list[str]:
    lines = []
    for title, side in (("first", comparison.first), ("second", comparison.second)):
        rows = zip(side.sources, side.steps, side.warm_up, side.run_medians_ns, strict=True)
        for source, steps, warm_up, (median, low, high) in rows:
            left_out = f", {warm_up} of warm-up left out" if warm_up else ""
            spread = f"{duration(median)} ({duration(low)} to {duration(high)})"
            lines.append(f"  {title:<7} {spread}, {steps} steps{left_out}: {source}")
    return lines


def _table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    escaped = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    return [
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {row} |" for row in escaped),
        "",
    ]
