"""The study of memory and its findings: each fault injected into a run that is known to the byte, beside one without it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_builders import GIB, METADATA, build, rank_result, steps_table
from hypothesis import given
from hypothesis import strategies as st
from memory_snapshots import MIB, Allocator, training

from trine.analyzers.allocations import pair
from trine.analyzers.analysis import analyze
from trine.analyzers.diagnose import diagnose
from trine.analyzers.memory_attribution import with_memory_owners
from trine.analyzers.reports import text
from trine.analyzers.results import Analysis, Finding, MemorySummary
from trine.analyzers.studies import result_of
from trine.analyzers.studies._memory_frees import freed
from trine.analyzers.studies._memory_leaks import ends_by_gradients, growing, median_slope
from trine.analyzers.studies.memory_owners import MemoryOwners, RankMemory, _step_ends
from trine.record.loading import load
from trine.record.model import HOST_KINDS, Rank, Strings, Table


def analysis_of(tmp_path: Path, run: Allocator, **options: Any) -> Analysis:
    return analyze(load(run.write(tmp_path / "it.pickle", **options)))


def owners(analysis: Analysis) -> MemoryOwners:
    found = result_of(analysis, "memory_owners", MemoryOwners)
    assert found is not None
    return found


def first(analysis: Analysis) -> RankMemory:
    return owners(analysis).ranks[0]


def findings(analysis: Analysis) -> dict[str, Finding]:
    return {finding.id: finding for finding in analysis.findings}


# --- the study ------------------------------------------------------------------------------------


def test_the_peak_its_owners_and_the_curve(tmp_path: Path) -> None:
    analysis = analysis_of(tmp_path, training(steps=3))
    part = first(analysis)
    summary = analysis.ranks[0].summary.memory
    assert summary is not None and summary.peak_bytes == part.peak_bytes
    assert not part.lower_bound and not summary.lower_bound
    # Parameters 6, state 12, activations 32, and of the backward pass the first temporary and the first gradient.
    assert part.peak_bytes == (6 + 12 + 32 + 3 + 4) * MIB
    assert {owned.owner: owned.bytes for owned in part.owners if owned.category == "activations"} == {
        f"me/model.py:{line} forward": 8 * MIB for line in (10, 11, 12, 13)
    }
    assert sum(owned.bytes for owned in part.owners) + part.others_bytes == part.peak_bytes
    at_peak = {name: size for name, size in summary.at_peak.items() if size and name != "reserved_but_free"}
    assert sum(at_peak.values()) == part.peak_bytes
    for point, total in enumerate(part.totals):
        assert sum(level[point] for level in part.levels) == total
    assert max(part.totals) == part.peak_bytes


def test_the_report_and_the_contract_say_it(tmp_path: Path) -> None:
    from trine.analyzers.contract import to_json

    analysis = analysis_of(tmp_path, training(steps=3), forget=4)
    said = text.render(analysis)
    assert "Memory peaks at 57.0 MiB or more" in analysis.verdict.sentence
    assert "Owners at the peak" in said and "me/model.py:10 forward" in said
    assert "no breakdown" not in said
    found = to_json(analysis)["memory_owners"]
    timeline = found["ranks"][0]["timeline"]
    assert set(timeline["bytes"]) == set(first(analysis).categories)
    assert all(len(level) == len(timeline["time_ns"]) for level in timeline["bytes"].values())
    assert analysis.findings == ()


def test_fragmentation_by_pool(tmp_path: Path) -> None:
    run = Allocator()
    kept = run.alloc(6 * MIB, run.plain())
    run.free(run.alloc(10 * MIB, run.plain()))
    snapshot = run.snapshot()
    # The first segment has a hole as large as half its block.
    segment = snapshot["segments"][0]
    segment["total_size"] += 3 * MIB
    segment["blocks"].append(
        {"address": kept + 6 * MIB, "size": 3 * MIB, "requested_size": 0, "state": "inactive"}
    )
    import pickle

    path = tmp_path / "it.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    state = first(analyze(load(path))).fragmentation
    assert state is not None
    assert (state.reserved_bytes, state.active_bytes) == (19 * MIB, 6 * MIB)
    assert (state.split_bytes, state.free_bytes, state.largest_free_bytes) == (3 * MIB, 10 * MIB, 10 * MIB)
    assert not state.expandable


def test_frees_are_taken_of_the_whole_curve() -> None:
    # Activations make the first peak, the optimizer's work the second, nearly as high.
    categories = ("activations", "optimizer_state", "temporary")
    levels = np.array([[80, 0], [20, 20], [0, 70]])
    found = {each.change: each for each in freed(categories, levels, levels.sum(axis=0), 4)}
    assert found["checkpointing"].freed_bytes == 10  # and not 56: the second peak stays
    assert found["checkpointing"].peak_bytes == 90
    assert found["ZeRO-1"].freed_bytes == 15
    assert found["ZeRO-1"].inputs["ranks"] == 4
    assert (
        "ranks_are"
        in {e.change: e for e in freed(categories, levels, levels.sum(axis=0), None)}["ZeRO-1"].inputs
    )
    assert not any(
        each.change.startswith("ZeRO") for each in freed(categories, levels, levels.sum(axis=0), 1)
    )


def test_a_part_stays_small(tmp_path: Path) -> None:
    import pickle

    analysis = analysis_of(tmp_path, training(steps=60))
    assert len(pickle.dumps(first(analysis))) < 100_000
    assert len(first(analysis).times_ns) == 400


# --- pairing and leaks, against slow references -----------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(1, 9)), max_size=40))
def test_pairing_against_a_dictionary(events: list[tuple[int, bool, int]]) -> None:
    address = np.array([a for a, _, _ in events], dtype=np.int64)
    change = np.array([size if begins else -size for _, begins, size in events], dtype=np.int64)
    open_: dict[int, int] = {}
    expected = []
    for row, (place, begins, size) in enumerate(events):
        if begins:
            if place in open_:
                expected.append((open_.pop(place), row))
            open_[place] = row
        elif place in open_:
            expected.append((open_.pop(place), row))
        else:
            expected.append((-1, row))
        del size
    expected += [(row, len(events)) for row in open_.values()]
    found = pair(address, change)
    assert sorted(zip(found.start.tolist(), found.end.tolist(), strict=True)) == sorted(expected)


def test_growth_needs_steps_and_steadiness() -> None:
    ends = np.arange(1, 13) * 10

    def one(levels: list[int]) -> list[Any]:
        """A place that holds ``levels`` MiB at each step's end."""
        rows = [(0, level * MIB, end - 5, end + 1) for level, end in zip(levels, ends, strict=False)]
        place, size, start, stop = (np.array(column) for column in zip(*rows, strict=True))
        return growing(place, size, start, stop, ends[: len(levels)])

    assert one([10] * 12) == []
    assert one([50, *range(10, 21)])[0].per_step_bytes == pytest.approx(MIB)  # the first step does not count
    assert one([10, 11, 12, 13]) == []  # too few
    assert one([10, 11, 13, 14, 16]) == []  # too few, and not alike
    assert one([10, 12, 14, 16, 18])[0].per_step_bytes == pytest.approx(2 * MIB)  # few, and all alike
    assert one([10, 30] * 6) == []  # to and fro
    assert one([10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 40]) == []  # once
    assert median_slope(np.array([0.0, 1, 2, 100, 4, 5, 6])) == pytest.approx(1)


