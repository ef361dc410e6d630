"""Sequences in parts on ranks, importable by spawned processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from typing import Any

from refusals import refusal_of

TWO = {"parallel.context": 2}


def attention(
    rank: int, ranks: int, causal: bool, heads: int, key_heads: int, by_bias: bool = False
) -> float:
    """The largest difference, forward and gradients, of attention over parts to that over the whole sequence.

    ``by_bias``: while PyTorch's attention is patched, with the causal bias that CUDA's kernels are given.
    """
    import torch
    from torch import distributed
    from torch.nn import functional

    from trine.optim.runtime.context_attention import Attending, positions_of

    assert distributed.group.WORLD is not None
    own = positions_of(16, ranks, rank)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 16, 8), (2, key_heads, 16, 8), (2, key_heads, 16, 8)]
    whole = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    grouped = heads != key_heads
    inputs = [each.clone().requires_grad_() for each in whole]
    expected = functional.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=grouped)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weights).sum().backward()
    parts = [each[..., own, :].clone().requires_grad_() for each in whole]
    attending = Attending(distributed.group.WORLD)
    with _on_cuda(attending) if by_bias else nullcontext():
        found = attending.attend(*parts, is_causal=causal, enable_gqa=grouped)
    (found * weights[..., own, :]).sum().backward()
    apart = [(found - expected[..., own, :]).abs().max()]
    apart += [(p.grad - i.grad[..., own, :]).abs().max() for p, i in zip(parts, inputs, strict=True)]
    return float(max(apart))


@contextmanager
def _on_cuda(attending: Any) -> Iterator[None]:
    """Attention as it is called in a step on CUDA, on a processor."""
    from unittest import mock

    from torch.nn.attention.bias import causal_lower_right

    from trine.optim.runtime.context_attention import patched, use

    take_back = patched()
    use(attending)
    try:
        with mock.patch.object(attending, "_mask", lambda rows, seen, device: causal_lower_right(rows, seen)):
            yield
    finally:
        take_back()


def gpt(**changes: Any) -> Any:
    from optim_cases import small_gpt

    return small_gpt(attention="sdpa", **changes).double()


def ids_of(step: int, size: int = 4) -> Any:
    import torch

    return torch.randint(0, 64, (size, 33), generator=torch.Generator().manual_seed(step))


def counted(rank: int, counts: bool) -> tuple[Any, Any]:
    """Targets of which parts have unequally many: mean losses and whether it was refused; the plain run's losses."""
    import torch
    from torch import distributed

    import trine

    def batch(step: int) -> Any:
        ids = ids_of(step)
        targets = ids[:, 1:].clone()
        targets[:, 20:] = -100
        targets[0, 3:] = -100
        return ids[:, :-1], targets

    def loss_fn(model: Any, batch: Any) -> Any:
        ids, targets = batch
        total = model(ids, targets=targets, reduction="sum")
        count = (targets != -100).sum()
        return (total / count.clamp(min=1), count) if counts else total / count

    reference = gpt()
    stepper = torch.optim.SGD(reference.parameters(), lr=0.3)
    expected = []
    for step in range(3):
        result = loss_fn(reference, batch(step))
        loss = result[0] if counts else result
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        expected.append(float(loss.detach()))
    model = gpt()
    engine = trine.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.3), trine.Config().with_changes(TWO), loss_fn=loss_fn
    )
    evaluated: list[float] = []

    def train() -> None:
        for step in range(3):
            evaluated.append(float(engine.evaluate(batch(step))))  # over all parts: the loss before the step
            engine.train_step(batch(step))

    said = refusal_of(train, "", closing=engine)
    if said:
        return said, expected
    distributed.barrier()
    return evaluated, expected


