"""Scaling: efficiencies, modes and losses that were put in come out, and what cannot be compared is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gate_runs import run_facts
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers._scalability_law import fit_law
from trine.analyzers.flaws import Flaw
from trine.analyzers.reports.scaling import (
    loss_words,
    render_html,
    render_json,
    render_markdown,
    render_text,
)
from trine.analyzers.run_facts import Part, RunFacts, Window
from trine.analyzers.scaling import ScalingResult, scale
from trine.record.errors import NotComparable, UsageError


def on(
    devices: int, step_ms: float, tokens: float | None = None, exposed_ms: float = 0.0, **more: Any
) -> RunFacts:
    """A run: a step of compute and exposed communication, each device taking ``tokens`` in it."""
    facts = run_facts(f"on-{devices}", step_ms, seed=more.pop("seed", devices), **more)
    mean = float(np.mean(facts.step_ns))
    phases = {
        "forward": (mean - exposed_ms * 1e6) / 3,
        "backward": (mean - exposed_ms * 1e6) * 2 / 3,
        "exposed_communication": exposed_ms * 1e6,
    }
    metrics = {} if tokens is None else {"tokens_per_s": tokens * devices / (mean / 1e9)}
    return replace(
        facts,
        environment={**facts.environment, "world_size": devices, "hosts": max(devices // 8, 1)},
        metrics=metrics,
        parts=tuple(Part("phase", name, ns) for name, ns in phases.items()),
    )


def losses(result: ScalingResult) -> dict[str, float]:
    return {part.name: part.loss_ns for part in result.points[-1].parts}


def test_weak_scaling_with_communication_that_grows() -> None:
    runs = [on(1, 100, 4096), on(2, 104, 4096, 4), on(4, 110, 4096, 10), on(8, 125, 4096, 25)]
    result = scale(runs)
    assert (result.mode, result.work_unit, result.partition) == ("weak", "tokens", "phases")
    assert [point.devices for point in result.points] == [1, 2, 4, 8]
    for point, step in zip(result.points, (100, 104, 110, 125), strict=True):
        assert point.efficiency == pytest.approx(100 / step, rel=0.01)
        assert point.efficiency_low <= point.efficiency <= point.efficiency_high
        assert point.throughput == pytest.approx(4096 * point.devices / (step / 1e3), rel=0.01)
    last = result.points[-1]
    assert losses(result)["exposed_communication"] == pytest.approx(25e6)
    assert last.loss_ns == pytest.approx(25e6, rel=0.05) and sum(losses(result).values()) == pytest.approx(
        last.loss_ns
    )
    words = loss_words(result.points[0], last)
    assert words.startswith(
        "From 1 to 8 devices a step takes 24.9 ms longer than it should (mean 125 ms against 99.9 ms): "
    )
    assert words.endswith(
        "+25.0 ms exposed communication."
    )  # more than the whole: noise made the rest shorter
    even = scale([on(1, 100, 4096, seed=1), on(8, 125, 4096, 20, seed=1)])
    assert "20.0 ms of it exposed communication, +3.3" in loss_words(even.points[0], even.points[-1])


def test_strong_scaling_shares_the_batch_out() -> None:
    runs = [on(1, 800, 8192), on(2, 410, 4096, 10), on(4, 220, 2048, 20)]
    result = scale(runs)
    assert result.mode == "strong"
    assert [point.efficiency for point in result.points] == pytest.approx([1, 800 / 820, 800 / 880], rel=0.01)
    last = result.points[-1]
    assert last.ideal_ns == pytest.approx(200e6, rel=0.01) and last.loss_ns == pytest.approx(20e6, rel=0.1)
    assert losses(result)["exposed_communication"] == pytest.approx(20e6)


def test_linear_scaling_loses_nothing() -> None:
    result = scale([on(n, 100, 4096, seed=1) for n in (1, 2, 4)])
    assert [point.efficiency for point in result.points] == [1, 1, 1]
    assert result.fit is not None and result.fit.contention == result.fit.coherence == 0
    assert "as long as it should" in loss_words(result.points[0], result.points[-1])


def test_repeats_of_a_count_are_one_point() -> None:
    result = scale([*(on(2, 100, 10, seed=n) for n in range(3)), *(on(4, 125, 10, seed=n) for n in range(3))])
    assert [(point.devices, len(point.sources)) for point in result.points] == [(2, 3), (4, 3)]
    assert result.points[1].efficiency == pytest.approx(0.8, rel=0.02)
    assert result.fit is None  # two counts say nothing about a law
    assert not any("one run a count" in note for note in result.notes)


def test_work_that_neither_stays_nor_is_shared_out_is_mixed() -> None:
    result = scale([on(1, 100, 1000), on(4, 100, 600)])
    assert result.mode == "mixed" and result.points[1].efficiency == pytest.approx(0.6, rel=0.01)


def test_the_slowest_rank_is_a_part_of_its_own() -> None:
    """Phases are means of the ranks; what the slowest takes beyond them is the job's loss all the same."""
    slow = on(2, 120, 10)
    parts = tuple(replace(part, ns=part.ns * 100 / 120) for part in slow.parts)
    result = scale([on(1, 100, 10), replace(slow, parts=parts)])
    assert losses(result)["uneven_ranks"] == pytest.approx(20e6, rel=0.02)


