"""Copies of activations in buffers that stay: fewer allocations, the same bits, and nothing that lives is overwritten."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import memory_cases
import optim_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trine
from trine.optim.runtime import memory_fit, tensor_pool
from trine.optim.runtime.host_memory import HostMemory
from trine.optim.runtime.low_precision import LowPrecision
from trine.optim.runtime.saved_tensors import LEAST_BYTES, SavedTensors
from trine.optim.runtime.tensor_pool import MOST_TIMES, TensorPool
from trine.record.errors import UsageError

CPU = torch.device("cpu")
POOL = {"activations.pool": True}
COPIES: list[dict[str, Any]] = [
    {"offload.activations": "cpu"},
    {"activations.dtype": "bf16"},
    {"activations.dtype": "fp16"},
    {"activations.dtype": "fp8", "offload.activations": "cpu"},
]


def allocations(changes: dict[str, Any]) -> tuple[int, int]:
    """(number, bytes) of a step's allocations that are large enough to be activations, by the profiler."""
    model = optim_cases.small_gpt(layers=4, dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = trine.Config().with_changes(changes)
    engine = trine.optimize(model, optimizer, config, loss_fn=memory_cases.loss_of)
    data = optim_cases.batches(3, 4)
    for batch in data:
        engine.train_step(batch)
    with memory_fit._quiet_profiler() as profiler:
        engine.train_step(data[0])
    sizes = [e.nbytes() for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    engine.close()
    made = [size for size in sizes if size >= LEAST_BYTES]
    return len(made), sum(made)


@pytest.mark.parametrize("changes", COPIES, ids=str)
def test_a_step_allocates_as_if_nothing_were_copied_and_the_bits_stay(changes: dict[str, Any]) -> None:
    plain, copied, pooled = allocations({}), allocations(changes), allocations(changes | POOL)
    assert copied[0] > plain[0]
    # What remains are temporaries of rounding: of the copies nothing is allocated any more.
    extra = 0 if "activations.dtype" not in changes or changes["activations.dtype"] == "bf16" else 400
    assert pooled[0] <= plain[0] + extra and pooled[0] < copied[0] and pooled[1] < copied[1]
    with_pool, without = memory_cases.train(changes | POOL), memory_cases.train(changes)
    assert with_pool.is_bitwise(without)
    made = [step["memory/activation_pool_allocations"] for step in with_pool.metrics[:3]]
    assert made[0] > 0 and made[2] == 0
    assert with_pool.metrics[2]["memory/activation_pool_bytes"] > 0


def held_hooks(pool: TensorPool, store: Any = None) -> SavedTensors:
    saved = SavedTensors(nn.Linear(1, 1))
    saved.store = store or LowPrecision(torch.bfloat16, None, pool)
    return saved


def test_a_tensor_that_lives_is_never_handed_out_again() -> None:
    pool = TensorPool(CPU)
    first = pool.empty(1000, torch.float32).fill_(1.0)
    view = first.view(10, 100)[3:]
    address = first.data_ptr()
    del first
    assert pool.empty(1000, torch.float32).data_ptr() != address  # the view lives
    assert float(view.sum()) == 700.0
    del view
    again = {pool.empty(1000, torch.float32).data_ptr() for _ in range(3)}
    assert address in again and pool.made == 2


def test_two_threads_at_once_get_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second asks after the first has found its buffer, and before a tensor has been made over that."""
    pool = TensorPool(CPU)
    pool.empty(1000, torch.float32)  # and dropped: a buffer is free
    lent, found = tensor_pool._Buffer.lent, []
    other = threading.Thread(target=lambda: found.append(pool.empty(1000, torch.float32)), daemon=True)

    def slow(buffer: Any, size: int) -> torch.Tensor:
        if not other.ident:
            other.start()
            other.join(0.5)  # it waits for the lock, or is done
        return lent(buffer, size)

    monkeypatch.setattr(tensor_pool._Buffer, "lent", slow)
    found.append(pool.empty(1000, torch.float32))
    other.join(5)
    assert len({each.data_ptr() for each in found}) == len(found) == 2
    assert pool.made == 2


def test_a_hook_that_keeps_what_was_saved_keeps_its_numbers() -> None:
    pool = TensorPool(CPU)
    host = HostMemory(CPU)
    host.returning = pool
    kept: list[torch.Tensor] = []

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x * 2.0

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            kept.append(context.saved_tensors[0].detach())
            return gradient * 2.0

    values = []
    for number in range(5):
        x = torch.full((4096,), float(number), requires_grad=True)
        with held_hooks(pool, host)():
            loss = Keeping.apply(x + 0.0).sum()
        loss.backward()
        values.append(float(number))
    assert [float(tensor.mean()) for tensor in kept] == values
    assert pool.made == 5
    kept.clear()
    x = torch.ones(4096, requires_grad=True)
    with held_hooks(pool, host)():
        loss = Keeping.apply(x + 0.0).sum()
    loss.backward()
    assert pool.made == 5


@pytest.mark.parametrize("where", ["host", "bf16"])
def test_double_backward_and_retained_graphs(where: str) -> None:
    def gradients(pool: TensorPool | None) -> list[torch.Tensor]:
        host = HostMemory(CPU)
        host.returning = pool
        store = host if where == "host" else LowPrecision(torch.bfloat16, None, pool)
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        w = torch.randn(64, 64, requires_grad=True)
        found = []
        for _ in range(3):  # buffers come round
            saved = SavedTensors(nn.Linear(1, 1))
            saved.store = store
            with saved():
                y = ((x @ w).tanh() @ w).square().sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            found.append(first.detach().clone())
            (second,) = torch.autograd.grad(first.square().sum(), w, retain_graph=True)
            (again,) = torch.autograd.grad(first.square().sum(), w)
            assert torch.equal(second, again)
            found.append(second)
        return found

    for a, b in zip(gradients(TensorPool(CPU)), gradients(None), strict=True):
        assert torch.equal(a, b)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=60))
def test_sizes_that_vary_are_bounded(sizes: list[int]) -> None:
    pool = TensorPool(CPU)
    most = 0
    for size in sizes:
        tensor = pool.empty(size, torch.uint8)
        assert tensor.numel() == size and tensor.untyped_storage().nbytes() == size
        del tensor
        most = max(most, size)
        # A size is rounded up by an eighth, or to 512 bytes.
        assert pool.total_bytes <= MOST_TIMES * (most * 9 // 8 + 512)


def test_the_pool_goes_with_the_engine() -> None:
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is TensorPool}  # of other tests
    model = optim_cases.small_gpt()
    config = trine.Config().with_changes({"activations.dtype": "bf16", **POOL})
    engine = trine.optimize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config, loss_fn=memory_cases.loss_of
    )
    engine.train_step(optim_cases.batches(1, 4)[0])
    found = [each for each in gc.get_objects() if type(each) is TensorPool and id(each) not in before]
    pools = [weakref.ref(each) for each in found]
    del found
    assert len(pools) == 1
    engine.close()
    del engine
    gc.collect()
    assert pools[0]() is None


def test_alone_it_is_refused() -> None:
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError, match=r"activations\.pool.*offload\.activations.*activations\.dtype"):
        trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), trine.Config().with_changes(POOL))
