"""Numbers of published runs as people write them: with their sign and unit, and none that a column cannot have."""

from __future__ import annotations

from typing import Any

import planner_rows
import pytest
from test_planner_rows import ROW, one, reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step_time_s": "-5"}, "step_time_s -5 is no time of a step"),
        ({"step_time_s": "− 5 s"}, "step_time_s − 5 s is no time of a step"),
        ({"step_time_s": "1e-9"}, "step_time_s 1e-9 is no time of a step"),
        ({"step_time_s": "8e5"}, "step_time_s 8e5 is no time of a step"),
        ({"tokens_per_s_gpu": "-525"}, "tokens_per_s_gpu -525 is no throughput of a device"),
        ({"mem_gib": "-1"}, "mem_gib -1 is no memory of a device"),
        ({"oom": "-1"}, "oom -1 is no mark of an out-of-memory"),
        ({"n_gpus": "-64"}, "n_gpus -64 is no number of devices"),
        ({"n_gpus": "1e12"}, "n_gpus 1e12 is no number of devices"),
        ({"layers": "-3"}, "layers -3 is no number of layers"),
        ({"seq_len": "1e7"}, "seq_len 1e7 is no length of a sequence"),
        ({"gbs": "1e15"}, "gbs 1e15 is no batch"),
        ({"gbs": "1e999"}, "gbs 1e999 is no batch"),
        ({"tp": "-8"}, "tp -8 is no number of ranks"),
    ],
)
def test_numbers_that_a_column_cannot_have_are_skipped(changes: dict[str, str], said: str) -> None:
    assert reason(**changes) == said


def test_a_row_without_a_credible_number_is_no_gap_in_coverage() -> None:
    (skipped,) = planner_rows.read_rows([{**ROW, "step_time_s": "-5"}])[1]
    assert not skipped.countable


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"step_time_s": "3900 ms"}, "seconds", 3.9),
        ({"step_time_s": ".5"}, "seconds", 0.5),
        ({"step_time_s": "1.5 min"}, "seconds", 90.0),
        ({"step_time_s": "~3.9 s"}, "seconds", 3.9),
        ({"step_time_s": "3.8–4.0 s"}, "seconds", 3.9),
        ({"step_time_s": "", "tokens_per_s_gpu": "1.2k"}, "seconds", 64 * 2048 / 64 / 1200),
        ({"mem_gib": "75,776 MiB"}, "memory_gib", 74.0),
        ({"gbs": "4M", "seq_len": "8K"}, "batch", 512),
        ({"gbs": "131,072 tokens"}, "batch", 64),
        ({"gbs": "1K"}, "batch", 1024),
        ({"gbs": "128k tokens"}, "batch", 64),
        ({"gbs": "64 sequences (131,072 tokens)"}, "batch", 64),
        ({"step_time_s": "3,9"}, "seconds", 3.9),
        ({"step_time_s": "3,900 ms"}, "seconds", 3.9),
        ({"mem_gib": "61.2,80"}, "memory_gib", 61.2),
        ({"gbs": "1,024"}, "batch", 1024),
    ],
)
def test_numbers_are_in_their_units(changes: dict[str, str], field: str, value: float) -> None:
    assert getattr(one(**changes), field) == pytest.approx(value)


def test_multiples_are_said_once() -> None:
    run = one(seq_len="8K", gbs="4M")
    assert run.workload.sequence == 8192
    assert run.assumed.count("seq_len 8K as 8192") == 1
    assert run.assumed.count("gbs 4M as 512 sequences of 8192") == 1


@pytest.mark.parametrize(
    "changes",
    [{"zero_stage": "zero-1"}, {"mem_gib": "0"}, {"oom": "0"}, {"n_gpus": "64 (8 nodes)"}, {"vpp": "0"}],
)
def test_what_only_looks_negative_or_large_is_read(changes: dict[str, str]) -> None:
    run: Any = one(**changes)
    assert run.devices == 64 and run.seconds == 3.9


@pytest.mark.parametrize("cell", ["step_time_s", "tokens_per_s_gpu", "mem_gib"])
def test_out_of_memory_is_said_where_the_number_would_stand(cell: str) -> None:
    run = one(**{"step_time_s": "", cell: "OOM"})
    assert run.oom and run.seconds is None
    assert "no truth" in reason(**{"step_time_s": "", cell: "–"})
