"""Models, and what ranks do with them, for the tests of pipelines; importable by spawned processes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

STEPS = 4
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
    "by name": by_name,
    "late": late,
    "crossing": crossing,
    "biased": biased,
}


_SCORES = ("detached", "detached, frozen", "sequential", "skipping", "by name", "late", "crossing", "biased")


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


def loss_for(name: str, outside: bool = False) -> Any:
    if name in ("vision", *_SCORES):
        return loss_of_scores
    return loss_outside if outside else loss_inside


def plain(name: str, outside: bool = False) -> list[float]:
    """Losses of the loop that people write."""
    import torch

    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        loss = loss_for(name, outside)(model, batch_of(name, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def piped(
    rank: int, name: str, changes: Mapping[str, Any], outside: bool = False, example: bool = False
) -> Any:
    """Losses and effects of a pipeline over all ranks."""
    import torch

    import trine

    model = made(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = trine.Config().with_changes({"parallel.pipeline": torch.distributed.get_world_size(), **changes})
    shown = batch_of(name, 100) if example else None
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_for(name, outside), example=shown)
    losses = [float(engine.train_step(batch_of(name, step))) for step in range(STEPS)]
    said = [str(effect) for effect in engine.effects]
    engine.close()
    return losses, said


def refused(rank: int, name: str, example: bool, changes: Mapping[str, Any] | None = None) -> str:
    import trine

    try:
        piped(rank, name, changes or {}, example=example)
    except trine.TrineError as error:
        return str(error)
    return "not refused"


def again(rank: int, name: str) -> str:
    """What is said of a model that a pipeline has cut, and that is given to ``trine.optimize`` once more."""
    import torch

    import trine

    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.microbatches": 2})
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_for(name))
    try:
        trine.optimize(model, optimizer, config, loss_fn=loss_for(name))
    except trine.TrineError as error:
        return str(error)
    finally:
        engine.close()
    return "not refused"


def failing(rank: int, ranks: int, name: str) -> str:
    """What the first step says, of a model that cannot be cut so."""
    import trine

    try:
        piped(rank, name, {})
    except trine.TrineError as error:
        return str(error)
    return "not refused"


def statistics(rank: int, chunks: int) -> list[float]:
    """Running means of the batch norms of two replicas of a pipeline, which see different batches, in an evaluation."""
    import torch
    from torch import nn

    import trine

    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = {"parallel.pipeline": 2, "parallel.data": 2, "parallel.chunks": chunks, "parallel.microbatches": 2}
    if chunks > 1:
        keys["parallel.schedule"] = "interleaved"  # type: ignore[assignment]
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(keys), loss_fn=loss_of_scores)
    try:
        batch = torch.randn(SIZE, 12), torch.randint(0, 12, (SIZE,))
        torch.manual_seed(engine.data_rank)
        engine.train_step((torch.randn(SIZE, 12), torch.randint(0, 12, (SIZE,))))
        engine.evaluate(batch)
        means = [b for name, b in engine.model.named_buffers() if name.endswith("running_mean")]
        return [float(value) for mean in means for value in mean]
    finally:
        engine.close()


def evaluated(rank: int, schedule: str) -> Any:
    """(mean loss by the pipeline, by the whole model, modes of the first own block's dropout)."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import Block, loss_of

    model = small_gpt(layers=4, dropout=0.5).double()
    batch = batches(1, 8)[0]
    with torch.no_grad():
        model.eval()
        whole = float(loss_of(model, batch))
        model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.schedule": schedule})
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    engine.train_step(batch)
    mine = float(engine.evaluate(batch))
    block = next(module for module in engine.model.modules() if isinstance(module, Block))
    modes = [block.training]
    for switched, mode in ((model, False), (model, True), (engine.model, False)):
        switched.train(mode)
        engine.evaluate(batch)
        modes.append(block.training)
    engine.close()
    return mine, whole, modes


def kept(rank: int) -> dict[str, Any]:
    """Names and bytes that a rank of two has left."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt(layers=4, hidden=64)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    names = {name for name, _ in model.named_parameters()}
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}])
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes({"parallel.pipeline": 2}), loss_fn=loss_of
    )
    engine.train_step(batches(1, 8)[0])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    by_id = {id(p): name for name, p in engine.parameters().items()}
    try:
        model(batches(1, 2)[0][0])
        called = ""
    except trine.TrineError as error:
        called = str(error)
    found = {
        "all": names,
        "names": set(engine.parameters()),
        "held": {by_id[each] for each in held},
        "duplicates": set(engine._assembly.duplicates),
        "whole_bytes": whole,
        "bytes": sum(
            {
                p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
            }.values()
        ),
        "groups": len(optimizer.param_groups),
        "called": called,
    }
    engine.close()
    return found


def held(rank: int, schedule: str, microbatches: int) -> int:
    """The most micro-batches whose activations a stage held at once, counted on what autograd saves."""
    import torch
    from torch import nn

    import trine

    alive: set[int] = set()
    most = 0

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            nonlocal most
            out = self.inner(x).exp()  # exp saves its result, which lives until backward has passed
            node = out.grad_fn
            if node is not None:
                key = id(node)
                alive.add(key)
                node.register_hook(partial(lambda key, *_: alive.discard(key), key))
                most = max(most, len(alive))
            return out * 0.1

    torch.manual_seed(0)
    ranks = torch.distributed.get_world_size()
    model = nn.Sequential(*(Block() for _ in range(ranks)))
    config = trine.Config().with_changes(
        {"parallel.pipeline": ranks, "parallel.schedule": schedule, "parallel.microbatches": microbatches}
    )
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config,
        loss_fn=lambda given, batch: given(batch).square().mean(),
    )
    batch = torch.randn(microbatches, 4, generator=torch.Generator().manual_seed(1))
    engine.train_step(batch)
    engine.train_step(batch)
    engine.close()
    return most


def shapes(rank: int) -> Any:
    """Losses of batches whose width changes from step to step and comes again, by the pipeline and whole."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import loss_of

    data = [
        batches(1, size, sequence=width)[0] for size, width in ((8, 16), (4, 24), (8, 16), (8, 9), (4, 24))
    ]

    def run(piping: bool) -> list[float]:
        model = small_gpt(layers=4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not piping:
            losses = []
            for batch in data:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses
        config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.schedule": "zbv"})
        engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
        losses = [float(engine.train_step(batch)) for batch in data]
        engine.close()
        return losses

    return run(True), run(False)


def recorded(rank: int, folder: str) -> Any:
    """Records a run; the engine's own metrics of its last step."""
    import torch
    from optim_cases import batches, small_gpt

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt(layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    config = trine.Config().with_changes({"parallel.pipeline": 2, "parallel.microbatches": 4})
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    with trine.profile(folder, model=engine.model, optimizer=engine.optimizer, windows=None):
        for batch in engine.steps(batches(6, 8)):
            engine.train_step(batch)
    metrics = engine._assembly.metrics
    found = metrics["pipeline/bubble"](), metrics["pipeline/ideal_bubble"]()
    engine.close()
    return found
