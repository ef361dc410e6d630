"""What a report says, in order: an analysis composed into a :class:`Document`.

Nothing is analysed here. Shares beside a number are that number over its row's total, for display.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trine.analyzers.desync_words import is_hang
from trine.analyzers.notices import notices
from trine.analyzers.results import Analysis, Finding, RankResult
from trine.analyzers.units import count, duration, percent, rank_list, size
from trine.analyzers.verdict import value_text
from trine.optim.config import APPLIED
from trine.record.model import Quality

from . import _exchange, _sections, studies
from ._cells import Limits
from .document import Document, FindingCard, Items, Paragraph, Section, clean
from .wording import words

__all__ = ["compose"]

#: Notes on what a source that shows no time could not say anyway.
_OF_TIME = frozenset({"unknown-hardware", "no-mfu"})


def compose(
    analysis: Analysis,
    *,
    language: str = "en",
    most_ranks: int = 64,
    most_rows: int = 20,
    most_detail: int | None = None,
    brief: bool = False,
) -> Document:
    """The report of ``analysis``. At most ``most_ranks`` ranks and ``most_rows`` rows a table are taken, in what studies add
    ``most_detail``; what is left out is said under the table. ``brief`` leaves out what another section says better, and
    of studies without a result all but their names. Raises ``UsageError`` for a language that does not exist."""
    text = words(language)
    shown, hidden = _pick_ranks(analysis.ranks, most_ranks)
    limits = Limits(shown, hidden, most_rows, brief)
    timed = analysis.is_timed
    placed = [
        (0, _findings(analysis, text)),
        (10, _sections.where(analysis, text, limits) if timed else None),
        (17, _applied(analysis, text)),
        (18, _not_bound(analysis, text)),
        (19, _sections.step_times(analysis, text, limits)),
        (30, _exchange.communication(analysis, text, limits)),
        (40, _exchange.memory(analysis, text, limits)),
        (50, _sections.work(analysis, text, limits)),
        (78, _sections.utilisation(analysis, text, limits) if timed else None),
        (90, _checklist(analysis, text) if timed else None),
        (95, _quality(analysis, text, most_rows * 2, brief)),
        *studies.placed_sections(analysis, most_rows if most_detail is None else most_detail),
    ]
    placed.sort(key=lambda pair: pair[0])
    verdict = analysis.verdict
    return Document(
        title=text["title"],
        subtitle=_subtitle(analysis, text),
        verdict=clean(verdict.sentence),
        confidence=text["confidence"].format(level=text[verdict.confidence]),
        bound=_bound(analysis),
        triangle=verdict.triangle,
        hull=verdict.hull,
        sides=_sides(verdict.triangle, text),
        sections=tuple(section for _, section in placed if section is not None),
        facts=_facts(analysis, text),
        notices=tuple(clean(notice) for notice in notices(analysis)),
    )


def _pick_ranks(ranks: Sequence[RankResult], most: int) -> tuple[tuple[RankResult, ...], int]:
    """At most ``most`` ranks: those that cause and those that wait most, in order of rank."""

    def weight(rank: RankResult) -> int:
        part = rank.communication
        return max(part.caused_wait_ns, part.wait_ns) if part is not None else 0

    if len(ranks) <= most:
        return tuple(ranks), 0
    picked = sorted(ranks, key=weight, reverse=True)[:most]
    return tuple(sorted(picked, key=lambda rank: rank.rank)), len(ranks) - most


def _bound(analysis: Analysis) -> Literal["fault", "healthy", "unknown"]:
    if any(finding.kind == "fault" for finding in analysis.findings):
        return "fault"
    return "healthy" if analysis.not_bound_by else "unknown"


def _sides(point: tuple[float, float, float] | None, text: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    if point is None:
        return ()
    names = ("computation", "communication", "memory")
    return tuple((name, f"{text[name]} {percent(share)}") for name, share in zip(names, point, strict=True))


def _subtitle(analysis: Analysis, text: Mapping[str, str]) -> str:
    source = analysis.source
    ranks, steps = len(source.ranks), source.steps
    parts = [f"{ranks} {text['rank'] if ranks == 1 else text['ranks']}"]
    parts.append(f"{steps} {text['step'] if steps == 1 else text['steps']}" if steps else text["no_steps"])
    if analysis.hardware.name:
        parts.append(clean(analysis.hardware.name))
    if analysis.step_statistics is not None:
        parts.append(f"{duration(analysis.step_statistics.median_ns)} a {text['step']}")
    return " · ".join(parts)


def _facts(analysis: Analysis, text: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    source = analysis.source
    facts = [(text["source"], clean(source.path)), (text["format"], clean(source.format))]
    if analysis.is_timed or source.steps:  # of a dump or a snapshot there are no steps to take
        facts.append((text["selection"], clean(source.selection)))
    if analysis.hardware.name:
        facts.append((text["device"], clean(analysis.hardware.name)))
    if source.missing_ranks:
        facts.append((text["missing"], rank_list(source.missing_ranks)))
    return tuple(facts)


# --- findings ------------------------------------------------------------------------------------


def _findings(analysis: Analysis, text: Mapping[str, str]) -> Section:
    cards = tuple(_card(number, finding, text) for number, finding in enumerate(analysis.findings, 1))
    nothing = text["no_findings"] if analysis.not_bound_by else text["no_not_bound"]
    if not analysis.is_timed:
        nothing = text["no_findings_here"]
    return Section("findings", text["findings"], cards or (Paragraph(nothing),))


def _card(number: int, finding: Finding, text: Mapping[str, str]) -> FindingCard:
    recommendation = finding.recommendation
    change = recommendation.change if recommendation is not None else {}
    predicted = recommendation.predicted if recommendation is not None else None
    return FindingCard(
        number=number,
        kind=finding.kind,
        kind_words=text[finding.kind],
        id=clean(finding.id),
        severity=text["stake_of_a_hang"] if is_hang(finding.id) else percent(finding.severity),
        title=clean(finding.title),
        change=tuple((clean(key), clean(value_text(value))) for key, value in change.items()),
        why=clean(recommendation.why) if recommendation is not None else "",
        numerics=clean(recommendation.numerics) if recommendation is not None else "",
        gain=_gain_words(finding, text),
        formula=text["formula"].format(formula=clean(predicted.formula)) if predicted is not None else "",
        evidence=tuple((clean(key), _evidence_words(key, value)) for key, value in finding.evidence.items()),
        caution=_caution(change, text),
    )


def _caution(change: Mapping[str, Any], text: Mapping[str, str]) -> str:
    foreign = [clean(key) for key in change if key not in APPLIED]
    return text["not_applied"].format(keys=", ".join(foreign)) if foreign else ""


def _gain_words(finding: Finding, text: Mapping[str, str]) -> str:
    predicted = finding.recommendation.predicted if finding.recommendation is not None else None
    if predicted is None:
        return text["gain_of_a_hang" if is_hang(finding.id) else "no_gain"]
    said = []
    if predicted.peak_bytes_change:
        said.append(text["frees"].format(bytes=size(-predicted.peak_bytes_change)))
    gain, after = predicted.gain_ns, predicted.step_time_ns
    if gain is not None:
        unit = text["unit_window" if "window_time_ns" in predicted.inputs else "unit_step"]
        values = {"basis": text["by_replay" if predicted.is_replayed else "by_estimate"]}
        if gain.mid < 0:
            values |= {"mid": duration(-gain.mid), "low": duration(-gain.high), "high": duration(-gain.low)}
            said.append(text["cost_words"].format(unit=unit, **values))
        elif after is not None:
            values |= {"mid": duration(gain.mid), "low": duration(gain.low), "high": duration(gain.high)}
            before = duration(after.mid + gain.mid)
            words_of_gain = text["gain_words"]
            said.append(words_of_gain.format(unit=unit, before=before, after=duration(after.mid), **values))
    return "; ".join(said) or text["no_gain"]


def _evidence_words(key: str, value: Any) -> str:
    """A value by the unit that ends its name."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        if key.endswith("_ns"):
            return duration(value)
        if key.endswith("bytes"):
            return size(value)
        if "share" in key:
            return percent(value)
        return count(value) if abs(value) >= 10_000 else f"{value:g}"
    if isinstance(value, Mapping):
        return "; ".join(
            f"{clean(k)} {_evidence_words(key if key.endswith('bytes') else str(k), v)}"
            for k, v in value.items()
        )
    if isinstance(value, (list, tuple)):
        return " | ".join(_evidence_words(key, item) for item in value)
    return clean(value) if isinstance(value, str) else clean(json.dumps(value, default=str))


