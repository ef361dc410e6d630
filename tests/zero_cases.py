"""What the tests of ZeRO run on each rank; importable by spawned processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import optim_cases
import torch
from refusals import refusal_of
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import trine
from trine.samples.gpt import loss_of

__all__: list[str] = []

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def ranks_of(batches: Batches, rank: int) -> Batches:
    """This rank's share of each batch."""
    ranks = distributed.get_world_size()
    return [tuple(t.chunk(ranks)[rank] for t in batch) for batch in batches]  # type: ignore[misc]


def mean_over_ranks(values: list[float]) -> list[float]:
    mean = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(mean)
    return (mean / distributed.get_world_size()).tolist()


def worst(plain: list[float], other: list[float]) -> float:
    assert len(plain) == len(other)
    return max(abs(a - b) / abs(a) for a, b in zip(plain, other, strict=True))


def digest(model: nn.Module) -> str:
    """Of all parameters' bits; sharded ones are gathered."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def double_gpt(**changes: Any) -> Any:
    return optim_cases.small_gpt(**changes).double()


def plain_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    loss_fn: Any = loss_of,
    clip: float | None = None,
    scheduler: Any = None,
) -> list[float]:
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    return losses


# --- memory ------------------------------------------------------------------------------------


def memory(rank: int, stage: int, shards: int | None) -> dict[str, float]:
    """Bytes per parameter that this rank holds: optimizer and gradients as the record says, parameters in a step."""
    from trine.profiler.memory import bytes_of_gradients, bytes_of_optimizer, bytes_of_tensors

    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = sum(p.numel() for p in model.parameters())
    inside: list[int] = []

    def loss_fn(running: Any, batch: Any) -> Any:
        loss = loss_of(running, batch)
        inside.append(bytes_of_tensors(model.parameters()))
        return loss

    changes = {"zero.stage": stage, **({} if shards is None else {"parallel.shard": shards})}
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_fn)
    gradients: list[int] = []
    engine._assembly.inspect.append(lambda: gradients.append(bytes_of_gradients(model.parameters())))
    for batch in optim_cases.batches(2, 2, rank):
        engine.train_step(batch)
    return {
        "optimizer": bytes_of_optimizer(optimizer) / whole,
        "gradients": gradients[-1] / whole,
        "parameters_inside": inside[-1] / whole,
        "parameters_between": bytes_of_tensors(model.parameters()) / whole,
    }


def recorded_memory(rank: int, stage: int, folder: str) -> dict[str, float]:
    """The same from Trine's record."""
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = sum(p.numel() for p in model.parameters())
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes({"zero.stage": stage}), loss_fn=loss_of
    )
    with trine.profile(folder, model=engine.model, optimizer=engine.optimizer, windows=None):
        for batch in engine.steps(optim_cases.batches(4, 2, rank)):
            engine.train_step(batch)
    distributed.barrier()
    samples = trine.load(folder).rank(rank).samples
    names = list(samples.text("metric"))
    return {
        metric: float(samples["value"][names.index(f"memory/{metric}_bytes")]) / whole
        for metric in ("optimizer", "gradients", "parameters")
    }


# --- the live optimizer ------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    # From nought, Adagrad blows the rounding noise of a gradient that is zero up to a whole step.
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, eps=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-4}]


def made_engine(changes: dict[str, Any], dropout: float = 0.1, schedule: bool = True) -> Any:
    model = optim_cases.small_gpt(dropout=dropout)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n) if schedule else None
    return trine.optimize(
        model,
        optimizer,
        trine.Config().with_changes(changes),
        loss_fn=loss_of,
        scheduler=scheduler,
        clip_norm=1.0,
    )


