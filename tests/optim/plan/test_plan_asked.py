"""``trine.plan`` from Python: what it takes, what it refuses in one line, how a plan prints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_problems import DENSE, cluster

import trine
from trine.record.errors import UsageError


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"devices": "16"}, "devices must be a whole number, not '16'"),
        ({"cluster": None}, "cluster must be a known cluster's or device's name"),
        ({"model": 5}, "model must be a known model's name"),
        ({"tokens": "lots"}, "no number of tokens"),
        ({"tokens": [1]}, "tokens must be a number"),
        ({"price": "2", "tokens": 1e9}, "price must be a number"),
        ({"pins": 5}, "pins must be words, not 5"),
        ({"pins": [5]}, "pins must be words, not 5"),
        ({"pins": {"tensor": 8.5}}, "tensor must be a whole number"),
        ({"search": 3}, "search must be words, not 3"),
        ({"stack": 4}, "stack must be a software stack's name"),
        ({"memory_headroom": "x"}, "memory_headroom must be a number"),
        ({"memory_headroom": None}, "memory_headroom must be a number"),
        ({"top": "3"}, "top must be a whole number"),
        ({"top": 0}, "top must be at least 1"),
        ({"sequence": 1.5}, "sequence must be a whole number"),
        ({"global_batch": True}, "global_batch must be a whole number"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_one_line(asked: dict[str, Any], told: str) -> None:
    options: dict[str, Any] = {"model": DENSE, "cluster": cluster(), "global_batch": 8, **asked}
    with pytest.raises(UsageError, match=r"^[^\n]*$") as caught:
        trine.plan(options.pop("model"), options.pop("cluster"), **options)
    assert told in str(caught.value)


def test_tokens_and_pins_are_taken_as_people_write_them() -> None:
    words = trine.plan(DENSE, cluster(), global_batch=8, tokens="1T", pins="pipeline=1", top=1)
    numbers = trine.plan(DENSE, cluster(), global_batch=8, tokens=1e12, pins={"pipeline": 1}, top=1)
    assert words.best.cost is not None and words.best.cost == numbers.best.cost
    assert words.problem.pins == numbers.problem.pins == {"pipeline": (1,)}


class Model(torch.nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 64)
        self.blocks = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(64, 4, 256) for _ in range(2))
        self.head = torch.nn.Linear(64, 1000)


def test_a_live_model_is_planned_for() -> None:
    model = Model()
    found = trine.plan(model, "dgx-a100-80", devices=4, sequence=512, top=1)
    assert found.problem.workload.parameters == sum(each.numel() for each in model.parameters())
    assert found.problem.workload.sequence == 512
    with pytest.raises(UsageError, match="sequence=2048"):
        trine.plan(model, "dgx-a100-80", devices=4)


def test_a_plan_prints_as_one_line() -> None:
    found = trine.plan(DENSE, cluster(), global_batch=8, pins={"tensor": 2}, top=2)
    line = str(found)
    assert "\n" not in line and len(line) < 300
    assert "small on 4 x test device, megatron-core: tensor 2" in line and " a step (" in line


def test_a_record_that_is_no_path_is_refused() -> None:
    with pytest.raises(UsageError, match="not 5"):
        trine.what_if(5, {"ranks": 2})  # type: ignore[arg-type]
