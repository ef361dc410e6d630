"""Models, loaders and worker functions for the tests of accumulation and of the engine's steps."""

from __future__ import annotations

from typing import Any


def regression(seed: int = 0, dropout: float = 0.0, norm: bool = False, double: bool = True) -> Any:
    """A perceptron of 4 inputs; with ``norm`` its batch norm keeps running statistics."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(4, 64)]
    layers += [nn.BatchNorm1d(64)] if norm else []
    layers += [nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 3)]
    model = nn.Sequential(*layers)
    return model.double() if double else model


def samples(size: int, seed: int = 1) -> Any:
    """(inputs, targets) of so many samples, float64."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (size,), generator=generator)


def loss_of(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    inputs, targets = batch
    return functional.cross_entropy(model(inputs), targets)


def engine_of(model: Any, changes: dict[str, Any], rate: float = 0.5, **keys: Any) -> Any:
    import torch

    import trine

    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    keys.setdefault("loss_fn", loss_of)
    return trine.optimize(model, optimizer, trine.Config().with_changes(changes), **keys)


def weights(model: Any) -> Any:
    import torch

    return torch.cat([p.detach().flatten() for p in model.parameters()])


def plain_step(model: Any, batch: Any, rate: float = 0.5) -> float:
    """One step of the loop that people write."""
    import torch

    loss = loss_of(model, batch)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    model.zero_grad()
    return float(loss.detach())


# --- on ranks ----------------------------------------------------------------------------------


def share_of(batch: Any, rank: int, ranks: int) -> Any:
    size = len(batch[0]) // ranks
    return tuple(tensor[rank * size : (rank + 1) * size] for tensor in batch)


def steps_on_ranks(rank: int, ranks: int, changes: dict[str, Any], size: int, loader_batch: int) -> Any:
    """Parameters after an epoch of 4 global batches of ``size`` from a loader of ``loader_batch``; steps; all-reduces."""
    from unittest import mock

    from torch import distributed

    model = regression()
    engine = engine_of(model, changes)
    own = [share_of(samples(size, seed), rank, ranks) for seed in range(4)]
    whole = [tuple_cat([batch[place] for batch in own]) for place in range(2)]
    batches = [
        tuple(tensor[start : start + loader_batch] for tensor in whole)
        for start in range(0, len(whole[0]), loader_batch)
    ]
    steps = 0
    with mock.patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as reduced:
        for batch in engine.steps(batches):
            engine.train_step(batch)
            steps += 1
    engine.close()
    return weights(model).tolist(), steps, reduced.call_count


def tuple_cat(tensors: list[Any]) -> Any:
    import torch

    return torch.cat(tensors)


def automatic_on_ranks(rank: int, ranks: int, device_bytes: list[int]) -> Any:
    """The micro-batch that each rank uses when each has another memory, and what a rank's error does."""
    model = regression()
    engine = engine_of(model, {"accumulation.steps": "auto", "offload.device_bytes": device_bytes[0]})
    # A configuration must be the same on all ranks; what they find free need not be.
    engine._assembly.config = engine.config.with_changes({"offload.device_bytes": device_bytes[rank]})
    for seed in range(3):
        engine.train_step(share_of(samples(64, seed), rank, ranks))
    engine.close()
    return engine._assembly.fitting.size, weights(model).tolist()


def out_of_memory_on_ranks(rank: int, ranks: int) -> Any:
    """Rank 1 alone runs out of memory in its second step, in a micro-batch that exchanges nothing yet."""
    import torch

    model = regression()
    calls = 0

    def failing(model: Any, batch: Any) -> Any:
        nonlocal calls
        loss = loss_of(model, batch)
        if rank == 1 and calls == 4:
            calls += 1
            raise torch.OutOfMemoryError("injected")
        calls += 1
        return loss

    engine = engine_of(
        model, {"accumulation.micro_batch": "auto", "offload.device_bytes": 25_000}, loss_fn=failing
    )
    sizes = []
    for seed in range(3):
        engine.train_step(share_of(samples(64, seed), rank, ranks))
        sizes.append(engine._assembly.fitting.size)
    engine.close()
    return sizes, engine._assembly.fitting.out_of_memory, weights(model).tolist()


def failures_on_ranks(rank: int, ranks: int) -> Any:
    """An exception before the exchange, on all ranks: the engine goes on. One while exchanging: it says it cannot."""
    import torch

    import trine

    model = regression()
    fail: dict[str, bool] = {"forward": False, "backward": False}

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if fail["backward"] and calls % 2 == 0:  # in the last micro-batch, which exchanges
                raise ValueError("in backward")
            return gradient

    calls = 0

    def failing(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        loss = Fails.apply(loss_of(model, batch))
        if fail["forward"]:
            raise ValueError("in forward")
        return loss

    engine = engine_of(model, {"accumulation.steps": 2}, loss_fn=failing)
    said = []
    for where in ("", "forward", "", "backward", ""):
        calls = 0
        fail.update(forward=where == "forward", backward=where == "backward")
        try:
            engine.train_step(share_of(samples(8), rank, ranks))
            said.append("fine")
        except (ValueError, trine.TrineError) as error:
            said.append(str(error))
    engine.close()
    return said


def counted_all_reduces(rank: int, ranks: int) -> Any:
    """All-reduces of a step beside DDP's own, which go through no Python: with token counts, and without."""
    from unittest import mock

    import optim_cases
    import torch
    from torch import distributed

    import trine

    found = []
    for loss_fn in (
        optim_cases.masked_loss,
        lambda model, batch: optim_cases.masked_loss(model, batch)[0],
    ):
        model = optim_cases.token_model()
        engine = trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"accumulation": {"steps": 3}},
            loss_fn=loss_fn,
            clip_norm=1.0,
        )
        engine.train_step(optim_cases.masked_batch(rank))  # the first agrees on a unit as well
        with mock.patch.object(distributed, "all_reduce", wraps=distributed.all_reduce) as reduced:
            engine.train_step(optim_cases.masked_batch(rank))
        found.append(reduced.call_count)
    return found


