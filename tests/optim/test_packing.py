"""Packing: each token once, rows that do not overflow, positions and masks that end at borders; the same training."""

from __future__ import annotations

import pickle
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import RankPool
from sequence_cases import Documents, engine_losses, gpt, optimizer_of, packed_loader, plain_losses
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import trine
from trine.optim.batches import pieces_of, pieces_of_size, size_of, to_device
from trine.optim.runtime.documents import Documents as Borders
from trine.optim.runtime.packing import Packed, Packer, balanced, best_fit
from trine.optim.runtime.sequences import lengths_of
from trine.profiler.padding import padding_of
from trine.record.errors import UsageError
from trine.samples.gpt import loss_of
from trine.samples.text import pad_documents

PACKING = {"data.packing": True}
LENGTHS = [5, 9, 1, 16, 3, 12, 2, 2, 31, 7, 7, 8, 1, 1, 20, 4]
_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=40)


def padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    documents = Documents(lengths, seed)
    return pad_documents([documents[index] for index in range(len(lengths))])


# --- the arithmetic ----------------------------------------------------------------------------


@given(_lengths, st.integers(40, 100))
def test_rows_hold_every_sequence_once_and_do_not_overflow(lengths: list[int], capacity: int) -> None:
    rows = best_fit(lengths, capacity)
    assert sorted(index for row in rows for index in row) == [i for i, length in enumerate(lengths) if length]
    assert all(0 < sum(lengths[index] for index in row) <= capacity for row in rows)
    assert rows == best_fit(list(lengths), capacity)  # the same on every rank, and on resume
    # No two rows would fit into one: any such packing needs less than twice the fewest rows possible.
    filled = sorted(sum(lengths[index] for index in row) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity


@given(_lengths, st.integers(1, 8))
def test_balanced_rows_hold_every_sequence_once_and_differ_by_at_most_one(
    lengths: list[int], count: int
) -> None:
    rows = balanced(lengths, count)
    assert len(rows) == count
    assert sorted(index for row in rows for index in row) == [i for i, length in enumerate(lengths) if length]
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert max(filled) - min(filled) <= max(lengths)  # else the fullest row's last would have gone elsewhere


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="41 tokens does not fit a row of 40"):
        best_fit([3, 41], 40)
    with pytest.raises(ValueError, match="do not fit a row of 8"):
        Borders.of([[4, 5]], 8)
    with pytest.raises(ValueError, match="do not fit"):
        Borders.of([[4, 0]], 8)


@settings(max_examples=30, deadline=None)
@given(_lengths, st.one_of(st.none(), st.integers(40, 90)), st.integers(0, 3))
def test_packed_rows(lengths: list[int], length: int | None, seed: int) -> None:
    batch = padded(lengths, seed)
    packed = Packer(length)(batch)
    rows, width = packed["input_ids"].shape
    assert (rows, width) == (len(packed.lengths), packed.length)
    assert length in (None, width)
    originals = sorted(tuple(Documents(lengths, seed).ids[i].tolist()) for i, n in enumerate(lengths) if n)
    found = []
    for row, within in enumerate(packed.lengths):
        begin = 0
        for each in within:
            end = begin + each
            document = packed["input_ids"][row, begin:end]
            found.append(tuple(document.tolist()))
            assert packed["positions"][row, begin:end].tolist() == list(range(each))
            # The first label is what a loss that shifts would ask the document before for.
            assert packed["labels"][row, begin:end].tolist() == [-100, *document[1:].tolist()]
            begin = end
        assert (packed["labels"][row, begin:] == -100).all()
        assert (packed["positions"][row, begin:] == 0).all()
    assert sorted(found) == originals
    assert sum(packed.document_lengths) == sum(lengths)
    assert packed.slots <= max(packed.slots_before, width) or length is not None


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(0, 6)
)
def test_masks_are_block_diagonal_and_causal(lengths: list[list[int]], more: int) -> None:
    width = max(sum(row) for row in lengths) + more
    borders = Borders.of(lengths, width)
    mask = borders.mask()
    assert mask.shape == (len(lengths), 1, width, width)
    for row, within in enumerate(lengths):
        blocks = [torch.ones(each, each, dtype=torch.bool).tril() for each in (*within, width - sum(within))]
        assert torch.equal(mask[row, 0], torch.block_diag(*blocks).bool())
    segments = [
        each for within in lengths for each in (*within, width - sum(within)) if each
    ]  # what remains of a row is a document of its own
    assert borders.cu_seqlens.tolist() == [0, *accumulate(segments)]
    longest = max(each for within in lengths for each in within)
    assert borders.longest >= longest and (borders.longest <= width)


