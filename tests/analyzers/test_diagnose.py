"""The verdict, its confidence, the triangle and the checklist."""

from __future__ import annotations

from dataclasses import replace

import pytest
from analysis_builders import (
    GIB,
    METADATA,
    MS,
    breakdown,
    build,
    communication,
    rank_result,
    shares,
    statistics,
    steps_table,
)
from hypothesis import given
from hypothesis import strategies as st

from trine.analyzers.diagnose import diagnose
from trine.analyzers.findings import gather
from trine.analyzers.results import Analysis, CheckItem, Hardware, MemorySummary, Mfu, NamedTime
from trine.analyzers.verdict import verdict
from trine.record.model import Quality


def checklist(analysis: Analysis) -> dict[str, CheckItem]:
    return {item.id: item for item in diagnose(analysis).checklist}


def test_the_verdict_names_the_heaviest_fault_with_its_change_and_gain() -> None:
    table = steps_table(shares(data=0.3, optimizer=0.22))
    ranks = [rank_result(r, steps=table, part=communication()) for r in (0, 1)]
    verdict = diagnose(build(ranks)).verdict
    assert verdict.bound_by == "input-bound"
    assert "held back by its input" in verdict.sentence
    assert "data.workers" in verdict.sentence and "would gain about" in verdict.sentence
    assert verdict.confidence == "high"


def test_a_healthy_run_is_bound_by_computation_and_nothing_is_promised() -> None:
    verdict = diagnose(build()).verdict
    assert verdict.bound_by == "computation"
    assert "No fault found" in verdict.sentence and "no change" in verdict.sentence


@pytest.mark.parametrize(
    ("exposed", "said"),
    [
        (0.6, "is computation and 60 % communication that it does not hide"),
        (0.3, "is computation, which bounds it, and 30 % communication that it does not hide"),
        (0.1, "is computation, which bounds it, and no change"),
    ],
)
def test_much_exposed_communication_is_said_though_no_fault_is_found(exposed: float, said: str) -> None:
    ranks = [rank_result(r, steps=steps_table(shares(exposed_communication=exposed))) for r in (0, 1)]
    sentence = verdict(gather(build(ranks)), ()).sentence
    assert sentence.startswith("No fault found") and said in sentence


def test_nothing_is_said_where_nothing_was_seen() -> None:
    missing = rank_result(0, metadata={}, breakdown_missing="the file has no device work")
    verdict = diagnose(build([missing], steps=0, step_statistics=None)).verdict
    assert verdict.bound_by is None
    assert verdict.confidence == "low"
    assert "the file has no device work" in verdict.sentence
    assert verdict.triangle is None


@pytest.mark.parametrize(
    ("count", "world", "severity", "expected"),
    [(20, 2, "info", "high"), (20, 4, "info", "medium"), (5, 2, "info", "medium"), (20, 2, "error", "low")],
)
def test_confidence_follows_steps_ranks_and_quality(
    count: int, world: int, severity: str, expected: str
) -> None:
    table = steps_table(count=count)
    ranks = [rank_result(r, steps=table, part=communication()) for r in (0, 1)]
    note = Quality("test", severity, "a test")  # type: ignore[arg-type]
    analysis = build(ranks, world_size=world, steps=count, data_quality=(note,))
    assert diagnose(analysis).verdict.confidence == expected


# --- the triangle ----------------------------------------------------------------------------------


def test_the_triangle_divides_by_what_limits() -> None:
    rows = (
        NamedTime("ampere_sgemm_128x64_tn", "compute", 10, 60 * MS),
        NamedTime("void at::native::vectorized_elementwise_kernel<4>", "compute", 10, 40 * MS),
    )
    window = breakdown(communication=0.2, copy=0.1, idle={"host": 0.2})
    analysis = build([rank_result(0, window=window, kernels=rows, metadata={})], steps=3)
    point = diagnose(analysis).verdict.triangle
    # Compute 0.5 splits 60 : 40; communication 0.2, copies 0.1; idle is left out.
    assert point == pytest.approx((0.3 / 0.8, 0.2 / 0.8, 0.3 / 0.8))


def test_the_hull_has_a_point_a_rank_and_the_dot_is_their_mean() -> None:
    tables = [steps_table(shares(exposed_communication=share)) for share in (0.0, 0.4)]
    ranks = [rank_result(r, steps=table, part=communication()) for r, table in enumerate(tables)]
    verdict = diagnose(build(ranks)).verdict
    assert len(verdict.hull) == 2
    assert verdict.triangle == pytest.approx(
        tuple(sum(point[n] for point in verdict.hull) / 2 for n in range(3))
    )
    assert verdict.hull[1][1] > verdict.hull[0][1]


