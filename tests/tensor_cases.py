"""What ranks of a tensor group do in the tests; importable by spawned processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import plain_loop
from optim_cases import batches, small_gpt
from refusals import refusal_of

from trine.record.errors import UsageError

__all__ = ["causal_lm", "stranger"]

TENSOR = {"parallel.tensor": 2}
EVERYTHING = {**TENSOR, "parallel.sequence": True, "parallel.loss": True}


def stranger(heads: int = 2, reads_heads: bool = True, across: str = "", dropout: float = 0.0) -> Any:
    """A model whose names nobody gives, with attention that reads its heads off the projection, or has them written.

    ``across``: what its code looks across between the layers (features, heads, slopes, tokens), which no structure shows.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(16, 48)
            self.back = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, sequence, _ = x.shape
            parts = self.into(x).view(batch, sequence, 3, -1 if reads_heads else heads, 16 // heads)
            parts = parts.permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
            if across == "heads":
                mixed = mixed + mixed.mean(1, keepdim=True)
            if across == "slopes":
                count = mixed.shape[1]
                mixed = mixed * torch.arange(1, count + 1).to(mixed).view(-1, 1, 1) / count
            mixed = mixed.transpose(1, 2).reshape(batch, sequence, -1)
            if across == "features":
                mixed = functional.layer_norm(mixed, mixed.shape[-1:])
            return self.back(mixed)

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.LayerNorm(16)
            self.mixer = Mixer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if across == "tokens":
                x = x + functional.pad(x[:, :-1], (0, 0, 1, 0))
            return x + functional.dropout(self.mixer(self.before(x)), dropout, self.training)

    class Stranger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(64, 16)
            self.parts = nn.ModuleList(Part() for _ in range(2))
            self.last = nn.Linear(16, 64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for part in self.parts:
                x = part(x)
            return self.last(x)

    torch.manual_seed(0)
    return Stranger().double()


def logits_loss(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    ids, targets = batch
    return functional.cross_entropy(model(ids % 64).flatten(0, 1), (targets % 64).flatten())


def _losses(model: Any, changes: Mapping[str, Any], loss_fn: Any, steps: int = 4) -> tuple[list[float], Any]:
    import torch

    import trine

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn)
    share = (engine.data_rank, engine.data_ranks)
    try:
        return [float(engine.train_step(batch)) for batch in batches(steps, 4, *share)], engine
    finally:
        engine.close()


_OWN_PLAN = {"parts.*.mixer.into": "qkv", "parts.*.mixer.back": "row", "last": "head", "tokens": "embedding"}


def looked_at(rank: int, changes: dict[str, Any], how: dict[str, Any]) -> list[str]:
    """Refused with what, or what of the effects says that a block was not compared."""
    try:
        _, engine = _losses(stranger(**how), {**changes, "parallel.plan": _OWN_PLAN}, logits_loss, steps=2)
    except UsageError as error:
        return [str(error)]
    return [str(effect) for effect in engine.effects if "not compared" in str(effect)]


def own_plan(rank: int, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of the stranger with a plan of one's own, and without any."""
    ours, _ = _losses(stranger(), {**changes, "parallel.plan": _OWN_PLAN}, logits_loss)
    return ours, plain_losses(stranger(), logits_loss)


def plain_losses(model: Any, loss_fn: Any, steps: int = 4) -> list[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return plain_loop.plain_losses(model, optimizer, batches(steps, 4), loss_fn)


def given_apart(rank: int, changes: dict[str, Any], how: str) -> list[str]:
    """What is said of the steps of a rank that is given another batch from the second on (width, values, or none other)."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    first, second, third = batches(3, 4)
    other = {"width": tuple(t[:, :16] for t in second), "values": third, "none": second}[how]
    said = refusal_of(lambda: engine.train_step(first))
    following = refusal_of(lambda: engine.train_step(other if rank else second), closing=engine)
    return [said, following]


# --- a live optimizer --------------------------------------------------------------------------


def adopted(rank: int, changes: dict[str, Any]) -> dict[str, Any]:
    """A model that was trained for some steps, one matrix and one norm of it frozen, against the one that goes on plain."""
    import torch

    import trine
    from trine.optim.runtime.tensor_plans import in_given_order
    from trine.samples.gpt import loss_of

    def run(adopt: bool) -> tuple[list[float], dict[str, torch.Tensor], Any]:
        model = small_gpt().double()
        model.blocks[0].up.weight.requires_grad_(False)
        model.blocks[1].norm1.weight.requires_grad_(False)
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=1e-2,
        )
        losses = []
        data = batches(8, 4)
        for batch in data[:4]:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        config = trine.Config().with_changes(changes if adopt else {})
        if not adopt:
            for batch in data[4:]:
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses, {name: p.detach() for name, p in model.named_parameters()}, None
        engine = trine.optimize(model, optimizer, config, loss_fn=loss_of, clip_norm=1e3)
        share = (engine.data_rank, engine.data_ranks)
        for batch in data[4:]:
            size = len(batch[0]) // share[1]
            own = tuple(t[share[0] * size : (share[0] + 1) * size] for t in batch)
            losses.append(float(engine.train_step(own)))
        held = {
            name: in_given_order(_whole(p), engine._assembly.reordered.get(name))
            for name, p in model.named_parameters()
        }
        frozen = model.blocks[0].up.weight
        facts = {
            "frozen": not frozen.requires_grad and not model.blocks[1].norm1.weight.requires_grad,
            "tied": model.head.weight is model.tokens.weight,
            "moments": {
                name: tuple(optimizer.state[p]["exp_avg"].to_local().shape)
                for name, p in engine.parameters().items()
                if hasattr(p, "to_local")
            },
            "orders": sorted(engine._assembly.reordered),
        }
        engine.close()
        return losses, held, facts

    plain, expected, _ = run(False)
    ours, held, facts = run(True)
    apart = max(float((held[name] - expected[name]).abs().max()) for name in expected)
    return {"plain": plain, "ours": ours, "apart": apart, **facts}


def _whole(parameter: Any) -> Any:
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def replicas(rank: int, changes: dict[str, Any], steps: int) -> dict[str, int]:
    """Checksums of what every rank of the group has whole, after ``steps``."""
    import torch
    from torch.distributed.tensor import DTensor

    import trine
    from trine.optim.runtime.fingerprints import bits_of
    from trine.samples.gpt import loss_of

    model = small_gpt(dropout=0.1)
    torch.manual_seed(17 + rank)  # ranks that were seeded apart, as programs do
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    share = (engine.data_rank, engine.data_ranks)
    for batch in batches(steps, 4, *share):
        engine.train_step(batch)
    engine.close()
    found = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            found[name] = bits_of(parameter)
        elif all(placement.is_replicate() for placement in parameter.placements):
            found[name] = bits_of(parameter.to_local())
    return found


# --- random numbers ----------------------------------------------------------------------------


def masks(rank: int, changes: dict[str, Any]) -> dict[str, Any]:
    """What dropout left of ones, in attention and in the residual stream, on this rank; and losses, with recomputation."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    def run(more: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
        model = small_gpt(dropout=0.3, heads=4).double()
        torch.manual_seed(5 + rank)
        engine = trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            trine.Config().with_changes({**changes, **more}),
            loss_fn=loss_of,
        )
        seen: dict[str, Any] = {}
        from torch.nn import functional

        original = functional.dropout

        def watched(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            result = original(x, p, training, inplace)
            if not training:  # blocks are looked at before the first step, without dropout
                return result
            kind = "attention" if x.dim() == 4 else "residual"
            if (
                kind not in seen and torch._C._current_graph_task_id() == -1 and x.shape[-1] == x.shape[-2]
            ) or (kind == "residual" and kind not in seen):
                seen[kind] = (result == 0).to(torch.uint8)
            return result

        functional.dropout = watched
        try:
            losses = [float(engine.train_step(batch)) for batch in batches(3, 4)]
        finally:
            functional.dropout = original
            engine.close()
        following = int(torch.randint(2**40, ()))
        return losses, {kind: mask.flatten().tolist() for kind, mask in seen.items()} | {"next": following}

    losses, seen = run({})
    again, _ = run({})
    recomputed, _ = run({"checkpointing.mode": "full"})
    return {"losses": losses, "again": again, "recomputed": recomputed, **seen}


# --- exchanges ---------------------------------------------------------------------------------


def exchanges(rank: int, changes: dict[str, Any], layers: int) -> dict[str, int]:
    """Collectives of one step, by kind.

    As PyTorch's CommDebugMode counts them, whose hooks on modules lose count of blocks that have hooks of their own.
    """
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt(layers=layers, mlp="swiglu", norm="rms", positions="rotary")
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        trine.Config().with_changes(changes),
        loss_fn=loss_of,
    )
    found: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            if DTensor in types:
                return NotImplemented  # until it has come down to local tensors and collectives
            kind = function.__name__.partition(".")[0]
            if function.namespace == "_c10d_functional" and not kind.startswith(("wait", "_wrap")):
                found[kind] += 1
            return function(*arguments, **(named or {}))

    data = batches(2, 4)
    engine.train_step(data[0])
    with Counting():
        loss = engine(data[1][0], targets=data[1][1])
        engine.backward(loss)
    engine.discard()
    engine.close()
    return dict(found)


# --- refusals, checkpoints, loops of one's own ---------------------------------------------------


def message(rank: int, changes: dict[str, Any], shape: dict[str, Any], train: bool = False) -> str:
    """What is said to these changes on a model of this shape; with ``train``, in the first step."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    shape = dict(shape)
    sequence = shape.pop("rows", 32)
    model = small_gpt(**shape)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def act() -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
        if train:
            engine.train_step(batches(1, 2, sequence=sequence)[0])

    said = refusal_of(act)
    if train or said == "not refused":
        return said
    untouched = all(torch.equal(before[name], p) for name, p in model.named_parameters())
    return said if untouched else f"changed the model: {said}"


def saved(rank: int, folder: str, changes: dict[str, Any]) -> list[float]:
    """Train, save, and train on; the losses after saving."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt().double()
    engine = trine.optimize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        trine.Config().with_changes(changes),
        loss_fn=loss_of,
    )
    data = batches(6, 4)
    for batch in data[:3]:
        engine.train_step(batch)
    engine.save(Path(folder))
    losses = [float(engine.train_step(batch)) for batch in data[3:]]
    engine.close()
    return losses


def resumed(rank: int, folder: str, changes: dict[str, Any]) -> list[float]:
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt(seed=9).double()
    engine = trine.optimize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        trine.Config().with_changes(changes),
        loss_fn=loss_of,
    )
    engine.load(Path(folder))
    ranks = engine.data_ranks
    data = batches(6, 4)[3:]
    own = [tuple(t.chunk(ranks)[engine.data_rank] for t in batch) for batch in data]
    losses = [float(engine.train_step(batch)) for batch in own]
    engine.close()
    mean = torch.tensor(losses, dtype=torch.float64)
    torch.distributed.all_reduce(mean)
    return (mean / torch.distributed.get_world_size()).tolist()


def own_body(rank: int, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """A loop with a body of its own: the loss inside the model's forward."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes))
    losses = []
    for ids, targets in batches(3, 4):
        loss = engine(ids, targets=targets)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        ids, targets = batches(1, 4)[0]
        losses.append(float(engine(ids, targets=targets)))
    engine.close()
    plain = small_gpt().double()
    expected = plain_losses(plain, loss_of, 3)
    return losses, [*expected, float(plain(ids, targets=targets).detach())]


# --- Transformers ------------------------------------------------------------------------------

KINDS = ("gpt2", "llama", "qwen2", "qwen3", "mixtral")


def causal_lm(kind: str, **changes: Any) -> Any:
    """A small Transformers model from its configuration, in float64."""
    import torch
    import transformers

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    if kind == "gpt2":
        shape = {
            "vocab_size": 96,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "use_cache": False,
        }
        shape |= {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        config: Any = transformers.GPT2Config(**{**shape, **changes})
        return transformers.GPT2LMHeadModel(config).double()
    if kind == "qwen3":
        shape["head_dim"] = 8
    if kind == "qwen2":
        shape["tie_word_embeddings"] = True
    if kind == "mixtral":
        shape |= {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral"}[kind]
    config = getattr(transformers, f"{name}Config")(**{**shape, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def labelled(model: Any, batch: Any) -> Any:
    ids = batch[0] % 96
    return model(input_ids=ids, labels=ids).loss


def outside(model: Any, batch: Any) -> Any:
    """The loss of the program's own, over logits: in float64, which Transformers' own is not."""
    from torch.nn import functional

    ids = batch[0] % 96
    logits = model(input_ids=ids).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def transformers_losses(
    rank: int, kind: str, changes: dict[str, Any], by: str
) -> tuple[list[float], list[float]]:
    """By the engine, averaged over ranks, and plain."""
    import torch
    from torch import distributed

    loss_fn = {"labelled": labelled, "outside": outside}[by]
    model = causal_lm(kind)
    import trine

    engine = trine.optimize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        trine.Config().with_changes(changes),
        loss_fn=loss_fn,
    )
    ranks, place = engine.data_ranks, engine.data_rank
    data = [tuple(t.chunk(ranks)[place] for t in batch) for batch in batches(4, 4)]
    losses = torch.tensor([float(engine.train_step(batch)) for batch in data], dtype=torch.float64)
    engine.close()
    distributed.all_reduce(losses)
    return (losses / distributed.get_world_size()).tolist(), plain_losses(causal_lm(kind), loss_fn)