# --- traces --------------------------------------------------------------------------------------


def traced(
    devices: int, compute_ms: float, exposed_ms: float, calls: float = 10.0, marked: bool = True
) -> RunFacts:
    """A trace: kernels and a breakdown, no tokens."""
    whole = (compute_ms + exposed_ms) * 1e6
    parts = [
        Part("breakdown", "compute", compute_ms * 1e6),
        Part("breakdown", "exposed_communication", exposed_ms * 1e6),
    ]
    parts += [Part("kernel", f"kernel {n}", compute_ms * 1e6 / 4, calls * (n + 1)) for n in range(4)]
    return RunFacts(
        f"trace-{devices}",
        step_ns=(int(whole),) * 3 if marked else (),
        environment={"world_size": devices, "device": "NVIDIA A100"},
        parts=tuple(parts),
        format="kineto",
        window=Window(whole, 3 if marked else 0, devices, "device"),
    )


def test_traces_tell_the_mode_by_what_a_device_computes() -> None:
    weak = scale([traced(1, 100, 0), traced(4, 102, 23)])
    assert (weak.mode, weak.work_unit, weak.partition) == ("weak", "steps", "breakdown")
    assert weak.points[1].efficiency == pytest.approx(0.8, rel=0.01)
    strong = scale([traced(1, 100, 0), traced(4, 27, 3)])
    assert strong.mode == "strong" and strong.points[1].efficiency == pytest.approx(100 / 4 / 30, rel=0.01)
    assert strong.points[1].loss_ns == pytest.approx(5e6)
    unclear = scale([traced(1, 100, 0), traced(4, 55, 0)])
    assert unclear.mode == "weak" and "--mode strong" in unclear.notes[0]
    assert scale([traced(1, 100, 0), traced(4, 55, 0)], mode="strong").mode == "strong"


def test_traces_without_steps_are_compared_by_equal_work() -> None:
    """The second window holds half as much again of the same work."""
    longer = traced(4, 150, 37.5, calls=15, marked=False)
    result = scale([traced(1, 100, 0, marked=False), longer])
    assert result.points[1].efficiency == pytest.approx(0.8, rel=0.01)
    assert "marks no steps" in result.notes[0]


# --- the law -------------------------------------------------------------------------------------


