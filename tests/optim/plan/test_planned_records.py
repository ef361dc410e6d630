"""The record of a plan: it agrees with the plan, says that nobody measured it, and is not blamed for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trine
from trine.analyzers.reports import html, text
from trine.analyzers.results import Analysis
from trine.analyzers.run_facts import measure_run
from trine.optim.plan.described import described
from trine.optim.plan.drawn import simulated_step
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.planning import Plan
from trine.optim.plan.simulated_record import job_of, write_record

#: A pipeline of 32 ranks of tensor, context and data; all shards alone; experts whose software waits for messages.
ASKED = {
    "pipeline": ("llama3-8b", {"devices": 32, "pins": ["pipeline=4", "tensor=2", "context=2"]}),
    "sharded": ("llama3-8b", {"devices": 8, "stack": "trine", "pins": ["zero_stage=3"]}),
    "experts": ("mixtral-8x7b", {"devices": 64, "stack": "trine", "pins": ["pipeline=2", "expert=4"]}),
}


@pytest.fixture(scope="module", params=ASKED)
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Path]:
    """A plan and its record."""
    model, options = ASKED[request.param]
    found = trine.plan(model, "dgx-h100", global_batch=64, top=1, **options)  # type: ignore[arg-type]
    problem = found.problem
    asked = (problem.workload, problem.cluster, problem.stack, Layouts.of(**found.best.layout), 0)
    folder = tmp_path_factory.mktemp("planned") / "record"
    write_record(simulated_step(*asked), folder, described(*asked))
    return found, folder


@pytest.fixture(scope="module")
def analysis(planned: tuple[Plan, Path]) -> Analysis:
    return trine.analyze(trine.load(planned[1]))


@pytest.mark.slow
def test_its_numbers_are_the_plans(planned: tuple[Plan, Path], analysis: Analysis) -> None:
    best = planned[0].best
    facts = measure_run(analysis).metrics
    assert facts["step_time_ns"] / 1e9 == pytest.approx(best.step.value)
    assert facts["mfu"] == pytest.approx(best.mfu.value)
    assert facts["tokens_per_s"] == pytest.approx(best.tokens_per_s.value)
    assert facts["reserved_peak_bytes"] == pytest.approx(best.peak.value)
    fullest = next(rank.summary for rank in analysis.ranks if rank.summary.memory is not None)
    assert fullest.memory is not None
    assert fullest.memory.at_peak["parameters"] == pytest.approx(best.memory_bytes["parameters"], abs=1)


def test_it_says_that_nobody_measured_it(planned: tuple[Plan, Path], analysis: Analysis) -> None:
    run = json.loads((planned[1] / "run.json").read_text(encoding="utf-8"))
    assert run["simulated"] and run["planned"].startswith(planned[0].problem.workload.name)
    assert run["layout"] == planned[0].best.layout
    heads = [text.render(analysis)[:900], html.render(analysis).split("<nav>")[0]]
    for head in heads:
        assert "Planned, not measured: " in " ".join(head.split())
    assert analysis.mfu is not None and "(planned)" in analysis.mfu.inputs["step_time"]


def test_ranks_and_groups_are_the_jobs(planned: tuple[Plan, Path], analysis: Analysis) -> None:
    layout, devices = planned[0].best.layout, planned[0].problem.devices
    assert analysis.source.world_size == devices
    assert analysis.source.ranks == tuple(range(0, devices, devices // int(layout["pipeline"])))
    assert not analysis.source.missing_ranks
    sizes = {row.group.split()[0]: row.group_size for row in analysis.collectives}
    assert sizes["all"] == devices
    for kind in sizes.keys() & {"tensor", "context", "expert"}:
        assert sizes[kind] == layout[kind]
    assert sizes["data"] == int(layout["data"]) * int(layout["context"])
    assert all(row.bytes for row in analysis.collectives)
    # A time that nothing hides is no link's.
    assert all(row.busbw_bytes_per_s is None for row in analysis.collectives)


def test_it_is_not_blamed_for_being_no_run(analysis: Analysis) -> None:
    shown = " ".join(text.render(analysis).split())
    for words in (
        "trine.profile",
        "Goodput",
        "start of the process",
        "ranks are missing",
        "nothing is replicated",
        "neither DDP nor FSDP",
        "trine hardware --calibrate",
        "trine compare",
        "deep window",
        "not answered",
    ):
        assert words not in shown
    assert {item.state for item in analysis.checklist} <= {"pass", "fail"}
    ids = {note.id for note in analysis.data_quality}
    assert ids == ({"planned"} if "pipeline" in analysis.studies else set())


def test_a_zero_stage_names_its_way_of_sharing(planned: tuple[Plan, Path], analysis: Analysis) -> None:
    kind = {0: "ddp", 1: "zero", 2: "zero", 3: "fsdp2"}[int(planned[0].best.layout["zero_stage"])]
    assert analysis.ranks[0].summary.metadata["data_parallel"]["kind"] == kind
    item = next(item for item in analysis.checklist if item.id == "zero-where-replicated")
    assert kind in item.evidence


def test_in_memory_it_is_the_same(planned: tuple[Plan, Path], analysis: Analysis) -> None:
    problem = planned[0].problem
    asked = (problem.workload, problem.cluster, problem.stack, Layouts.of(**planned[0].best.layout), 0)
    found = trine.analyze(job_of(simulated_step(*asked), described(*asked)))
    assert found.mfu is not None and analysis.mfu is not None
    assert found.mfu.value == pytest.approx(analysis.mfu.value)
    assert found.source.world_size == analysis.source.world_size
