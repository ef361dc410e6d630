"""What a batch says of its padding, and what is kept of it; batches that do not say so count for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from trine.profiler.padding import MOST_ELEMENTS, MOST_LENGTHS, SequenceLengths, padding_of

IDS = torch.arange(32).reshape(4, 8) + 1
MASK = (torch.arange(8)[None] < torch.tensor([[8], [5], [2], [1]])).long()
#: Two sequences of 5 and 2 tokens, one slot of padding behind them, in the last of four rows.
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 3 + [[0, 1, 2, 3, 4, 0, 0, 0]])


def masked_labels(filler: int) -> dict[str, torch.Tensor]:
    ids, labels = IDS.clone(), IDS.clone()
    ids[MASK == 0] = filler
    labels[MASK == 0] = -100
    labels[:, 0] = -100  # a prompt: not learned, and no padding
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("batch", "padding", "lengths", "packed"),
    [
        ({"input_ids": IDS, "attention_mask": MASK}, 16, [8, 5, 2, 1], False),
        ({"attention_mask": MASK.bool()}, 16, [8, 5, 2, 1], False),
        ({"attention_mask": MASK.flip(1).to(torch.float32)}, 16, [8, 5, 2, 1], False),
        ({"attention_mask": MASK.numpy()}, 16, [8, 5, 2, 1], False),
        ([{"input_ids": IDS, "attention_mask": MASK}, "more"], 16, [8, 5, 2, 1], False),
        (SimpleNamespace(input_ids=IDS, attention_mask=MASK), 16, [8, 5, 2, 1], False),
        ({"input_ids": IDS, "lengths": torch.tensor([8, 5, 2, 1])}, 16, [8, 5, 2, 1], False),
        ({"input_ids": IDS.reshape(1, 32), "cu_seqlens": torch.tensor([0, 10, 29])}, 3, [10, 19], True),
        ({"input_ids": IDS, "position_ids": PACKED}, 3, [5, 3, 5, 3, 5, 3, 5], True),
        (masked_labels(0), 16, [8, 5, 2, 1], False),
        ({"input_ids": IDS, "attention_mask": torch.ones(4, 8)}, 0, [8, 8, 8, 8], False),
    ],
)
def test_padding_is_counted(batch: Any, padding: int, lengths: list[int], packed: bool) -> None:
    found = padding_of(batch)
    assert found is not None
    assert (found.padding, found.lengths.tolist(), found.packed) == (padding, lengths, packed)
    assert found.slots == found.padding + found.lengths.sum() == 32


@pytest.mark.parametrize(
    "batch",
    [
        None,
        17,
        "text",
        IDS,
        (IDS, IDS),
        {"input_ids": IDS},
        {"input_ids": IDS, "labels": IDS},
        {
            "input_ids": IDS,
            "labels": torch.full((4, 8), -100),
        },  # no id repeats: nothing shows that it is padding
        {"input_ids": IDS, "position_ids": torch.arange(8).repeat(4, 1)},
        {"input_ids": IDS, "attention_mask": MASK[:, :4]},  # of something else
        {"input_ids": IDS, "attention_mask": MASK[:, None, None, :]},
        {"input_ids": IDS, "attention_mask": MASK.to("meta")},
        {"input_ids": IDS, "attention_mask": MASK.to(torch.bfloat16)},
        {"input_ids": IDS, "lengths": torch.tensor([9, 5, 2, 1])},
        {"input_ids": IDS, "cu_seqlens": torch.tensor([0, 40])},
        {"attention_mask": torch.ones(1, MOST_ELEMENTS + 1, dtype=torch.bool)},
        {"attention_mask": torch.nn.Parameter(torch.ones(2, 2))},
        {"attention_mask": MASK.to_sparse()},
    ],
)
def test_what_does_not_say_is_unknown(batch: Any) -> None:
    assert padding_of(batch) is None


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=6),
    st.sampled_from("lr"),
)
def test_any_padded_batch_is_counted_to_the_token(rows: list[list[int]], side: str) -> None:
    width = max(map(len, rows))
    ids, mask = np.full((len(rows), width), 99), np.zeros((len(rows), width), dtype=np.int64)
    for row, tokens in enumerate(rows):
        place = slice(0, len(tokens)) if side == "l" else slice(width - len(tokens), width)
        ids[row, place], mask[row, place] = tokens, 1
    found = padding_of({"input_ids": ids, "attention_mask": mask})
    assert found is not None and found.lengths.tolist() == [len(tokens) for tokens in rows]
    assert found.padding == sum(width - len(tokens) for tokens in rows)
    labels = np.where(mask == 1, ids, -100)
    by_labels = padding_of({"input_ids": ids, "labels": labels})
    if side == "l" and by_labels is not None:
        assert by_labels.padding == found.padding


def test_a_count_that_does_not_fit_the_mask_is_not_mixed_with_it() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK}
    lengths = SequenceLengths()
    assert lengths.take(batch, 33) is None and lengths.facts() is None
    assert lengths.take(batch, None) is None
    assert lengths.take(batch, 32) == 16
    facts = lengths.facts()
    assert facts is not None and not facts["tokens_exclude_padding"]
    assert lengths.take(batch, 16) == 16  # the user's own function counts real tokens
    facts = lengths.facts()
    assert facts is not None and facts["tokens_exclude_padding"]


def test_lengths_stay_bounded_and_spread_over_the_run() -> None:
    lengths = SequenceLengths()
    for number in range(10_000):
        mask = (np.arange(16)[None] < np.full((4, 1), 1 + number * 15 // 9_999)).astype(np.int64)
        lengths.take({"attention_mask": mask}, 64)
    facts = lengths.facts()
    assert facts is not None
    assert MOST_LENGTHS / 4 <= len(facts["lengths"]) <= MOST_LENGTHS
    assert len(facts["lengths"]) == sum(facts["sequences"])
    assert min(facts["lengths"]) == 1 and max(facts["lengths"]) >= 15
    assert abs(np.mean(facts["lengths"]) - 8.5) < 1


class _Calls(TorchDispatchMode):
    """Hears of every operator."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def test_looking_leaves_tensors_as_they_are() -> None:
    """A buffer that is used again for the next, longer batch grows; and no operator runs."""
    mask, ids = MASK.clone(), IDS.clone()
    with _Calls() as calls:
        assert padding_of({"input_ids": ids, "attention_mask": mask}) is not None
    assert calls.heard == []
    mask.resize_(64, 64)
    ids.resize_(64, 64)
    assert mask.untyped_storage().resizable()


@pytest.mark.parametrize(
    "mask",
    [MASK.T.contiguous().T, torch.cat([MASK, MASK * 0], dim=1)[:, :8], torch.cat([MASK * 0, MASK])[4:]],
)
def test_views_are_read_where_they_lie(mask: torch.Tensor) -> None:
    found = padding_of({"input_ids": IDS, "attention_mask": mask})
    assert found is not None and found.lengths.tolist() == [8, 5, 2, 1]


def test_rows_that_share_memory_and_memory_that_was_freed() -> None:
    found = padding_of({"attention_mask": MASK[1:2].expand(3, 8)})
    assert found is not None and found.lengths.tolist() == [5, 5, 5]
    freed = MASK.clone()
    freed.untyped_storage().resize_(0)
    assert padding_of({"attention_mask": freed}) is None