# --- findings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotated", [True, False])
def test_a_leak_is_found_with_its_line(tmp_path: Path, annotated: bool) -> None:
    leaking = analysis_of(tmp_path, training(steps=9, leak=2 * MIB, annotated=annotated))
    found = findings(leaking)["memory-leak"]
    assert found.kind == "fault"
    assert "grows by 2.00 MiB a step, held by me/model.py:77 forward" in found.title
    assert leaking.verdict.bound_by == "memory-leak"
    assert "Growing from step to step" in text.render(leaking)
    healthy = analysis_of(tmp_path, training(steps=9, annotated=annotated))
    assert healthy.findings == ()
    # Too few steps to tell.
    assert analysis_of(tmp_path, training(steps=4, leak=2 * MIB, annotated=annotated)).findings == ()


def test_a_cache_that_grows_while_tokens_are_generated_is_no_leak(tmp_path: Path) -> None:
    run = Allocator()
    run.alloc(40 * MIB, run.setup())
    for _ in range(12):
        run.alloc(2 * MIB, run.forward(20))
        run.free(run.alloc(4 * MIB, run.forward(21)), run.forward(21))
        run.optimizer_step()  # what marks the steps, and nothing else of training
    analysis = analysis_of(tmp_path, run)
    assert first(analysis).leaks[0].owner == "me/model.py:20 forward"
    assert analysis.findings == ()