@settings(max_examples=30, deadline=None)
@given(_lengths, st.integers(1, 6), st.booleans())
def test_pieces_hold_every_document_once(lengths: list[int], count: int, short_rows: bool) -> None:
    packed = Packer(None if short_rows else 200)(padded(lengths))
    pieces = pieces_of(packed, count)
    assert len(pieces) == count
    assert _documents_of(pieces) == _documents_of([packed])
    for piece in pieces:  # as if these documents had been packed by themselves
        numbers, made = piece["documents"], Borders.of(piece.lengths, piece.length)
        assert torch.equal(numbers.numbers, made.numbers) and torch.equal(numbers.cu_seqlens, made.cu_seqlens)
    if sum(1 for length in lengths if length) > 1:
        parts = pieces_of_size(packed, 2)
        assert [size_of(part) for part in parts[:-1]] == [2] * (len(parts) - 1)
        assert _documents_of(parts) == _documents_of([packed])
        assert _documents_of([parts[0].joined(tuple(parts[1:]))]) == _documents_of([packed])


def _documents_of(batches: list[Any]) -> list[tuple[int, ...]]:
    found = []
    for packed in batches:
        for row, within in enumerate(packed.lengths):
            edges = [0, *accumulate(within)]
            found += [tuple(packed["input_ids"][row, a:b].tolist()) for a, b in pairwise(edges)]
    return sorted(found)


@settings(max_examples=30, deadline=None)
@given(_lengths.filter(lambda lengths: max(lengths) > 1))
def test_the_profiler_counts_the_same_padding(lengths: list[int]) -> None:
    batch = padded(lengths)
    before = padding_of(batch)
    found = lengths_of(batch)
    assert before is not None and found is not None
    assert (found[0], found[1] - sum(found[0])) == (before.lengths.tolist(), before.padding)
    packed = Packer(64)(batch)
    after = padding_of(packed)
    assert after is not None and after.packed
    assert (after.slots, after.padding) == (packed.slots, packed.slots - sum(lengths))
    assert sorted(after.lengths.tolist()) == sorted(length for length in lengths if length)


# --- the same training -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data.packed_length": 64},
        {"data.packed_length": 128, "compute.attention": "sdpa"},
        {"compute.attention": "flash"},
        {"accumulation.steps": 2},
        {"data.packed_length": 128, "accumulation.steps": 5},
        {"accumulation.micro_batch": 3},
        {"data.workers": 1},
    ],
    ids=str,
)
def test_trains_as_padded(changes: dict[str, Any]) -> None:
    plain = plain_losses(packed_loader(LENGTHS, 4))
    seen: list[Any] = []
    packed = engine_losses({**PACKING, **changes}, packed_loader(LENGTHS, 4), seen=seen)
    assert packed == pytest.approx(plain, rel=1e-10)
    assert all(isinstance(batch, Packed) for batch in seen)


def test_documents_that_see_each_other_train_another_way() -> None:
    """What borders and positions are for: without either, losses are others."""
    plain = plain_losses(packed_loader(LENGTHS, 4))
    seen = list(engine_batches(packed_loader(LENGTHS, 4)))
    for left in ("positions", "documents"):
        without = [{name: value for name, value in batch.items() if name != left} for batch in seen]
        assert plain_losses(seen) == pytest.approx(plain, rel=1e-10)
        assert plain_losses(without) != pytest.approx(plain, rel=1e-5)


def test_each_document_is_an_ordinary_run_of_its_own() -> None:
    model = gpt()
    packed = Packer(None)(padded(LENGTHS))
    logits = model(packed["input_ids"], positions=packed["positions"], documents=packed["documents"])
    for row, within in enumerate(packed.lengths):
        edges = [0, *accumulate(within)]
        for begin, end in pairwise(edges):
            alone = model(packed["input_ids"][row : row + 1, begin:end])
            assert torch.allclose(logits[row : row + 1, begin:end], alone, rtol=0, atol=1e-12)


