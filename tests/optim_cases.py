"""Models, data and worker functions for the runtime's tests; importable by spawned processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import started_ranks
from plain_loop import plain_losses
from refusals import refusal_of

TEXT = b"".join(
    bytes(f"def function_{n}(x):\n    return x * {n} + {n * n % 17}\n", "ascii") for n in range(600)
)


def small_gpt(seed: int = 0, **changes: Any) -> Any:
    import torch

    from trine.samples.gpt import GPT, GPTConfig

    shape: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32}
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**shape, **changes}))


def batches(steps: int, size: int, rank: int = 0, ranks: int = 1, sequence: int = 32) -> list[Any]:
    import torch

    from trine.samples.text import SourceText

    data = SourceText(TEXT, sequence)
    found = []
    for step in range(steps):
        start = (step * ranks + rank) * size
        pairs = [data[(start + position) % len(data)] for position in range(size)]
        found.append((torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])))
    return found


def train(
    config: Mapping[str, Any],
    steps: int = 10,
    size: int = 4,
    rank: int = 0,
    ranks: int = 1,
    double: bool = False,
    model_changes: Mapping[str, Any] | None = None,
) -> tuple[list[float], Any, Any]:
    """Losses, model and engine of a run by the engine with the changes of ``config``."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt(**(model_changes or {}))
    if double:
        model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(config), loss_fn=loss_of)
    losses = [float(engine.train_step(batch)) for batch in engine.steps(batches(steps, size, rank, ranks))]
    return losses, model, engine


def train_plain(
    steps: int = 10, size: int = 4, double: bool = False, model_changes: Mapping[str, Any] | None = None
) -> tuple[list[float], Any]:
    """The loop that people write, on one rank."""
    import torch

    from trine.samples.gpt import loss_of

    model = small_gpt(**(model_changes or {}))
    if double:
        model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return plain_losses(model, optimizer, batches(steps, size), loss_of), model


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """What ``function(rank, ranks, *arguments)`` returns on each rank of a gloo group, by rank."""
    return started_ranks.on_ranks(
        ranks, function, ranks, *arguments, timeout_s=timeout, collective_timeout_s=60, grace_s=5
    )


# --- what runs on ranks ------------------------------------------------------------------------


def losses_of_configurations(
    rank: int, ranks: int, configurations: list[dict[str, Any]], double: bool
) -> Any:
    """Per configuration: the losses averaged over ranks, and a checksum of the parameters on this rank."""
    import torch
    from torch import distributed

    found = []
    for changes in configurations:
        losses, model, _ = train(changes, steps=8, size=4, rank=rank, ranks=ranks, double=double)
        mean = torch.tensor(losses, dtype=torch.float64)
        distributed.all_reduce(mean)
        total = sum(float(p.detach().double().sum()) for p in model.parameters())
        found.append(((mean / ranks).tolist(), total))
    return found


def weighted_by_tokens(rank: int, ranks: int, steps: int) -> Any:
    """Gradients after accumulation over unequal token counts, in float64: unequal over ranks as well."""
    import torch

    import trine

    model = token_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes({"accumulation.steps": steps}), loss_fn=masked_loss
    )
    engine.train_step(masked_batch(rank))
    return [p.detach().flatten().tolist() for p in model.parameters()]


def token_model() -> Any:
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5)).double()


def masked_batch(rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(11 + rank)
    inputs = torch.randn(6, 7, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 5, (6, 7), generator=generator)
    for row in range(6):  # rows hold very different numbers of valid tokens
        targets[row, 1 + (row * 3 + rank * 2) % 6 :] = -100
    return inputs, targets


def masked_loss(model: Any, batch: Any) -> Any:
    from torch.nn import functional

    inputs, targets = batch
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, (targets != -100).sum()


def rewrap_live_ddp(rank: int, ranks: int) -> Any:
    """Adopt a wrapped model and its optimizer in mid-training, against the run that never changed."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import trine
    from trine.samples.gpt import loss_of

    def run(adopt: bool) -> tuple[list[float], str]:
        model = DistributedDataParallel(small_gpt())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses, refused = [], ""
        data = batches(10, 4, rank, ranks)
        for batch in data[:4]:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        changes: dict[str, Any] = {}
        if adopt:
            changes = {
                "compute.fuse": ["optimizer"],
                "communication.bucket_mib": 0.01,
                "communication.gradient_as_view": True,
            }
        engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
        for batch in engine.steps(data[4:]):
            losses.append(float(engine.train_step(batch)))
        if adopt:
            try:
                model(data[0][0])
            except trine.TrineError as error:
                refused = str(error)
        return losses, refused

    plain, _ = run(False)
    adopted, refused = run(True)
    return plain, adopted, refused


def synchronisations(rank: int, ranks: int, steps: int) -> int:
    """All-reduces of one step of ``steps`` micro-batches, counted by a communication hook."""
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes({"accumulation.steps": steps}), loss_fn=loss_of
    )
    calls = 0

    def counting_hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch checks the annotations
        nonlocal calls
        calls += 1
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        return allreduce_hook(state, bucket)

    engine.model.register_comm_hook(torch.distributed.group.WORLD, counting_hook)
    data = batches(2, 4, rank, ranks)
    engine.train_step(data[0])
    calls = 0  # buckets are rebuilt after the first step
    engine.train_step(data[1])
    return calls


def static_graph_with_no_sync(rank: int, ranks: int) -> str:
    """What PyTorch does with the combination that we refuse: its error, or the replicas' difference."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from trine.samples.gpt import loss_of

    def gradients(static: bool) -> Any:
        model = DistributedDataParallel(small_gpt(), static_graph=static)
        for _ in range(3):
            model.zero_grad()
            for position, batch in enumerate(batches(2, 2, rank, ranks)):
                model.require_backward_grad_sync = position == 1
                loss_of(model, batch).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    try:
        difference = (gradients(True) - gradients(False)).abs().max()
    except RuntimeError as error:
        return f"error: {error}"
    distributed.all_reduce(difference, op=distributed.ReduceOp.MAX)
    return f"difference {float(difference)}"


def refused(rank: int, ranks: int, changes: dict[str, Any]) -> str:
    """Our refusal of these changes."""
    import torch

    import trine

    model = small_gpt()
    config = trine.Config().with_changes(changes)
    return refusal_of(lambda: trine.optimize(model, torch.optim.AdamW(model.parameters()), config))


def everything_on_ranks(rank: int, ranks: int, configurations: list[dict[str, Any]]) -> dict[str, Any]:
    """All of the above but the broken one, which may leave its process group unusable."""
    return {
        "losses": losses_of_configurations(rank, ranks, configurations, True),
        "weighted": weighted_by_tokens(rank, ranks, 3),
        "rewrapped": rewrap_live_ddp(rank, ranks),
        "synchronisations": synchronisations(rank, ranks, 4),
        "refused": refused(rank, ranks, {"communication.static_graph": True, "accumulation.steps": 2}),
        "refused_bucket": refused(rank, ranks, {"communication.bucket_mib": 0.5, "compute.compile": "model"}),
    }
