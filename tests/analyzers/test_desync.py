"""Dumps of jobs that hang in every way known, and of jobs that do not."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from flight_dumps import Dump
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.analyzers import analyze
from trine.analyzers.desync_words import statement
from trine.analyzers.reports import html, markdown, text
from trine.analyzers.results import Analysis
from trine.analyzers.studies import result_of
from trine.analyzers.studies._desync_ring import numel, ring_of
from trine.analyzers.studies.desync import Desync
from trine.record.readers.flight_recorder import open_paths

WAITS_NS = 60 * 10**9


def analysed(folder: Path, dumps: Sequence[Dump]) -> Analysis:
    return analyze(open_paths([dump.write(folder) for dump in dumps], folder))


def studied(folder: Path, dumps: Sequence[Dump]) -> Desync:
    result = result_of(analysed(folder, dumps), "desync", Desync)
    assert result is not None
    return result


def kinds(result: Desync) -> list[tuple[str, tuple[int, ...]]]:
    return [(culprit.kind, culprit.ranks) for culprit in result.culprits]


def world(count: int, done: int = 6, **how: object) -> list[Dump]:
    return [Dump(rank, count, **how).calls(done) for rank in range(count)]  # type: ignore[arg-type]


def test_the_real_desync_names_rank_1_and_its_call(data: Path) -> None:
    folder = data / "traces" / "flight_recorder" / "gloo_desync"
    analysis = analyze(open_paths(sorted(folder.iterdir()), folder))
    (finding,) = (one for one in analysis.findings if one.id == "desync")
    assert finding.kind == "fault"
    assert finding.title == (
        "Rank 1 called all_gather where ranks 0, 2 and 3 called all_reduce, "
        "at collective sequence 30 of the default group (rec.py:29)"
    )
    assert analysis.verdict.sentence.startswith("This job hangs: rank 1 called all_gather")
    assert analysis.verdict.confidence == "high"
    for page in (text.render(analysis), markdown.render(analysis), html.render(analysis)):
        assert "called all_gather where ranks 0, 2 and 3 called all_reduce" in " ".join(page.split())


def test_the_real_dumps_in_json_alone_say_the_same_without_a_line(data: Path) -> None:
    folder = data / "traces" / "flight_recorder" / "gloo_desync"
    result = result_of(analyze(open_paths(sorted(folder.glob("*.json")), folder)), "desync", Desync)
    assert result is not None and not result.stacks
    assert kinds(result) == [("operation", (1,))]
    assert result.culprits[0].sequence == 30


@pytest.mark.parametrize("pattern", ["*.json", "comm_lib_trace_rank_*"])
def test_the_real_healthy_dumps_have_no_desync(data: Path, pattern: str) -> None:
    folder = data / "traces" / "flight_recorder" / "gloo_plain"
    analysis = analyze(open_paths(sorted(folder.glob(pattern)), folder))
    assert not analysis.findings
    assert "No desync: 4 ranks agree on each of the 68 collectives" in analysis.verdict.sentence


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_healthy_dumps(tmp_path: Path, backend: str) -> None:
    analysis = analysed(tmp_path, world(4, backend=backend))
    result = result_of(analysis, "desync", Desync)
    assert result is not None and not result.culprits and not result.stuck
    assert not analysis.findings
    assert {item.id for item in analysis.not_bound_by} == {"desync"}


def test_another_operation(tmp_path: Path) -> None:
    dumps = world(4)
    for dump in dumps:
        operation = "broadcast" if dump.rank == 2 else "all_reduce"
        dump.call(operation, state="scheduled", line=77 if dump.rank == 2 else 10)
    result = studied(tmp_path, dumps)
    assert kinds(result) == [("operation", (2,))]
    culprit = result.culprits[0]
    assert (culprit.sequence, culprit.waiting, culprit.certainty) == (7, (0, 1, 3), "high")
    assert statement(culprit) == (
        "Rank 2 called broadcast where ranks 0, 1 and 3 called all_reduce, "
        "at collective sequence 7 of the default group (train.py:77)"
    )


def test_another_size_and_another_dtype(tmp_path: Path) -> None:
    dumps = world(3)
    for dump in dumps:
        dump.call("all_reduce", shapes=[[4, 4]] if dump.rank else [[4, 5]], state="started")
    assert kinds(studied(tmp_path, dumps)) == [("elements", (0,))]
    dumps = world(3)
    for dump in dumps:
        dump.call("broadcast", dtype="Half" if dump.rank == 1 else "Float", state="started")
    result = studied(tmp_path, dumps)
    assert kinds(result) == [("types", (1,))]
    assert "broadcast of Half where ranks 0 and 2 called broadcast of Float" in statement(result.culprits[0])


@pytest.mark.parametrize("operation", ["all_gather", "all_to_all", "gather", "scatter", "all_reduce_sparse"])
def test_uneven_sizes_are_allowed_where_the_operation_allows_them(tmp_path: Path, operation: str) -> None:
    dumps = [dump.call(operation, shapes=[[dump.rank + 1]]) for dump in world(3)]
    assert not studied(tmp_path, dumps).culprits


@pytest.mark.parametrize(
    "operation", ["_all_gather_base", "_reduce_scatter_base", "reduce", "allreduce_coalesced"]
)
def test_uneven_sizes_are_a_fault_where_it_does_not(tmp_path: Path, operation: str) -> None:
    dumps = [dump.call(operation, shapes=[[8 + (dump.rank == 1)]], state="started") for dump in world(3)]
    assert kinds(studied(tmp_path, dumps)) == [("elements", (1,))]


def test_a_difference_that_went_through_is_said_and_no_fault(tmp_path: Path) -> None:
    dumps = [dump.call("all_reduce", shapes=[[8 + (dump.rank == 1)]]).calls(2) for dump in world(3)]
    analysis = analysed(tmp_path, dumps)
    result = result_of(analysis, "desync", Desync)
    assert result is not None and kinds(result) == [("elements", (1,))] and result.culprits[0].completed
    assert not result.stuck and not analysis.findings and not analysis.not_bound_by


def test_a_call_too_many_a_call_too_few_and_two_swapped(tmp_path: Path) -> None:
    order = {"usual": ["all_reduce", "barrier", "broadcast"]}
    order["extra_call"] = ["all_gather", "all_reduce", "barrier"]
    order["skipped_call"] = ["barrier", "broadcast"]
    order["swapped"] = ["barrier", "all_reduce", "broadcast"]
    for hint in ("extra_call", "skipped_call", "swapped"):
        dumps = world(3)
        for dump in dumps:
            for operation in order[hint if dump.rank == 1 else "usual"]:
                dump.call(operation, state="scheduled")
        culprit = studied(tmp_path, dumps).culprits[0]
        assert (culprit.kind, culprit.ranks, culprit.hint) == ("operation", (1,), hint)


def test_a_tie_is_decided_by_what_the_ranks_did_before(tmp_path: Path) -> None:
    dumps = [Dump(rank, 2) for rank in range(2)]
    for dump in dumps:
        for _ in range(4):
            dump.call("all_gather").call("all_reduce").call("reduce_scatter")
        dump.call("all_gather").call("all_reduce")
        dump.call("reduce_scatter" if dump.rank == 0 else "broadcast", state="scheduled")
    culprit = studied(tmp_path, dumps).culprits[0]
    assert (culprit.ranks, culprit.hint, culprit.certainty) == ((1,), "history", "medium")


def test_a_tie_without_a_past_blames_nobody(tmp_path: Path) -> None:
    dumps = [Dump(0, 2).call("all_reduce", state="scheduled"), Dump(1, 2).call("barrier", state="scheduled")]
    result = studied(tmp_path, dumps)
    assert kinds(result) == [("operation", (0, 1))]
    said = "rank 0 all_reduce, rank 1 barrier; who is right cannot be told"
    assert said in statement(result.culprits[0])


def test_a_rank_that_never_came(tmp_path: Path) -> None:
    dumps = world(4)
    for dump in dumps:
        if dump.rank != 3:
            dump.call("all_reduce", state="started", line=55)
    result = studied(tmp_path, dumps)
    assert kinds(result) == [("missing", (3,))]
    said = statement(result.culprits[0])
    assert said.startswith("Rank 3 is missing from all_reduce, collective sequence 7 of the default group")
    assert "ranks 0, 1 and 2 (train.py:55) wait" in said and "train.py:10, is completed" in said


def test_rings_that_lost_different_entries_are_aligned_by_sequence(tmp_path: Path) -> None:
    dumps = world(3, done=50)
    for dump in dumps:
        dump.call("all_reduce" if dump.rank else "barrier", state="scheduled")
        del dump.entries[: 10 + 15 * dump.rank]
        dump.entries.reverse()  # writers do not promise an order
    analysis = analysed(tmp_path, dumps)
    result = result_of(analysis, "desync", Desync)
    assert result is not None and kinds(result) == [("operation", (0,))] and result.culprits[0].sequence == 51
    assert {note.id for note in analysis.data_quality} >= {"flight-recorder-overflow"}


def test_a_rank_without_a_dump_may_be_the_one(tmp_path: Path) -> None:
    dumps = [dump.call("all_reduce", state="started") for dump in world(4)]
    result = studied(tmp_path, dumps[:3])
    assert kinds(result) == [("no_dump", (3,))] and result.stuck
    assert "rank 3 left no dump: it may have died" in statement(result.culprits[0])
    # Where most are not here, that says nothing ...
    result = studied(tmp_path, dumps[:1])
    assert kinds(result) == [("no_dump", (1, 2, 3))] and not result.stuck
    # ... but for a wait of a minute.
    dumps[0].groups["1"] = ("tp", [0])
    dumps[0].call("all_reduce", group="1", later_ns=WAITS_NS)
    assert studied(tmp_path, dumps[:1]).stuck


def test_the_end_of_a_chain_is_to_blame_not_its_victims(tmp_path: Path) -> None:
    """Rank 0 waits for 1 in a, 1 waits for 2 in b, and 2 is in no call at all."""
    groups = {"a": ("dp", [0, 1]), "b": ("tp", [1, 2])}
    dumps = world(3, groups=groups)
    dumps[0].call("all_reduce", group="a", state="started")
    dumps[1].call("all_gather", group="b", state="started")
    assert kinds(studied(tmp_path, dumps)) == [("missing", (2,))]


def test_two_groups_entered_in_two_orders_are_a_deadlock(tmp_path: Path) -> None:
    groups = {"a": ("dp", [0, 1]), "b": ("tp", [0, 1])}
    dumps = world(2, groups=groups)
    dumps[0].call("all_reduce", group="a", state="started", line=5)
    dumps[1].call("all_gather", group="b", state="started", line=9)
    result = studied(tmp_path, dumps)
    assert [kind for kind, _ in kinds(result)] == ["deadlock"]
    assert set(result.culprits[0].ranks) == {0, 1}
    said = statement(result.culprits[0])
    assert "rank 0 in all_reduce, sequence 1 of group a at train.py:5" in said
    assert "rank 1 in all_gather, sequence 1 of group b at train.py:9" in said


def test_the_same_with_calls_that_return_at_once(tmp_path: Path) -> None:
    """Both ranks enqueued both, in two orders; each device holds the first and has not begun the second."""
    groups = {"a": ("dp", [0, 1]), "b": ("tp", [0, 1])}
    dumps = world(2, groups=groups)
    dumps[0].call("all_reduce", group="a", state="started").call("all_gather", group="b", state="scheduled")
    dumps[1].call("all_gather", group="b", state="started").call("all_reduce", group="a", state="scheduled")
    result = studied(tmp_path, dumps)
    assert [kind for kind, _ in kinds(result)] == ["deadlock"] and result.stuck


def test_one_order_in_both_groups_is_none(tmp_path: Path) -> None:
    groups = {"a": ("dp", [0, 1]), "b": ("tp", [0, 1])}
    dumps = world(2, groups=groups)
    for dump in dumps:
        dump.call("all_reduce", group="a", state="started").call("all_gather", group="b", state="scheduled")
    result = studied(tmp_path, dumps)
    assert not result.stuck and "deadlock" not in {kind for kind, _ in kinds(result)}


def test_all_in_and_some_devices_have_not_begun(tmp_path: Path) -> None:
    dumps = world(3)
    for dump in dumps:
        dump.call("all_reduce", state="scheduled" if dump.rank == 2 else "started")
    analysis = analysed(tmp_path, dumps)
    result = result_of(analysis, "desync", Desync)
    assert result is not None and kinds(result) == [("not_started", (2,))] and not result.stuck
    assert not analysis.findings and "device of rank 2 has not begun it" in analysis.verdict.sentence
    dumps[0].groups["1"] = ("own", [0])
    dumps[0].call("barrier", group="1", later_ns=WAITS_NS)
    assert studied(tmp_path, dumps).stuck


def test_all_in_and_none_out_is_not_the_programs_fault(tmp_path: Path) -> None:
    dumps = [dump.call("all_reduce", state="started") for dump in world(3)]
    result = studied(tmp_path, dumps)
    assert kinds(result) == [("in_flight", (0, 1, 2))] and not result.stuck
    assert "the network or a device, not the program" in statement(result.culprits[0])


def test_a_dump_taken_earlier_is_not_a_missing_rank(tmp_path: Path) -> None:
    dumps = [Dump(rank, 3).calls(40 if rank else 20) for rank in range(3)]
    dumps[1].call("all_reduce", state="scheduled")
    analysis = analysed(tmp_path, dumps)
    result = result_of(analysis, "desync", Desync)
    assert result is not None and result.older_dumps == (0,)
    assert "missing" not in {kind for kind, _ in kinds(result)} or result.culprits[0].ranks != (0,)
    assert "dump-older" in {note.id for note in analysis.data_quality}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_dumps_of_a_job_at_work_are_taken_one_after_the_other(tmp_path: Path, backend: str) -> None:
    """Rank 2's shows the 20th call in flight, the others' show it done and rank 0 in the next: it has not hung."""
    dumps = [Dump(rank, 3, backend=backend).calls(19) for rank in range(3)]
    for dump in dumps:
        dump.call("all_reduce", state="started" if dump.rank == 2 else "completed")
    dumps[0].call("all_reduce", state="started")
    dumps[1].call("all_reduce", state="started")
    analysis = analysed(tmp_path, dumps)
    result = result_of(analysis, "desync", Desync)
    assert result is not None and not result.stuck and result.older_dumps == (2,)
    assert not analysis.findings and "taken before they came to it" in analysis.verdict.sentence
    # The same, and the others have been in the next call for a minute: something holds it up.
    dumps[0].groups["1"] = ("own", [0])
    dumps[0].call("barrier", group="1", later_ns=WAITS_NS)
    assert studied(tmp_path, dumps).stuck
    # Its own last call done, and it never came to the next: missing.
    stuck = [Dump(rank, 3, backend=backend).calls(20) for rank in range(3)]
    for dump in stuck[:2]:
        dump.call("all_reduce", state="started")
    assert kinds(studied(tmp_path, stuck)) == [("missing", (2,))]


def test_a_rank_that_died_under_gloo_is_told_where_some_calls_failed(tmp_path: Path) -> None:
    """The others' all_reduce failed on rank 1 (retired, as if completed) and still waits on rank 0; rank 2 is gone."""
    dumps = [Dump(rank, 4, backend="gloo").calls(10) for rank in (0, 1, 3)]
    for dump in dumps:
        dump.call("all_reduce", state="completed" if dump.rank == 1 else "scheduled")
    analysis = analysed(tmp_path, dumps)
    result = result_of(analysis, "desync", Desync)
    assert result is not None and kinds(result) == [("no_dump", (2,))] and result.stuck
    assert "rank 2 left no dump" in statement(result.culprits[0])
    assert {"dump-missing", "missing-ranks"} & {note.id for note in analysis.data_quality}