def programs(rank: int, which: str) -> str:
    """What is said of a program's own way of computing its loss; "trained" where it was."""
    import torch
    from torch.nn import functional

    import trine

    def right(model: Any, batch: Any) -> Any:
        ids, targets = batch
        return functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())

    def shifting_logits(model: Any, batch: Any) -> Any:
        logits = model(batch[0])
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def slicing_ids(model: Any, batch: Any) -> Any:
        return model(batch[0][:, :-1], targets=batch[0][:, 1:])

    losses = {"right": right, "shifting logits": shifting_logits, "slicing ids": slicing_ids}
    model = _ByHand() if which == "by hand" else gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = ids_of(0)
    whole, targets = (ids[:, :24], ids[:, 1:25]) if which != "odd" else (ids[:, :21], ids[:, 1:22])

    def act() -> None:
        config = trine.Config().with_changes(TWO)
        engine = trine.optimize(model, optimizer, config, loss_fn=losses.get(which, right))
        with closing(engine):
            if which == "own loop":
                engine(whole)
            engine.train_step((whole, targets))

    return refusal_of(act, "trained")


def _ByHand() -> Any:  # noqa: N802 - it stands for a class
    """A model that knows positions, and whose attention nobody reaches."""
    import torch

    class ByHand(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(64, 16)
            self.head = torch.nn.Linear(16, 64)

        def forward(self, ids: Any, positions: Any = None) -> Any:
            x = self.tokens(ids)
            scores = (x @ x.transpose(-2, -1)).softmax(-1).tril()
            return self.head(scores @ x)

    torch.manual_seed(0)
    return ByHand().double()


def refused(rank: int, changes: Mapping[str, Any], plain: bool) -> str:
    """Our refusal of these changes, for the GPT or for a model that knows of no positions."""
    import torch

    import trine

    model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)) if plain else gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = trine.Config().with_changes(changes)
    return refusal_of(
        lambda: trine.optimize(model, optimizer, config, loss_fn=lambda model, batch: model(batch).mean())
    )


def taken_back(rank: int) -> tuple[bool, bool]:
    """Whether PyTorch's function is replaced while an engine lives, and back when it is closed."""
    import torch
    from torch.nn import functional

    import trine
    from trine.samples.gpt import loss_of

    before = functional.scaled_dot_product_attention
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(TWO), loss_fn=loss_of)
    during = functional.scaled_dot_product_attention
    engine.close()
    return during is not before, functional.scaled_dot_product_attention is before


def padded(rank: int, side: str) -> str:
    """A Transformers model with an attention mask that pads on one side; "trained" where that is right."""
    import torch
    from expert_cases import transformers_model

    import trine

    model = transformers_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = ids_of(0)[:, :32]
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(27, None)] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(**batch).loss

    expected = float(loss_fn(transformers_model("llama"), batch))
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(TWO), loss_fn=loss_fn)
    found: list[float] = []

    def act() -> None:
        found.append(float(engine.evaluate(batch)))
        engine.train_step(batch)

    said = refusal_of(act, "trained", closing=engine)
    right = said != "trained" or abs(found[0] / expected - 1) < 1e-6
    return said if right else f"{found[0]} is not {expected}"


def classified(rank: int) -> str:
    """What is said of a Transformers model with one label a sequence, which is no sequence of labels."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    import trine

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    settings = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=63, num_labels=3)
    model = LlamaForSequenceClassification(settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batch = {"input_ids": ids_of(0)[:, :32], "labels": torch.tensor([0, 1, 2, 0])}
    config = trine.Config().with_changes(TWO)
    engine = trine.optimize(model, optimizer, config, loss_fn=lambda model, batch: model(**batch).loss)
    return refusal_of(lambda: engine.train_step(batch), "trained", closing=engine)


def sliding(rank: int) -> str:
    """A model whose attention looks back over a window alone."""
    import torch
    from expert_cases import transformers_model

    import trine

    model = transformers_model("sliding")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids = ids_of(0)[:, :32]

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(**batch).loss

    engine = trine.optimize(model, optimizer, trine.Config().with_changes(TWO), loss_fn=loss_fn)
    batch = {"input_ids": ids, "labels": ids.clone()}
    return refusal_of(lambda: engine.train_step(batch), "trained", closing=engine)
