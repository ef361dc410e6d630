"""Shape buckets: few widths, the same losses, one compilation a bucket."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sequence_cases import Documents, engine_losses, gpt, optimizer_of, packed_loader, plain_losses
from torch.utils.data import DataLoader

import trine
from trine.optim.config import Config, Data
from trine.optim.runtime.sequences import lengths_of
from trine.optim.runtime.shape_buckets import LEAST_BUCKET, ShapeBuckets, automatic_bucket
from trine.record.errors import UsageError
from trine.samples.gpt import loss_of
from trine.samples.text import pad_documents


@given(st.integers(1, 1 << 20))
def test_automatic_buckets_are_few_and_near(width: int) -> None:
    bucket = automatic_bucket(width)
    assert bucket >= width and automatic_bucket(bucket) == bucket
    assert bucket == LEAST_BUCKET or bucket <= width * 1.5
    assert bucket & (bucket - 1) == 0 or (bucket % 3 == 0 and (bucket // 3) & (bucket // 3 - 1) == 0)


def test_the_first_automatic_buckets() -> None:
    assert sorted({automatic_bucket(width) for width in range(1, 1025)}) == [
        64, 96, 128, 192, 256, 384, 512, 768, 1024,
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_padded_to_a_bucket_and_otherwise_the_same(lengths: list[int]) -> None:
    documents = Documents(lengths)
    batch = pad_documents([documents[index] for index in range(len(lengths))])
    width = batch["input_ids"].shape[1]
    padded = ShapeBuckets((16, 40, 60))(batch)
    bucket = next(each for each in (16, 40, 60) if width <= each)
    for name, filler in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
        assert padded[name].shape == (len(lengths), bucket) and padded[name].dtype == batch[name].dtype
        assert torch.equal(padded[name][:, :width], batch[name]) and (padded[name][:, width:] == filler).all()
    known = lengths_of(padded)
    assert known is not None and known[0] == lengths


class Pair(NamedTuple):
    ids: torch.Tensor
    targets: torch.Tensor


def test_forms_and_fillers() -> None:
    ids = torch.tensor([[5, 6, 7], [5, 9, 9]])
    targets = torch.tensor([[6, 7, 8], [-100, -100, -100]])
    buckets = ShapeBuckets((5,))
    for pair in ((ids, targets), [ids, targets], Pair(ids, targets)):
        padded = buckets(pair)
        assert type(padded) is type(pair)
        assert padded[0].tolist() == [[5, 6, 7, 9, 9], [5, 9, 9, 9, 9]]  # padding's own id
        assert padded[1].tolist() == [[6, 7, 8, -100, -100], [-100] * 5]
    assert buckets(ids).tolist() == [[5, 6, 7, 0, 0], [5, 9, 9, 0, 0]]
    named = buckets({"input_ids": ids, "labels": targets, "genre": torch.tensor([1, 2]), "names": ["a", "b"]})
    assert named["genre"].tolist() == [1, 2] and named["names"] == ["a", "b"]
    placed = buckets({"input_ids": ids, "position_ids": torch.arange(3).expand(2, 3)})
    assert placed["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    full = torch.ones(2, 5, dtype=torch.long)
    assert buckets(full) is full
    with pytest.raises(
        UsageError, match="a batch is 6 wide, and the last bucket 5: add a bucket of 6 or more"
    ):
        buckets(torch.ones(2, 6, dtype=torch.long))
    for nothing in (3, {"x": ids}, (torch.rand(2, 3),), [torch.ones(3, dtype=torch.long)]):
        with pytest.raises(UsageError, match=r"data\.shape_buckets: the batch is no mapping with input_ids"):
            buckets(nothing)


def test_automatic_buckets_end_at_the_model_s_longest_sequence() -> None:
    assert ShapeBuckets(None, 70)(torch.ones(1, 65, dtype=torch.long)).shape == (1, 70)
    assert ShapeBuckets(None, 70)(torch.ones(1, 3, dtype=torch.long)).shape == (1, 64)
    assert ShapeBuckets(None, 70)(torch.ones(1, 80, dtype=torch.long)).shape == (
        1,
        96,
    )  # the model's to refuse


@pytest.mark.parametrize("buckets", [[16, 32, 64], "auto"])
def test_losses_are_the_same_on_few_widths(buckets: Any) -> None:
    lengths = [(7 * n * n + 3 * n) % 40 + 1 for n in range(96)]
    loader = packed_loader(lengths, 4)
    seen: list[Any] = []
    bucketed = engine_losses({"data.shape_buckets": buckets}, loader, seen=seen)
    assert bucketed == pytest.approx(plain_losses(loader), rel=1e-10)
    widths = {batch["input_ids"].shape[1] for batch in seen}
    assert widths <= ({16, 32, 64} if isinstance(buckets, list) else {64})
    assert len({batch["input_ids"].shape[1] for batch in loader}) > len(widths)


@pytest.mark.parametrize("wrong", [[0, 4], [4, 4], [8, 4], ["a"], [1.5], [True], "many", 64])
def test_what_the_key_takes(wrong: Any) -> None:
    with pytest.raises(
        UsageError, match=r"data\.shape_buckets = .*it takes a list of ascending whole numbers or"
    ):
        Config.from_dict({"data": {"shape_buckets": wrong}})


def test_the_key_survives_toml(tmp_path: Any) -> None:
    for buckets in ((64, 128), "auto"):
        config = Config(data=Data(shape_buckets=buckets))
        (tmp_path / "tuned.toml").write_text(config.to_toml())
        assert Config.from_toml(tmp_path / "tuned.toml") == config
    with pytest.raises(UsageError, match=r"data\.packed_length.*data\.packing"):
        Config.from_dict({"data": {"packed_length": 64}})


def _graphs(buckets: list[int], count: int) -> list[tuple[int, int]]:
    """(width of the batch, graphs that torch._dynamo had compiled after it) of each step, one document a step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = gpt()
    config = trine.Config().with_changes({"compute.compile": "blocks", "data.shape_buckets": buckets})
    engine = trine.optimize(model, optimizer_of(model), config, loss_fn=loss_of)
    found = []
    lengths = [n % 30 + 3 for n in range(count)]
    for batch in engine.steps(DataLoader(Documents(lengths), batch_size=1, collate_fn=pad_documents)):
        engine.train_step(batch)
        found.append((batch["input_ids"].shape[1], int(counters["stats"]["unique_graphs"])))
    engine.close()
    return found


def _hold_one_compilation_a_bucket(found: list[tuple[int, int]], buckets: list[int]) -> None:
    seen: set[int] = set()
    for (width, after), before in zip(found, [0, *(graphs for _, graphs in found)], strict=False):
        assert after - before == (width not in seen)
        seen.add(width)
    assert seen == set(buckets)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns itself
def test_one_graph_a_bucket(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """None more when a bucket comes again. Graphs are counted, not made faster: compiling them would take long."""
    original = torch.nn.Module.compile

    def captured(self: Any, dynamic: bool | None = None, **_: Any) -> None:
        original(self, backend="eager", dynamic=dynamic)

    monkeypatch.setattr(torch.nn.Module, "compile", captured)
    buckets = [8, 12, 16, 24, 32]
    _hold_one_compilation_a_bucket(_graphs(buckets, 90), buckets)
    assert not [line for line in caplog.messages if "compiled anew" in line]
    without = _graphs([], 6)  # the control: the second width is compiled anew, for any width
    assert [graphs for _, graphs in without][:2] == [1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_compilation_a_bucket() -> None:
    """By PyTorch's own compiler."""
    _hold_one_compilation_a_bucket(_graphs([16, 32], 40), [16, 32])
