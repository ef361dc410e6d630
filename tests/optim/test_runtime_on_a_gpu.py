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
        ({"precision.dtype": "fp16"}, 2e-3),
        ({"precision.dtype": "bf16", "precision.master_weights": True}, 4e-3),
        ({"precision.dtype": "fp16", "precision.master_weights": True}, 2e-3),
        ({"precision.tf32": True}, 1e-3),
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


# --- precision ---------------------------------------------------------------------------------


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@pytest.mark.skipif(_capability() < (8, 9), reason="no float8 units")
def test_float8_trains_the_same_within_its_tolerance(plain: list[float]) -> None:
    pytest.importorskip("torchao")
    changes = {"precision.dtype": "bf16", "precision.float8": True, "compute.compile": "blocks"}
    losses, engine = train(changes)
    assert 0 < apart(losses, plain) <= 2e-2
    assert any("8 linear layers" in str(effect) for effect in engine.effects)
    kinds = {type(module).__name__ for module in engine.model.modules()}
    assert "Float8Linear" in kinds


def test_tf32_is_put_back_when_the_engine_closes() -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    _, engine = train({"precision.tf32": True}, steps=1)
    assert torch.backends.cuda.matmul.allow_tf32
    engine.close()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


@pytest.mark.parametrize("counted", [False, True], ids=["by samples", "by tokens"])
def test_an_ordinary_step_never_waits_for_the_device(counted: bool) -> None:
    def loss_fn(given: torch.nn.Module, batch: Any) -> Any:
        loss = loss_of(given, batch)
        mean = loss[0] if isinstance(loss, tuple) else loss
        return (mean, (batch[1] >= 0).sum()) if counted else mean

    model = GPT(GPTConfig(layers=2, hidden=128, heads=4, sequence=64, attention="sdpa")).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = trine.optimize(model, optimizer, {"precision": {"dtype": "bf16"}}, loss_fn=loss_fn)
    data = [(ids.cuda(), targets.cuda()) for ids, targets in batches(6, 4, 64, 256)]
    for batch in data[:3]:  # the unit of counts is agreed on at the first
        engine.train_step(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in data[3:]:
            engine.train_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_gradient_that_is_not_finite_is_told_one_step_late() -> None:
    from trine.record.errors import TrainingError

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).cuda()
    engine = trine.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda given, x: given(x).square().mean()
    )
    good = torch.ones(6, 4)
    engine.train_step(good)
    engine.train_step(good * torch.inf)
    with pytest.raises(TrainingError, match=r"optimizer step 1: the gradient of 0\.weight was not finite"):
        engine.train_step(good)


@pytest.mark.parametrize("divided", [False, True], ids=["ignored targets", "a masked mean"])
def test_a_micro_batch_without_valid_tokens_weighs_nothing_on_a_device(divided: bool) -> None:
    """Its count is on the device and is not read."""

    def loss_fn(given: torch.nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        valid = targets >= 0
        if not divided:
            return torch.nn.functional.cross_entropy(given(inputs), targets), valid.sum()
        each = -given(inputs).log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
        return (each * valid).sum() / valid.sum(), valid.sum()

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 4, generator=generator)
    targets = torch.randint(0, 3, (6,), generator=generator)
    targets[2:4] = -100
    results = []
    for rows in (torch.arange(6), torch.tensor([0, 1, 4, 5])):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).cuda()
        steps = 3 if len(rows) == 6 else 1
        engine = trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            {"accumulation": {"steps": steps}},
            loss_fn=loss_fn,
        )
        loss = float(engine.train_step((inputs[rows], targets[rows])))
        results.append((loss, model.weight.detach().cpu()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1])


# --- packed sequences --------------------------------------------------------------------------


def document_losses(changes: Mapping[str, Any], **shape: Any) -> list[float]:
    """Losses on documents of 1 to 256 tokens, eight a step, padded or packed."""
    from sequence_cases import Documents
    from torch.utils.data import DataLoader

    from trine.samples.text import pad_documents

    torch.manual_seed(0)
    config = GPTConfig(**{"layers": 2, "hidden": 256, "heads": 4, "sequence": 256, **shape})
    model = GPT(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    lengths = [(7 * n * n + 3 * n) % 256 + 1 for n in range(64)]
    loader = DataLoader(Documents(lengths), batch_size=8, collate_fn=pad_documents)
    try:
        return [float(engine.train_step(batch)) for batch in engine.steps(loader)]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    [("sdpa", "fp32", 1e-4), ("flex", "fp32", 1e-4), ("sdpa", "bf16", 4e-3), ("varlen", "bf16", 4e-3)],
)
@pytest.mark.parametrize("compiled", [False, "blocks"])
def test_packed_documents_train_as_padded_ones(
    attention: str, dtype: str, tolerance: float, compiled: bool | str
) -> None:
    plain = document_losses({})
    packed = document_losses(
        {
            "data.packing": True,
            "data.packed_length": 512,
            "compute.attention": attention,
            "compute.compile": compiled,
            "precision.dtype": dtype,
        }
    )
    assert apart(packed, plain) <= tolerance