def test_where_no_step_is_marked_the_optimizers_annotations_end_them() -> None:
    """torch.profiler without a schedule marks no steps; ``Optimizer.step#`` is there all the same."""
    strings = Strings()
    names = [
        strings.code(text) for text in ("Optimizer.step#AdamW.step", "aten::mm", "Optimizer.step#AdamW.step")
    ]
    host = Table(
        "host",
        {
            "start_ns": [80, 110, 180],
            "end_ns": [95, 120, 195],
            "kind": [HOST_KINDS.index(kind) for kind in ("annotation", "operator", "annotation")],
            "name": names,
        },
        strings,
    )
    rank = Rank(0, "it", "kineto", strings, host=host)
    assert _step_ends(rank, rank, {}).tolist() == [95, 195]
    assert _step_ends(rank, rank, {"step_ends_ns": [7]}).tolist() == [7]
    assert _step_ends(Rank(0, "it", "kineto", strings), rank, {}).tolist() == []


def exported(
    path: Path, steps: int, kept: int, parts: int = 1, zeroed: bool = True, category: int = 7
) -> Analysis:
    """An exported timeline of training that keeps ``kept`` bytes a step, and nothing of whose steps is marked.
    Gradients come in ``parts`` micro-batches; ``zeroed``: they are released at the end of a step."""
    begin, rows = 1_700_000_000 * 10**9, [[-1, 1, 8 * MIB, 0]]
    held = 0
    for step in range(steps):
        now = begin + step * 10**8
        for part in range(parts):
            rows.append([now + part * 10**6 + 1000, 2, 16 * MIB, 4])
            if not held:
                rows += [
                    [now + part * 10**6 + 2000, 2, 4 * MIB, 5],
                    [now + part * 10**6 + 3000, 2, 4 * MIB, 5],
                ]
                held = 8 * MIB
            rows.append([now + part * 10**6 + 4000, 4, -16 * MIB, 4])
        if zeroed:
            rows += [[now + 5 * 10**7, 4, -4 * MIB, 5], [now + 6 * 10**7, 4, -4 * MIB, 5]]
            held = 0
        if kept:
            rows.append([now + 9 * 10**7, 2, kept, category])
    path.write_text(json.dumps(rows))
    return analyze(load(path))


@pytest.mark.parametrize("parts", [1, 4])
def test_of_a_timeline_alone_the_gradients_end_the_steps(tmp_path: Path, parts: int) -> None:
    analysis = exported(tmp_path / "it.json", 9, 2 * MIB, parts)
    assert first(analysis).steps == 9
    (leak,) = first(analysis).leaks
    assert (leak.owner, leak.category, leak.per_step_bytes) == (None, "unattributed", 2 * MIB)
    assert "grows by 2.00 MiB a step" in findings(analysis)["memory-leak"].title
    named = exported(tmp_path / "named.json", 9, 2 * MIB, parts, category=4)
    assert "category activations" in findings(named)["memory-leak"].title
    healthy = exported(tmp_path / "healthy.json", 9, 0, parts)
    assert first(healthy).steps == 9 and healthy.findings == ()


def test_gradients_that_stay_end_no_step(tmp_path: Path) -> None:
    analysis = exported(tmp_path / "it.json", 9, 2 * MIB, zeroed=False)
    assert first(analysis).steps == 0 and first(analysis).leaks == ()
    assert ends_by_gradients(np.arange(3), np.zeros(3, dtype=np.int64)).tolist() == []


def sampled(levels: list[float], kind: str = "device", steps: int = 80) -> Analysis:
    """A record's device whose samples read ``levels`` (GiB) over 80 steps."""
    table = steps_table(count=steps)
    start, end = int(table["start_ns"][0]), int(table["end_ns"][-1])
    times = np.linspace(start, end, len(levels)).astype(int).tolist()
    series = tuple((when, int(level * GIB), None) for when, level in zip(times, levels, strict=True))
    peak = max(point[1] for point in series)
    memory = MemorySummary(peak, None, 80 * GIB, {}, False, 0, kind, series)  # type: ignore[arg-type]
    result = rank_result(0, steps=table)
    result = replace(result, summary=replace(result.summary, memory=memory, format="trine"))
    return diagnose(build([result]))


def test_a_leak_in_samples_of_a_record() -> None:
    wave = [10 + 5 * (point % 7 == 0) for point in range(160)]
    grown = [level + 0.02 * point for point, level in enumerate(wave)]
    found = findings(sampled(grown))["memory-leak"]
    assert found.evidence["per_step_bytes"] == pytest.approx(0.04 * GIB, rel=0.2)
    assert "steps_left" in found.evidence
    assert "memory-leak" not in findings(sampled(wave))
    assert "memory-leak" not in findings(sampled(grown, kind="host"))
    assert "memory-leak" not in findings(sampled([10 + min(point, 30) * 0.1 for point in range(160)]))


