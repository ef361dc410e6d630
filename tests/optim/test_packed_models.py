"""Packing and models: who can keep documents apart, by which attention; what is refused; what the record shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from sequence_cases import Documents, engine_losses, gpt, optimizer_of, packed_loader, plain_losses
from torch.nn import functional

import trine
from trine.optim.runtime.documents import Documents as Borders
from trine.record.errors import UsageError
from trine.record.events import listen
from trine.samples.gpt import loss_of
from trine.samples.text import pad_documents

PACKING = {"data.packing": True}
LENGTHS = [5, 9, 1, 16, 3, 12, 2, 2, 31, 7, 7, 8, 1, 1, 20, 4]
_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=40)


def padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    documents = Documents(lengths, seed)
    return pad_documents([documents[index] for index in range(len(lengths))])


# --- models ------------------------------------------------------------------------------------


class Decoder(torch.nn.Module):
    """Told of documents as Transformers' decoders are, by position_ids and a mask of four dimensions."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        self.inner = gpt(attention="sdpa")
        self.config = type("Config", (), {"_attn_implementation": implementation})()

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any = None, labels: Any = None
    ) -> Any:
        inner, x = self.inner, None
        positions = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        visible = torch.ones(input_ids.shape[1], input_ids.shape[1]).tril().bool()
        if attention_mask.dim() == 4:
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        x = inner.tokens(input_ids) + inner.positions(positions)
        for block in inner.blocks:
            x = block(x, visible)
        logits = inner.head(inner.norm(x))
        targets = functional.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        return functional.cross_entropy(logits.flatten(0, 1), targets)


class DecoderForCausalLM(Decoder):
    """By its name a causal language model."""