def test_all_ranks_of_a_job_in_one_call_are_all_whatever_the_dumps_say_of_the_group(tmp_path: Path) -> None:
    dumps = [Dump(rank, 2, backend="gloo").calls(10) for rank in range(2)]
    for dump in dumps:
        dump.call("all_reduce", state="started")
    result = studied(tmp_path, dumps)
    assert not result.stuck and statement(result.culprits[0]).startswith("All 2 ranks are in all_reduce")


def test_who_is_in_a_group_may_be_unknown_where_all_ranks_left_a_dump(tmp_path: Path) -> None:
    """Gloo's dumps name no members: ranks 0 and 1 stand in one group and rank 2 in another."""
    dumps = [Dump(rank, 3, backend="gloo").calls(10) for rank in range(3)]
    for dump in dumps:
        group = "b" if dump.rank == 2 else "a"
        dump.groups[group] = ("dp" if dump.rank == 2 else "tp", [])
        dump.call("all_reduce", group=group, state="started")
    result = studied(tmp_path, dumps)
    assert not result.stuck
    words = [statement(culprit) for culprit in result.culprits]
    assert any(
        "if rank 2 does, who is in all_reduce of group b, they wait for each other" in one for one in words
    )
    assert not any("the other ranks' dumps would show" in one for one in words)