def test_out_of_memory_names_who_asked_and_what_would_help(tmp_path: Path) -> None:
    run = training(steps=2)
    for layer in range(6):
        run.alloc(8 * MIB, run.forward(10 + layer))
    run.blocks = {place: block for place, block in run.blocks.items() if block["state"] == "active_allocated"}
    run.out_of_memory(64 * MIB, 3 * MIB, run.forward(16))
    analysis = analysis_of(tmp_path, run)
    found = findings(analysis)["out-of-memory"]
    assert "64.0 MiB were asked for by me/model.py:16 forward, 3.00 MiB were free" in found.title
    assert found.recommendation is not None and found.recommendation.change == {"checkpointing.mode": "full"}
    assert found.recommendation.predicted is not None
    assert found.title.endswith("most of the peak is activations (67 %)")
    assert (analysis.verdict.bound_by, analysis.verdict.confidence) == ("out-of-memory", "high")
    # What a change frees is that of the whole curve, in every rule that speaks of it.
    freed_by = {each.change: each.freed_bytes for each in owners(analysis).frees}
    for id, change in (
        ("checkpointing-would-free", "checkpointing"),
        ("offload-would-free", "offload optimizer state"),
    ):
        assert findings(analysis)[id].evidence["freed_bytes"] == freed_by[change]
    assert "out-of-memory" not in findings(analysis_of(tmp_path, training(steps=2)))


def test_out_of_memory_in_pieces_advises_expandable_segments(tmp_path: Path) -> None:
    for expandable in (False, True):
        run = training(steps=2)
        for block in [run.alloc(100 * MIB, run.plain(), segment=True) for _ in range(2)]:
            run.free(block, run.plain())
        run.out_of_memory(150 * MIB, 3 * MIB, run.forward(16))
        found = findings(analysis_of(tmp_path, run, expandable=expandable))["out-of-memory"]
        assert "lay reserved and in pieces" in found.title
        assert found.recommendation is not None
        assert ("expandable_segments" in found.recommendation.why) != expandable


@pytest.mark.parametrize(("times", "found"), [(4, True), (1, False)])
def test_retries_of_a_device_of_unknown_size(tmp_path: Path, times: int, found: bool) -> None:
    run = training(steps=2)
    for turn in range(times):
        run.event("segment_free", 1 << 40, (20 + turn) * MIB, run.forward())
        run.free(run.alloc((21 + turn) * MIB, run.forward(), segment=True), run.forward())
    told = findings(analysis_of(tmp_path, run)).get("allocation-retries")
    assert (told is not None) == found
    if told is not None:
        assert told.evidence["retries"] == times


def on_device(peak: float, **at_peak: float) -> Analysis:
    """A rank of DDP on a device of 80 GiB, its peak in GiB and what was alive there."""
    metadata = {
        **METADATA,
        "device": {"type": "cuda", "name": "Test GPU", "memory_bytes": 80 * GIB},
        "backend": "nccl",
    }
    metadata["model"] = {
        "parameter_bytes": 8 * GIB,
        "gradient_bytes": 8 * GIB,
        "optimizer_bytes": int(at_peak.get("optimizer_state", 0) * GIB),
    }
    memory = MemorySummary(
        int(peak * GIB),
        int(peak * GIB),
        80 * GIB,
        {k: int(v * GIB) for k, v in at_peak.items()},
        False,
        0,
        "device",
    )
    results = []
    for rank in (0, 1):
        result = rank_result(rank)
        results.append(replace(result, summary=replace(result.summary, memory=memory, metadata=metadata)))
    return diagnose(build(results))


def test_offload_shows_where_memory_limits_and_state_is_large() -> None:
    found = findings(on_device(72, optimizer_state=16))["offload-would-free"]
    assert found.kind == "opportunity"
    assert found.recommendation is not None and found.recommendation.predicted is not None
    predicted = found.recommendation.predicted
    assert predicted.peak_bytes_change == -16 * GIB
    assert predicted.gain_ns is not None and predicted.gain_ns.mid < 0  # it costs the way over the bus
    assert "offload-would-free" not in findings(on_device(40, optimizer_state=16))
    assert "offload-would-free" not in findings(on_device(72, optimizer_state=1))