@pytest.mark.parametrize("kind", ["varlen", "flex"])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_ends_at_documents_as_by_mask(kind: str, heads: int) -> None:
    """Forward and gradients against the mask in fp32; fewer heads of key and value are shared."""
    from trine.optim.runtime.documents import Documents
    from trine.optim.runtime.packed_attention import attend, visible_of

    dtype = torch.bfloat16 if kind == "varlen" else torch.float32
    borders = Documents.of([[5, 100, 23], [128], [1, 1, 64]], 128)
    borders = Documents(borders.numbers.cuda(), borders.cu_seqlens.cuda(), borders.longest)
    query = torch.randn(3, 4, 128, 64, device="cuda")
    key, value = torch.randn(2, 3, heads, 128, 64, device="cuda")

    def result(implementation: str, dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [each.to(dtype).detach().requires_grad_() for each in (query, key, value)]
        mixed = attend(*inputs, visible_of(borders, implementation))
        mixed.float().square().sum().backward()
        return [mixed.detach().float(), *(each.grad.float() for each in inputs)]

    for found, wanted in zip(result(kind, dtype), result("sdpa", torch.float32), strict=True):
        assert float((found - wanted).norm() / wanted.norm()) <= (2e-2 if kind == "varlen" else 2e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute.attention": "varlen"}, "its kernel computes in bf16 or fp16"),
        ({"compute.attention": "flash", "precision.dtype": "bf16"}, "takes no mask"),
    ],
)
def test_attention_that_cannot_run_packed_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(trine.TrineError, match=words):
        document_losses({"data.packing": True, **changes})


# --- fused regions -----------------------------------------------------------------------------


def test_regions_are_the_same_as_eager() -> None:
    """Liger's kernels where installed, else compiled ones; the optimizer as well."""
    shape = {"norm": "rms", "mlp": "swiglu", "positions": "rotary", "attention": "sdpa"}
    names = ["norm", "mlp", "rotary", "bias_dropout_residual", "cross_entropy", "optimizer"]
    plain, _ = train({}, **shape)
    fused, engine = train({"compute.fuse": names}, **shape)
    assert apart(fused, plain) <= 1e-4
    assert any("compiled region" in str(each) or "Liger" in str(each) for each in engine.effects)
    low, _ = train({"compute.fuse": names, "precision.dtype": "bf16"}, **shape)
    assert apart(low, plain) <= 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_liger_against_eager(dtype: torch.dtype) -> None:
    from trine.optim.runtime import regions

    if regions.liger() is None:
        pytest.skip("liger-kernel is not installed")
    bodies, torch_functional = regions.bodies, torch.nn.functional
    targets = torch.randint(0, 1000, (128,), device="cuda")
    targets[:9] = -100
    tables = regions.rotary_tables(torch.arange(32, device="cuda"), 64, dtype=dtype)
    cases: list[tuple[str, Any, Any, list[tuple[int, ...]]]] = [
        (
            "layer_norm",
            regions.layer_norm,
            lambda x, w, b: bodies.layer_norm(x, w, b, 1e-5),
            [(4, 32, 256), (256,), (256,)],
        ),
        (
            "rms_norm",
            lambda x, w: regions.rms_norm(x, w, 1e-6),
            lambda x, w: bodies.rms_norm(x, w, 1e-6),
            [(4, 32, 256), (256,)],
        ),
        ("gated", regions.gated, bodies.gated, [(4, 32, 256), (4, 32, 256)]),
        (
            "rotary",
            lambda q, k: regions.rotary(q, k, *tables),
            lambda q, k: bodies.rotary(q, k, *tables),
            [(2, 4, 32, 64), (2, 2, 32, 64)],
        ),
        (
            "linear_cross_entropy",
            lambda h, w: regions.linear_cross_entropy(h, w, targets),
            lambda h, w: torch_functional.cross_entropy((h @ w.T).float(), targets),
            [(128, 256), (1000, 256)],
        ),
    ]
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for name, ours, theirs, shapes in cases:
        torch.manual_seed(0)
        inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
        assert regions.implementation(name, inputs[0]) == "liger", name
        kept = [each.detach().clone() for each in inputs]
        found = []
        for function in (ours, theirs):
            out = function(*inputs)
            out = out if isinstance(out, tuple) else (out,)
            found.append([*out, *torch.autograd.grad(out, inputs, [torch.ones_like(each) for each in out])])
        for a, b in zip(*found, strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) <= tolerance, name
        assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True)), (
            f"{name} wrote to its inputs"
        )


def test_micro_batches_are_picked_by_the_allocators_memory() -> None:
    """The same losses in less memory, and what was picked keeps to the limit."""
    whole, engine = train({}, size=32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine.train_step(batches(1, 32, 256, 256)[0])
    needed = torch.cuda.max_memory_allocated()
    engine.close()
    del engine
    torch.cuda.empty_cache()
    limit = needed // 2
    picked, engine = train({"accumulation.micro_batch": "auto", "offload.device_bytes": limit}, size=32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine.train_step(batches(1, 32, 256, 256)[0])
    assert torch.cuda.max_memory_allocated() <= 1.05 * limit
    assert engine._assembly.fitting.pieces > 1
    assert apart(picked, whole) < 1e-3


def test_running_out_of_memory_runs_the_step_again() -> None:
    """Sequences that grow after measuring: the allocator's own error, under a cap on what this process may take."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, hidden=256, heads=4, sequence=1024)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(model, optimizer, {"accumulation": {"micro_batch": "auto"}}, loss_fn=loss_of)
    engine.train_step(batches(1, 32, 64, 256)[0])
    fitting: Any = engine._assembly.fitting
    assert fitting.size == 32
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**30) / total)
    try:
        assert float(engine.train_step(batches(1, 32, 1024, 256)[0])) > 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert fitting.out_of_memory >= 1 and fitting.size < 32