@given(
    st.lists(
        st.tuples(*(st.floats(0, 0.24) for _ in range(4))),
        min_size=3,
        max_size=12,
    )
)
def test_any_phases_give_shares_that_sum_to_one(rows: list[tuple[float, float, float, float]]) -> None:
    names = ("data", "optimizer", "exposed_communication", "copy")
    table = steps_table([shares(**dict(zip(names, row, strict=True))) for row in rows])
    analysis = diagnose(build([rank_result(0, steps=table)], steps=len(rows)))
    assert analysis.verdict.triangle is not None
    assert sum(analysis.verdict.triangle) == pytest.approx(1.0)
    assert all(0 <= share <= 1 for share in analysis.verdict.triangle)
    for finding in analysis.findings:
        assert 0 <= finding.severity <= 1


# --- the checklist ---------------------------------------------------------------------------------


def test_the_checklist_keeps_the_fields_order() -> None:
    assert list(checklist(build())) == [
        "single-device-mfu",
        "zero-where-replicated",
        "layout-fits-model",
        "balance",
        "linear-scaling",
    ]


@pytest.mark.parametrize(
    ("value", "span", "state"),
    [
        (0.55, {}, "pass"),
        (0.3, {}, "fail"),
        (None, {"6n": 0.47, "palm": 0.53}, "unknown"),
        (None, {"6n": 0.3, "palm": 0.35}, "fail"),
    ],
)
def test_mfu_against_one_half(value: float | None, span: dict[str, float], state: str) -> None:
    mfu = Mfu(value, "palm" if value else None, 1e12, 1e14, "bf16", span)
    assert checklist(build(mfu=mfu))["single-device-mfu"].state == state


def test_mfu_that_cannot_be_said_says_why() -> None:
    note = Quality("no-mfu", "info", "no MFU: this device has no known peak")
    item = checklist(build(data_quality=(note,)))["single-device-mfu"]
    assert (item.state, item.evidence) == ("unknown", note.message)


def with_memory(peak: float, optimizer_bytes: int) -> Analysis:
    memory = MemorySummary(round(peak * GIB), None, 80 * GIB, {}, False, 0, "device")
    model = {"parameter_bytes": GIB, "gradient_bytes": GIB, "optimizer_bytes": optimizer_bytes}
    metadata = {**METADATA, "device": {"type": "cuda"}, "model": model}
    table = steps_table()
    ranks = [
        rank_result(r, steps=table, part=communication(), memory=memory, metadata=metadata) for r in (0, 1)
    ]
    return build(ranks, hardware=Hardware("GPU", 1))


def test_replicated_state_fails_only_where_it_weighs() -> None:
    assert checklist(with_memory(60, 30 * GIB))["zero-where-replicated"].state == "fail"
    assert checklist(with_memory(60, GIB))["zero-where-replicated"].state == "pass"


def test_a_layout_that_barely_fits_fails() -> None:
    assert checklist(with_memory(60, GIB))["layout-fits-model"].state == "pass"
    assert checklist(with_memory(78, GIB))["layout-fits-model"].state == "fail"


def test_a_layout_of_several_kinds_is_not_called_data_parallelism_alone() -> None:
    engine = {"data_parallel": {"kind": "fsdp2", "ranks": 2}}

    def of(parallel: dict[str, int], **more: object) -> dict[str, CheckItem]:
        metadata = {**METADATA, **engine, "configuration": {"parallel": parallel, **more}}
        memory = MemorySummary(60 * GIB, None, 80 * GIB, {}, False, 0, "device")
        return checklist(
            build(
                [rank_result(r, part=communication(), memory=memory, metadata=metadata) for r in (0, 1)],
                hardware=Hardware("GPU", 1),
            )
        )

    cut = of({"pipeline": 2, "data": 2, "tensor": 2})
    assert "pipeline 2, tensor 2" in cut["layout-fits-model"].evidence
    assert "alone" not in cut["layout-fits-model"].evidence
    assert cut["zero-where-replicated"].state == "unknown"
    assert of({"tensor": 2}, zero={"stage": 3})["zero-where-replicated"].state == "pass"
    assert "alone" in of({"data": 2})["layout-fits-model"].evidence


def test_balance_and_scaling_read_exposed_communication() -> None:
    assert checklist(build())["balance"].state == "pass"
    assert checklist(build())["linear-scaling"].state == "unknown"
    table = steps_table(shares(exposed_communication=0.3))
    heavy = build([rank_result(r, steps=table, part=communication()) for r in (0, 1)])
    assert checklist(heavy)["balance"].state == "fail"
    assert checklist(heavy)["linear-scaling"].state == "fail"


def test_diagnosis_is_pure() -> None:
    analysis = build()
    assert diagnose(analysis) == diagnose(analysis)
    assert analysis.findings == () and diagnose(replace(analysis)).checklist


def test_one_rank_needs_no_balance() -> None:
    alone = build([rank_result(0, steps=steps_table())], step_statistics=statistics())
    assert checklist(alone)["balance"].state == "pass"
    assert checklist(alone)["zero-where-replicated"].state == "pass"


def test_the_verdict_has_words_for_every_fault() -> None:
    """An id with a hyphen in a sentence is nobody's language. A hang has a sentence of its own."""
    from trine.analyzers.findings import rules
    from trine.analyzers.verdict import _BOUND

    assert {rule.ID for rule in rules() if rule.KIND == "fault"} - {"desync"} == set(_BOUND)
