"""The dashboard in headless Chromium: every page, both looks, no internet, and a run that is still training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from conftest import Site
from dashboard_samples import Recorder

pytestmark = pytest.mark.browser

TITLES = ("Overview", "Explain", "Timeline", "Communication", "Memory", "Recommendations")


def settle(page: Any) -> None:
    """Until the page has what it waits for."""
    page.wait_for_selector("main")
    page.wait_for_function("!document.querySelector('.notice.busy')")


def drawn(page: Any) -> None:
    """Until the timeline has read what it shows, and has drawn it."""
    page.wait_for_function(
        "window.trine?.timeline.current?.loaded && document.getElementById('timeline').dataset.state === 'ready'"
    )
    page.wait_for_timeout(50)


def until(page: Any, check: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not come"
        page.wait_for_timeout(100)


def operations(body: str, id: str) -> list[dict[str, Any]]:
    """What a patch of a figure does."""
    return list(json.loads(body)["response"][id]["figure"]["operations"])


def query(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def view(page: Any) -> list[float]:
    return list(page.evaluate("window.trine.timeline.current.view"))


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("run", "width"), [("record", 1440), ("job", 1000)])
def test_every_page_in_both_looks(page: Any, site: Site, theme: str, run: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(site("overview", run, theme=theme))
    settle(page)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate("document.body.dataset.agThemeMode") == theme
    for title in TITLES:
        page.get_by_role("link", name=title, exact=True).click()
        page.wait_for_selector(f"#here:has-text('{title}')")
        settle(page)
        if title == "Timeline":
            drawn(page)
        else:
            page.wait_for_selector("main .section, main .card")
        assert page.locator(".notice.fault").count() == 0
        overflow = page.evaluate(
            "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
        )
        assert overflow <= 0, f"{title} is wider than the window by {overflow} pixels"
    assert query(page)["theme"] == ["dark"] if theme == "dark" else "theme" not in query(page)


def test_the_list_finds_filters_and_opens_runs(page: Any, site: Site) -> None:
    page.goto(site(""))
    page.wait_for_selector("a.run-row:has-text('record')")
    page.wait_for_function(
        "[...document.querySelectorAll('a.run-row')].some(row => row.textContent.includes('cut.json')"
        " && row.querySelector('.fault-text'))"
    )
    page.fill("#runs-filter", "job")
    page.wait_for_function("document.querySelectorAll('a.run-row').length === 1")
    page.click("a.run-row")
    settle(page)
    assert urlsplit(page.url).path == "/overview" and query(page)["run"][0].endswith("/job")
    page.wait_for_selector("#verdict")
    page.go_back()
    page.wait_for_selector("#runs-filter")


def test_the_overview_sums_and_explains(page: Any, site: Site) -> None:
    page.goto(site("overview", "job"))
    page.wait_for_selector("#breakdown .bars")
    bars = page.evaluate(
        "document.querySelector('#breakdown .js-plotly-plot').data.map(trace => [...trace.x])"
    )
    whole = page.evaluate("document.querySelector('#breakdown .js-plotly-plot').layout.xaxis.range[1]")
    assert max(sum(rank) for rank in zip(*bars, strict=True)) == pytest.approx(whole, rel=0.01)
    assert page.locator(".verdict .glyph img:visible").count() == 1
    assert page.get_by_role("heading", name="Data quality").count() == 1
    page.goto(site("overview", "record"))
    page.wait_for_selector("#loss .scatterlayer")
    loss = page.evaluate("[...document.querySelector('#loss .js-plotly-plot').data[0].y]")
    assert loss == pytest.approx([3.0 / (1 + step) for step in range(40)])


@pytest.mark.slow
def test_zooming_to_one_kernel(page: Any, site: Site) -> None:
    page.goto(site("timeline", "job"))
    settle(page)
    drawn(page)
    lane = "window.trine.timeline.current.rows.find(r => r.lane?.group === 'device')"
    where = page.evaluate(
        f"""(() => {{ const t = window.trine.timeline.current, row = {lane}, d = row.lane.data, i = row.lane.first + 1;
        const box = t.canvas.getBoundingClientRect();
        const x = 172 + (d.start[i] + d.duration[i] / 2 - t.view[0]) / (t.view[1] - t.view[0]) * t.width();
        return {{x: box.x + x, y: box.y + row.y + 10, start: d.start[i], duration: d.duration[i], name: d.head.names[d.name[i]]}}; }})()"""
    )
    page.mouse.move(where["x"], where["y"])
    page.wait_for_selector(".timeline-tip:not([hidden])")
    assert where["name"] in page.inner_text(".timeline-tip")
    page.mouse.dblclick(where["x"], where["y"])
    page.wait_for_function(
        f"window.trine.timeline.current.view[1] - window.trine.timeline.current.view[0] < {2.5 * where['duration']}"
    )
    begin, end = view(page)
    assert begin < where["start"] and end > where["start"] + where["duration"]
    assert where["name"] in page.inner_text("#timeline-selection")
    assert page.evaluate("window.trine.timeline.current.statistics.milliseconds") < 500
    page.wait_for_function("document.querySelector('#timeline-table td')")


@pytest.mark.slow
def test_the_keyboard_reaches_everything_on_the_timeline(page: Any, site: Site) -> None:
    page.goto(site("timeline", "job"))
    settle(page)
    drawn(page)
    page.focus("#timeline")
    whole = view(page)
    page.keyboard.press("w")
    page.keyboard.press("w")
    near = view(page)
    assert near[1] - near[0] < 0.5 * (whole[1] - whole[0])
    page.keyboard.press("ArrowRight")
    assert view(page)[0] > near[0]
    page.keyboard.press("Home")
    assert view(page) == pytest.approx(whole)
    page.keyboard.press("ArrowDown")
    first = page.inner_text("#timeline-selection")
    page.keyboard.press("]")
    assert first and page.inner_text("#timeline-selection") != first
    page.keyboard.press("Enter")
    near = view(page)
    assert near[1] - near[0] < whole[1] - whole[0]
    page.keyboard.press("Escape")
    assert page.inner_text("#timeline-selection") == ""


@pytest.mark.slow
def test_the_address_carries_the_view_through_reload_and_history(page: Any, site: Site) -> None:
    page.goto(site("timeline", "job", rank=1, theme="dark"))
    settle(page)
    drawn(page)
    page.click("[data-timeline='zoom-in']")
    page.wait_for_function("location.search.includes('from=')")
    page.wait_for_timeout(300)
    shown = view(page)
    page.reload()
    settle(page)
    drawn(page)
    assert view(page) == pytest.approx(shown, abs=2)
    assert page.evaluate("window.trine.timeline.current.spec.ranks") == [1]
    page.get_by_role("link", name="Memory", exact=True).click()
    page.wait_for_selector("#here:has-text('Memory')")
    assert "from" not in query(page) and query(page)["rank"] == ["1"] and query(page)["theme"] == ["dark"]
    page.go_back()
    page.wait_for_selector("#here:has-text('Timeline')")
    drawn(page)
    assert view(page) == pytest.approx(shown, abs=2)
    page.go_forward()
    page.wait_for_selector("#here:has-text('Memory')")


@pytest.mark.slow
def test_the_range_downloads_as_a_trace(page: Any, site: Site) -> None:
    page.goto(site("timeline", "job"))
    settle(page)
    drawn(page)
    page.wait_for_function("document.getElementById('timeline-download').href.includes('/data/trace.json')")
    with page.expect_download() as caught:
        page.click("#timeline-download")
    trace = json.loads(caught.value.path().read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    assert any(event.get("cat") == "compute" for event in trace["traceEvents"])


@pytest.mark.slow
def test_a_million_spans_draw_at_once_and_zoom_to_each(page: Any, site: Site) -> None:
    page.goto(site("timeline", "big/million.json", rank=0))
    settle(page)
    drawn(page)
    assert "1,200,000 spans" in page.inner_text("#timeline-status")
    assert "merged" in page.inner_text("#timeline-status")
    # Measured 10 ms on an idle core; the bounds only catch a drawing that grows with the spans.
    assert page.evaluate("window.trine.timeline.current.statistics.milliseconds") < 400
    page.focus("#timeline")
    took = page.evaluate(
        """() => { const t = window.trine.timeline.current, took = [];
        for (let n = 0; n < 20; n++) { t.act('zoom-in'); const from = performance.now(); t.paint(); took.push(performance.now() - from); }
        return Math.max(...took); }"""
    )
    assert took < 400
    # Near enough, the server sends each span by its name.
    page.wait_for_function(
        "[...window.trine.timeline.current.ranks.values()].every(data => data.head.merged === 0)"
        " && document.querySelector('#timeline-table td')?.textContent.startsWith('kernel_')"
    )
    whole = page.evaluate("window.trine.timeline.current.statistics.rectangles")
    assert 0 < whole < 60_000


@pytest.mark.slow
def test_a_run_that_is_training_is_followed_and_never_resent(page: Any, site: Site) -> None:
    page.goto(site("overview", "live"))
    settle(page)
    page.wait_for_selector("#live-steps .js-plotly-plot")
    points = "document.querySelector('#live-steps .js-plotly-plot').data[0].x.length"
    page.wait_for_function(f"{points} >= 5")
    before = page.evaluate(points)
    answers: list[Any] = []
    page.on("response", lambda answer: answers.append(answer))
    for _ in range(3):
        site.live.steps(4)
        page.wait_for_timeout(1300)
    page.wait_for_function(f"{points} === {before + 12}")
    assert page.evaluate("[...document.querySelector('#live-steps .js-plotly-plot').data[0].x]") == list(
        range(before + 12)
    )
    assert f"Step {before + 11}" in page.inner_text("#live-summary")
    assert page.locator(".pill.running").count() == 1
    bodies = [answer.text() for answer in answers if "_dash-update-component" in answer.url]
    live = [body for body in bodies if '"live-cursor"' in body and '"live-steps"' in body]
    assert live and all("__dash_patch_update" in body and '"Extend"' in body for body in live)
    # Twelve steps were drawn by patches that held twelve steps in all, and nothing of those before.
    values = [patch["params"]["value"] for body in live for patch in operations(body, "live-steps")]
    assert sum(len(value) for value in values) == 2 * 12
    # The analysis is renewed too, at its own pace.
    until(page, lambda: int(page.inner_text(".fact:has-text('Steps') .fact-value")) >= 16)
    site.live.close()
    page.wait_for_selector("#run-state .pill.finished")


@pytest.mark.slow
def test_a_timeline_keeps_its_place_and_offers_newer_data(page: Any, site: Site) -> None:
    recorder = Recorder(site.root / "live-timeline")
    recorder.steps(4)
    page.goto(site("timeline", "live-timeline"))
    settle(page)
    drawn(page)
    page.click("[data-timeline='zoom-in']")
    shown = view(page)
    page.wait_for_timeout(1200)
    recorder.steps(6)
    page.wait_for_selector("#timeline-newer a")
    assert view(page) == shown
    page.click("#timeline-newer a")
    page.wait_for_function("window.trine?.timeline.current?.ranks.get(0)?.lanes[0].count === 10")
    recorder.close()


@pytest.mark.slow
def test_looks_change_with_a_button_and_stay(page: Any, site: Site) -> None:
    page.goto(site("overview", "record"))
    settle(page)
    page.click("#theme")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    assert query(page)["theme"] == ["dark"] and query(page)["run"]
    page.wait_for_selector("#verdict")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(18, 20, 23)"
    page.reload()
    settle(page)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.goto(site(""))  # without a theme in the address: the one chosen last
    page.wait_for_selector("a.run-row")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.slow
def test_steps_and_ranks_are_chosen_in_the_address(page: Any, site: Site) -> None:
    page.goto(site("overview", "job"))
    settle(page)
    page.wait_for_selector("#ranks")
    page.fill("#steps", "2:4")
    page.press("#steps", "Enter")
    page.wait_for_function("location.search.includes('steps=2:4')")
    page.wait_for_selector(".fact:has-text('selection: 2:4')")
    page.goto(site("overview", "job", rank=1))
    page.wait_for_selector("#breakdown .bars")
    assert page.evaluate("document.querySelector('#breakdown .js-plotly-plot').data[0].y.length") == 1


def test_two_runs_compared_draw_an_arrow(page: Any, site: Site) -> None:
    page.goto(site("overview", "job", against=f"{site.root.name}/record"))
    page.wait_for_selector(".fact:has-text('Against')")
    assert "was 50.0 ms" in page.inner_text(".fact:has-text('Against')")


@pytest.mark.slow
@pytest.mark.parametrize("run", ["broken/cut.json", "absent"])
def test_what_cannot_be_shown_says_why(page: Any, site: Site, run: str) -> None:
    for name in ("overview", "timeline", "recommendations"):
        page.goto(site(name, run))
        page.wait_for_selector(".notice.fault")
        said = page.inner_text(".notice.fault")
        assert run in said and "Traceback" not in said
    assert page.locator(".dash-debug-menu, .dash-error-card, ._dash-error-menu").count() == 0


@pytest.mark.slow
def test_names_from_traces_are_shown_and_not_run(page: Any, site: Site) -> None:
    for name in ("overview", "explain", "timeline", "communication", "memory", "recommendations"):
        page.goto(site(name, "evil/evil.json"))
        settle(page)
        if name == "timeline":
            drawn(page)
            page.focus("#timeline")
            for _ in range(3):
                page.keyboard.press("ArrowDown")
            page.wait_for_function("document.querySelector('#timeline-table td')")
            assert "<img src=x" in page.inner_text("#timeline-table")
        page.wait_for_timeout(200)
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img[src='x']").count() == 0


@pytest.mark.slow
def test_every_control_has_a_name(page: Any, site: Site) -> None:
    for name in ("overview", "timeline", "recommendations"):
        page.goto(site(name, "job"))
        settle(page)
        nameless = page.evaluate(
            """[...document.querySelectorAll('button, a[href], input, [role=img], [tabindex="0"]')].filter(e =>
            e.offsetParent && !e.closest('.js-plotly-plot') && !(e.getAttribute('aria-label') || e.title || e.textContent.trim()
            || e.getAttribute('aria-labelledby') || (e.labels && e.labels.length) || e.placeholder)).map(e => e.outerHTML.slice(0, 200))"""
        )
        assert nameless == []


@pytest.mark.slow
def test_the_straggler_of_a_real_job_is_named(page: Any, site: Site, data: Any) -> None:
    page.goto(site.address + "communication?run=kineto/torchrec_straggler_v100")
    settle(page)
    page.wait_for_selector("#caused-wait .bars")
    colours = page.evaluate("document.querySelector('#caused-wait .js-plotly-plot').data[0].marker.color")
    assert [rank for rank, colour in enumerate(colours) if colour == "#D55E00"] == [2]
    page.get_by_role("link", name="Recommendations", exact=True).click()
    page.wait_for_selector("#finding-straggler")
    assert "Rank 2" in page.inner_text("#finding-straggler h2")


@pytest.mark.slow
def test_eight_real_ranks_on_one_timeline(page: Any, site: Site, data: Any) -> None:
    page.goto(site.address + "timeline?run=kineto/megatron_tp8_a100&theme=dark")
    settle(page)
    drawn(page)
    assert page.evaluate("window.trine.timeline.current.ranks.size") == 8
    begins = page.evaluate("[...window.trine.timeline.current.ranks.values()].map(data => data.head.begin)")
    assert (
        begins[0] == 0 and max(abs(begin) for begin in begins) < 1e8
    )  # one clock: within 100 ms of each other
    assert page.evaluate("window.trine.timeline.current.statistics.milliseconds") < 500


# --- the studies, on real files ------------------------------------------------------------------------


def explain(page: Any, site: Site, data: Path, run: str, theme: str = "light") -> None:
    page.goto(f"{site.address}explain?run={run}&theme={theme}")
    settle(page)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_pipelines_schedule_is_drawn_and_zooms(page: Any, site: Site, data: Path, theme: str) -> None:
    explain(page, site, data, "pipeline_schedule/pp8", theme)
    page.wait_for_selector("#pipeline .bars .point")
    plot = "document.querySelector('#pipeline .js-plotly-plot')"
    drawn_spans = page.evaluate(
        f"{plot}.data.map(trace => [trace.name, trace.x.length, [...new Set(trace.y)].length])"
    )
    assert drawn_spans == [["forward", 8 * 16, 8], ["backward", 8 * 16, 8]]
    whole = page.evaluate(f"[...{plot}.layout.xaxis.range]")
    box = page.locator("#pipeline .js-plotly-plot .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{plot}.layout.xaxis.range[1] - {plot}.layout.xaxis.range[0] < {0.4 * whole[1]}")
    assert page.get_by_text("at best this schedule leaves").count() == 1
    assert page.get_by_role("heading", name="Not answered").count() == 1


@pytest.mark.slow
def test_the_timeline_of_a_schedule_shows_its_micro_batches(page: Any, site: Site, data: Path) -> None:
    page.goto(site.address + "timeline?run=pipeline_schedule/pp8")
    page.wait_for_selector("#timeline-table table tbody tr")
    rows = page.locator("#timeline-table tbody tr").all_inner_texts()
    assert len(rows) == 2 and all("micro-batch" in row for row in rows)
    lanes = page.evaluate("trine.timeline.current.rows.filter(r => r.lane?.group === 'microbatches').length")
    assert lanes == 8


@pytest.mark.slow
@pytest.mark.parametrize("shown", ["overview", "recommendations"])
def test_nothing_is_wider_than_a_narrow_window(page: Any, site: Site, data: Path, shown: str) -> None:
    page.set_viewport_size({"width": 420, "height": 800})
    page.goto(f"{site.address}{shown}?run=kineto/megatron_tp8_a100")
    settle(page)
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    page.set_viewport_size({"width": 1440, "height": 900})
    assert wide <= 0


@pytest.mark.slow
def test_memory_by_category_adds_up(page: Any, site: Site, data: Path) -> None:
    explain(page, site, data, "memory_snapshot/medium_128_training_memory_snapshot.pickle")
    page.wait_for_selector("#memory-owners .scatterlayer")
    layers = page.evaluate(
        "document.querySelector('#memory-owners .js-plotly-plot').data.map(t => [t.name, Math.max(...t.y), !!t.stackgroup])"
    )
    named = {name: most for name, most, stacked in layers if stacked}
    assert named["optimizer state"] == pytest.approx(3.23, abs=0.01)
    assert named["parameters"] == pytest.approx(1.57, abs=0.01)


@pytest.mark.slow
def test_a_hang_is_the_first_thing_on_its_overview(page: Any, site: Site, data: Path) -> None:
    page.goto(site.address + "overview?run=flight_recorder/gloo_desync")
    settle(page)
    verdict = page.locator("#verdict").inner_text()
    assert (
        "rank 1 called all_gather where ranks 0, 2 and 3 called all_reduce, at collective sequence 30"
        in verdict
    )
    assert page.locator("#desync").count() == 1
    for absent in ("MFU", "Checklist", "Breakdown of the window"):
        assert page.get_by_role("heading", name=absent).count() == 0


@pytest.mark.slow
def test_the_index_leads_to_each_study_without_drawing_the_page_anew(
    page: Any, site: Site, data: Path
) -> None:
    explain(page, site, data, "kineto/torchrec_straggler_v100")
    links = page.locator("#explain-index a")
    assert links.count() >= 5
    page.evaluate("document.getElementById('main').dataset.mark = 'same'")
    for place in range(links.count()):
        target = links.nth(place).get_attribute("href")
        links.nth(place).click()
        page.wait_for_function(
            f"Math.abs(document.querySelector('{target}').getBoundingClientRect().top) < innerHeight"
        )
    assert page.evaluate("document.getElementById('main').dataset.mark") == "same"