def adopted(rank: int, name: str, stage: int, wrapped: bool) -> dict[str, Any]:
    """Adopt model and optimizer after four plain steps; schedulers hold the optimizer that was given."""
    data = optim_cases.batches(8, 8)

    def made(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = OPTIMIZERS[name](groups_of(model))
        if name == "sgd":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
        else:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
        return optimizer, scheduler

    model = double_gpt()
    optimizer, scheduler = made(model)
    plain = plain_run(model, optimizer, data, scheduler=scheduler)

    model = double_gpt()
    optimizer, scheduler = made(model)
    whole = plain_run(model, optimizer, data[:4], scheduler=scheduler)
    given: nn.Module = DistributedDataParallel(model) if wrapped else model
    engine = trine.optimize(
        given,
        optimizer,
        trine.Config().with_changes({"zero.stage": stage}),
        loss_fn=loss_of,
        scheduler=scheduler,
    )
    share = ranks_of(data[4:], rank)
    rest = mean_over_ranks([float(engine.train_step(batch)) for batch in share])
    moments = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    return {
        "worst": worst(plain, whole + rest),
        "same_object": engine.optimizer is optimizer,
        "sharded": all(hasattr(p, "to_local") for g in optimizer.param_groups for p in g["params"]),
        "moments_sharded": all(hasattr(v, "to_local") for v in moments),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "refused": refusal_of(lambda: given(share[0][0])) if wrapped and stage > 1 else "",
        "digest": digest(model),
    }


def optimizer_from_before(rank: int) -> dict[str, float]:
    """PyTorch alone: an optimizer made before fully_shard trains nothing, without a word. The control is ours."""
    from torch.distributed.fsdp import fully_shard

    from trine.optim.runtime.sharding import mesh_of

    data = ranks_of(optim_cases.batches(6, 4), rank)
    moved = {}
    for who in ("pytorch", "trine", "trine after a bare forward"):
        model = optim_cases.small_gpt()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        before = [p.detach().clone() for p in model.parameters()]
        if who == "pytorch":
            fully_shard(model, mesh=mesh_of("cpu", 1, distributed.get_world_size()))
            plain_run(model, optimizer, data)
        else:
            if who != "trine":
                with torch.no_grad():
                    model(data[0][0])
            engine = trine.optimize(model, optimizer, {"zero": {"stage": 3}}, loss_fn=loss_of)
            for batch in data:
                engine.train_step(batch)
        pairs = zip(before, model.parameters(), strict=True)
        least = min(float((a - b.detach().full_tensor()).norm() / a.norm().clamp(min=1.0)) for a, b in pairs)
        moved[who] = least
    return moved


# --- traps -------------------------------------------------------------------------------------


def evaluated_before_the_update(rank: int, stage: int) -> float:
    """A forward without gradients between backward and the update leaves FSDP2's root gathered, with old values."""
    data = optim_cases.batches(5, 4)
    model = double_gpt()
    plain = plain_run(model, torch.optim.SGD(model.parameters(), lr=0.3), data)
    model = double_gpt()
    engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.3), {"zero": {"stage": stage}})
    losses = []
    for ids, targets in ranks_of(data, rank):
        loss = functional.cross_entropy(engine(ids).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        with torch.no_grad():
            engine(ids)
        engine.step()
        losses.append(float(loss.detach()))
    return worst(plain, mean_over_ranks(losses))


def discarded_micro_batch(rank: int, stage: int) -> float:
    """A micro-batch that was given up leaves nothing behind, also before ranks have synchronised."""
    data = optim_cases.batches(5, 8)
    model = double_gpt()
    plain = plain_run(model, torch.optim.SGD(model.parameters(), lr=0.3), data[1:])
    model = double_gpt()
    config = {"zero": {"stage": stage}, "accumulation": {"steps": 2}}
    engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.3), config)
    share = ranks_of(data, rank)

    def micro_batch(ids: torch.Tensor, targets: torch.Tensor) -> float:
        loss = functional.cross_entropy(engine(ids).flatten(0, 1), targets.flatten())
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    micro_batch(*(t[:2] for t in share[0]))
    engine.discard()
    losses = []
    for ids, targets in share[1:]:
        pair = [micro_batch(ids[half], targets[half]) for half in (slice(0, 2), slice(2, 4))]
        losses.append(sum(pair) / 2)
    return worst(plain, mean_over_ranks(losses))


def clipped(rank: int, changes: dict[str, Any], optimizer: str) -> tuple[float, list[float], list[float]]:
    """Clipping by the norm of the whole gradient: how far losses are, and the norms of both sides' updates."""
    data = optim_cases.batches(6, 8)
    model = double_gpt()
    start = [p.detach().clone() for p in model.parameters()]
    plain = plain_run(model, OPTIMIZERS[optimizer](model.parameters()), data, clip=0.05)
    moved = [float((a - b.detach()).norm()) for a, b in zip(start, model.parameters(), strict=True)]
    model = double_gpt()
    engine = trine.optimize(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        trine.Config().with_changes(changes),
        loss_fn=loss_of,
        clip_norm=0.05,
    )
    losses = mean_over_ranks([float(engine.train_step(batch)) for batch in ranks_of(data, rank)])
    ours = [
        float((a - (b.detach().full_tensor() if hasattr(b, "full_tensor") else b.detach())).norm())
        for a, b in zip(start, model.parameters(), strict=True)
    ]
    return worst(plain, losses), moved, ours


