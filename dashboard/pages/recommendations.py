"""Recommendations: each finding with its evidence, the change to copy, and what it would gain."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dash import dcc, html

from trine.analyzers.desync_words import is_hang
from trine.analyzers.reports.wording import words
from trine.dashboard import units
from trine.dashboard.attributes import aria
from trine.dashboard.components import copy_button
from trine.dashboard.parts import pairs, pill, section, table
from trine.dashboard.urls import State
from trine.dashboard.view import View
from trine.optim.config import APPLIED

if TYPE_CHECKING:
    from trine.analyzers.results import Analysis, Finding, Gain, Recommendation

__all__ = ["body", "finding_line", "toml_of"]

#: Of items with many facts, how many stand beside each other, and how many facts fit beside each other instead.
_MOST_BESIDE = 4
_MOST_COLUMNS = 4


def body(view: View) -> list[Any]:
    """A card a finding, the most at stake first; then what the run is not bound by."""
    found = view.analysis.findings
    cards = [_card(finding, view.analysis) for finding in found]
    if not cards:
        cards = [
            html.P(
                "No fault was found, and no change with a predicted gain of at least 5 % of the step.",
                id="no-findings",
            )
        ]
    parts: list[Any] = [html.P(view.analysis.verdict.sentence, className="verdict-sentence lone"), *cards]
    if view.analysis.not_bound_by:
        rows = [html.Li(item.statement) for item in view.analysis.not_bound_by]
        parts.append(section("Not bound by", html.Ul(rows, className="plain")))
    return parts


def finding_line(finding: Finding, analysis: Analysis, link: State) -> Any:
    """One line on the overview: kind, title, gain."""
    gain = _gain(finding)
    said, look = _briefly(finding, gain)
    return dcc.Link(
        [
            pill(finding.kind, finding.kind),
            html.Span(finding.title, className="finding-title"),
            _gain_bar(gain, _step_ns(finding, analysis)) if gain is not None else html.Span(),
            html.Span(said, className=look),
        ],
        href=link.address,
        className="finding-line",
    )


def _briefly(finding: Finding, gain: Gain | None) -> tuple[str, str]:
    """What mending it gains, in few words, and their class: only a gain has the colour of one."""
    if is_hang(finding.id):
        return words("en")["gain_of_a_hang"], "finding-gain stops"
    if gain is None:
        return "gain not predicted", "finding-gain unknown"
    return f"would gain {units.duration(gain.mid)} a step", "finding-gain"


def _stake(finding: Finding, analysis: Analysis) -> Any:
    """What it costs as it stands: a share of the step where there are steps, of the job where it never ends."""
    if is_hang(finding.id):
        said = words("en")["stake_of_a_hang"]
    elif finding.severity and analysis.is_timed:
        said = f"{units.percent(finding.severity)} of the step at stake"
    else:
        return None
    return html.Span(said, className="stake quiet")


def toml_of(change: Mapping[str, Any]) -> str:
    """Dotted keys as the TOML that the runtime reads: a table a section.

    >>> print(toml_of({"precision.dtype": "bf16", "data.workers": 4}))
    [data]
    workers = 4
    <BLANKLINE>
    [precision]
    dtype = "bf16"
    """
    tables: dict[str, list[str]] = {}
    # Keys without a table come first: below a head they would belong to it.
    for key, value in sorted(change.items(), key=lambda item: (item[0].rpartition(".")[0], item[0])):
        name, _, last = key.rpartition(".")
        tables.setdefault(name, []).append(f"{last} = {_toml_value(value)}")
    blocks = [("\n".join(([f"[{name}]"] if name else []) + lines)) for name, lines in tables.items()]
    return "\n\n".join(blocks)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _card(finding: Finding, analysis: Analysis) -> Any:
    gain = _gain(finding)
    parts: list[Any] = [
        html.Div(
            [
                pill(finding.kind, finding.kind),
                html.Code(finding.id, className="finding-id"),
                _stake(finding, analysis),
            ],
            className="card-head",
        ),
        html.H2(finding.title),
        html.Div(
            [_evidence(finding), _advice(finding, gain, _step_ns(finding, analysis))],
            className="card-columns",
        ),
    ]
    return html.Article(parts, className=f"card {finding.kind}", id=f"finding-{finding.id}")


def _evidence(finding: Finding) -> Any:
    """Plain values in one table; a list of alike rows, such as late ranks, in one of its own."""
    plain: list[tuple[str, Any]] = []
    parts: list[Any] = []
    for key, value in finding.evidence.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, Mapping) for item in value):
            parts += [html.H3(_words(key).capitalize()), _rows_of(value)]
        else:
            plain.append((_words(key), _evidence_value(key, value)))
    shown = [pairs(plain)] if plain else []
    return html.Div([html.H3("Evidence"), *shown, *parts])


def _rows_of(items: Sequence[Mapping[str, Any]]) -> Any:
    """One item: a line a key. Few items of many keys: the same with a column an item. Else a line an item, a
    column a key that any of them fills."""
    keys = [key for key in items[0] if any(item.get(key) not in (None, "") for item in items)]
    if len(items) == 1:
        return pairs((_words(key), _evidence_value(key, items[0][key])) for key in keys)
    rows = [[_evidence_value(key, item.get(key)) for key in keys] for item in items]
    if len(items) <= _MOST_BESIDE and len(keys) > _MOST_COLUMNS:
        beside = [[_words(key), *(row[at] for row in rows)] for at, key in enumerate(keys)]
        return html.Div(table(beside[0], beside[1:], range(1, 1 + len(items))), className="evidence")
    numbers = [i for i, key in enumerate(keys) if not any(isinstance(item.get(key), str) for item in items)]
    shown = table([_words(key).capitalize() for key in keys], rows, numbers)
    return html.Div(shown, className="evidence")


def _advice(finding: Finding, gain: Gain | None, step_ns: int | None) -> Any:
    advice = finding.recommendation
    if advice is None:
        return html.Div([html.H3("Change"), html.P("There is no recommendation for this.")])
    parts: list[Any] = [html.H3("Change")]
    if advice.change:
        text = toml_of(advice.change)
        parts.append(html.Div([html.Pre(text), copy_button(text, "Copy this change")], className="change"))
        foreign = ", ".join(sorted(set(advice.change) - APPLIED))
        if foreign:
            words_of_it = f"Trine's own runtime does not apply {foreign} yet: set it in your framework."
            parts.append(html.P(words_of_it, className="quiet"))
    parts.append(html.P(advice.why))
    parts.append(html.H3("Predicted gain"))
    if is_hang(finding.id):
        parts.append(html.P(words("en")["gain_of_a_hang"].capitalize() + "."))
    elif gain is None:
        parts.append(html.P("It cannot be predicted from what was recorded.", className="quiet"))
    else:
        parts += [_gain_bar(gain, step_ns), _gain_words(gain, advice, step_ns)]
    parts += [html.H3("What it does to the numbers"), html.P(advice.numerics)]
    if advice.predicted is not None:
        prediction = advice.predicted
        inputs = [(_words(key), _evidence_value(key, value)) for key, value in prediction.inputs.items()]
        detail: list[Any] = [html.Summary("How it was predicted"), html.P(html.Code(prediction.formula))]
        if inputs:
            detail.append(pairs(inputs))
        parts.append(html.Details(detail))
    return html.Div(parts)


def _gain_words(gain: Gain, advice: Recommendation, step_ns: int | None) -> Any:
    low, mid, high = (units.duration(value) for value in (gain.low, gain.mid, gain.high))
    basis = "by replay" if advice.predicted is not None and advice.predicted.is_replayed else "an estimate"
    rows = [[f"gain a step, {basis}", low, mid, high]]
    if step_ns:
        rows.append(
            ["share of the step", *(units.ratio(v, step_ns) for v in (gain.low, gain.mid, gain.high))]
        )
    after = advice.predicted.step_time_ns if advice.predicted is not None else None
    if after is not None:
        # Columns are scenarios: the low gain leaves the high step time.
        rows.append(["step time after", *(units.duration(v) for v in (after.high, after.mid, after.low))])
    change = advice.predicted.peak_bytes_change if advice.predicted is not None else None
    if change is not None:
        rows.append(["peak memory", "", units.size(change), ""])
    return table(["", "Low gain", "Mid", "High gain"], rows, (1, 2, 3))


def _gain_bar(gain: Gain, step_ns: int | None) -> Any:
    """The step as a bar, the gain cut from it: solid to the low end, pale to the high, a mark at mid."""
    whole = max(step_ns or 0, gain.high, 1)
    low, mid, high = (f"{100 * max(0, value) / whole:.2f}%" for value in (gain.low, gain.mid, gain.high))
    words = f"gain {units.duration(gain.low)} to {units.duration(gain.high)}, mid {units.duration(gain.mid)}"
    return html.Div(
        [
            html.Span(className="gain-high", style={"width": high}),
            html.Span(className="gain-low", style={"width": low}),
            html.Span(className="gain-mid", style={"left": mid}),
        ],
        className="gain-bar",
        role="img",
        title=words,
        **aria(label=words),
    )


def _gain(finding: Finding) -> Gain | None:
    advice = finding.recommendation
    return advice.predicted.gain_ns if advice is not None and advice.predicted is not None else None


def _step_ns(finding: Finding, analysis: Analysis) -> int | None:
    """The step before the change: the prediction's own, else the median."""
    advice = finding.recommendation
    predicted = advice.predicted if advice is not None else None
    if predicted is not None and predicted.gain_ns is not None and predicted.step_time_ns is not None:
        return predicted.gain_ns.mid + predicted.step_time_ns.mid
    return analysis.step_statistics.median_ns if analysis.step_statistics is not None else None


