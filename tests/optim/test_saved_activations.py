"""Activations saved in fewer bits, on the host and on disk: bytes by theory, bits by type, nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_cases
import optim_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import RankPool
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trine
from trine.optim.runtime import saved_tensors
from trine.optim.runtime.disk import Disk
from trine.optim.runtime.host_memory import HostMemory
from trine.optim.runtime.low_precision import DTYPES, LowPrecision
from trine.optim.runtime.saved_tensors import SavedTensors, Store
from trine.record.errors import UsageError

CPU = torch.device("cpu")
OFFLOAD = {"offload.activations": "cpu"}


def disk(folder: Path) -> dict[str, Any]:
    return {"offload.activations": "nvme", "offload.path": str(folder)}


def hooks(store: Store | None, model: nn.Module | None = None) -> SavedTensors:
    saved = SavedTensors(model or nn.Linear(1, 1))
    saved.always_counting = True
    saved.store = store
    return saved


# --- numbers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> memory_cases.Trained:
    return memory_cases.train({})


@pytest.mark.parametrize("extra", [{}, {"checkpointing.mode": "full", "checkpointing.every": 2}], ids=str)
def test_offloading_is_bitwise_with_dropout(
    extra: dict[str, Any], plain: memory_cases.Trained, tmp_path: Path
) -> None:
    for changes in (OFFLOAD, disk(tmp_path)):
        trained = memory_cases.train(changes | extra)
        assert trained.is_bitwise(plain)
        step = trained.metrics[1]
        assert step["memory/saved_activation_bytes"] < 0.02 * step["memory/unstored_activation_bytes"]
        assert step["memory/offloaded_activation_bytes"] > 0.9 * step["memory/unstored_activation_bytes"]


def test_rounding_leaves_the_forward_alone_and_keeps_its_tolerance(plain: memory_cases.Trained) -> None:
    for dtype, tolerance in (("bf16", 2e-3), ("fp16", 1e-3), ("fp8", 1e-2)):
        trained = memory_cases.train({"activations.dtype": dtype})
        assert trained.losses[0] == plain.losses[0]
        assert trained.losses[1] != plain.losses[1]  # it did round
        assert trained.losses == pytest.approx(plain.losses, rel=tolerance)
        moved = memory_cases.train({"activations.dtype": dtype} | OFFLOAD)
        assert moved.is_bitwise(trained)


@pytest.mark.parametrize("store", [None, "cpu", "disk", "bf16"])
def test_backward_twice(store: str | None, tmp_path: Path) -> None:
    disk_store = Disk(CPU, tmp_path)
    stores: dict[str | None, Store] = {
        "cpu": HostMemory(CPU),
        "disk": disk_store,
        "bf16": LowPrecision(torch.bfloat16),
    }
    model = optim_cases.small_gpt()
    with hooks(stores.get(store), model)():
        loss = memory_cases.loss_of(model, optim_cases.batches(1, 4)[0])
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    disk_store.close()


def test_on_ranks(two_ranks: RankPool, tmp_path: Path) -> None:
    pairs = [
        ({}, OFFLOAD),
        ({}, disk(tmp_path) | {"communication.gradient_as_view": True}),
        ({"zero.stage": 3}, OFFLOAD | {"zero.stage": 3}),
    ]
    for by_pair in two_ranks.run("memory_cases:on_ranks", pairs):
        for same, what in by_pair:
            assert same, what


def test_gathered_parameters_are_not_stored(two_ranks: RankPool) -> None:
    for stored, parameters in two_ranks.run("memory_cases:stored_under_sharding"):
        assert stored and not parameters


# --- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "part"), [("bf16", 2), ("fp16", 2), ("fp8", 4)])
def test_bytes_are_those_of_the_type(dtype: str, part: int) -> None:
    batch = optim_cases.batches(1, 4)[0]
    saved = memory_cases.held_by(optim_cases.small_gpt(attention="sdpa"), batch, LowPrecision(DTYPES[dtype]))
    low = memory_cases.held_by(
        optim_cases.small_gpt(attention="sdpa", layers=4), batch, LowPrecision(DTYPES[dtype])
    )
    plain = (low.plain_peak_bytes - saved.plain_peak_bytes) / 2  # of one block
    stored = (low.peak_bytes - saved.peak_bytes) / 2
    # Statistics stay: means and deviations of two norms, attention's log-sum-exp; scales are four bytes each.
    statistics = 4 * 32 * 4 * (2 * 2 + 2)
    assert stored == pytest.approx((plain - statistics) / part + statistics, abs=4 * 20)
    assert saved.held_bytes == 0 and saved.plain_bytes == 0


def test_tensors_that_are_saved_several_times_are_stored_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]
    saved = hooks(LowPrecision(torch.bfloat16))
    with saved():
        hidden = x * 1.0
        total = sum((hidden.view(64, 64) @ weight).sum() for weight in weights)
        total = total + (hidden.t() @ weights[0]).sum() + hidden[:32].square().sum()
    numbers = 64 * 64
    # hidden once, in two bytes; three weights, leaves that no module holds, likewise; nothing else is saved.
    assert saved.peak_bytes == 4 * numbers * 2
    total.backward()


def test_a_part_of_a_large_storage_does_not_drag_all_of_it_along() -> None:
    host = HostMemory(CPU)
    data = torch.randn(1000, 64)
    weight = torch.randn(64, 64, requires_grad=True)
    with hooks(host)():
        loss = (data[100:140] @ weight).square().sum()
    assert host.moved_bytes <= 40 * 64 * 4 * 2 + 64 * 64 * 4
    loss.backward()
    expected = 2 * data[100:140].t() @ (data[100:140] @ weight.detach())
    torch.testing.assert_close(weight.grad, expected)


def test_dropping_a_graph_gives_everything_back(tmp_path: Path) -> None:
    for store in (HostMemory(CPU), Disk(CPU, tmp_path, staged_bytes=1)):
        model = optim_cases.small_gpt()
        saved = hooks(store, model)
        sizes = []
        for number in range(4):
            with saved():
                loss = memory_cases.loss_of(model, optim_cases.batches(1, 4)[0])
            if number % 2:
                loss.backward()
            del loss
            assert saved.held_bytes == 0
            sizes.append((store.host_bytes, getattr(store, "file_bytes", 0)))
        assert len({file for _, file in sizes}) == 1  # places in the file are used again
        assert sizes[3][0] <= 1.5 * sizes[1][0]  # and buffers
        store.close()


# --- what is rounded, and what is not ----------------------------------------------------------


class Noting:
    """A store that wants everything and notes what it was given."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.seen: list[torch.Tensor] = []

    def choose(self, tensor: torch.Tensor) -> Store | None:
        found = self.inner.choose(tensor)
        if found is not None:
            self.seen.append(tensor)
        return found

    def device_bytes(self, elements: int, dtype: torch.dtype) -> int:
        return self.inner.device_bytes(elements, dtype)

    def put(self, flat: torch.Tensor) -> Any:
        raise AssertionError("the chosen store is asked")


