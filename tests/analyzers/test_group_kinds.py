"""What process groups are for, and what each kind of parallelism costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from analysis_tables import calls_at, rank_of, summary_of

import trine
from trine.analyzers.conclusion import conclude
from trine.analyzers.group_kinds import kind_of_caller, kinds_of_groups
from trine.analyzers.results import Analysis, RankSummary
from trine.analyzers.selection import parse_selection, select
from trine.analyzers.studies import Scope, result_of
from trine.analyzers.studies import groups as groups_study
from trine.analyzers.studies.groups import GroupCosts, GroupsResult, to_json
from trine.analyzers.summary import summarize
from trine.record.model import Group, Job, Rank, Strings

MS = 1_000_000


def kind(
    description: str | None, ranks: tuple[int, ...] = (), world: int = 16, **operations: int
) -> tuple[str, str]:
    groups = [Group("7", None, description, ranks)]
    found = kinds_of_groups(groups, {"7": operations}, {}, world)["7"]
    return found.kind, found.by


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("dp", "data"),
        ("mesh_dp", "data"),
        ("mesh_dp_shard_cp", "data"),
        ("fsdp", "data"),
        ("DATA_PARALLEL_GROUP", "data"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("tp", "tensor"),
        ("mesh_tp", "tensor"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("mesh_sp", "tensor"),
        ("pp", "pipeline"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("EMBEDDING_GROUP", "pipeline"),
        ("ep", "expert"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("moe", "expert"),
        ("cp", "context"),
        ("CONTEXT_PARALLEL_GROUP", "context"),
        ("mesh_ep", "expert"),
    ],
)
def test_frameworks_say_it_in_the_description(description: str, expected: str) -> None:
    assert kind(description, (0, 1)) == (expected, "description")


@pytest.mark.parametrize("description", [None, "undefined", "", "3", "group_12", "shape", "type", "depth"])
def test_words_that_say_nothing(description: str | None) -> None:
    assert kind(description, (0, 1, 3)) == ("unknown", "nothing")


def test_without_words_the_operations_tell() -> None:
    assert kind(None, (0, 4), send=3, recv=3) == ("pipeline", "operations")
    assert kind(None, (0, 1, 2, 3), all_to_all=8, all_reduce=1) == ("expert", "operations")


def test_without_words_and_operations_the_ranks_tell() -> None:
    assert kind(None, (0, 1, 2, 3), all_reduce=4) == ("tensor", "ranks")
    assert kind("undefined", (0, 4, 8, 12), all_reduce=4) == ("data", "ranks")
    assert kind(None, (0, 1, 5), all_reduce=4) == ("unknown", "nothing")


def test_the_only_group_of_all_ranks_is_data_parallel_when_it_exchanges_gradients() -> None:
    assert kind("default_pg", tuple(range(16)), all_reduce=9, broadcast=1) == ("data", "operations")
    assert kind("default_pg", tuple(range(16)), all_to_all=9, all_reduce=1)[0] == "world"


def test_beside_smaller_groups_the_group_of_all_ranks_is_just_that() -> None:
    groups = [
        Group("0", None, "default_pg", (0, 1, 2, 3)),
        Group("1", None, "tp", (0, 1)),
        Group("1", None, "tp", (2, 3)),
    ]
    found = kinds_of_groups(groups, {"0": {"all_reduce": 3}, "1": {"all_reduce": 3}}, {}, 4)
    assert (found["0"].kind, found["1"].kind) == ("world", "tensor")


def test_callers_tell_of_unnamed_groups() -> None:
    assert kind_of_caller("_ReduceFromModelParallelRegion") == "tensor"
    assert kind_of_caller("DistributedDataParallel.forward") == "data"
    assert kind_of_caller("aten::add") is None
    found = kinds_of_groups([], {"": {"all_reduce": 10}}, {"": {"tensor": 8}}, 8)
    assert (found[""].kind, found[""].by) == ("tensor", "callers")
    few = kinds_of_groups([], {"": {"all_reduce": 10}}, {"": {"tensor": 4}}, 8)
    assert few[""].kind == "unknown"


# --- costs ---------------------------------------------------------------------------------------


def job_of(*ranks: Rank) -> Analysis:
    summaries = [summarize(rank, parse_selection("all")) for rank in ranks]
    return concluded(*summaries)


def concluded(*summaries: RankSummary) -> Analysis:
    return conclude(Job(Path("by hand"), "kineto", (), None), summaries, parse_selection("all"))


def costs(analysis: Analysis) -> dict[str, GroupCosts]:
    result = result_of(analysis, "groups", GroupsResult)
    assert result is not None
    return {one.kind: one for one in result.kinds}


def reduced(summary: RankSummary) -> object:
    """The study's part of a rank that has collectives and nothing else."""
    rank = Rank(summary.rank, "by hand", "kineto", Strings(), collectives=summary.collectives)
    everything = parse_selection("all")
    return groups_study.reduce(Scope(rank, everything, select(rank, everything), (), summary.collectives))