def _loss_of_decoder(model: Any, batch: Mapping[str, Any]) -> Any:
    return model(**batch), (batch["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_as_transformers_has_them(implementation: str) -> None:
    plain = plain_losses(packed_loader(LENGTHS, 4), DecoderForCausalLM("sdpa"), _loss_of_decoder)
    seen: list[Any] = []
    for changes in (PACKING, {**PACKING, "accumulation.steps": 3, "data.packed_length": 64}):
        model = DecoderForCausalLM(implementation)
        packed = engine_losses(changes, packed_loader(LENGTHS, 4), model, _loss_of_decoder, seen)
        assert packed == pytest.approx(plain, rel=1e-10)
    mask = seen[0]["attention_mask"]
    assert mask.dim() == 4 and mask.dtype == (torch.bool if implementation == "sdpa" else torch.float32)


def test_flash_attention_of_transformers_reads_the_positions() -> None:
    model = DecoderForCausalLM("flash_attention_2")
    engine = trine.optimize(model, optimizer_of(model), trine.Config().with_changes(PACKING))
    batch = next(iter(engine.steps(packed_loader(LENGTHS, 4))))
    assert sorted(batch) == ["input_ids", "labels", "position_ids"]
    engine.close()


def test_models_that_cannot_keep_documents_apart_are_refused() -> None:
    plain = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    encoder = Decoder("sdpa")
    for model, words in (
        (plain, "Sequential.forward takes no positions and documents"),
        (encoder, "Decoder is no causal language model"),
    ):
        with pytest.raises(UsageError, match=f"data.packing: {words}"):
            trine.optimize(model, optimizer_of(model), trine.Config().with_changes(PACKING))


def test_a_loss_that_forgets_the_borders_is_refused_and_validation_is_not() -> None:
    def forgetful(model: Any, batch: Any) -> Any:
        logits = model(batch["input_ids"]).flatten(0, 1)
        return functional.cross_entropy(logits, batch["labels"].flatten())

    with pytest.raises(UsageError, match="called without positions=: loss_fn must pass on"):
        engine_losses(PACKING, packed_loader(LENGTHS, 4), loss_fn=forgetful)
    model = gpt()
    engine = trine.optimize(model, optimizer_of(model), trine.Config().with_changes(PACKING), loss_fn=loss_of)
    with pytest.raises(UsageError, match=r"batches must come from engine\.steps"):
        engine.train_step(padded(LENGTHS))
    model.eval()
    assert model(torch.ones(1, 4, dtype=torch.long)).shape == (1, 4, 256)
    model.train()
    engine.close()
    assert model(torch.ones(1, 4, dtype=torch.long)).shape == (1, 4, 256)  # as it was


def test_micro_batches_need_a_loss_with_its_count() -> None:
    def uncounted(model: Any, batch: Any) -> Any:
        return loss_of(model, batch)[0]

    loader = packed_loader(LENGTHS, 4)
    assert engine_losses(PACKING, loader, loss_fn=uncounted) == pytest.approx(plain_losses(loader), rel=1e-10)
    with pytest.raises(UsageError, match=r"data\.packing with micro-batches.*\(mean loss, token count\)"):
        engine_losses({**PACKING, "accumulation.steps": 2}, loader, loss_fn=uncounted)


# --- combinations and attention ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "model", "words"),
    [
        ({"compute.attention": "varlen"}, {}, ["no variable-length kernel on cpu", 'use "sdpa"']),
        ({"compute.attention": "flex"}, {}, ["flex attention has no backward on cpu", 'use "sdpa"']),
        ({"compute.attention": "varlen", "data.packing": False}, {}, ["packed rows", "data.packing"]),
        ({"compute.attention": "flash"}, {"dropout": 0.1}, ["no dropout", "drops 0.1", 'use "sdpa"']),
        ({"data.shape_buckets": [64]}, {}, ["data.packing", "data.shape_buckets", "data.packed_length"]),
    ],
    ids=str,
)
def test_what_is_refused(changes: dict[str, Any], model: dict[str, Any], words: list[str]) -> None:
    network = gpt(**model)
    with pytest.raises(UsageError) as raised:
        trine.optimize(network, optimizer_of(network), trine.Config().with_changes({**PACKING, **changes}))
    message = str(raised.value)
    assert "\n" not in message and all(word in message for word in words)
    assert next(network.modules()).training  # untouched: no hook, no other attention
    assert not network._forward_pre_hooks
    assert {block.attention.implementation for block in network.blocks} == {"manual"}


def test_attention_says_which_kernel_runs() -> None:
    def effects(changes: dict[str, Any], **model: Any) -> str:
        network = gpt(**model)
        engine = trine.optimize(network, optimizer_of(network), trine.Config().with_changes(changes))
        engine.close()
        return str(next(each for each in engine.effects if each.key == "compute.attention"))

    assert "math one" in effects({"compute.attention": "sdpa"}, dropout=0.1)
    assert "math one" not in effects({"compute.attention": "sdpa"})
    packed = effects({**PACKING, "compute.attention": "auto"})
    assert "→ sdpa" in packed and "documents apart by a mask" in packed
    assert "the flash kernel alone" in effects({"compute.attention": "flash"})


def test_flash_on_a_cpu_takes_the_mask() -> None:
    """Held to the flash kernel, which runs with the mask and fails with dropout: what the refusal rests on."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    query = torch.randn(1, 2, 16, 8, dtype=torch.float64, requires_grad=True)
    mask = Borders.of([[5, 9]], 16).mask()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        mixed = functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        assert "FlashAttention" in mixed.grad_fn.name()
        with pytest.raises(RuntimeError, match="No available kernel"), pytest.warns(UserWarning):
            functional.scaled_dot_product_attention(query, query, query, attn_mask=mask, dropout_p=0.1)
    scores = (query @ query.transpose(-2, -1) / 8**0.5).masked_fill(~mask, float("-inf"))
    assert torch.allclose(mixed, scores.softmax(-1) @ query, atol=1e-12)


def test_flex_has_no_backward_on_a_cpu() -> None:
    """What its refusal rests on."""
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.randn(1, 1, 16, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="backward"):
        flex_attention(query, query, query)


# --- the record --------------------------------------------------------------------------------


def test_waste_before_and_after_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told: dict[str, list[float]] = {}
    stop = listen(
        lambda kind, values: (
            told.setdefault(values["name"], []).append(values["value"]) if kind == "metric" else None
        )
    )
    seen: list[Any] = []
    with caplog.at_level("INFO", "trine"):
        engine_losses(PACKING, packed_loader(LENGTHS, 8), seen=seen)
    stop()
    tokens = [sum(LENGTHS[:8]), sum(LENGTHS[8:])]
    assert told["padding/waste_before"] == pytest.approx([1 - tokens[0] / (8 * 16), 1 - tokens[1] / (8 * 31)])
    assert told["padding/waste"] == pytest.approx(
        [1 - count / batch.slots for count, batch in zip(tokens, seen, strict=True)]
    )
    assert max(told["padding/waste"]) < min(told["padding/waste_before"]) / 2
    said = next(line for line in caplog.messages if "padding" in line and "before" in line)
    assert f"376 → {sum(batch.slots for batch in seen)} slots for {sum(tokens)} tokens in 2 batches" in said


def test_the_record_shows_packed_batches_and_their_waste(tmp_path: Path) -> None:
    model = gpt()
    engine = trine.optimize(model, optimizer_of(model), trine.Config().with_changes(PACKING), loss_fn=loss_of)
    loader = packed_loader(LENGTHS * 4, 8)
    slots = 0
    with trine.profile(tmp_path / "run", model=model, optimizer=engine.optimizer, windows=None) as prof:
        for batch in prof.steps(engine.steps(loader)):
            slots += batch.slots
            engine.train_step(batch)
    engine.close()
    found = trine.analyze(trine.load(tmp_path / "run"), steps="all").studies["padding"]
    assert found.packed and found.source == "documents"
    assert found.tokens == slots and found.padding_tokens == slots - 4 * sum(LENGTHS)