@given(st.floats(0, 0.3), st.floats(0, 0.02), st.integers(1, 8))
def test_the_law_is_recovered(contention: float, coherence: float, fewest: int) -> None:
    def step(count: int) -> float:
        x = count / fewest
        return 100 * (1 + contention * (x - 1) + coherence * x * (x - 1))

    runs = [
        on(count, step(count), 4096, steps=6, seed=7)
        for count in (fewest, 2 * fewest, 4 * fewest, 8 * fewest)
    ]
    fit = scale(runs).fit
    assert fit is not None and fit.freedom == 1
    assert fit.contention == pytest.approx(contention, abs=1e-4)
    assert fit.coherence == pytest.approx(coherence, abs=1e-4)
    assert fit.largest_error < 1e-3
    if coherence > 1e-3:
        assert fit.peak_devices == pytest.approx(fewest * np.sqrt((1 - contention) / coherence), rel=0.05)


def test_a_law_through_three_counts_is_no_forecast() -> None:
    text = render_text(scale([on(1, 100, 10), on(2, 110, 10), on(4, 140, 10)]))
    assert "no forecast" in text
    assert "no forecast" not in render_text(scale([on(n, 100 + 5 * n, 10) for n in (1, 2, 4, 8, 16)]))


def test_contention_is_a_share_whatever_the_runs_do() -> None:
    """Throughput that falls from the second device on is no share of anything: the law is bounded, and said not to fit."""
    result = scale([on(1, 5, 10), on(2, 16, 10), on(4, 40, 10)])
    fit = result.fit
    assert fit is not None and 0 <= fit.contention <= 1 and fit.coherence >= 0
    text = " ".join(render_text(result).split())
    if fit.describes:
        assert "make it slower" in text
    steep = fit_law([1, 2, 4], [1.0, 0.2, 0.19])
    assert steep is not None and steep.contention == 1.0 and not steep.describes
    worst = scale([on(1, 5, 10), on(2, 25, 10), on(4, 26, 10)])
    assert "does not describe these runs" in render_text(worst)
    assert json.loads(render_json(worst))["fit"]["describes"] is False


@given(st.lists(st.floats(0.01, 2.0), min_size=2, max_size=6))
def test_the_bounded_fit_is_the_best_within_its_bounds(efficiencies: list[float]) -> None:
    """Against a slow reference: no point of a fine grid of σ and κ lies closer, by the error that the fit minimises."""
    devices = [2**n for n in range(len(efficiencies) + 1)]
    fit = fit_law(devices, [1.0, *efficiencies])
    assert fit is not None and 0 <= fit.contention <= 1 and fit.coherence >= 0
    x = np.array(devices, dtype=float)
    capacity = np.array([1.0, *efficiencies]) * x

    def error(sigma: float, kappa: float) -> float:
        return float((((1 + sigma * (x - 1) + kappa * x * (x - 1)) * capacity / x - 1) ** 2).sum())

    best = min(
        error(sigma, kappa)
        for sigma in np.linspace(0, 1, 21)
        for kappa in (0.0, *np.geomspace(1e-4, 100, 30))
    )
    assert error(fit.contention, fit.coherence) <= best + 1e-9


def test_the_lines_share_one_scale_and_one_axis() -> None:
    """Half the ideal throughput is drawn at half the height, at the same place."""
    text = render_text(scale([on(1, 100, 4096), on(2, 140, 4096), on(8, 190, 4096)]))
    lines = [line.split() for line in text.splitlines() if line.startswith(("measured", "ideal", "law"))]
    sparks = {line[0]: line[1] for line in lines}
    assert len({len(spark) for spark in sparks.values()}) == 1
    assert (
        sparks["ideal"][-1] == "█"
        and sparks["measured"][-1] in "▄▅"
        and sparks["measured"][0] == sparks["ideal"][0]
    )
    assert "one scale" in text and "a step, median" in text


# --- what is refused -----------------------------------------------------------------------------


def test_one_count_is_refused() -> None:
    with pytest.raises(NotComparable, match=r"all 2 runs are on 4 devices.*trine compare") as caught:
        scale([on(4, 100), on(4, 101)])
    assert caught.value.exit_code == 3
    with pytest.raises(NotComparable, match="the one run is on 1 device;"):
        scale([on(1, 100)])
    with pytest.raises(UsageError):
        scale([])