# --- the rest ------------------------------------------------------------------------------------


def _applied(analysis: Analysis, text: Mapping[str, str]) -> Section | None:
    """What trine.optimize has changed, in its own words; the first rank's, for all are given the same."""
    effects = next((e for rank in analysis.ranks if (e := rank.summary.metadata.get("effects"))), ())
    if not isinstance(effects, Sequence) or isinstance(effects, str) or not effects:
        return None
    items = tuple(("·", clean(str(effect)), "") for effect in effects)
    return Section("applied", text["applied"], (Items(items),))


def _not_bound(analysis: Analysis, text: Mapping[str, str]) -> Section | None:
    if not analysis.not_bound_by:
        return None
    items = tuple(("✓", clean(item.statement), "") for item in analysis.not_bound_by)
    return Section("not-bound", text["not_bound"], (Items(items),))


def _checklist(analysis: Analysis, text: Mapping[str, str]) -> Section | None:
    if not analysis.checklist:
        return None
    marks = {"pass": "✓", "fail": "✗", "unknown": "?"}
    items = tuple(
        (marks[item.state], f"{clean(item.title)}: {clean(item.evidence)}", clean(item.next))
        for item in analysis.checklist
    )
    return Section("checklist", text["checklist"], (Items(items),))


def _quality(analysis: Analysis, text: Mapping[str, str], most: int, brief: bool) -> Section:
    if not analysis.data_quality:
        return Section("quality", text["quality"], (Paragraph(text["no_quality"]),))
    timed = analysis.is_timed
    order = {"error": 0, "warning": 1, "info": 2}
    # The same note of many ranks is one line with its ranks.
    notes: dict[tuple[str, str, str], list[int]] = {}
    unanswered: set[str] = set()
    for note in analysis.data_quality:
        name = _unanswered(note)
        if name is not None and (brief or not timed):
            unanswered.add(name)
            continue
        if not timed and note.id in _OF_TIME:
            continue
        ranks = notes.setdefault((note.severity, note.id, note.message), [])
        if note.rank is not None:
            ranks.append(note.rank)
    ordered = sorted(notes.items(), key=lambda pair: order[pair[0][0]])
    items = []
    for (severity, id, message), ranks in ordered[:most]:
        where = f" ({rank_list(sorted(set(ranks)))})" if ranks else ""
        items.append((text[severity], f"{clean(id)}: {clean(message)}{where}", ""))
    if unanswered:
        items.append((text["info"], text["unanswered"].format(names=", ".join(sorted(unanswered))), ""))
    blocks: tuple[Any, ...] = (Items(tuple(items)),)
    if len(ordered) > most:
        blocks += (Paragraph(text["more_rows"].format(left=len(ordered) - most)),)
    return Section("quality", text["quality"], blocks)


def _unanswered(note: Quality) -> str | None:
    """The study that a note gives the reason for, in words; None for another note."""
    name, null, _ = note.message.partition(" is null: ")
    return name.replace("_", " ") if null and note.id == f"no-{name.replace('_', '-')}" else None