def test_a_send_without_its_receive(tmp_path: Path) -> None:
    groups = {"p": ("pp", [4, 5])}
    dumps = [Dump(rank, 6, groups=groups) for rank in (4, 5)]
    dumps[0].call("send 0->1", group="p", peer=True).call(
        "send 0->1", group="p", peer=True, state="started", line=3
    )
    dumps[1].call("recv 1<-0", group="p", peer=True)
    result = studied(tmp_path, dumps)
    assert kinds(result) == [("peer_missing", (5,))] and result.stuck
    assert statement(result.culprits[0]).startswith(
        "Rank 4 sends to rank 5 in group pp (p), and rank 5 never receives it (train.py:3)"
    )


def test_messages_that_pair_are_none_and_of_another_size_are_one(tmp_path: Path) -> None:
    def pair(size: int, state: str) -> list[Dump]:
        dumps = [Dump(rank, 2) for rank in range(2)]
        dumps[0].call("send 0->1", peer=True, shapes=[[16]], state=state)
        dumps[1].call("recv 1<-0", peer=True, shapes=[[size]], state=state)
        return dumps

    assert not studied(tmp_path, pair(16, "started")).culprits
    result = studied(tmp_path, pair(12, "started"))
    assert kinds(result) == [("peer_elements", (0, 1))]
    assert "sends 16 elements to rank 1 in the default group, which receives 12" in statement(
        result.culprits[0]
    )


