"""The demo at a tiny size: every stage for real, and the arithmetic of its table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trine._demo_changes import Candidate, candidates, with_pieces
from trine._demo_table import render
from trine.analyzers.results import Finding, Gain, Prediction, Recommendation
from trine.cli import main
from trine.demo import DemoResult, Measured, Options, Outcome, run_demo
from trine.optim import Config
from trine.record.errors import UsageError
from trine.record.hardware import Peaks, calibrated, processor_name, store_calibration

pytest.importorskip("torch")

SHAPE = ("--layers=2", "--hidden=64", "--heads=4", "--sequence=64", "--batch=4")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DemoResult, list[str]]]:
    """One run of everything, with two ranks."""
    folder = tmp_path_factory.mktemp("demo")
    told: list[str] = []
    cache = os.environ.get("TRINE_CACHE")
    os.environ["TRINE_CACHE"] = str(folder / "cache")
    try:
        options = Options(folder / "out", steps=18, ranks=2, try_seconds=4.0, shape=SHAPE)
        yield run_demo(options, told.append), told
    finally:
        if cache is None:
            del os.environ["TRINE_CACHE"]
        else:
            os.environ["TRINE_CACHE"] = cache


@pytest.mark.slow
@pytest.mark.torchrun
class TestDemo:
    def test_stages_are_told_and_timed(self, demo: tuple[DemoResult, list[str]]) -> None:
        result, told = demo
        assert sum(line.startswith("[") for line in told) == 6
        assert set(result.seconds) == {"machine", "plain", "analysis", "trials", "tuned", "report"}

    def test_it_trains_the_same(self, demo: tuple[DemoResult, list[str]]) -> None:
        result, _ = demo
        assert result.same
        assert list(result.plain.losses) == list(result.tuned.losses) == list(range(18))
        assert result.plain.losses[17] < result.plain.losses[0] - 0.1  # it learns

    def test_every_change_was_measured_and_decided(self, demo: tuple[DemoResult, list[str]]) -> None:
        result, _ = demo
        changed = {key for outcome in result.outcomes for key in outcome.candidate.change}
        assert {"compute.attention", "compute.fuse"} <= changed
        for outcome in result.outcomes:
            assert outcome.alone.rounds >= 3
            assert outcome.alone.low_s <= outcome.alone.gain_s <= outcome.alone.high_s
            middle, low, high = outcome.on_top
            assert outcome.kept == (middle <= 1.005)
            assert low <= middle <= high
        kept = [outcome for outcome in result.outcomes if outcome.kept]
        expected = {key for outcome in kept for key in outcome.candidate.change}
        assert set(result.config.changes()) == expected

    def test_the_tuned_record_says_what_was_applied(self, demo: tuple[DemoResult, list[str]]) -> None:
        result, _ = demo
        metadata = result.tuned.analysis.ranks[0].summary.metadata
        assert metadata["configuration"] == result.config.to_dict()
        assert Config.from_toml(result.config_path) == result.config

    def test_the_table_holds_the_measured_figures(self, demo: tuple[DemoResult, list[str]]) -> None:
        result, _ = demo
        text = render(result)
        folder = str(result.config_path.parent)  # as long as pytest makes it
        assert all(len(line) <= 100 for line in text.splitlines() if folder not in line)
        assert f"{1 / result.together_ratio:.2f} × as fast" in text
        assert str(result.plain.report) in text and result.plain.report.stat().st_size > 10_000
        assert f"trine dashboard {result.config_path.parent}" in text
        ledger = json.loads((result.config_path.parent / "demo.json").read_text())
        assert ledger["schema"] == "trine.demo/1"
        assert len(ledger["changes"]) == len(result.outcomes)

    def test_the_table_of_a_slow_machine_is_no_wider(self, demo: tuple[DemoResult, list[str]]) -> None:
        result, _ = demo
        slow = Measured(12.3456, -11.1111, 13.3333, 9)
        change = {"communication.bucket_mib": 12.34, "communication.gradient_as_view": True}
        candidate = Candidate(
            "buckets", change, Gain(-(10**10), 10**10, 2 * 10**10), "α and β of this machine"
        )
        outcome = Outcome(candidate, slow, False, (1.1, 0.9, 1.2), ())
        text = render(replace(result, outcomes=(outcome, *result.outcomes), together=slow))
        folder = str(result.config_path.parent)
        assert all(len(line) <= 100 for line in text.splitlines() if folder not in line)
        assert "12346 (-11111 to 13333)" in text and "left out: no clear gain" in text
        assert "communication.gradient_as_view = true" in text

    def test_a_full_folder_is_refused(self, demo: tuple[DemoResult, list[str]]) -> None:
        with pytest.raises(UsageError, match="not empty"):
            run_demo(Options(demo[0].config_path.parent, shape=SHAPE), lambda line: None)

    # What to try, from findings.

    def test_a_bundle_is_split_by_technique(self, demo: tuple[DemoResult, list[str]]) -> None:
        change = {"compute.compile": "blocks", "compute.fuse": ["optimizer"], "compute.attention": "sdpa"}
        found, skipped = self._candidates(demo, change, mid_ns=1_000_000)
        by_key = {key: candidate for candidate in found for key in candidate.change}
        assert by_key["compute.fuse"].predicted is None  # the finding predicted the whole bundle
        assert "compute.compile" not in by_key
        reason = next(each.reason for each in skipped if "compute.compile" in each.change)
        assert "pays after 30000 steps" in reason

    def test_compile_is_tried_where_it_pays(self, demo: tuple[DemoResult, list[str]]) -> None:
        found, _ = self._candidates(demo, {"compute.compile": "blocks"}, mid_ns=2_000_000_000)
        chosen = next(each for each in found if "compute.compile" in each.change)
        assert chosen.predicted is not None and chosen.predicted.mid == 2_000_000_000

    def test_what_cannot_be_applied_is_named(self, demo: tuple[DemoResult, list[str]]) -> None:
        found, skipped = self._candidates(demo, {"parallel.schedule": "zbv"}, mid_ns=10**9)
        assert not any("parallel.schedule" in each.change for each in found)
        assert any(
            "parallel.schedule" in each.change and "parallel.pipeline" in each.reason for each in skipped
        )

    def _candidates(self, demo: tuple[DemoResult, list[str]], change: dict[str, Any], mid_ns: int) -> Any:
        gain = Gain(mid_ns // 2, mid_ns, mid_ns * 2)
        recommendation = Recommendation(change, "", "", Prediction(gain, None, None, "", {}))
        finding = Finding("some-finding", "opportunity", "", {}, recommendation, 0.2)
        return candidates(replace(demo[0].plain.analysis, findings=(finding,)), 30, False)


def test_a_piece_gives_a_prediction_where_the_finding_has_none() -> None:
    piece = {"before_s": [0.010, 0.011, 0.012, 0.013], "after_s": [0.004, 0.005, 0.006, 0.007]}
    open_, known = Candidate("a", {}, None, ""), Candidate("b", {}, Gain(1, 2, 3), "")
    first, second = with_pieces([open_, known], {"a": piece, "b": piece})
    assert first.predicted is not None
    assert first.predicted.mid == 6_000_000
    assert first.predicted.low < 6_000_000 < first.predicted.high
    assert second.predicted == Gain(1, 2, 3)


def test_predictions_together_shorten_what_is_left() -> None:
    from types import SimpleNamespace

    from trine.demo import Measured, _predicted_together

    step = SimpleNamespace(step_statistics=SimpleNamespace(median_ns=1_000_000_000))
    halves = Candidate("a", {}, Gain(0, 500_000_000, 10**9), "")
    outcome = Outcome(halves, Measured(0.5, 0.4, 0.6, 5), True, (0.5, 0.4, 0.6), ())
    left_out = replace(outcome, kept=False)
    assert _predicted_together((outcome, outcome, left_out), step) == pytest.approx(0.75)  # type: ignore[arg-type]


def test_a_calibration_without_all_reduce_gets_one_and_keeps_all_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    from trine import demo
    from trine.profiler import calibrate, observer_build

    known = Peaks(
        processor_name(),
        {"fp32": 1e9},
        2**30,
        1e9,
        None,
        "by hand",
        True,
        1,
        {},
        None,
        [{"operation": "codec", "dtype": "int8", "bytes": 4, "seconds": 1e-3, "ratio": 4.0}],
    )
    collective = {"ranks": 2, "backend": "gloo", "alpha_s": 1e-4, "bytes_per_s": 1e9}
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    monkeypatch.setattr(observer_build, "ensure_built", lambda wait: None)
    monkeypatch.setattr(calibrate, "measure_all_reduce", lambda ranks: collective)
    store_calibration(known)
    told: list[str] = []
    demo._measure_machine(2, 1, None, told.append)
    assert told == [] and calibrated(known.name, 1) == replace(known, collective=collective)


def test_only_an_all_reduce_between_devices_is_one_of_their_links() -> None:
    from trine.profiler import calibrate

    known = Peaks(
        "a GPU", {"fp32": 1e9}, None, None, None, "by hand", True, operations=[{"operation": "codec"}]
    )
    collective = {"ranks": 2, "backend": "nccl", "alpha_s": 1e-4, "bytes_per_s": 1e9}
    linked = replace(known, collective=collective, link_bytes_per_s=1e9)  # 2·(2 − 1)/2 of it
    assert calibrate.with_collective(known, collective) == linked
    assert calibrate.with_collective(known, {**collective, "backend": "gloo"}) == known
    assert calibrate.with_collective(linked, {**collective, "backend": "gloo"}) == linked


@pytest.mark.parametrize(
    ("wanted", "devices", "expected"),
    [
        (None, 0, (2, 4, None)),
        (None, 1, (1, 8, "first")),
        (None, 3, (2, 4, "first")),
        (2, 1, (2, 4, None)),  # the sample trains on the CPU, and of it are shape and calibration
        (16, 2, (16, 1, None)),
    ],
)
def test_ranks_that_have_no_device_each_are_on_the_cpu(
    wanted: int | None, devices: int, expected: tuple[int, int, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trine import demo

    monkeypatch.setattr(demo, "usable_cores", lambda: 8)
    assert demo._place(wanted, ["first", "second", "third"][:devices]) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "5"], "at least 16"),
        (["--ranks", "0"], "--ranks"),
        (["--try-seconds", "0"], "--try-seconds"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said


def test_without_torch_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trine.commands.demo.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install 'trine[train]'" in capsys.readouterr().err
