"""To and from whom gloo's messages go: the trace says it in the operator's arguments alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trine.record.model import MISSING, Table
from trine.record.readers.kineto import read_file


def written(path: Path, groups: list[list[int]], peers: list[str]) -> Path:
    events: list[dict[str, Any]] = []
    for number, peer in enumerate(peers):
        begin = 1000.0 + 100 * number
        names = ("c10d::send", "gloo:send") if number % 2 == 0 else ("c10d::recv_", "gloo:recv")
        inputs = {"Input Dims": [[[4]], [], [], []], "Concrete Inputs": ["", "", peer, "0"]}
        events += [
            {"ph": "X", "cat": "cpu_op", "name": names[0], "pid": 1, "tid": 1, "ts": begin, "dur": 20, "args": inputs},
            # The annotation begins within the operator and ends behind it.
            {"ph": "X", "cat": "user_annotation", "name": names[1], "pid": 1, "tid": 1, "ts": begin + 10, "dur": 50,
             "args": {"Input Dims": [[4]], "Input type": ["float"]}},
        ]  # fmt: skip
    configured = [
        {"pg_name": str(place), "pg_desc": "default_pg", "pg_size": len(ranks), "ranks": ranks}
        for place, ranks in enumerate(groups)
    ]
    content = {
        "distributedInfo": {"rank": 1, "world_size": 9, "pg_config": configured},
        "traceEvents": events,
    }
    path.write_text(json.dumps(content))
    return path


def messages(path: Path) -> Table:
    table = read_file(path).collectives
    assert table is not None
    return table


def test_peers_are_ranks_of_the_only_group(tmp_path: Path) -> None:
    table = messages(written(tmp_path / "rank1.json", [[0, 1, 5]], ["2", "0", "0", "2"]))
    assert list(table.text("operation")) == ["send", "recv", "send", "recv"]
    assert table["peer"].tolist() == [5, 0, 0, 5]
    assert (table["issued_ns"] <= table["start_ns"]).all()


@pytest.mark.parametrize("groups", [[], [[0, 1, 5], [1, 5]]])
def test_of_several_groups_it_is_not_known_which(tmp_path: Path, groups: list[list[int]]) -> None:
    table = messages(written(tmp_path / "rank1.json", groups, ["2", "0"]))
    assert len(table) == 2 and (table["peer"] == MISSING).all()


@pytest.mark.parametrize("peer", ["", "x", "-1", "99", "1e5"])
def test_nonsense_is_no_peer(tmp_path: Path, peer: str) -> None:
    table = messages(written(tmp_path / "rank1.json", [[0, 1, 5]], [peer, peer]))
    assert (table["peer"] == MISSING).all()


def alone(path: Path, world: int, rank: int) -> Path:
    """The same without the operators' arguments, as a profiler without shapes writes it."""
    written(path, [list(range(world)), list(range(world))], ["0", "0"])
    content = json.loads(path.read_text())
    content["distributedInfo"] |= {"rank": rank, "world_size": world}
    for event in content["traceEvents"]:
        event["args"] = {}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_other_is_the_peer_without_any_argument(tmp_path: Path, rank: int) -> None:
    assert messages(alone(tmp_path / f"rank{rank}.json", 2, rank))["peer"].tolist() == [1 - rank] * 2


def test_of_three_ranks_the_peer_stays_unknown(tmp_path: Path) -> None:
    assert (messages(alone(tmp_path / "rank1.json", 3, 1))["peer"] == MISSING).all()