def stored_low(rank: int, stage: int) -> dict[str, Any]:
    """Mixed precision by FSDP2: what blocks see, what they hand on, what is held."""
    seen: dict[str, torch.dtype] = {}
    model = optim_cases.small_gpt()
    config = {"zero": {"stage": stage}, "precision": {"master_weights": True, "dtype": "bf16"}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    model.blocks[0].up.register_forward_hook(lambda m, x, y: seen.update(weight=m.weight.dtype))
    model.blocks[0].register_forward_hook(lambda m, x, y: seen.update(handed_on=y.dtype))
    engine.train_step(optim_cases.batches(1, 2, rank)[0])
    held = {p.dtype for p in model.parameters()}
    with torch.no_grad():
        out = engine(optim_cases.batches(1, 2, rank)[0][0])
    return {
        **{name: str(dtype) for name, dtype in seen.items()},
        "output": str(out.dtype),
        "held": sorted(map(str, held)),
        "effects": [str(effect) for effect in engine.effects],
    }


def prefetched(rank: int, depth: int | None) -> Any:
    model = optim_cases.small_gpt(layers=4)
    config = trine.Config().with_changes({"zero.stage": 3, "zero.prefetch": depth})
    trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    places = {id(block._get_fsdp_state()): n for n, block in enumerate(model.blocks)}
    return [
        (
            [places[id(s)] for s in block._get_fsdp_state()._states_to_forward_prefetch],
            [places[id(s)] for s in block._get_fsdp_state()._states_to_backward_prefetch],
        )
        for block in model.blocks
    ]


def overflow_on_one_shard(rank: int, stage: int) -> Any:
    """An infinite gradient in rank 0's rows alone: every rank leaves the step out."""
    model = optim_cases.small_gpt()
    config = {"zero": {"stage": stage}, "precision": {"dtype": "fp16"}}
    engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), config, loss_fn=loss_of)
    before = digest(model)

    def spoil() -> None:
        if rank == 0:
            held = engine.parameters()["blocks.0.up.weight"]
            held.grad.to_local().view(-1)[0] = float("inf")

    engine._assembly.collect.append(spoil)
    batch = optim_cases.batches(1, 2, rank)[0]
    engine.train_step(batch)
    left_out = digest(model) == before
    engine._assembly.collect.remove(spoil)
    engine.train_step(batch)
    return left_out, digest(model) == before, engine._assembly.scaler.current


def refused(rank: int, changes: dict[str, Any], optimizer: str = "AdamW") -> str:
    model = optim_cases.small_gpt()
    before = digest(model)
    made = getattr(torch.optim, optimizer)
    parameters = list(model.blocks[0].parameters()) if optimizer == "Muon" else list(model.parameters())
    stepper = made([p for p in parameters if optimizer != "Muon" or p.dim() == 2], lr=1e-3)
    said = refusal_of(lambda: trine.optimize(model, stepper, trine.Config().with_changes(changes)))
    untouched = digest(model) == before and not any(hasattr(p, "to_local") for p in model.parameters())
    return said if untouched else "changed something: " + said


def refused_models(rank: int) -> list[str]:
    """Models and optimizers that cannot be sharded."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from trine.optim.runtime.sharding import mesh_of

    config = {"zero": {"stage": 1}}
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh_of("cpu", 1, distributed.get_world_size()))
    plain = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    both = [*plain.parameters(), *other.parameters()]
    zro = ZeroRedundancyOptimizer(plain.parameters(), torch.optim.SGD, lr=0.1)
    odd_state = torch.optim.SGD(plain.parameters(), lr=0.1)
    odd_state.state[plain.weight] = {"factors": torch.zeros(2)}
    pairs = [
        (sharded, torch.optim.SGD(sharded.parameters(), lr=0.1)),
        (plain, torch.optim.SGD(both, lr=0.1)),
        (plain, zro),
        (plain, odd_state),
    ]
    said = [refusal_of(lambda m=m, o=o: trine.optimize(m, o, config)) for m, o in pairs]
    hollow = nn.Sequential(nn.Linear(4, 4))
    hollow.nothing = nn.Parameter(torch.zeros(0))
    three = {"zero": {"stage": 3}}
    return [
        *said,
        refusal_of(lambda: trine.optimize(hollow, torch.optim.SGD(hollow.parameters(), lr=0.1), three)),
    ]


def refused_wrappers(rank: int) -> list[str]:
    """DistributedDataParallel with what FSDP2 could not take over."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    hooked = DistributedDataParallel(nn.Linear(4, 4))
    hooked.register_comm_hook(distributed.group.WORLD, fp16_compress_hook)
    alone = distributed.new_subgroups(1)[0]
    partial = DistributedDataParallel(nn.Linear(4, 4), process_group=alone)
    pairs = [(hooked, 3), (partial, 1)]
    return [
        refusal_of(
            lambda m=m, s=s: trine.optimize(
                m, torch.optim.SGD(m.parameters(), lr=0.1), {"zero": {"stage": s}}
            )
        )
        for m, s in pairs
    ]


def automatic(rank: int, per_node: int) -> list[str]:
    """The effects of ``parallel.shard = "auto"``."""
    import os
    from unittest import mock

    changes: dict[str, Any] = {"zero.stage": 3, "parallel.shard": "auto"}
    model = optim_cases.small_gpt()
    with mock.patch.dict(os.environ, {"TRINE_RANKS_PER_NODE": str(per_node)}):
        engine = trine.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), trine.Config().with_changes(changes)
        )
    return [str(effect) for effect in engine.effects if effect.key == "parallel.shard"]