def buffers_on_ranks(rank: int, ranks: int) -> Any:
    """Buffers and parameters after measuring on two ranks: replicas must stay the same bits."""
    model = regression(norm=True)
    engine = engine_of(model, {"accumulation.steps": "auto", "offload.device_bytes": 45_000})
    for seed in range(3):
        engine.train_step(share_of(samples(64, seed), rank, ranks))
    engine.close()
    return weights(model).tolist(), engine._assembly.fitting.pieces


def everything(rank: int, ranks: int) -> dict[str, Any]:
    """All of the above that leaves its process group usable."""
    gathered = {"accumulation.global_batch": 16, "accumulation.micro_batch": 4}
    return {
        "gathered": steps_on_ranks(rank, ranks, gathered, 16, 4),
        "cut": steps_on_ranks(rank, ranks, gathered, 16, 16),
        "automatic": automatic_on_ranks(rank, ranks, [40_000, 25_000]),
        "out_of_memory": out_of_memory_on_ranks(rank, ranks),
        "all_reduces": counted_all_reduces(rank, ranks),
        "buffers": buffers_on_ranks(rank, ranks),
    }


def everything_on_two(rank: int) -> dict[str, Any]:
    return everything(rank, 2)


def reduce_scatters(rank: int) -> Any:
    """Gradient reductions of FSDP2 in a step of one and of four micro-batches."""
    from unittest import mock

    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

    found = []
    for steps in (1, 4):
        engine = engine_of(regression(), {"zero.stage": 2, "accumulation.steps": steps})
        engine.train_step(share_of(samples(16), rank, 2))
        with mock.patch.object(
            _fsdp_param_group, "foreach_reduce", wraps=_fsdp_collectives.foreach_reduce
        ) as reduced:
            engine.train_step(share_of(samples(16), rank, 2))
        engine.close()
        found.append(reduced.call_count)
    return found