def test_ranks_with_unequal_tokens_train_as_one_process_on_the_whole(two_ranks: RankPool) -> None:
    lengths = [(7 * n * n + 3 * n) % 32 + 1 for n in range(32)]
    whole = gpt()
    documents = Documents(lengths)
    plain_losses(
        [pad_documents([documents[i] for i in range(at, at + 8)]) for at in range(0, len(lengths), 8)], whole
    )
    wanted = torch.cat([p.detach().flatten() for p in whole.parameters()])
    for changes in (PACKING, {**PACKING, "accumulation.steps": 2}):
        (first, tokens), (second, others) = two_ranks.run("sequence_cases:share_of_rank", 2, changes, lengths)
        assert tokens != others  # or the ranks' weights would not matter
        assert first == second
        assert torch.allclose(torch.tensor(first, dtype=torch.float64), wanted, rtol=1e-10, atol=1e-13)


def test_two_runs_and_a_resumed_one_pack_alike() -> None:
    batches = [list(engine_batches(packed_loader(LENGTHS, 4))) for _ in range(2)]
    later = list(engine_batches(DataLoader(Documents(LENGTHS), batch_size=4, sampler=range(8, 16))))
    for one, other in zip(batches[0], batches[1], strict=True):
        assert one.lengths == other.lengths and torch.equal(one["input_ids"], other["input_ids"])
    assert [batch.lengths for batch in later] == [batch.lengths for batch in batches[0][2:]]


def engine_batches(loader: Any) -> Any:
    model = gpt()
    engine = trine.optimize(model, optimizer_of(model), trine.Config().with_changes(PACKING), loss_fn=loss_of)
    yield from engine.steps(loader)
    engine.close()


def test_gradients_of_dropout_free_layers_do_not_see_padding() -> None:
    """One row of many documents against one of each: gradients, not only losses."""

    def gradients(batch: Any) -> list[torch.Tensor]:
        model = gpt()
        loss_of(model, batch)[0].backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    batch = padded(LENGTHS)
    for length in (None, sum(LENGTHS), 500):
        for one, other in zip(gradients(batch), gradients(Packer(length)(batch)), strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-13)


# --- forms of batches --------------------------------------------------------------------------


def test_forms_that_say_the_same_pack_alike() -> None:
    documents = Documents(LENGTHS[:8])
    samples = [documents[index] for index in range(8)]
    by_mask = pad_documents(samples)
    by_lengths = {**by_mask, "lengths": torch.tensor(LENGTHS[:8])}
    del by_lengths["attention_mask"]
    by_labels = {name: by_mask[name] for name in ("input_ids", "labels")}
    forms = [by_mask, by_lengths, by_labels, samples, [sample["input_ids"] for sample in samples]]
    packed = [Packer(None)(form) for form in forms]
    for other in packed[1:]:
        assert other.lengths == packed[0].lengths
        assert all(torch.equal(other[name], packed[0][name]) for name in ("input_ids", "labels", "positions"))


def test_pairs_keep_their_targets() -> None:
    """Ids and the next ids: no document asks for the first token of the next."""
    documents = Documents([n + 1 for n in LENGTHS])
    ids, targets = [d[:-1] for d in documents.ids], [d[1:] for d in documents.ids]
    pairs = list(zip(ids, targets, strict=True))
    collated = (pad_sequence(ids, True), pad_sequence(targets, True, -100))
    for form in (pairs, collated):
        packed = Packer(40)(form)
        for row, within in enumerate(packed.lengths):
            edges = [0, *accumulate(within)]
            for begin, end in pairwise(edges):
                one = (
                    tuple(packed["ids"][row, begin:end].tolist()),
                    tuple(packed["targets"][row, begin:end].tolist()),
                )
                assert one in [(tuple(a.tolist()), tuple(b.tolist())) for a, b in pairs]