def layout(rank: int) -> Rank:
    """Two by two: tensor pairs (0, 1), (2, 3), data pairs (0, 2), (1, 3). Rank 3 is late in tensor's."""
    late = 4 if rank == 3 else 0
    spans = [((10 + late) * MS, 20 * MS, "tp"), (30 * MS, 36 * MS, "dp")]
    device = [
        (0, (10 + late) * MS, "compute", -1, 0, "gemm"),
        *((start, end, "communication", -1, 0, "nccl") for start, end, _ in spans),
        (33 * MS, 40 * MS, "compute", -1, 0, "gemm", 1),
    ]
    collectives = [
        {
            **call,
            "device_row": row,
        }
        for row, (start, end, group) in enumerate(spans, 1)
        for call in calls_at([start], [end], group=group, bytes=1000)
    ]
    groups = (
        Group("tp", None, "mesh_tp", (rank - rank % 2, rank - rank % 2 + 1)),
        Group("dp", None, "mesh_dp", (rank % 2, rank % 2 + 2)),
    )
    return rank_of(rank=rank, device=device, collectives=collectives, groups=groups, world_size=4)


def test_costs_of_each_kind() -> None:
    found = costs(job_of(*(layout(rank) for rank in range(4))))
    assert set(found) == {"tensor", "data"}
    tensor, data = found["tensor"], found["data"]
    assert (tensor.groups, tensor.sizes, tensor.ranks, tensor.calls) == (2, (2,), 4, 2)
    # Transfers of ranks 0 and 1: 10 ms; of 2 and 3: 6 ms, for which rank 2 waits 4 ms.
    assert (tensor.transfer_ns, tensor.wait_ns) == (8 * MS, 1 * MS)
    assert [(late.rank, late.caused_wait_ns, late.lateness_ns) for late in tensor.late] == [
        (3, 4 * MS, 4 * MS)
    ]
    assert (data.transfer_ns, data.wait_ns, data.late) == (6 * MS, 0, ())
    assert (data.busy_ns, data.exposed_ns) == (6 * MS, 3 * MS)
    assert data.exposed_share == pytest.approx(3 / 40)
    # Two ranks: the bus carries what the buffer holds.
    assert data.busbw_bytes_per_s == pytest.approx(1000 / 0.006)
    assert [one["kind"] for one in to_json(result_of(job_of(layout(0)), "groups", GroupsResult))["kinds"]]  # type: ignore[arg-type]


def test_a_rank_alone_has_exposure_and_no_waits() -> None:
    found = costs(job_of(layout(0)))
    assert found["data"].transfer_ns is None and found["data"].exposed_ns == 3 * MS and not found["data"].late


def test_sends_and_receives_in_a_group_for_nothing_particular_are_a_pipelines() -> None:
    groups = (Group("0", None, "default_pg", (0, 1)),)
    sender = summary_of(0, calls_at([0], [9 * MS], "send", "0", peer=1), groups=groups)
    receiver = summary_of(1, calls_at([6 * MS], [9 * MS], "recv", "0", peer=0), groups=groups)
    found = costs(concluded(*(replace(one, parts={"groups": reduced(one)}) for one in (sender, receiver))))
    assert set(found) == {"pipeline"}
    assert (found["pipeline"].transfer_ns, found["pipeline"].wait_ns) == (3 * MS, 3 * MS)
    assert found["pipeline"].late[0].rank == 1


def test_no_collectives_no_result() -> None:
    analysis = job_of(rank_of(device=[(0, 10, "compute")]))
    assert "groups" not in analysis.studies
    assert any(note.id == "no-groups" for note in analysis.data_quality)


def test_megatrons_unnamed_group_is_tensor_parallel_by_its_callers(data: Path) -> None:
    found = costs(trine.analyze(trine.load(data / "traces" / "kineto" / "megatron_tp8_a100")))
    assert set(found) == {"tensor"} and found["tensor"].known_by == ("callers",)
    assert {late.rank for late in found["tensor"].late[:2]} == {0, 6}
