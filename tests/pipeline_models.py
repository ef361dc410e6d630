"""Models that pipelines are tried on, with their batches and losses; importable by spawned processes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

SIZE = 8


def llama(tied: bool = False) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        **_SMALL, num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=tied
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def qwen() -> Any:
    import transformers

    config = transformers.Qwen2Config(**_SMALL, num_key_value_heads=2, intermediate_size=64)
    return transformers.Qwen2ForCausalLM(config)


def mixtral() -> Any:
    import transformers

    config = transformers.MixtralConfig(
        **_SMALL, num_key_value_heads=2, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


_SMALL: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
}


def vision() -> Any:
    from trine.samples.vision import VisionConfig, VisionTransformer

    return VisionTransformer(VisionConfig(layers=4, hidden=32, heads=2, image=16))


def sequential() -> Any:
    from torch import nn

    widths = (12, 48, 24, 64, 10)
    layers: list[Any] = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def skipping() -> Any:
    """The embedding is added again before the head: more than the hidden state crosses the cut."""
    from torch import nn

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 16)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.head = nn.Linear(16, 10)

        def forward(self, x: Any) -> Any:
            first = x = self.inner(x)
            for block in self.blocks:
                x = block(x).tanh()
            return self.head(x + first)

    return Skipping()


def crossing() -> Any:
    """A block's output is added two blocks later, past the cut between them."""
    from torch import nn

    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 16)
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.head = nn.Linear(16, 10)

        def forward(self, x: Any) -> Any:
            x = self.inner(x)
            kept = []
            for block in self.blocks:
                x = block(x).tanh()
                kept.append(x)
            return self.head(x + kept[0])

    return Crossing()


def taking(what: str) -> Any:
    """Takes more than the hidden state past the cut, without a gradient: a mask of the embedding, a choice of the first
    block, or the embedding itself, which is frozen. ``shape``: nothing but its shape, which every stage has.
    """
    import torch
    from torch import nn

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 16)
            self.inner.requires_grad_(what != "frozen")
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.head = nn.Linear(16, 10)

        def forward(self, x: Any) -> Any:
            first = x = self.inner(x)
            kept = []
            for block in self.blocks:
                x = block(x).tanh()
                kept.append(x)
            if what == "mask":
                x = x * (first > 0)
            if what == "choice":
                x = x * (1 + kept[0].argmax(-1, keepdim=True) % 2)
            if what == "frozen":
                x = x + first
            return self.head(x + torch.ones_like(first))

    return Taking()


def by_name() -> Any:
    """Blocks are given the hidden state by name, and something else before it."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, hidden: Any, keep: Any) -> Any:
            return self.inner(hidden).tanh() * keep

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 16)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = nn.Linear(16, 10)

        def forward(self, x: Any) -> Any:
            hidden = self.inner(x)
            for block in self.blocks:
                hidden = block(keep=torch.ones(16, dtype=torch.bool), hidden=hidden)
            return self.head(hidden)

    return ByName()


def biased() -> Any:
    """A table that every block is given beside the hidden state, and the embedding's weight used again as the head."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x: Any, bias: Any) -> Any:
            return (self.inner(x) + bias).tanh()

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(12, 16)
            self.table = nn.Linear(12, 16)
            self.scale = nn.Parameter(torch.ones(()) * 0.7)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.norm = nn.LayerNorm(16)

        def forward(self, x: Any) -> Any:
            bias = self.table(x)
            x = self.inner(x) * self.scale
            for block in self.blocks:
                x = block(x, bias)
            return functional.linear(self.norm(x), self.inner.weight.T)

    return Biased()


def late() -> Any:
    """Registered behind the blocks, used before them."""
    from torch import nn

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.inner = nn.Linear(12, 16)
            self.head = nn.Linear(16, 10)

        def forward(self, x: Any) -> Any:
            x = self.inner(x)
            for block in self.blocks:
                x = block(x).tanh()
            return self.head(x)

    return Late()


def detached(frozen: bool = False) -> Any:
    """Nothing before the cut is trained; what is there is frozen, or has been forgotten."""
    from torch import nn

    class Detached(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x.detach()).tanh()

    blocks = [nn.Linear(16, 16), nn.Linear(16, 16), Detached(16, 16), Detached(16, 16)]
    model = nn.Sequential(nn.Linear(12, 16), nn.ModuleList(blocks), nn.Linear(16, 10))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.blocks, self.head = model

        def forward(self, x: Any) -> Any:
            x = self.inner(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    whole = Whole()
    for part in [whole.inner, *whole.blocks[:3]] if frozen else []:
        part.requires_grad_(False)
    return whole


MODELS = {
    "detached": detached,
    "detached, frozen": lambda: detached(True),
    "llama": llama,
    "llama tied": lambda: llama(True),
    "gpt2": gpt2,
    "qwen": qwen,
    "mixtral": mixtral,
    "vision": vision,
    "sequential": sequential,
    "skipping": skipping,
    "mask": partial(taking, "mask"),
    "choice": partial(taking, "choice"),
    "frozen": partial(taking, "frozen"),
    "shape": partial(taking, "shape"),
    "penalty": partial(taking, "shape"),
    "reading": partial(taking, "shape"),
    "by name": by_name,
    "late": late,
    "crossing": crossing,
    "biased": biased,
}


_SCORES = ("detached", "detached, frozen", "sequential", "skipping", "by name", "late", "crossing", "biased")
_SCORES += ("mask", "choice", "frozen", "shape", "penalty", "reading")


def made(name: str) -> Any:
    import torch

    torch.manual_seed(5)
    model = MODELS[name]()
    return model if name == "mixtral" else model.double()  # its grouped products know no float64


def batch_of(name: str, step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(step)
    if name == "vision":
        return torch.rand(SIZE, 1, 16, 16, generator=generator, dtype=torch.float64), torch.randint(
            0, 10, (SIZE,), generator=generator
        )
    if name in _SCORES:
        return torch.randn(SIZE, 12, generator=generator, dtype=torch.float64), torch.randint(
            0, 10, (SIZE,), generator=generator
        )
    return torch.randint(0, 97, (SIZE, 16), generator=generator)


def loss_inside(model: Any, batch: Any) -> Any:
    """A causal language model computes its own loss from labels."""
    return model(input_ids=batch, labels=batch).loss


def loss_outside(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    logits = model(input_ids=batch).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def loss_of_scores(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def penalised(model: Any, batch: Any) -> Any:
    return loss_of_scores(model, batch) + 1e-2 * sum((p**2).sum() for p in model.parameters())


def reading(model: Any, batch: Any) -> Any:
    """Reads a parameter of the first stage's."""
    return loss_of_scores(model, batch) + model.blocks[0].weight.detach().mean()


def loss_for(name: str, outside: bool = False) -> Any:
    if name in ("penalty", "reading"):
        return penalised if name == "penalty" else reading
    if name in ("vision", *_SCORES):
        return loss_of_scores
    return loss_outside if outside else loss_inside
