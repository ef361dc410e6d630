"""What the runtime does on a CUDA device: ``pytest -m gpu``. Skipped, and said, where there is none.

One device is enough but for the tests marked with :data:`two`; all of it takes under eight minutes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import trine
from trine.samples.gpt import GPT, GPTConfig, loss_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's compiler and profiler warn themselves
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

#: The goal on an H100 or H200, under the convention `megatron`.
LEAST_MFU = 0.55


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def batches(steps: int, size: int, sequence: int, vocab: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (steps, size, sequence + 1), generator=generator)
    return [(step[:, :-1].contiguous(), step[:, 1:].contiguous()) for step in ids]


def train(changes: Mapping[str, Any], steps: int = 8, size: int = 4, **shape: Any) -> tuple[list[float], Any]:
    """Losses and engine of the sample GPT on the device."""
    torch.manual_seed(0)
    config = GPTConfig(**{"layers": 2, "hidden": 256, "heads": 4, "sequence": 256, **shape})
    model = GPT(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    data = batches(steps, size, config.sequence, config.vocab)
    losses = [float(engine.train_step(batch)) for batch in engine.steps(data)]
    return losses, engine


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return train({})[0]


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"compute.attention": "sdpa"}, 1e-4),
        ({"precision.dtype": "bf16", "compute.attention": "flash"}, 4e-3),
        ({"compute.fuse": ["optimizer"]}, 1e-4),
        ({"compute.compile": "blocks"}, 1e-4),
        ({"precision.dtype": "bf16", "compute.attention": "sdpa", "compute.compile": "model"}, 4e-3),
        ({"accumulation.steps": 2}, 1e-4),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_each_technique_trains_the_same(
    changes: dict[str, Any], tolerance: float, plain: list[float]
) -> None:
    assert apart(train(changes)[0], plain) <= tolerance


def test_model_flops_utilization_of_a_billion_parameters(tmp_path: Path) -> None:
    """A GPT of 1.0 billion parameters in bf16: what the runtime is for."""
    shape = {"layers": 18, "hidden": 2048, "heads": 16, "vocab": 50304, "sequence": 2048}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(GPTConfig(**shape))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(1.0e9, rel=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    changes = {
        "precision.dtype": "bf16",
        "compute.attention": "flash",
        "compute.compile": "blocks",
        "compute.fuse": ["optimizer"],
    }
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    data = batches(4, 8, shape["sequence"], shape["vocab"]) * 6
    with trine.profile(tmp_path / "run", model=model, optimizer=engine.optimizer, windows=None) as prof:
        for batch in prof.steps(engine.steps(data)):
            engine.train_step(batch)
    analysis = trine.analyze(trine.load(tmp_path / "run"), convention="megatron")
    mfu = analysis.mfu
    assert mfu is not None and mfu.value is not None, analysis.data_quality
    print(f"MFU of {count / 1e9:.2f} billion parameters in bf16, megatron convention: {mfu.value:.1%}")  # noqa: T201
    name = torch.cuda.get_device_name()
    if any(kind in name for kind in ("H100", "H200")):
        assert mfu.value > LEAST_MFU
    else:
        warnings.warn(f"the goal of {LEAST_MFU:.0%} is for H100 and H200; this is {name}", stacklevel=1)


# --- activations -------------------------------------------------------------------------------


def peak_of(changes: Mapping[str, Any]) -> tuple[list[float], int]:
    """Losses with dropout, and the most bytes that the allocator gave out in the steps after the first two."""
    engine = train(changes, steps=2, layers=6, dropout=0.1)[1]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(5)
    losses = [float(engine.train_step(batch)) for batch in batches(4, 4, 256, 256)]
    peak = torch.cuda.max_memory_allocated()
    engine.close()
    return losses, peak


@pytest.fixture(scope="module")
def plain_with_dropout() -> tuple[list[float], int]:
    return peak_of({})


@pytest.mark.parametrize(
    ("changes", "tolerance", "share"),
    [
        # Dropout that is not repeated, or memory that is used too early, is off by far more than the order of sums.
        ({"checkpointing.mode": "full"}, 1e-4, 0.5),
        ({"checkpointing.mode": "selective"}, 1e-4, 0.8),
        ({"checkpointing.mode": "budget", "checkpointing.budget_bytes": 120_000_000}, 1e-4, 1.0),
        ({"checkpointing.mode": "auto"}, 1e-4, 1.1),
        ({"offload.activations": "cpu"}, 1e-4, 0.6),
        ({"offload.activations": "cpu", "checkpointing.mode": "full", "checkpointing.every": 2}, 1e-4, 0.7),
        ({"activations.dtype": "bf16"}, 4e-3, 0.85),
        ({"activations.dtype": "fp8"}, 2e-2, 0.75),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_activations_take_less_and_train_the_same(
    changes: dict[str, Any],
    tolerance: float,
    share: float,
    plain_with_dropout: tuple[list[float], int],
) -> None:
    losses, peak = peak_of(changes)
    assert apart(losses, plain_with_dropout[0]) <= tolerance
    print(f"{changes}: {peak / 2**20:.0f} of {plain_with_dropout[1] / 2**20:.0f} MiB")  # noqa: T201
    assert peak <= share * plain_with_dropout[1]


def test_activations_on_disk(tmp_path: Path, plain_with_dropout: tuple[list[float], int]) -> None:
    losses, peak = peak_of({"offload.activations": "nvme", "offload.path": str(tmp_path)})
    assert apart(losses, plain_with_dropout[0]) <= 1e-4
    assert peak < 0.6 * plain_with_dropout[1]
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_is_called_by_names_repeats_its_dropout() -> None:
    """PyTorch keeps the device's random state for positional tensors alone."""
    from trine.optim.runtime.checkpointed import Region, checkpoint_in_place
    from trine.optim.runtime.recomputation import RecomputationWatch

    class Drops(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(x.sin(), 0.5, True).sin()

    module = Drops().cuda()
    checkpoint_in_place(Region("drops", module))
    x = torch.randn(4096, device="cuda", requires_grad=True)
    with RecomputationWatch(module) as watch:
        module(x=x).sum().backward()
    assert watch.compared and watch.differences == []
