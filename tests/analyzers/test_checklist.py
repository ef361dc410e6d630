"""The checklist filled from the studies: kernels, groups, the pipeline's bubble; and files that hold no time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from analysis_builders import GIB, MS, build, communication, rank_result, steps_table

import trine
from trine.analyzers.diagnose import diagnose
from trine.analyzers.results import CheckItem, Hardware, MemorySummary, Mfu
from trine.analyzers.studies import result_of
from trine.analyzers.studies.groups import GroupCosts, GroupsResult
from trine.analyzers.studies.kernel_efficiency import KernelEfficiency
from trine.analyzers.studies.pipeline import Pipeline


def items(analysis: trine.Analysis) -> dict[str, CheckItem]:
    return {item.id: item for item in diagnose(analysis).checklist}


@cache
def schedule(folder: Path) -> trine.Analysis:
    return trine.analyze(trine.load(folder))


def pipeline(data: Path, **changes: Any) -> Pipeline:
    found = result_of(schedule(data / "traces" / "pipeline_schedule" / "pp8"), "pipeline", Pipeline)
    assert found is not None
    return replace(found, **changes)


def test_a_schedule_alone_says_what_it_can_and_nothing_else(data: Path) -> None:
    listed = items(schedule(data / "traces" / "pipeline_schedule" / "pp8"))
    assert list(listed) == ["balance"]
    assert listed["balance"].state == "pass"
    assert "35 % of an iteration is pipeline bubble (its schedule's ideal 30 %)" in listed["balance"].evidence


@pytest.mark.parametrize("path", ["flight_recorder/gloo_desync", "memory_snapshot/memory_timeline.raw.gz"])
def test_dumps_and_snapshots_have_no_list_of_unknowns(data: Path, path: str) -> None:
    analysis = trine.analyze(trine.load(data / "traces" / path))
    assert all(item.state != "unknown" for item in analysis.checklist)


def test_bubble_beyond_the_schedules_own_is_no_balance(data: Path) -> None:
    def balance(**changes: Any) -> CheckItem:
        return items(build(studies={"pipeline": pipeline(data, **changes)}))["balance"]

    assert balance().state == "pass"
    assert balance(bubble_ratio=0.45).state == "fail"
    assert balance(bubble_ratio=0.08, ideal_ratio=None).state == "pass"
    assert balance(bubble_ratio=0.2, ideal_ratio=None).state == "fail"


def test_the_list_agrees_with_a_verdict_that_found_no_fault(data: Path) -> None:
    """On CPUs transfers take the cores that compute, so a fault of them, and imbalance, begin later."""
    analysis = trine.analyze(trine.load(data / "traces" / "kineto" / "gloo_ddp4_cpu"))
    assert analysis.verdict.sentence.startswith("No fault found")
    balance = {item.id: item for item in analysis.checklist}["balance"]
    assert balance.evidence == "23 % of the step is exposed communication (balance up to 25 %)"
    assert (balance.state, balance.next) == ("pass", "Go on to scaling.")
    assert not any("faults above" in item.next for item in analysis.checklist)


def exchanging(share: float, device: str, wait_share: float = 0.5) -> trine.Analysis:
    """Two ranks that leave ``share`` of each step in communication that nothing hides, this much of it waiting."""
    rest = 1 - share - 0.05
    phases = {"forward": rest / 3, "backward": 2 * rest / 3, "exposed_communication": share}
    waited = communication(
        transfer_ns=round(100 * MS * (1 - wait_share)), wait_ns=round(100 * MS * wait_share)
    )
    metadata = {"device": {"type": device, "name": "Device", "count": 2}}
    ranks = [rank_result(r, steps=steps_table(phases), part=waited, metadata=metadata) for r in (0, 1)]
    return build(ranks, hardware=Hardware("Device", 2))


def test_out_of_balance_without_a_fault_says_where_to_look() -> None:
    """16 % exposed, half of it waiting: neither half is a fault of an accelerator, the whole is no balance."""
    diagnosis = diagnose(exchanging(0.16, "cuda"))
    assert not [finding for finding in diagnosis.findings if finding.kind == "fault"]
    balance = {item.id: item for item in diagnosis.checklist}["balance"]
    assert balance.state == "fail"
    assert balance.next.startswith("No fault by itself: which collectives take that time")


def test_out_of_balance_with_a_fault_says_to_mend_it() -> None:
    diagnosis = diagnose(exchanging(0.4, "cuda", wait_share=0.1))
    assert [finding.id for finding in diagnosis.findings if finding.kind == "fault"] == [
        "exposed-communication"
    ]
    balance = {item.id: item for item in diagnosis.checklist}["balance"]
    assert (balance.state, balance.next) == ("fail", "Mend the faults above, the largest first.")


def test_mfu_is_explained_by_kernels(data: Path) -> None:
    analysis = trine.analyze(trine.load(data / "traces" / "kineto" / "single" / "a100_nccl_metadata.json.gz"))
    kernels = result_of(analysis, "kernel_efficiency", KernelEfficiency)
    assert kernels is not None
    known = replace(kernels, roofline_ns=(200, 50), products={"used": 30, "unused": 10, "unknown": 5})
    evidence = items(build(mfu=Mfu(0.3, "palm", 1e12, 1e14, "bf16"), studies={"kernel_efficiency": known}))
    assert evidence["single-device-mfu"].state == "fail"
    assert evidence["single-device-mfu"].evidence == (
        "MFU 30 % (palm); operators known from their shapes reach 25 % of the roofline; "
        "75 % of the products' time is on tensor cores"
    )
    on_host = replace(known, basis="host")
    unknown = items(build(studies={"kernel_efficiency": on_host}))["single-device-mfu"]
    assert unknown.state == "unknown" and "roofline" not in unknown.evidence


def recorded(**metadata: Any) -> dict[str, CheckItem]:
    """The list of two recorded ranks on a device of which nothing is known but its name."""
    memory = MemorySummary(2 * GIB, None, None, {}, False, 0, "host")
    known = {"device": {"type": "cpu", "name": "CPU"}, "model": {"class": "GPT"}, **metadata}
    ranks = [rank_result(r, steps=steps_table(), memory=memory, metadata=known) for r in (0, 1)]
    return items(build(ranks, hardware=Hardware("CPU", 2)))


def test_what_is_advised_is_only_what_is_not_known_yet() -> None:
    listed = recorded(flops={"6n": 1e9})
    assert listed["single-device-mfu"].next == "Run trine hardware --calibrate on the device."
    assert recorded()["single-device-mfu"].next == (
        "Record with trine.profile(model=…). Run trine hardware --calibrate on the device."
    )
    layout = listed["layout-fits-model"]
    assert layout.evidence == "2.00 GiB at the peak of the fullest rank; how much the device has is not known"
    assert layout.next == "Run trine hardware --calibrate on the device."


def test_a_recorded_model_without_a_wrapper_is_asked_for_with_it() -> None:
    bare = recorded()["zero-where-replicated"]
    assert bare.state == "unknown" and "neither DDP nor FSDP" in bare.evidence
    assert bare.next == "Give trine.profile the wrapped model, as the loop calls it."
    assert "neither DDP" not in recorded(data_parallel={"kind": "ddp"})["zero-where-replicated"].evidence


def test_one_device_is_not_halved() -> None:
    alone = items(build([rank_result(0, steps=steps_table(), world_size=1)], world_size=1))["linear-scaling"]
    assert alone.next == "Run the same work on two devices, and compare the two with trine scaling."
    assert recorded()["linear-scaling"].next.startswith("Run the same work on half the devices")


def groups(exposed: float | None) -> GroupsResult:
    tensor = GroupCosts("tensor", ("callers",), 1, (8,), 8, 100, MS, MS, MS, MS, exposed, 1e11, (), ())
    return GroupsResult((tensor, replace(tensor, kind="data", sizes=(2,))))


@pytest.mark.parametrize(
    ("filled", "exposed", "state"),
    [
        (30, 0.3, "fail"),
        (30, 0.02, "unknown"),
        (60, 0.3, "unknown"),
        (30, None, "unknown"),
        (79, 0.3, "fail"),
    ],
)
def test_a_layout_is_judged_by_its_groups(filled: int, exposed: float | None, state: str) -> None:
    memory = MemorySummary(filled * GIB, None, 80 * GIB, {}, False, 0, "device")
    ranks = [
        rank_result(r, steps=steps_table(), memory=memory, metadata={"device": {"type": "cuda"}})
        for r in (0, 1)
    ]
    layout = items(build(ranks, hardware=Hardware("GPU", 1), studies={"groups": groups(exposed)}))[
        "layout-fits-model"
    ]
    assert layout.state == state
    if filled < 70:
        assert "parallel by tensor 8, data 2" in layout.evidence
    if (filled, exposed) == (30, 0.3):
        assert layout.next.startswith("Try parallel.tensor = 4")