@pytest.mark.parametrize("autocast", [False, True])
def test_never_parameters_masks_statistics_or_logarithms(autocast: bool) -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        model = optim_cases.small_gpt(hidden=64, attention="sdpa", dropout=0.1)
        noting = Noting(LowPrecision(dtype))
        with hooks(noting, model)(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = memory_cases.loss_of(model, optim_cases.batches(1, 4)[0])
        loss.backward()
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        shapes = {tuple(p.shape) for p in model.parameters()} | {
            tuple(p.t().shape) for p in model.parameters() if p.dim() == 2
        }
        assert noting.seen
        for tensor in noting.seen:
            assert tensor.is_floating_point() and tensor.requires_grad
            assert tensor.untyped_storage().data_ptr() not in parameters
            assert tuple(tensor.shape) not in shapes  # of casts, too
            assert tensor.grad_fn is None or "LogSoftmax" not in tensor.grad_fn.name()


def test_inputs_of_checkpointed_modules_stay_exact() -> None:
    model = optim_cases.small_gpt(layers=4, dropout=0.1)
    changes = {"activations.dtype": "fp8", "checkpointing.mode": "full", "checkpointing.every": 2}
    from trine.optim.runtime.recomputation import RecomputationWatch

    with RecomputationWatch(model) as watch:
        memory_cases.train(changes, model)
    assert watch.regions == 2 and watch.differences == []


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    st.sampled_from(sorted(DTYPES)),
)
def test_rounding_errors_are_those_of_the_type(values: list[float], dtype: str) -> None:
    kind = DTYPES[dtype]
    tensor = torch.tensor(values)
    back = LowPrecision(kind).put(tensor).get()
    # Half a unit in the last place, or of the smallest number once the largest is scaled to the top.
    top = float(tensor.abs().max())
    information = torch.finfo(kind)
    smallest = top / information.max * information.smallest_normal * information.eps * 4
    bound = tensor.abs() * information.eps / 2 * 1.0001 + (smallest + 2.0**-108 if dtype != "bf16" else 1e-38)
    assert back.dtype == torch.float32
    finite = tensor.abs() <= 3.38e38 if dtype == "bf16" else tensor.abs() <= 3.4e38
    assert bool(((back - tensor).abs() <= bound)[finite].all()), (tensor, back)


