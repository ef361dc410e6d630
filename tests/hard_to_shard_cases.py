"""Models that are hard to shard, and what the tests of ZeRO do with them on each rank."""

from __future__ import annotations

from typing import Any

import torch
from refusals import refusal_of
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from zero_cases import OPTIMIZERS, Batches, digest, mean_over_ranks, plain_run, ranks_of

import trine

__all__: list[str] = []


class Odd(nn.Module):
    """Frozen, unused, scalar, tied, indivisible and buffer-carrying all at once."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.gates = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + 0.1 * place)) for place in range(8))
        self.idle = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Linear(5, 5)
        self.inputs = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.shared = self.blocks[2]  # stands in the list and beside it
        self.norm = nn.BatchNorm1d(12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(not frozen)
        self.outputs = nn.Linear(12, 3)  # three rows: fewer than four ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        for place, gate in enumerate(self.gates):
            x = x + torch.sin((place + 1) * gate * x) / 8
        x = self.frozen(self.norm(self.shared(x)))
        result: torch.Tensor = self.outputs(x) * self.scale
        return result


def odd_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return functional.cross_entropy(model(x), y)


def odd_batches(steps: int) -> Batches:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(16, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (16,), generator=generator),
        )
        for _ in range(steps)
    ]


def odd_model(seed: int = 0) -> Odd:
    torch.manual_seed(seed)
    return Odd().double()


def odd_run(rank: int, changes: dict[str, Any], optimizer: str = "fused", seeds_apart: bool = False) -> Any:
    """Losses by DDP (the control) and by ``changes``; the parameters' and the statistics' bits after each."""
    found = []
    for each in ({}, changes):
        model = odd_model(rank if seeds_apart else 0)
        stepper = OPTIMIZERS[optimizer](model.parameters())
        config = trine.Config().with_changes(each)
        given: nn.Module = model
        if config.zero.stage < 2:
            given = DistributedDataParallel(model, find_unused_parameters=True)
        engine = trine.optimize(given, stepper, config, loss_fn=odd_loss, clip_norm=0.5)
        share = ranks_of(odd_batches(6), rank)
        losses = mean_over_ranks([float(engine.train_step(batch)) for batch in share])
        model.eval()
        with torch.no_grad():
            held_out = float(odd_loss(engine.model, odd_batches(7)[6]))
        found.append((losses, held_out, digest(model), model.norm.running_mean.tolist()))
    return found


class MixedBlock(nn.Module):
    """A norm in fp64 after a matrix in fp32: FSDP2 alone asserts that a group has one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.linear(x).double()).float()
        return result


class Mixed(nn.Module):
    """Two such blocks, and the like outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
        self.norm = nn.LayerNorm(8).double()
        self.outputs = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.outputs(self.norm(x.double()).float())
        return result


def mixed_dtypes(rank: int, stage: int) -> tuple[list[float], list[float]]:
    generator = torch.Generator().manual_seed(5)
    batches = [
        (torch.randn(8, 8, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(5)
    ]
    torch.manual_seed(1)
    model = Mixed()
    plain = plain_run(model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches, odd_loss)
    torch.manual_seed(1)
    model = Mixed()
    engine = trine.optimize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"zero": {"stage": stage}}, loss_fn=odd_loss
    )
    return plain, mean_over_ranks([float(engine.train_step(b)) for b in ranks_of(batches, rank)])


def other_models(rank: int) -> str:
    """Ranks that bring different models."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4 + rank), nn.Linear(4 + rank, 4))
    return refusal_of(
        lambda: trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"zero": {"stage": 3}})
    )


class Branching(nn.Module):
    """Ranks that use different parameters in the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.outputs = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.outputs(x + self.branches[distributed.get_rank()](x))
        return result


def branches_apart(rank: int) -> tuple[list[float], list[float], float, str]:
    """Losses by DDP and by stage 1; how far PyTorch's fully_shard is from them at once; what we say of stage 3."""
    from torch.distributed.fsdp import fully_shard

    from trine.optim.runtime.sharding import mesh_of

    generator = torch.Generator().manual_seed(rank)
    data = [
        (torch.randn(4, 4, generator=generator), torch.randint(0, 2, (4,), generator=generator))
        for _ in range(5)
    ]

    def made(stage: int) -> Any:
        torch.manual_seed(0)
        model = DistributedDataParallel(Branching(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return trine.optimize(model, optimizer, {"zero": {"stage": stage}}, loss_fn=odd_loss)

    plain, ours = ([float(engine.train_step(batch)) for batch in data] for engine in (made(0), made(1)))
    torch.manual_seed(0)
    model = Branching()
    for branch in model.branches:
        fully_shard(branch, mesh=mesh_of("cpu", 1, 2))
    fully_shard(model, mesh=mesh_of("cpu", 1, 2))
    with torch.no_grad():
        apart = abs(float(odd_loss(model, data[0])) - plain[0])
    return plain, ours, apart, refusal_of(lambda: made(3))
