"""Ranks in file names: what is one, and what only looks like one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.record.readers._names import natural, rank_of_name, ranks_of_names


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank0.json", 0),
        ("rank_3", 3),
        ("trace-rank-12.json.gz", 12),
        ("Rank7.json", 7),
        ("nccl_trace_rank_5", 5),
        ("comm_lib_trace_rank_11", 11),
        ("node1_rank5.json", 5),
        ("node1_rank5/trace.json", 5),
        ("global_rank12_local_rank4.json", 12),
        ("rank3-of-8.json", 3),
        ("step_100/rank_3.pickle", 3),
        ("rank_3/step_100.pickle", 3),
        ("worker_3", 3),
        ("worker0.1700000000000.pt.trace.json", 0),
        ("r12.json", 12),
        ("gpu3.sqlite", 3),
        ("local_rank3.json", 3),
        ("pp_rank_2.json", 2),
        ("_0.json", 0),
        ("megatron_kineto_4.json.gz", 4),
        ("snapshot_2.pickle", 2),
        ("trace_00012.json", 12),
        ("0_trace.json", 0),
    ],
)
def test_a_rank(name: str, rank: int) -> None:
    assert rank_of_name(name) == rank


@pytest.mark.parametrize(
    "name",
    [
        "host_21147.1698955063520869240.pt.trace.json",
        "ip-172-31-16-248.us-east-2.compute.internal_21150.1698955063519804832.pt.trace.json.gz",
        "10-0-0-3.json",
        "trace_2024_05_06.json",
        "step_5.json",
        "memory_step_100.pickle",
        "proc12345.json",
        "pid_1234.json",
        "tp0_pp1.json",
        "tp_rank_00_pp_rank_001.json",
        "tp2_pp1_0.json",
        "node1_local_rank3.json",
        "node_2.json",
        "my_prank3.json",
        "report1.sqlite",
        "trace.json",
        "step_based_trace_2543932.json.gz",
        "torch1.9_resnet50_workers4.json.gz",
        "mi300x_qwen1.5_0.5b.json.gz",
        "medium_512_training_memory_snapshot.pickle",
        "",
        "/",
    ],
)
def test_no_rank(name: str) -> None:
    assert rank_of_name(name) is None


def test_certain_wants_the_word() -> None:
    assert rank_of_name("rank3.json", certain=True) == 3
    assert rank_of_name("model_7.json", certain=True) is None
    assert rank_of_name("worker3.json", certain=True) is None


def test_names_that_tell_each_other_apart() -> None:
    assert ranks_of_names(["rank1/trace_0.json", "rank0/trace_0.json"]) == [1, 0]
    assert ranks_of_names(["a/7/profile/x.json", "a/8/profile/x.json"]) == [7, 8]
    assert ranks_of_names(["b.json", "a.json"]) is None
    assert ranks_of_names(["rank1.json", "rank1.json.gz"]) is None


@given(st.integers(0, 9999), st.sampled_from(["rank{}.json", "rank_{}", "x_rank-{}.pickle", "n_{}.json.gz"]))
def test_any_rank_comes_back(rank: int, form: str) -> None:
    assert rank_of_name(form.format(rank)) == rank


@given(st.text(max_size=60))
def test_any_text_is_a_name(text: str) -> None:
    rank = rank_of_name(text)
    assert rank is None or 0 <= rank < 1_000_000
    assert "".join(part for _, _, part in natural(text)).isascii() == text.isascii()


def test_numbers_sort_as_numbers() -> None:
    assert sorted(["rank10", "rank9", "rank1"], key=natural) == ["rank1", "rank9", "rank10"]
