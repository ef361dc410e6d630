"""Mixtures of experts on ranks, importable by spawned processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from plain_loop import plain_losses
from refusals import refusal_of

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "experts": 4}


def mixture(**changes: Any) -> Any:
    import torch

    from trine.samples.moe import MixtureConfig, MixtureGPT

    torch.manual_seed(0)
    return MixtureGPT(MixtureConfig(**{**SHAPE, **changes})).double()


def batch_of(step: int, rank: int = 0, ranks: int = 1, size: int = 8) -> Any:
    import torch

    ids = torch.randint(0, 64, (size, 33), generator=torch.Generator().manual_seed(step))
    share = size // ranks
    ids = ids[rank * share : (rank + 1) * share]
    return ids[:, :-1], ids[:, 1:]


def plain(steps: int, clip: float | None = None, model: Any = None) -> tuple[list[float], Any, Any]:
    """Losses, model and optimizer of the loop that people write, in one process on the whole batch."""
    import torch

    from trine.samples.gpt import loss_of

    model = mixture() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = plain_losses(model, optimizer, [batch_of(step) for step in range(steps)], loss_of, clip)
    return losses, model, optimizer


def _mean(losses: list[float]) -> list[float]:
    import torch
    from torch import distributed

    total = torch.tensor(losses, dtype=torch.float64)
    distributed.all_reduce(total)
    return (total / distributed.get_world_size()).tolist()


def clipped(rank: int, changes: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """The engine's losses with a norm that always clips, and the plain loop's."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = trine.Config().with_changes(changes)
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of, clip_norm=0.05)
    losses = [
        float(engine.train_step(batch_of(step, engine.data_rank, engine.data_ranks))) for step in range(4)
    ]
    engine.close()
    return _mean(losses), plain(4, clip=0.05)[0]


def adopted(rank: int, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Adopt a trained model with its optimizer in mid-training; names and whole values against the plain run's."""
    import trine
    from trine.samples.gpt import loss_of

    expected, reference, _ = plain(6)
    model = mixture()
    given = [name for name, _ in model.named_parameters()]
    _, model, optimizer = plain(3, model=model)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    losses = [
        float(engine.train_step(batch_of(step, engine.data_rank, engine.data_ranks))) for step in range(3, 6)
    ]
    held = engine.parameters()
    apart = {
        name: float((held[name].detach().full_tensor() - whole.detach()).abs().max())
        for name, whole in reference.named_parameters()
    }
    local = held["blocks.0.mixture.experts.up"].to_local().shape[0]
    engine.close()
    return {
        "losses": _mean(losses),
        "expected": expected[3:],
        "same_names": list(held) == given,
        "apart": max(apart.values()),
        "local_experts": local,
    }


def skewed(rank: int, everything_to: int | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A router that sends every token to one expert (``None``: in turn to each); losses against the plain run."""
    import torch

    import trine
    from trine.record.events import listen
    from trine.samples.gpt import loss_of

    def model() -> Any:
        made = mixture(top_k=1)
        for block in made.blocks:
            del block.mixture.router.linear
            block.mixture.router.linear = _To(everything_to)
        return made

    expected = plain(3, model=model())[0]
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    engine = trine.optimize(trained, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    losses, told = [], {}
    for step in range(6):
        losses.append(float(engine.train_step(batch_of(step, engine.data_rank, engine.data_ranks))))

    def listener(kind: str, values: Mapping[str, Any]) -> None:
        if kind == "metric":
            told[values["name"]] = values["value"]

    stop = listen(listener)
    engine.train_step(batch_of(7, engine.data_rank, engine.data_ranks))
    stop()
    effects = [str(effect) for effect in engine.effects]
    engine.close()
    return {"losses": _mean(losses)[:3], "expected": expected, "told": told, "effects": effects}


class _To:
    """Stands for a router's projection; not a module, so that nothing of it is trained."""

    def __init__(self, expert: int | None) -> None:
        self._expert = expert

    def __call__(self, hidden: Any) -> Any:
        import torch

        logits = torch.zeros(len(hidden), SHAPE["experts"], dtype=hidden.dtype)
        rows = torch.arange(len(hidden))
        logits[rows, rows % SHAPE["experts"] if self._expert is None else self._expert] = 50.0
        return logits + 0.0 * hidden.sum(-1, keepdim=True)


def refused(rank: int, changes: Mapping[str, Any], of: str) -> str:
    """Our refusal of these changes for a model of that kind, with model and optimizer as they were."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    models = {
        "mixture": mixture,
        "balanced": lambda: mixture(balance=0.01),
        "dense": _dense,
        "listed": _listed,
    }
    model = models[of]()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adafactor if "adafactor" in changes else torch.optim.AdamW
    changes = {key: value for key, value in changes.items() if key != "adafactor"}
    config = trine.Config().with_changes(changes)
    said = refusal_of(lambda: trine.optimize(model, optimizer(model.parameters()), config, loss_fn=loss_of))
    if said == "not refused":
        return said
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return said if same else f"the model changed: {said}"


def _dense() -> Any:
    from optim_cases import small_gpt

    return small_gpt()


def _listed() -> Any:
    """Experts as modules of their own, which nobody stacks for the program."""
    import torch

    model = torch.nn.Module()
    model.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
    return model


def hugging_face(rank: int, kind: str, changes: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """The engine's mean losses and the plain loop's, of one of Transformers' models by its configuration."""
    import torch

    import trine

    def loss_fn(model: Any, batch: Any) -> Any:
        return model(**batch).loss

    def batch(step: int, place: int, places: int) -> Any:
        ids, _ = batch_of(step, place, places)
        return {"input_ids": ids, "labels": ids.clone()}

    model = transformers_model(kind)
    reference = transformers_model(kind)
    stepper = torch.optim.SGD(reference.parameters(), lr=0.3, momentum=0.9)
    expected = []
    for step in range(3):
        loss = loss_fn(reference, batch(step, 0, 1))
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        expected.append(float(loss.detach()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn)
    losses = [float(engine.train_step(batch(step, engine.data_rank, engine.data_ranks))) for step in range(3)]
    engine.close()
    return _mean(losses), expected


def transformers_model(kind: str) -> Any:
    """Small, in float64 but for Transformers' losses, which are in float32."""
    import torch
    import transformers

    shape = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    torch.manual_seed(0)
    routed = {"num_experts_per_tok": 2}
    if kind == "mixtral":
        config = transformers.MixtralConfig(**shape, **routed, num_local_experts=4, sliding_window=None)
        model = transformers.MixtralForCausalLM(config)
    elif kind == "qwen_moe":
        inner = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
        config = transformers.Qwen2MoeConfig(**shape, **routed, **inner, num_experts=4)
        model = transformers.Qwen2MoeForCausalLM(config)
    elif kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    elif kind == "sliding":
        config = transformers.MistralConfig(**shape, sliding_window=8)
        model = transformers.MistralForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False
        )
        config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
        model = transformers.GPT2LMHeadModel(config)
    model = model.double()
    if kind in ("mixtral", "qwen_moe"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model


def resumed(rank: int, folder: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[Any, Any]:
    """Three steps of one layout, saved; three of another, loaded into a model of another seed; the plain run's six."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    losses = []
    for seed, changes, steps in ((0, first, range(3)), (1, second, range(3, 6))):
        model = mixture()
        if seed:
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
        if seed:
            engine.load(folder)
        for step in steps:
            losses.append(float(engine.train_step(batch_of(step, engine.data_rank, engine.data_ranks))))
        if not seed:
            engine.save(folder)
        engine.close()
    return _mean(losses), plain(6)[0]