def test_fragmentation_takes_what_the_snapshot_knows(tmp_path: Path) -> None:
    run = Allocator()
    run.alloc(60 * MIB, run.plain(), segment=True)
    holes = [run.alloc(10 * MIB, run.plain(), segment=True) for _ in range(4)]
    for hole in holes:
        run.free(hole, run.plain())
    run.alloc(60 * MIB, run.plain(), segment=True)
    run.out_of_memory(50 * MIB, 4 * MIB, run.plain())
    found = findings(analysis_of(tmp_path, run))
    assert found["fragmentation"].evidence["free_segments_bytes"] == 40 * MIB
    assert found["fragmentation"].evidence["expandable_segments"] is False
    assert "expandable_segments:True" in found["fragmentation"].recommendation.why  # type: ignore[union-attr]
    again = findings(analysis_of(tmp_path, run, expandable=True))["fragmentation"]
    assert "can grow already" in again.recommendation.why  # type: ignore[union-attr]
    assert "fragmentation" not in findings(analysis_of(tmp_path, training(steps=2)))


# --- a trace's events -----------------------------------------------------------------------------


def traced() -> Rank:
    """A step on two threads: forward in a module, backward on another thread, the optimizer."""
    strings = Strings()
    spans = [  # kind, thread, start, end, name, parent
        ("annotation", 1, 0, 1000, "ProfilerStep#3", -1),
        ("python", 1, 10, 400, "me/model.py(12): forward", 0),
        ("operator", 1, 20, 390, "aten::linear", 1),
        ("operator", 1, 30, 380, "aten::addmm", 2),
        ("operator", 2, 450, 700, "autograd::engine::evaluate_function: AddmmBackward0", -1),
        ("operator", 2, 460, 690, "AddmmBackward0", 4),
        ("annotation", 1, 750, 900, "Optimizer.step#AdamW.step", 0),
        ("operator", 1, 760, 890, "aten::sqrt", 6),
    ]
    columns = list(zip(*spans, strict=True))
    host = Table(
        "host",
        {
            "kind": [HOST_KINDS.index(kind) for kind in columns[0]],
            "thread": columns[1],
            "start_ns": columns[2],
            "end_ns": columns[3],
            "name": [strings.code(name) for name in columns[4]],
            "parent": columns[5],
        },
        strings,
    )
    events = [  # time, address, bytes
        (40, 1, 100),  # an activation
        (50, 2, 10),  # a temporary of the forward pass
        (60, 2, -10),
        (470, 3, 60),  # a gradient
        (480, 4, 20),  # a temporary of the backward pass
        (490, 4, -20),
        (650, 1, -100),
        (770, 5, 30),  # state
        (780, 6, 5),
        (790, 6, -5),
        (950, 7, -40),  # older than the trace
    ]
    time, address, change = zip(*events, strict=True)
    memory = Table(
        "memory",
        {"time_ns": time, "address": address, "bytes": change, "device": [0] * len(time)},
        strings,
    )
    return Rank(0, "it", "kineto", strings, host=host, memory=memory)


def test_events_of_a_trace_get_owners_and_categories() -> None:
    rank = traced()
    told = with_memory_owners(rank)
    assert told is not rank and told.memory is not None and rank.memory is not None
    assert (rank.memory["owner"] == -1).all()  # what was given stays as it was
    table = told.memory
    assert table.text("category").tolist() == [
        "activations",
        "temporary",
        "temporary",
        "gradients",
        "temporary",
        "temporary",
        "activations",
        "optimizer_state",
        "temporary",
        "temporary",
        "unattributed",
    ]
    assert table.text("owner").tolist()[:4] == ["me/model.py:12 forward"] * 3 + ["AddmmBackward0"]
    assert table.text("owner")[7] == "aten::sqrt"
    assert table.text("stack")[0].split("\n") == ["operator aten::linear", "me/model.py:12 forward"]
    assert with_memory_owners(told) is told


def test_real_traces_get_owners(data: Path) -> None:
    analysis = analyze(load(data / "traces" / "kineto" / "single" / "h100_qwen1.5_0.5b.json.gz"))
    part = first(analysis)
    assert part.peak_bytes / GIB == pytest.approx(1.95, abs=0.01)
    assert any((owned.owner or "").startswith("qwen2/modeling_qwen2.py:") for owned in part.owners)
    assert any("Qwen2MLP" in (owned.module or "") for owned in part.owners)
    assert "memory-leak" not in findings(analysis)


@pytest.mark.parametrize("name", ["medium_128_training", "medium_512_training", "medium_512_inference"])
def test_real_snapshots_have_no_fault(data: Path, name: str) -> None:
    path = data / "traces" / "memory_snapshot" / f"{name}_memory_snapshot.pickle"
    analysis = analyze(load(path))
    assert analysis.findings == ()
    assert "Memory peaks at" in analysis.verdict.sentence
    assert any((owned.owner or "").startswith("cs336_basics/") for owned in first(analysis).owners)