def test_two_blocking_sends_are_a_deadlock(tmp_path: Path) -> None:
    dumps = [Dump(rank, 2) for rank in range(2)]
    dumps[0].call("send 0->1", peer=True, state="started")
    dumps[1].call("send 1->0", peer=True, state="started")
    result = studied(tmp_path, dumps)
    assert [kind for kind, _ in kinds(result)] == ["deadlock"]


def test_coalesced_calls_are_compared_whole(tmp_path: Path) -> None:
    def coalesced(dump: Dump, parts: int) -> Dump:
        number = dump.sequences["0"] + 1
        for _ in range(parts):
            dump.call("all_reduce", sequence=number, state="started")
        return dump.call("coalesced", sequence=number, state="started")

    dumps = [coalesced(dump, 3) for dump in world(3)]
    assert [kind for kind, _ in kinds(studied(tmp_path, dumps))] == ["in_flight"]
    dumps = [coalesced(dump, 2 if dump.rank == 1 else 3) for dump in world(3)]
    result = studied(tmp_path, dumps)
    assert kinds(result) == [("operation", (1,))]
    assert "Rank 1 called all_reduce (2 of them coalesced) where ranks 0 and 2" in statement(
        result.culprits[0]
    )


def test_two_groups_of_one_name_are_told_apart_by_their_ranks(tmp_path: Path) -> None:
    dumps = world(4)
    for dump in dumps:
        dump.groups["7"] = ("tp", [0, 1] if dump.rank < 2 else [2, 3])
        dump.call("all_reduce" if dump.rank < 2 else "barrier", group="7", state="completed")
    result = studied(tmp_path, dumps)
    assert not result.culprits
    assert sorted(group.ranks for group in result.groups if group.group == "7") == [(0, 1), (2, 3)]


