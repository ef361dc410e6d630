"""Pipelines: bubbles against formulas, schedules by their order, and every source of times."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from analysis_tables import rank_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import (
    BACKWARD,
    FORWARD,
    LENGTHS,
    Action,
    analysed,
    breadth_first,
    gpipe,
    interleaved,
    job_of,
    one_by_one,
    pipeline,
    timed,
    zero_bubble_1,
)

from trine.analyzers import analyze
from trine.analyzers.contract import to_json
from trine.analyzers.reports import html, markdown, text
from trine.analyzers.results import Analysis
from trine.analyzers.studies import result_of
from trine.analyzers.studies._pipeline_schedules import ideal_bubble
from trine.analyzers.studies.pipeline import Pipeline
from trine.record.model import Rank
from trine.record.readers.pipeline_schedule import open_paths

MS = 1_000_000


def studied(ranks: Sequence[Rank]) -> Pipeline:
    return found(analysed(ranks))


def found(analysis: Analysis) -> Pipeline:
    result = result_of(analysis, "pipeline", Pipeline)
    assert result is not None, [note.message for note in analysis.data_quality]
    return result


def findings(analysis: Analysis) -> set[str]:
    return {finding.id for finding in analysis.findings}


def test_the_real_schedule_of_eight_stages(data: Path) -> None:
    folder = data / "traces" / "pipeline_schedule" / "pp8"
    analysis = analyze(open_paths(sorted(folder.iterdir()), folder))
    result = found(analysis)
    assert result.schedule == "1F1B" and result.microbatches == 16 and result.warm_up == (1,)
    assert result.iterations == 19
    assert result.ideal_ratio == pytest.approx(7 / 23)
    assert [stage.rank for stage in result.stages] == list(range(8))
    for stage in result.stages:
        assert 0.30 <= round(stage.bubble_ratio, 2) <= 0.37
    assert findings(analysis) == {"pipeline-bubble"}
    assert {note.id for note in analysis.data_quality} >= {"pipeline-clock"}
    assert not any(check.applied_ns for check in result.clocks)
    assert "Iteration 1 is warm-up" in " ".join(text.render(analysis).split())
    for page in (markdown.render(analysis), html.render(analysis)):
        assert "1F1B over 8 stages, 16 micro-batches" in page


def exact_bubbles(data: Path) -> dict[int, list[float]]:
    """The definition worked out by hand from the files: rank → bubble ratio of iterations 2 to 20."""
    files = [
        json.loads((data / "traces" / "pipeline_schedule" / "pp8" / f"pp_rank_{r}.json").read_text())
        for r in range(8)
    ]
    ratios: dict[int, list[float]] = {rank: [] for rank in range(8)}
    for number in map(str, range(2, 21)):
        length = max(max(f[number]["bwd_end"]) for f in files) - min(
            min(f[number]["fwd_start"]) for f in files
        )
        for rank, file in enumerate(files):
            entry = file[number]
            computed = (
                sum(entry["fwd_end"])
                - sum(entry["fwd_start"])
                + sum(entry["bwd_end"])
                - sum(entry["bwd_start"])
            )
            ratios[rank].append(1 - computed / length)
    return ratios


def test_its_bubbles_are_those_of_the_definition(data: Path) -> None:
    folder = data / "traces" / "pipeline_schedule" / "pp8"
    result = found(analyze(open_paths(sorted(folder.iterdir()), folder)))
    for rank, ratios in exact_bubbles(data).items():
        assert result.stages[rank].bubble_ratio == pytest.approx(sorted(ratios)[9], abs=1e-7)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (8, 16), (4, 4), (3, 1)])
@pytest.mark.parametrize(("order", "name"), [(gpipe, "GPipe"), (one_by_one, "1F1B")])
def test_even_stages_leave_exactly_the_ideal(order: Any, name: str, p: int, m: int) -> None:
    result = studied(pipeline(order, p, m))
    assert result.ideal_ratio is None or result.ideal_ratio == pytest.approx((p - 1) / (m + p - 1))
    if m > 1:
        assert result.schedule == name
    for stage in result.stages:
        assert stage.bubble_ratio == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)
        assert stage.warm_up_ns + stage.steady_ns + stage.drain_ns == stage.bubble_ns
        assert (stage.forward_ns, stage.backward_ns) == (MS, 2 * MS)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16)])
def test_interleaved_chunks_leave_half_the_bubble(p: int, m: int) -> None:
    result = studied(pipeline(interleaved, p, m, chunks=2))
    assert (result.schedule, result.chunks) == ("Interleaved1F1B", 2)
    assert result.ideal_ratio == pytest.approx((p - 1) / (2 * m + p - 1))
    for stage in result.stages:
        assert len(stage.stages) == 2
        assert stage.bubble_ratio == pytest.approx(result.ideal_ratio, abs=1e-9)


def test_breadth_first_and_zero_bubble_orders_are_told_apart() -> None:
    assert studied(pipeline(breadth_first, 4, 8, chunks=2)).schedule == "LoopedBFS"
    split, whole = studied(pipeline(zero_bubble_1, 4, 8)), studied(pipeline(one_by_one, 4, 8))
    assert split.schedule == "ZB-H1"
    assert split.bubble_ratio < whole.bubble_ratio
    assert split.ideal_ratio == pytest.approx(3 / (8 * 3 + 3))  # F = B = W
    assert split.bubble_ratio == pytest.approx(split.ideal_ratio, abs=0.02)


def test_the_zero_bubble_papers_ideals() -> None:
    """Qi et al. 2023, table 1: ZB-H1 keeps (p − 1)(F + B − W), ZB-H2 (p − 1)(F + B − 2W)."""
    second = ideal_bubble("ZB-H2", 8, 24, 1, (1.0, 1.0, 1.0))
    assert second is not None and second.ratio == 0
    first = ideal_bubble("ZB-H1", 8, 24, 1, (18.5, 18.1, 9.3))
    assert first is not None and first.ratio == pytest.approx(7 * 27.3 / (24 * 45.9 + 7 * 27.3))
    assert ideal_bubble(None, 8, 24, 1, (1.0, 1.0, 1.0)) is None


def test_an_order_that_is_no_schedule_has_no_name_and_no_ideal() -> None:
    def eager(rank: int, p: int, m: int) -> list[Action]:
        """Twice as many forwards ahead as 1F1B, backwards whole."""
        lead = min(2 * (p - rank) + 1, m)
        order = [(FORWARD, rank, index) for index in range(lead)]
        for index in range(m):
            order.append((BACKWARD, rank, index))
            if lead + index < m:
                order.append((FORWARD, rank, lead + index))
        return order

    result = studied(pipeline(eager, 4, 16))
    assert result.schedule is None and result.ideal_ratio is None
    assert "unknown name" in text.render(analysed(pipeline(eager, 4, 16)))


def test_a_slow_first_iteration_is_named_warm_up() -> None:
    result = studied(pipeline(one_by_one, 4, 8, iterations=12, first=3))
    assert result.warm_up == (1,) and result.iterations == 11
    assert result.bubble_ratio == pytest.approx(3 / 11)


def uneven(slow: int, factor: float) -> Callable[[Action], int]:
    return lambda action: round(LENGTHS[action[0]] * (factor if action[1] == slow else 1))


def test_a_long_stage_is_a_fault_and_an_even_pipeline_is_none() -> None:
    analysis = analysed(pipeline(one_by_one, 4, 32, length=uneven(2, 1.5)))
    (finding,) = (one for one in analysis.findings if one.id == "stage-imbalance")
    assert finding.kind == "fault" and finding.evidence["rank"] == 2
    assert finding.evidence["imbalance_share"] == pytest.approx(0.5)
    assert analysis.verdict.bound_by == "stage-imbalance"
    for factor in (1.0, 1.1):
        healthy = analysed(pipeline(one_by_one, 4, 32, length=uneven(2, factor)))
        assert "stage-imbalance" not in findings(healthy)
        assert "stage-imbalance" in {item.id for item in healthy.not_bound_by}


def test_stages_that_are_long_in_turn_are_no_imbalance() -> None:
    ranks = pipeline(one_by_one, 4, 32, iterations=6)
    turns = [pipeline(one_by_one, 4, 32, iterations=6, length=uneven(stage, 1.6)) for stage in (0, 1, 2)]
    for rank in ranks:
        tables = [turn[rank.rank].microbatches for turn in turns]
        assert rank.microbatches is not None and all(table is not None for table in tables)
        for step in range(1, 7):
            table = tables[step % 3]
            assert table is not None
            own, other = rank.microbatches["step"] == step, table["step"] == step
            for column in ("start_ns", "end_ns"):
                shift = table[column][other] - int(table["start_ns"][other].min()) + step * 10**10
                rank.microbatches.columns[column][own] = shift
    result = studied(ranks)
    assert result.slowest_share < 0.65
    assert "stage-imbalance" not in findings(analysed(ranks))


def test_a_large_bubble_is_an_opportunity_and_a_small_one_is_none() -> None:
    analysis = analysed(pipeline(one_by_one, 8, 8))
    (finding,) = (one for one in analysis.findings if one.id == "pipeline-bubble")
    assert finding.recommendation is not None
    assert finding.recommendation.change == {"parallel.microbatches": 16}
    predicted = finding.recommendation.predicted
    assert predicted is not None and predicted.gain_ns is not None
    # At its best the prediction is what the same schedule with halves of the micro-batches takes.
    halves = studied(pipeline(one_by_one, 8, 16, length=lambda action: LENGTHS[action[0]] // 2))
    now = studied(pipeline(one_by_one, 8, 8)).iteration_ns
    assert now - predicted.gain_ns.high == pytest.approx(halves.iteration_ns, rel=0.001)
    small = analysed(pipeline(one_by_one, 4, 64))
    assert not findings(small) and "pipeline-bubble" in {item.id for item in small.not_bound_by}


def test_a_bubble_beyond_the_schedules_own_is_told_as_such() -> None:
    """Each micro-batch takes 3 ms more to arrive than it takes to compute."""

    def slow_links(action: Action) -> int:
        return LENGTHS[action[0]] + 3 * MS

    ranks = pipeline(one_by_one, 3, 24, length=slow_links)
    for rank in ranks:
        assert rank.microbatches is not None
        rank.microbatches.columns["start_ns"] = rank.microbatches["start_ns"] + 3 * MS
    analysis = analysed(ranks)
    (finding,) = (one for one in analysis.findings if one.id == "pipeline-bubble")
    assert "where 1F1B itself leaves 7.7 %" in finding.title
    assert finding.evidence["beyond_the_ideal_share"] > 0.4
    assert not findings(analysed(pipeline(one_by_one, 3, 24)))


def test_a_clock_that_is_wrong_is_corrected_and_said() -> None:
    right = studied(pipeline(one_by_one, 4, 8))
    analysis = analysed(pipeline(one_by_one, 4, 8, offsets={2: -20 * MS, 3: -20 * MS}))
    result = found(analysis)
    assert [check.rank for check in result.clocks] == [2, 3]
    for check in result.clocks:
        assert check.applied_ns == pytest.approx(20 * MS, abs=2 * MS)
    assert result.bubble_ratio == pytest.approx(right.bubble_ratio, abs=0.02)
    assert "clock is corrected" in " ".join(note.message for note in analysis.data_quality)
    assert not right.clocks


def test_a_stage_that_is_missing_is_said_and_no_finding_is_drawn() -> None:
    analysis = analysed([rank for rank in pipeline(one_by_one, 4, 4) if rank.rank != 1])
    result = found(analysis)
    assert result.missing_stages == (1,) and result.schedule == "1F1B"
    assert not findings(analysis)
    assert "pipeline-stages-missing" in {note.id for note in analysis.data_quality}


def test_pipelines_side_by_side_are_counted_and_the_slowest_is_shown() -> None:
    ranks = pipeline(one_by_one, 2, 8)
    for rank in pipeline(one_by_one, 2, 8, length=lambda action: LENGTHS[action[0]] * 2):
        rank.rank += 2
        ranks.append(rank)
    result = studied(ranks)
    assert result.replicas == 2 and [stage.rank for stage in result.stages] == [2, 3]


def test_one_stage_alone_is_no_pipeline() -> None:
    analysis = analysed(pipeline(one_by_one, 4, 8)[:1])
    assert result_of(analysis, "pipeline", Pipeline) is None or found(analysis).missing_stages
    single = analysed(pipeline(one_by_one, 1, 8))
    assert to_json(single)["pipeline"] is None
    assert "one stage alone" in " ".join(note.message for note in single.data_quality)


def test_many_micro_batches_stay_small() -> None:
    ranks = pipeline(one_by_one, 2, 128, iterations=60)
    result = studied(ranks)
    assert result.iterations == 60 and 0 < len(result.spans) <= 4_000
    summary = analyze(job_of(ranks)).ranks[0].summary
    assert len(pickle.dumps(summary.parts["pipeline"])) < 100_000


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(1, 7), st.data())
def test_the_parts_of_a_bubble_sum_to_it_for_any_times(p: int, m: int, data: st.DataObject) -> None:
    lengths: dict[Action, int] = {}

    def length(action: Action) -> int:
        if action not in lengths:
            lengths[action] = data.draw(st.integers(1, 50))
        return lengths[action]

    order = data.draw(st.sampled_from([gpipe, one_by_one]))
    result = studied(pipeline(order, p, m, iterations=1, length=length))
    assert len({stage.compute_ns + stage.bubble_ns for stage in result.stages}) == 1
    for stage in result.stages:
        assert stage.warm_up_ns + stage.steady_ns + stage.drain_ns == stage.bubble_ns
        assert min(stage.warm_up_ns, stage.steady_ns, stage.drain_ns) >= 0
        assert stage.compute_ns == sum(value for action, value in lengths.items() if action[1] == stage.rank)


# --- annotations and messages ----------------------------------------------------------------------


def annotated(
    order: Any, p: int, m: int, name: Callable[[str, int, int], str], chunks: int = 1
) -> list[Rank]:
    """Traces with a device: each piece of work an annotation on the host and one kernel later on the device."""
    lag = 100
    ranks = []
    for rank, works in enumerate(
        timed([order(r, p, m) for r in range(p)], p * chunks, lambda a: LENGTHS[a[0]])
    ):
        host: list[tuple[Any, ...]] = []
        device: list[tuple[Any, ...]] = []
        for step in range(3):
            for kind, stage, index, start, end in works:
                begin = step * 200 * MS + start
                host.append((begin, begin + 50, "annotation", name(kind, stage, index), 1, -1, step))
                host.append((begin + 10, begin + 20, "runtime", "cudaLaunchKernel", 1, len(host) - 1, step))
                device.append((begin + lag, begin + lag + end - start, "compute", len(host) - 1, step))
        calls = [{"operation": "send", "group": "p", "start_ns": 0, "end_ns": 1, "step": 0}]
        ranks.append(rank_of(rank=rank, host=host, device=device, collectives=calls))
    return ranks


LETTERS = {FORWARD: "F", BACKWARD: "B", "backward_input": "I", "backward_weight": "W"}


def test_annotations_of_torchs_pipelining() -> None:
    result = studied(
        annotated(one_by_one, 3, 6, lambda kind, stage, index: f"PP:{stage}{LETTERS[kind]}{index}")
    )
    assert (result.source, result.schedule, result.microbatches) == ("annotations", "1F1B", 6)
    assert result.bubble_ratio == pytest.approx(2 / 8, abs=1e-6)
    assert not result.inferred_stages
    chunked = annotated(
        interleaved, 2, 4, lambda kind, stage, index: f"PP:{stage}{LETTERS[kind]}{index}", chunks=2
    )
    assert studied(chunked).schedule == "Interleaved1F1B"


def test_annotations_that_do_not_number_the_stage() -> None:
    names = {FORWARD: "Forward", BACKWARD: "Backward"}
    analysis = analysed(annotated(gpipe, 3, 4, lambda kind, stage, index: f"{names[kind]} {index}"))
    result = found(analysis)
    assert result.schedule == "GPipe" and result.inferred_stages
    assert [stage.rank for stage in result.stages] == [0, 1, 2]
    assert result.bubble_ratio == pytest.approx(2 / 6, abs=1e-6)
    assert "pipeline-stages-inferred" in {note.id for note in analysis.data_quality}


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("forward_step", "backward_step"),
        (
            "pipeline_parallel/schedules.py(214): forward_step",
            "pipeline_parallel/schedules.py(391): backward_step",
        ),
        (
            "deepspeed/runtime/pipe/engine.py(700): _exec_forward_pass",
            "deepspeed/runtime/pipe/engine.py(800): _exec_backward_pass",
        ),
    ],
)
def test_functions_of_megatron_and_deepspeed(forward: str, backward: str) -> None:
    result = studied(
        annotated(one_by_one, 3, 6, lambda kind, stage, index: forward if kind == FORWARD else backward)
    )
    assert result.schedule == "1F1B" and result.microbatches == 6
    assert result.bubble_ratio == pytest.approx(2 / 8, abs=1e-6)


def test_names_like_these_are_no_pipeline_where_nothing_is_sent() -> None:
    ranks = annotated(gpipe, 2, 4, lambda kind, stage, index: f"{kind.title()} {index}")
    for rank in ranks:
        rank.collectives = None
    assert result_of(analysed(ranks), "pipeline", Pipeline) is None


def messages(order: Any, p: int, m: int) -> list[Rank]:
    """Traces that say nothing but what was computed and what was sent to whom."""
    ranks = []
    works = timed([order(r, p, m) for r in range(p)], p, lambda a: LENGTHS[a[0]])
    ends = {(kind, stage, index): end for rank in works for kind, stage, index, _, end in rank}
    for rank, own in enumerate(works):
        device: list[tuple[Any, ...]] = []
        calls: list[dict[str, Any]] = []
        for step in range(3):
            base = step * 200 * MS
            for kind, _, index, start, end in own:
                device.append((base + start, base + end, "compute", -1, step))
                source, target = (rank - 1, rank + 1) if kind == FORWARD else (rank + 1, rank - 1)
                for peer, operation, at in (
                    (source, "recv", ends.get((kind, source, index))),
                    (target, "send", end),
                ):
                    if 0 <= peer < p and at is not None:
                        time = base + at - (operation == "recv")  # it is there when the work on it begins
                        calls.append(
                            {"operation": operation, "group": "p", "peer": peer, "step": step}
                            | {"start_ns": time, "end_ns": time + 1, "bytes": 8}
                        )
        ranks.append(
            rank_of(
                rank=rank,
                device=device,
                collectives=calls,
                steps=[(s, s * 200 * MS, (s + 1) * 200 * MS) for s in range(3)],
            )
        )
    return ranks


def test_messages_alone_show_stages_bubbles_and_the_schedule() -> None:
    analysis = analysed(messages(one_by_one, 4, 8))
    result = found(analysis)
    assert result.source == "messages" and result.inferred_stages
    assert [stage.rank for stage in result.stages] == [0, 1, 2, 3]
    assert result.bubble_ratio == pytest.approx(3 / 11, abs=1e-6)
    assert result.schedule == "1F1B" and result.microbatches == 8
    assert studied(messages(gpipe, 4, 8)).schedule == "GPipe"


@pytest.mark.parametrize(("order", "name"), [(one_by_one, "1F1B"), (gpipe, "GPipe")])
def test_messages_of_two_stages_show_the_schedule_by_the_first(order: Any, name: str) -> None:
    """The last stage's forwards and backwards lie in one piece, and so do some of the first's."""
    result = studied(messages(order, 2, 4))
    assert (result.schedule, result.microbatches) == (name, 4)
    assert result.bubble_ratio == pytest.approx(1 / 5, abs=1e-6)
    assert result.ideal_ratio == pytest.approx(1 / 5)


def test_waiting_for_the_stages_beside_is_bubble_and_no_straggler() -> None:
    """The messages of this pipeline wait for most of an iteration; the rules on waiting leave that to the pipeline's."""
    ranks = annotated(gpipe, 3, 4, lambda kind, stage, index: f"PP:{stage}{LETTERS[kind]}{index}")
    for rank, other in zip(ranks, messages(gpipe, 3, 4), strict=True):
        assert other.collectives is not None
        calls = other.collectives
        # A receive is posted when the iteration begins and ends when the message is there.
        receives = [code for code, name in enumerate(calls.strings.values) if name == "recv"]
        posted = calls["step"] * 200 * MS
        is_receive = [code in receives for code in calls["operation"].tolist()]
        calls.columns["start_ns"] = calls["start_ns"].copy()
        calls.columns["start_ns"][is_receive] = posted[is_receive]
        rank.collectives = calls
    analysis = analysed(ranks)
    waits = sum(one.wait_ns for one in analysis.collectives)
    assert waits > 0.3 * 3 * found(analysis).iteration_ns
    assert not findings(analysis) & {"straggler", "exposed-communication"}


def test_messages_between_equals_are_no_pipeline() -> None:
    """A ring (context parallelism) sends and receives with both neighbours at once."""
    ranks = []
    for rank in range(4):
        calls = [
            {
                "operation": operation,
                "group": "c",
                "peer": (rank + way) % 4,
                "step": 0,
                "start_ns": t,
                "end_ns": t + 5,
                "bytes": 8,
            }
            for t in range(0, 1000, 10)
            for operation, way in (("send", 1), ("recv", -1))
        ]
        device = [(t, t + 9, "compute", -1, 0) for t in range(0, 1000, 10)]
        ranks.append(rank_of(rank=rank, device=device, collectives=calls))
    assert result_of(analysed(ranks), "pipeline", Pipeline) is None
