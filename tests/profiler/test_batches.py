"""Tokens and samples of a batch, from its shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trine.profiler.batches import measure_batch

IDS = torch.zeros(4, 16, dtype=torch.int64)
IMAGES = torch.zeros(8, 3, 5, 5)


@pytest.mark.parametrize(
    ("batch", "tokens", "samples"),
    [
        (IDS, 64, 4),
        ((IDS, IDS), 64, 4),
        ([IDS, torch.zeros(4)], 64, 4),
        ({"labels": torch.zeros(4), "input_ids": IDS}, 64, 4),
        ({"a": {"b": [IDS]}}, 64, 4),
        (SimpleNamespace(input_ids=IDS), 64, 4),
        ((IMAGES, torch.zeros(8, dtype=torch.int64)), None, 8),
        (np.zeros((3, 7), dtype=np.int32), 21, 3),
        (torch.zeros(5), None, 5),
        (torch.tensor(1.0), None, None),
        ([], None, None),
        ("text", None, None),
        (None, None, None),
        (17, None, None),
    ],
)
def test_shapes_tell(batch: Any, tokens: int | None, samples: int | None) -> None:
    assert measure_batch(batch)[:2] == (tokens, samples)


def test_overrides() -> None:
    assert measure_batch(IMAGES, tokens=12, samples=lambda batch: len(batch) * 2)[:2] == (12, 16)
    assert measure_batch(IDS)[2] == 16
    assert measure_batch(IDS)[3]  # in host memory
    assert not measure_batch(IDS.to("meta"))[3]