def test_old_versions_without_states_groups_and_types(tmp_path: Path) -> None:
    paths = []
    for dump in world(2):
        dump.call("all_reduce" if dump.rank else "barrier", state="scheduled")
        entries = [
            {
                "record_id": entry["record_id"],
                "pg_id": 0,
                "seq_id": entry["collective_seq_id"],
                "profiling_name": entry["profiling_name"],
                "input_sizes": entry["input_sizes"],
                "state": entry["state"],
                "time_created_ns": entry["time_created_ns"],
                "frames": entry["frames"],
            }
            for entry in dump.entries
        ]
        path = tmp_path / f"nccl_trace_rank_{dump.rank}"
        path.write_bytes(pickle.dumps(entries))
        paths.append(path)
    result = result_of(analyze(open_paths(paths, tmp_path)), "desync", Desync)
    assert result is not None and result.culprits[0].sequence == 7


def test_a_part_stays_small(tmp_path: Path) -> None:
    dump = Dump(0, 8).calls(2_500).call("barrier", state="scheduled")
    ring = ring_of(next(iter(open_paths([dump.write(tmp_path)], tmp_path))))
    assert ring is not None and len(ring.record) == 2_000 and ring.lost == 501
    assert len(pickle.dumps(ring)) < 120_000


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_nonsense_in_a_dump_breaks_the_analysis(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("dumps")
    dumps = [dump.call("all_reduce", state="started") for dump in world(2, done=3)]
    nonsense = st.sampled_from(
        [None, "", "x", -1, 2**70, 1.5, [], {}, [[None]], [["a"]], "[", True, [[2**80]]]
    )
    for dump in dumps:
        for entry in dump.entries:
            for key in data.draw(st.lists(st.sampled_from(sorted(entry)), max_size=3)):
                entry[key] = data.draw(nonsense)
    analysis = analysed(folder, dumps)
    assert not [note for note in analysis.data_quality if note.id == "study-failed"], analysis.data_quality
    assert text.render(analysis)


def test_elements_that_no_buffer_can_have_are_unknown() -> None:
    assert numel("[4, 8], [2]") == 34
    assert numel(f"[{10**17}, {10**17}]") is None
    assert numel(f"[{'9' * 5000}]") is None
