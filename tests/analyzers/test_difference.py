"""What changed between two runs: of known changes each is found, in order, and of the same run nothing."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gate_runs import run_facts, side
from hypothesis import given
from hypothesis import strategies as st
from nsight_exports import MATMUL, Training, build

import trine
from trine.analyzers.comparison import compare
from trine.analyzers.difference import RunDifference, differ
from trine.analyzers.reports.comparison import render_html, render_json, render_markdown, render_text
from trine.analyzers.run_facts import Part, RunFacts, Window, lighter, measure_run
from trine.cli import main
from trine.record.errors import NotComparable

PARTITION = {"compute": 80e6, "exposed_communication": 10e6, "exposed_copy": 0.0, "idle": 10e6}


def trace(
    name: str,
    kernels: dict[str, tuple[float, float]],
    partition: dict[str, float] | None = None,
    steps: int = 3,
    **more: Any,
) -> RunFacts:
    """A trace: kernels by name are (ns, calls) a step or window."""
    parts = [Part("breakdown", part, ns) for part, ns in (partition or PARTITION).items()]
    parts += [Part("idle", "host", (partition or PARTITION)["idle"])]
    parts += [Part("kernel", kernel, ns, calls) for kernel, (ns, calls) in kernels.items()]
    parts += more.pop("parts", [])
    whole = sum((partition or PARTITION).values())
    facts = RunFacts(
        name,
        step_ns=(int(whole),) * steps,
        format="kineto",
        window=Window(whole, steps, 1, "device"),
        parts=tuple(parts),
    )
    return replace(facts, **more)


def states(difference: RunDifference) -> dict[str, str]:
    return {change.name: change.state for change in difference.changes}


def test_what_appeared_vanished_and_changed_is_told_apart_and_ordered() -> None:
    old = trace("old", {"gemm": (40e6, 10), "gelu": (20e6, 10), "copy": (20e6, 40)})
    new = trace(
        "new", {"gemm": (40e6, 10), "fused": (12e6, 10), "copy": (10e6, 20)}, {**PARTITION, "compute": 62e6}
    )
    difference = differ([new], [old])
    assert [(change.name, change.state) for change in difference.changes] == [
        ("gelu", "vanished"),
        ("fused", "appeared"),
        ("copy", "faster"),
    ]
    assert difference.unit.name == "step" and difference.change_ns == -18e6
    gelu, fused, copy = difference.changes
    assert (
        gelu.change_ns == -20e6
        and gelu.of_unit == pytest.approx(-0.2)
        and gelu.of_change == pytest.approx(20 / 18)
    )
    assert (copy.by_calls_ns, copy.by_each_ns) == (-10e6, 0.0)
    assert (fused.second_calls, fused.first_calls) == (0, 10)


def test_a_run_against_itself_changed_nothing() -> None:
    run = trace("a", {"gemm": (40e6, 10), "gelu": (20e6, 10)})
    difference = differ([run], [run])
    assert difference.changes == difference.host == () and difference.change_ns == 0
    assert all(part.state == "same" for part in difference.partition)
    assert "nothing: every part is within" in render_text(compare([run], [replace(run, source="b")]))


def test_a_kernel_under_another_versions_name_is_the_same_kernel() -> None:
    old_name = "void at::native::vectorized_elementwise_kernel<4, AddFunctor<float>, at::detail::Array<char*, 3>>(int)"
    new_name = old_name.replace("at::detail::Array<char*, 3>", "std::array<char*, 3ul>")
    old, new = trace("old", {old_name: (40e6, 10)}), trace("new", {new_name: (50e6, 10)})
    (change,) = [one for one in differ([new], [old]).changes if one.kind == "kernel"]
    assert (change.state, change.name, change.other_name) == ("slower", new_name, old_name)
    other = trace("other", {new_name.replace("Add", "Mul"): (50e6, 10)})
    assert sorted(change.state for change in differ([other], [old]).changes if change.kind == "kernel") == [
        "appeared",
        "vanished",
    ]


def test_a_list_that_was_cut_claims_nothing_below_its_end() -> None:
    old = trace("old", {"big": (40e6, 1), "small": (5e6, 1)})
    new = replace(trace("new", {"big": (40e6, 1)}), least_ns={"kernel": 6e6})
    assert "small" not in states(differ([new], [old]))
    assert states(differ([replace(new, least_ns={})], [old]))["small"] == "vanished"
    names = {f"kernel {number}": (float(number) * 1e6, 1.0) for number in range(1, 61)}
    light = lighter(trace("many", names), 40)
    assert len([part for part in light.parts if part.kind == "kernel"]) == 40 and light.least_ns == {
        "kernel": 21e6
    }


def test_communication_is_told_once() -> None:
    """Its kernels are what its collectives take: where both are known the collectives speak."""
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    wait = "all_reduce over 2 ranks: wait for others"
    old = trace("old", {nccl: (10e6, 5)}, parts=[Part("collective", wait, 2e6, 5)])
    new = trace("new", {nccl: (20e6, 5)}, parts=[Part("collective", wait, 12e6, 5)])
    assert states(differ([new], [old])) == {wait: "slower"}
    alone = [trace(run.source, {nccl: (ns, 5)}) for run, ns in ((new, 20e6), (old, 10e6))]
    assert states(differ([alone[0]], [alone[1]])) == {nccl: "slower"}


# --- equal work ----------------------------------------------------------------------------------


def windows(ratio: float, slower: float = 1.0, **more: Any) -> tuple[RunFacts, RunFacts]:
    """Two windows of one program: the new holds ``ratio`` times the work of the old, its idle ``slower``."""
    kernels = {f"layer kernel {number}": (ns * 1e6, 100.0) for number, ns in enumerate((30, 20, 10, 5))}
    old = trace("old", kernels, step_ns=(), window=Window(100e6, 0, 1, "device"), **more)
    scaled = {name: (ns * ratio, calls * ratio) for name, (ns, calls) in kernels.items()}
    partition = {part: ns * ratio * (slower if part == "idle" else 1) for part, ns in PARTITION.items()}
    whole = sum(partition.values())
    return trace("new", scaled, partition, step_ns=(), window=Window(whole, 0, 1, "device"), **more), old


def test_windows_without_steps_are_compared_for_equal_work() -> None:
    new, old = windows(0.8, slower=3.0)
    difference = differ([new], [old])
    assert difference.unit.name == "work" and difference.unit.ratio == pytest.approx(0.8)
    assert difference.unit.agreement == pytest.approx(1)
    assert difference.second_ns == pytest.approx(100e6) and difference.first_ns == pytest.approx(120e6)
    assert [(one.kind, one.name) for one in difference.changes] == [("idle", "host")]
    assert difference.changes[0].change_ns == pytest.approx(20e6)
    comparison = compare([new], [old])
    assert comparison.verdict == "not judged" and comparison.step_time is None
    assert "0.8 times as much" in " ".join(comparison.notes)
    assert "20 % longer" in render_text(comparison).splitlines()[2]


@given(st.floats(0.1, 10))
def test_how_long_a_window_was_changes_nothing_by_itself(ratio: float) -> None:
    new, old = windows(ratio)
    difference = differ([new], [old])
    assert difference.changes == ()
    assert difference.first_ns is not None and math.isclose(difference.first_ns, 100e6, rel_tol=1e-9)


def test_windows_of_different_programs_are_compared_whole_and_it_is_said() -> None:
    old = trace("old", {"a": (40e6, 100), "b": (40e6, 100)}, step_ns=(), window=Window(100e6, 0, 1, "device"))
    new = trace("new", {"a": (40e6, 100), "b": (40e6, 300)}, step_ns=(), window=Window(100e6, 0, 1, "device"))
    difference = differ([new], [old])
    assert difference.unit.name == "window" and "different work" in difference.notes[0]


def test_one_call_at_the_cut_is_no_change() -> None:
    new, old = windows(1.0)
    parts = tuple(
        replace(part, ns=part.ns * 1.05, calls=105.0) if part.name == "layer kernel 3" else part
        for part in new.parts
    )
    assert differ([replace(new, parts=parts)], [old]).changes == ()


# --- what is refused, and reports ----------------------------------------------------------------


def test_traces_of_few_steps_get_no_verdict_and_records_and_gates_still_need_them() -> None:
    old, new = (
        trace("old", {"gemm": (40e6, 10)}),
        trace("new", {"gemm": (60e6, 10)}, {**PARTITION, "compute": 100e6}),
    )
    assert compare([new], [old]).verdict == "not judged"
    assert compare([new], [old], minimum_steps=3).verdict == "one run"
    with pytest.raises(NotComparable, match="too few to compare"):
        compare([new], [old], judged=True)
    with pytest.raises(NotComparable, match="too few to compare"):
        compare([run_facts("record", 100, steps=3)], [old])
    nothing = [replace(run, parts=(), window=None, step_ns=()) for run in (new, old)]
    with pytest.raises(NotComparable, match="no breakdown in common"):
        compare([nothing[0]], [nothing[1]])


def test_every_form_names_the_sides_by_their_paths() -> None:
    old, new = (
        trace(f"/runs/mfu_{name}.sqlite", {"gemm|<x>": (ns, 10)})
        for name, ns in (("before", 40e6), ("after", 60e6))
    )
    comparison = compare([new], [old])
    assert (comparison.first.label, comparison.second.label) == ("after", "before")
    text = render_text(comparison)
    assert max(map(len, text.splitlines())) <= 100 and "first" not in text and "second" not in text
    assert text.index("before") < text.index("after  ")  # columns go from old to new
    document = json.loads(render_json(comparison))["difference"]
    assert document["unit"] == "step" and document["changes"][0]["name"] == "gemm|<x>"
    assert document["changes"][0]["second_name"] == "gemm|<x>" and document["changes"][0]["first_calls"] == 10
    assert "gemm\\|" in render_markdown(comparison)
    page = render_html(comparison)
    assert "<x>" not in page and "before" in page and "<script" not in page


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        ("runs/new", "runs/old", ("new", "old")),
        ("a/run-1", "b/run-1", ("a", "b")),
        ("h100_qwen.pt.trace.json.gz", "mi300x_qwen.pt.trace.json.gz", ("h100", "mi300x")),
        ("run-1.json", "run-2.json", ("run-1", "run-2")),
    ],
)
def test_labels_are_short_and_differ(first: str, second: str, labels: tuple[str, str]) -> None:
    comparison = compare(
        [replace(run_facts("x", 100), source=first)], [replace(run_facts("x", 100), source=second)]
    )
    assert (comparison.first.label, comparison.second.label) == labels


def test_several_runs_a_side_say_how_many() -> None:
    comparison = compare(side("new", 115), side("old", 100))
    assert comparison.first.label == "new"
    three = [
        replace(run, source=f"{name}/{number}")
        for number, (run, name) in enumerate(zip(side("x", 115), ("fast", "quick", "brisk"), strict=True))
    ]
    assert compare(three, side("old", 100)).first.label == "0 +2"


# --- exports and traces --------------------------------------------------------------------------


def test_a_slower_kernel_in_an_export_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = build(tmp_path / "old.sqlite", Training(steps=5))
    new = build(tmp_path / "new.sqlite", Training(steps=5, matmul_ns=MATMUL + 500_000))
    same = build(tmp_path / "same.sqlite", Training(steps=5))
    assert main(["compare", str(new), "--against", str(old), "--format", "json"]) == 0
    changes = json.loads(capsys.readouterr().out)["difference"]["changes"]
    kernels = [change for change in changes if change["kind"] == "kernel"]
    assert [(change["name"], change["state"], change["change_ns"]) for change in kernels] == [
        ("ampere_sgemm_128x64_tn", "slower", 500_000)
    ]
    assert main(["compare", str(same), "--against", str(old), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"]["changes"] == []


def test_the_two_real_exports(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal compute to a hundred thousandth for equal work; what changed is idle time and waiting for the peer."""
    after, before = (
        str(data / "traces" / "nsys" / f"mfu_2gpu_{name}.sqlite") for name in ("after", "before")
    )
    assert main(["compare", after, "--against", before, "--format", "json"]) == 0
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert difference["unit"] == "work" and difference["work_ratio"] == pytest.approx(0.893, abs=0.005)
    assert difference["work_agreement"] > 0.95
    parts = {part["name"]: part for part in difference["partition"]}
    assert abs(parts["compute"]["of_unit"]) < 0.001
    assert parts["idle"]["of_change"] == pytest.approx(0.83, abs=0.02)
    assert sum(part["change_ns"] for part in parts.values()) == pytest.approx(difference["change_ns"])
    named = [(change["kind"], change["name"].split(":")[-1].strip()) for change in difference["changes"]]
    assert named[:3] == [("idle", "host"), ("idle", "dependency"), ("collective", "wait for others")]
    copy = shutil.copy(before, tmp_path / "copy.sqlite")
    assert main(["compare", str(copy), "--against", before, "--format", "json"]) == 0
    same = json.loads(capsys.readouterr().out)["difference"]
    assert same["changes"] == same["host"] == [] and same["change_ns"] == 0


def test_loader_workers_are_what_made_a_real_trace_faster(data: Path) -> None:
    folder = data / "traces" / "kineto" / "single"
    new, old = (
        measure_run(trine.analyze(trine.load(folder / f"torch1.9_resnet50_workers{n}.json.gz")))
        for n in (4, 0)
    )
    difference = differ([new], [old])
    largest = difference.changes[0]
    assert (largest.kind, largest.name, largest.state) == ("idle", "data", "faster")
    assert difference.change_ns is not None and largest.change_ns < difference.change_ns < 0
    assert difference.unit.name == "step"