def test_a_loader_that_does_not_pad() -> None:
    """PyTorch's own collate cannot stack documents; packing needs no collate."""
    loader = DataLoader(Documents(LENGTHS), batch_size=4)
    with pytest.raises(RuntimeError, match="equal size"):
        next(iter(loader))
    plain = plain_losses(packed_loader(LENGTHS, 4))
    assert engine_losses(PACKING, loader) == pytest.approx(plain, rel=1e-10)
    listed = DataLoader(Documents(LENGTHS), batch_size=4, collate_fn=list)
    assert engine_losses(PACKING, listed) == pytest.approx(plain, rel=1e-10)
    assert engine_losses(PACKING, iter(list(packed_loader(LENGTHS, 4)))) == pytest.approx(plain, rel=1e-10)


def test_empty_documents_and_batches_without_a_token_to_predict() -> None:
    packed = Packer(None)(padded([0, 3, 0, 2]))
    assert packed.document_lengths == [3, 2] and packed["input_ids"].shape == (2, 3)
    for lengths in ([0, 0], [1, 1, 1]):
        nothing = Packer(None)(padded(lengths))
        assert nothing["input_ids"].shape[0] >= 1
        loss, count = loss_of(gpt(), nothing)
        assert int(count) == 0 and float(loss.detach()) == 0.0


def test_other_values_per_token_travel_and_others_are_refused() -> None:
    batch = padded([3, 4, 2])
    weights = torch.rand(3, 4)
    packed = Packer(None)({**batch, "weights": weights})
    assert packed["weights"].sum() == pytest.approx(float((weights * batch["attention_mask"]).sum()))
    with pytest.raises(UsageError, match=r"'genre' \(\(3,\)\) is not one value a token"):
        Packer(None)({**batch, "genre": torch.zeros(3)})
    with pytest.raises(UsageError, match=r"'names' \(list\)"):
        Packer(None)({**batch, "names": ["a", "b", "c"]})


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.long), ["one tensor", "collate_fn=list"]),
        ({"x": torch.zeros(2, 3)}, ["no input_ids", "x"]),
        ({"input_ids": torch.ones(2, 3)}, ["no tensor of token ids"]),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, ["without 'labels'"]),
        (3, ["int", "no token sequences"]),
        ([], ["no token sequences"]),
        ([torch.zeros(2, 2)] * 3, ["3 tensors"]),
        ([{"input_ids": [1, 2], "labels": [1]}], ["'labels' is not one value a token"]),
        ([{"input_ids": [1]}, {"labels": [1]}], ["differ in what they hold"]),
        (["text"], ["str"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else type(value).__name__,
)
def test_batches_that_cannot_be_packed(batch: Any, words: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        Packer(None)(batch)
    message = str(raised.value)
    assert message.startswith("data.packing") and "\n" not in message
    assert all(word in message for word in words)


def test_padding_on_the_left_and_labels_of_another_kind_are_refused() -> None:
    batch = padded([2, 4])
    flipped = {name: value.flip(1) for name, value in batch.items()}
    with pytest.raises(UsageError, match="padded on the left"):
        Packer(None)(flipped)
    masked = {**batch, "labels": torch.full_like(batch["labels"], 7)}
    with pytest.raises(UsageError, match="neither its ids nor the next ones"):
        Packer(None)(masked)
    placed = {**batch, "position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])}
    with pytest.raises(UsageError, match="position_ids"):  # packed already
        Packer(None)(placed)
    counted = {**batch, "position_ids": torch.arange(4).expand(2, 4)}
    assert Packer(None)(counted).document_lengths == [2, 4]


def test_a_document_longer_than_a_row_is_refused() -> None:
    changes = {**PACKING, "data.packed_length": 16}
    with pytest.raises(
        UsageError, match=r"data\.packed_length = 16: a document has 31 tokens.*set 31 or more"
    ):
        engine_losses(changes, packed_loader(LENGTHS, 4))


def test_packed_batches_survive_pickling_and_moving() -> None:
    packed = Packer(32)(padded(LENGTHS))
    for other in (pickle.loads(pickle.dumps(packed)), to_device(packed, torch.device("cpu"))):
        assert isinstance(other, Packed) and other.lengths == packed.lengths
        assert torch.equal(other["documents"].numbers, packed["documents"].numbers)
    assert pickle.loads(pickle.dumps(Packer(32, "bias"))) == Packer(32, "bias")