def test_different_models_are_refused_and_padding_is_not() -> None:
    def model(parameters: int, name: str = "GPT") -> dict[str, Any]:
        return {"configuration": {"model": {"class": name, "parameters": parameters}}}

    with pytest.raises(NotComparable, match="different models: parameters is 1000 in on-1 and 2000 in on-2"):
        scale([on(1, 100, **model(1000)), on(2, 100, **model(2000))])
    with pytest.raises(NotComparable, match=r"class is GPT .* and Llama"):
        scale([on(1, 100, **model(1000)), on(2, 100, **model(1000, "Llama"))])
    assert scale([on(1, 100, **model(1000)), on(2, 100, **model(1010))]).points


def test_different_devices_and_programs_are_refused_unless_asked_for() -> None:
    other = on(2, 100)
    other = replace(other, environment={**other.environment, "device": "NVIDIA H100"})
    with pytest.raises(NotComparable, match=r"different devices.*--any-environment"):
        scale([on(1, 100), other])
    assert any("device (" in note for note in scale([on(1, 100), other], any_environment=True).notes)
    strange = traced(4, 100, 0)
    strange = replace(
        strange,
        parts=tuple(
            replace(part, name=f"other {part.name}") if part.kind == "kernel" else part
            for part in strange.parts
        ),
    )
    with pytest.raises(NotComparable, match="do not seem to train one model"):
        scale([traced(1, 100, 0), strange])


def test_runs_without_anything_to_time_are_refused_with_the_way_out() -> None:
    silent = replace(traced(4, 100, 0, marked=False), window=None)
    with pytest.raises(NotComparable, match=r"trace-4 holds no steps.*profiler.step"):
        scale([traced(1, 100, 0), silent])


# --- reports -------------------------------------------------------------------------------------


def test_every_form_has_the_same_answer() -> None:
    result = scale([on(1, 100, 4096), on(2, 110, 4096, 10), on(4, 130, 4096, 30)])
    text = render_text(result)
    assert max(map(len, text.splitlines())) <= 100
    assert "4 devices have 77 % of 4 times the throughput of 1" in text.splitlines()[1]
    document = json.loads(render_json(result))
    assert document["schema"] == "trine.scaling/1" and document["mode"] == "weak"
    assert document["points"][2]["efficiency"]["value"] == result.points[2].efficiency
    assert {part["name"] for part in document["points"][2]["parts"]} >= {"forward", "exposed_communication"}
    for form in (render_markdown(result), render_html(result)):
        assert "77 %" in form and "exposed communication" in form
    page = render_html(result)
    assert "<svg" in page and ">ideal<" in page and "<script" not in page


def test_ranks_that_share_cores_are_said_to_right_under_the_headline() -> None:
    shared = Flaw(
        "shared-cores", "warning", "4 ranks with 1 thread each share 2 cores of a, so they take turns"
    )
    killed = Flaw("killed", "warning", "the process ended without closing its record")
    result = scale([on(1, 100, 4096), on(4, 210, 4096, flaws=(shared, killed))])
    (notice,) = result.notices
    assert notice.startswith(
        "On 4 devices, 4 ranks with 1 thread each share 2 cores of a, so they take turns. "
    )
    assert notice.endswith("cannot grow there in proportion to ranks, whatever the program does.")
    lines = render_text(result).splitlines()
    assert lines[2].startswith("On 4 devices, 4 ranks with 1 thread each share 2 cores")
    for form in (render_markdown(result), render_html(result)):
        assert form.index("share 2 cores of a") < form.index("Throughput over")
    assert json.loads(render_json(result))["notices"] == list(result.notices)
    assert result.notes[-1] == "killed: on-4: the process ended without closing its record"
    assert not any("cores" in note for note in result.notes)
    assert scale([on(1, 100, 4096), on(4, 110, 4096)]).notices == ()