_UNITS = re.compile(r"_(ns|bytes|bytes_per_s|flops_per_s)$")


def _words(key: str) -> str:
    return _UNITS.sub("", key).replace("_", " ").replace("/", " / ")


def _evidence_value(key: str, value: Any) -> Any:
    """A value by the unit that ends its name."""
    if isinstance(value, Mapping):
        unit = {name: str(name) if _UNITS.search(str(name)) else key for name in value}
        lines = [html.Li(f"{_words(str(name))}: {_flat(unit[name], part)}") for name, part in value.items()]
        return html.Ul(lines, className="plain")
    if isinstance(value, str) and len(value) > 24:
        return html.Span(value, className="wraps")
    return _flat(key, value)


def _flat(key: str, value: Any) -> str:
    if value is None:
        return units.NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_flat(key, item) for item in value)
    if not isinstance(value, (int, float)):
        return str(value)
    if key.endswith("_ns"):
        return units.duration(value)
    if key.endswith("bytes_per_s"):
        return units.bandwidth(value)
    if key.endswith("flops_per_s"):
        return units.flops(value, "FLOP/s")
    if key.endswith("_bytes") or key == "bytes":
        return units.size(value)
    if "share" in key or key.endswith(("_ratio", "efficiency", "mfu", "utilization")):
        return units.percent(value)
    return f"{value:.4g}" if isinstance(value, float) else units.count(value)