@pytest.mark.parametrize("scale", [1e-9, 1e9])
def test_narrow_ranges_are_scaled(scale: float) -> None:
    tensor = torch.randn(1000) * scale  # fp16 by itself would give zeros, or infinities
    for dtype in ("fp16", "fp8"):
        back = LowPrecision(DTYPES[dtype]).put(tensor).get()
        assert float((back - tensor).norm() / tensor.norm()) < torch.finfo(DTYPES[dtype]).eps


def test_what_is_not_finite_stays_so() -> None:
    tensor = torch.tensor([1.0, float("inf"), float("nan"), -2.0])
    for kind in DTYPES.values():
        back = LowPrecision(kind).put(tensor).get()
        assert not back[1:3].isfinite().any() and torch.equal(back[[0, 3]], tensor[[0, 3]])
    assert torch.equal(LowPrecision(torch.float16).put(torch.zeros(9)).get(), torch.zeros(9))


@pytest.mark.parametrize("store", [None, "cpu", "bf16"])
def test_modifying_in_place_what_was_saved_is_an_error_or_harmless(store: str | None) -> None:
    """Hooks switch PyTorch's own check off; without ours, gradients would be wrong without a word."""

    def gradient(changed: bool, size: int) -> torch.Tensor:
        x = torch.linspace(0, 1, size, requires_grad=True)
        with hooks({"cpu": HostMemory(CPU), "bf16": LowPrecision(torch.bfloat16)}.get(store or ""))():
            hidden = x * 1.0
            loss = hidden.square().sum()
        if changed:
            with torch.no_grad():
                hidden.mul_(3.0)
        loss.backward()
        assert x.grad is not None
        return x.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(True, 16)  # too small to be stored
    large = saved_tensors.LEAST_BYTES
    if store is None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(True, large)
    else:
        assert torch.equal(gradient(True, large), gradient(False, large))  # the copy is what was saved


def test_strides_survive() -> None:
    seen: list[tuple[Any, Any]] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            (x,) = context.saved_tensors
            seen.append((x.stride(), x.clone()))
            return gradient

    base = torch.randn(32, 3, 4, 16, requires_grad=True)
    views = [base.transpose(1, 3), base[:, 1], base.permute(3, 2, 1, 0)[1:], base.expand(2, 32, 3, 4, 16)]
    with hooks(HostMemory(CPU))():
        loss = sum(Keep.apply(view).sum() for view in views)
    loss.backward()
    for view, (stride, value) in zip(reversed(views), seen, strict=True):
        assert stride == view.stride() and torch.equal(value, view)


def test_hooks_of_somebody_else_are_left_in_charge_where_we_only_count() -> None:
    packed = []
    model = optim_cases.small_gpt(layers=2)
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        {"checkpointing": {"mode": "full"}},
        loss_fn=memory_cases.loss_of,
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        engine.train_step(optim_cases.batches(1, 4)[0])
    assert packed


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activations.pool": True}, ["activations.pool", "activations.dtype"]),
        ({"offload.path": "/tmp"}, ["offload.path", ".activations"]),
        (
            {"offload.activations": "nvme", "offload.path": "/no/such/folder"},
            ["/no/such/folder", "no such folder"],
        ),
        (
            {"activations.dtype": "bf16", "compute.compile": "blocks"},
            ["activations.dtype", "compute.compile", "statistics"],
        ),
        ({"offload.activations": "nvme"}, ["offload.path"]),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError) as raised:
        trine.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), trine.Config().with_changes(changes)
        )
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


def test_rounding_is_refused_where_it_would_spoil_or_do_nothing() -> None:
    for dtype, kept, words in (
        ("bf16", torch.float64, ["activations.dtype", "float64"]),
        ("bf16", torch.bfloat16, ["activations.dtype", "16 bits", "fp8"]),
    ):
        model = optim_cases.small_gpt().to(kept)
        with pytest.raises(UsageError) as raised:
            trine.optimize(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                trine.Config().with_changes({"activations.dtype": dtype}),
            )
        assert all(word in str(raised.value) for word in words), raised.value


def test_a_checkpoint_by_hand_within_goes_on_working() -> None:
    results = []
    for changes in ({}, OFFLOAD):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            for layer in model:  # type: ignore[attr-defined]
                x = checkpoint(
                    lambda x, layer=layer: functional.dropout(layer(x).relu(), 0.2), x, use_reentrant=False
                )
            return x.square().mean()

        results.append(memory_cases.train(changes, layers, [torch.randn(64, 64)], loss_fn))
    assert results[0].is_bitwise(results[1])
