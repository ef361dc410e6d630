"""Reports in three forms: the answer first, within limits, and safe against what traces contain."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from analysis_builders import (
    MS,
    all_reduce,
    breakdown,
    build,
    communication,
    rank_result,
    shares,
    steps_table,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from trine.analyzers.diagnose import diagnose
from trine.analyzers.reports import html, markdown, text
from trine.analyzers.reports.document import clean, shorten
from trine.analyzers.reports.wording import ENGLISH, LANGUAGES, words
from trine.analyzers.results import Analysis, HeatCell, Mfu, NamedTime
from trine.record.errors import UsageError
from trine.record.model import Quality

HOSTILE = "<script>alert(1)</script>\x1b[31mred\x1b[0m|`*_[a](b)&amp;\"'\x00\u202eevil\n# head"


def hostile() -> Analysis:
    """A run with faults whose every foreign string is an attack."""
    table = steps_table(shares(data=0.3))
    rows = (NamedTime(HOSTILE, HOSTILE, 3, MS), NamedTime("k" * 5_000, "compute", 3, MS))
    ranks = [
        rank_result(
            r,
            steps=table,
            part=communication(),
            window=breakdown(idle={"data": 0.3}),
            kernels=rows,
            operators=rows,
            host_name=HOSTILE,
        )
        for r in (0, 1)
    ]
    analysis = build(
        ranks,
        kernels=rows,
        operators=rows,
        collectives=(all_reduce(op=HOSTILE, group=HOSTILE, label=HOSTILE),),
        heatmap=tuple(HeatCell(r, HOSTILE, MS, MS, 1) for r in (0, 1)),
        mfu=Mfu(None, None, 1e12, 1e14, "bf16", {HOSTILE: 0.3}, None, {HOSTILE: HOSTILE}),
        data_quality=(Quality("test", "warning", HOSTILE, 0),),
    )
    return diagnose(replace(analysis, source=replace(analysis.source, path=HOSTILE)))


def many_ranks(count: int = 300) -> Analysis:
    table = steps_table(shares(data=0.3))
    ranks = [
        rank_result(
            r, steps=table, part=communication(caused_wait_ns=r * MS), window=breakdown(), world_size=count
        )
        for r in range(count)
    ]
    return diagnose(build(ranks))


# --- text ------------------------------------------------------------------------------------------


def test_the_first_ten_lines_say_what_is_slow_and_what_to_do() -> None:
    table = steps_table(shares(data=0.3))
    report = text.render(diagnose(build([rank_result(r, steps=table, part=communication()) for r in (0, 1)])))
    head = "\n".join(report.splitlines()[:10])
    assert "held back by its input" in head
    assert "FAULT 30 %" in head
    assert "data.workers" in head


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("analysis", [build(), hostile(), many_ranks()], ids=["plain", "hostile", "ranks"])
def test_lines_fit(analysis: Analysis, width: int) -> None:
    report = text.render(analysis, width=width)
    longest = max(report.splitlines(), key=cell_len)
    assert cell_len(longest) <= min(width, 100), longest


def test_piped_text_has_no_escape_codes_and_coloured_text_has_the_same_words() -> None:
    plain, coloured = text.render(hostile()), text.render(hostile(), colour=True)
    assert "\x1b" not in plain
    assert "\x1b[" in coloured
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in stripped.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("render", [text.render, markdown.render, html.render])
def test_shares_of_the_triangle_say_of_what(render: Callable[[Analysis], str]) -> None:
    """They leave idle time out: 52 % computation beside a verdict of 91 % must not read as a contradiction."""
    assert "of the time at work" in render(many_ranks(2))


def test_a_healthy_run_reads_as_such() -> None:
    report = text.render(diagnose(build()))
    assert "No fault found" in report and "FAULT" not in report
    assert "Not bound by" in report
    assert "✓ Input: 1.0 %" in report


def test_bars_of_the_same_time_have_the_same_length() -> None:
    report = text.render(diagnose(build()))
    drawn = [line[12:] for line in report.splitlines() if re.match(r"rank \d +[█▓]", line)]
    assert len(drawn) >= 2
    assert len(drawn[0]) == len(drawn[1]) == 88


# --- HTML ------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Tags and attributes as a browser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "circle", "polygon", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.mark.parametrize("analysis", [build(), hostile(), many_ranks()], ids=["plain", "hostile", "ranks"])
def test_the_page_is_whole_and_asks_nobody_for_anything(analysis: Analysis) -> None:
    page = html.render(analysis)
    parsed = _Page(page)
    assert parsed.open == []
    assert not any(tag in ("script", "link", "img", "iframe", "object") for tag, _ in parsed.tags)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    for _, attributes in parsed.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page
    assert "prefers-color-scheme:dark" in page
    assert len(page.encode()) <= html.MOST_BYTES


def test_every_figure_has_its_table() -> None:
    page = html.render(hostile())
    figures = page.count('<figure class="wide">')
    assert figures >= 4
    assert (
        len(
            re.findall(
                r'</svg></figure><details[^>]*><summary>numbers</summary><div class="scroll"><table>', page
            )
        )
        == figures
    )


def test_a_page_that_would_be_too_large_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MOST_BYTES", 40_000)
    page = html.render(many_ranks())
    assert len(page.encode()) <= 40_000
    assert "was cut to" in page and "Where the time goes" in page.rsplit("was cut to", 1)[1]
    assert 'class="finding fault"' in page, "what to do is kept"


def test_thousands_of_ranks_stay_readable() -> None:
    page = html.render(many_ranks(2_000))
    assert len(page.encode()) <= html.MOST_BYTES
    assert "more ranks not shown" in page
    assert "rank 1999" in page, "the rank that causes most waiting is shown"


# --- Markdown --------------------------------------------------------------------------------------


@pytest.mark.parametrize("analysis", [build(), hostile(), many_ranks()], ids=["plain", "hostile", "ranks"])
def test_markdown_tables_are_rectangular_and_within_limits(analysis: Analysis) -> None:
    report = markdown.render(analysis)
    assert len(report.encode()) <= markdown.MOST_BYTES
    columns = 0
    for line in report.splitlines():
        if line.startswith("|"):
            columns = columns or line.count("|")
            assert line.count("|") == columns, line
        else:
            columns = 0


def test_markdown_that_would_be_too_long_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "MOST_BYTES", 8_000)
    report = markdown.render(many_ranks())
    assert len(report.encode()) <= 8_000
    assert "was cut to" in report


# --- what traces contain ---------------------------------------------------------------------------


def test_no_form_lets_foreign_text_act() -> None:
    analysis = hostile()
    for report in (text.render(analysis), markdown.render(analysis), html.render(analysis)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", report)
        assert "alert" in report, "it is shown, as text"
    assert "<script" not in markdown.render(analysis) and "<script" not in html.render(analysis)
    assert "\n# head" not in markdown.render(analysis)


@given(st.text(max_size=200))
def test_clean_text_is_one_printable_line(value: str) -> None:
    cleaned = clean(value)
    assert cleaned == cleaned.strip() and "\n" not in cleaned
    assert all(character.isprintable() or character == " " for character in cleaned if character < "\u0300")
    cleaned.encode("utf-8")
    assert clean(cleaned) == cleaned


@given(st.text(max_size=300), st.integers(5, 60))
def test_shortened_text_keeps_both_ends(value: str, most: int) -> None:
    short = shorten(value, most)
    assert len(short) <= most
    if len(value) > most:
        assert short[0] == value[0] and short[-1] == value[-1]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (36, "qwen2/modeling_qwen2.py:350 forward"),
        (30, "modeling_qwen2.py:350 forward"),
        (26, "modeling_qwen2.py:350 for…"),
        (22, "modeling_qwen2.py:350"),
        (12, "…wen2.py:350"),
    ],
)
def test_a_place_in_a_program_keeps_its_file_and_line(most: int, expected: str) -> None:
    assert shorten("qwen2/modeling_qwen2.py:350 forward", most) == expected


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 100))
def test_shortened_places_fit(before: str, after: str, most: int) -> None:
    assert len(shorten(f"{before} a/b_c.py(12){after}", most)) <= most


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=80))
def test_any_name_renders_in_every_form(name: str) -> None:
    rows = (NamedTime(name, "compute", 1, MS),)
    analysis = build(kernels=rows, collectives=(all_reduce(op=name, label=name),))
    for line in text.render(analysis).splitlines():
        assert cell_len(line) <= 100
    assert _Page(html.render(analysis)).open == []
    markdown.render(analysis)


# --- language --------------------------------------------------------------------------------------


def test_every_language_has_every_word_with_the_same_places() -> None:
    for language, catalogue in LANGUAGES.items():
        assert set(catalogue) == set(ENGLISH), language
        for key, value in catalogue.items():
            assert set(re.findall(r"{(\w+)}", value)) == set(re.findall(r"{(\w+)}", ENGLISH[key])), (
                language,
                key,
            )


def test_an_unknown_language_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="--lang takes en"):
        words("tlh")


# --- what the runtime does not apply -----------------------------------------------------------------


def test_a_change_that_our_runtime_does_not_apply_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recommendation that ``trine.optimize`` would refuse must not look like one that it takes."""
    from trine.analyzers import contract
    from trine.analyzers.contract import to_json
    from trine.analyzers.reports import content
    from trine.analyzers.results import Finding, Recommendation

    for module in (contract, content):  # a key that is in the schema before a technique answers for it
        monkeypatch.setattr(module, "APPLIED", module.APPLIED - {"offload.optimizer"})
    change = {"offload.optimizer": "cpu", "precision.dtype": "bf16"}
    finding = Finding("x", "opportunity", "A title", {}, Recommendation(change, "Why.", "unchanged", None))
    foreign = replace(build(), findings=(finding,))
    own = replace(
        foreign,
        findings=(
            replace(finding, recommendation=Recommendation({"precision.dtype": "bf16"}, "", "", None)),
        ),
    )
    for render in (text.render, markdown.render, html.render):
        said = re.sub(r"\s+", " ", render(foreign)).replace("&#x27;", "'")
        assert "Trine's own runtime does not apply offload.optimizer yet" in said
        assert "does not apply" not in render(own)
    written = [
        to_json(one)["findings"][0]["recommendation"]["not_applied_by_runtime"] for one in (foreign, own)
    ]
    assert written == [["offload.optimizer"], []]


def test_a_section_that_fails_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong kind of result stands for any defect of a section."""
    analysis = diagnose(build(studies={"goodput": object(), "padding": object()}))
    for render in (text.render, markdown.render, html.render):
        said = re.sub(r"\s+", " ", render(analysis))
        assert said.count("This section could not be drawn (unexpected AttributeError") == 2
        assert "The order of work" in said
    monkeypatch.setenv("TRINE_DEBUG", "1")
    with pytest.raises(AttributeError):
        text.render(analysis)
