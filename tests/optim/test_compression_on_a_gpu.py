"""Codes and the communication thread on a CUDA device: the same bits as on the CPU, and the streams' order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from trine.optim.config import Communication
from trine.optim.runtime.exchange import Bucket, Piece
from trine.optim.runtime.exchange.choice import reduction_of
from trine.optim.runtime.exchange.codecs import Cast, Int8, OneBit, Qsgd, Ternary
from trine.optim.runtime.exchange.thread import CommunicationThread
from trine.optim.runtime.exchange.two_phase import Alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("codec", [Int8(), OneBit(), Cast(torch.bfloat16)], ids=lambda codec: codec.name)
def test_deterministic_codes_are_the_same_bytes_as_on_the_cpu(codec: Any) -> None:
    rows = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))
    there = codec.encode(rows.cuda())
    if codec.name != "onebit":  # a mean's order of summation is the device's own
        assert torch.equal(there.cpu(), codec.encode(rows))
    back = codec.decode(there, 4096, torch.float32).cpu()
    assert torch.allclose(back, codec.decode(codec.encode(rows), 4096, torch.float32), rtol=1e-2)


@pytest.mark.parametrize("code", ["bf16", "fp16", "int8", "qsgd", "powersgd", "onebit", "terngrad"])
def test_every_code_runs_without_waiting_for_the_device(code: str) -> None:
    device = torch.device("cuda")
    reduction = reduction_of(Communication(compression=code), lambda flat: None, Alone(2), device)
    pieces = (Piece("w", 0, (256, 128)), Piece("b", 256 * 128, (256,)))
    flat = torch.randn(256 * 128 + 256, device=device)
    reduction.mean(Bucket(flat.clone(), pieces))  # allocations and caches
    torch.cuda.synchronize()
    if code != "powersgd":  # its QR asks the device whether it converged
        torch.cuda.set_sync_debug_mode("error")
    try:
        reduction.mean(Bucket(flat, pieces))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(torch.isfinite(flat).all())


@pytest.mark.parametrize("codec", [Qsgd, Ternary], ids=lambda kind: kind.name)
def test_stochastic_codes_are_right_on_average(codec: Any) -> None:
    made = codec(torch.Generator("cuda").manual_seed(0))
    rows = (torch.rand(1, 512, device="cuda") - 0.5).double()
    draws = 2000
    summed = sum(made.decode(made.encode(rows), 512, torch.float64) for _ in range(draws))
    assert float((summed / draws - rows).abs().max()) < 6.5 * 0.5 / draws**0.5


def test_the_thread_waits_for_the_training_stream_and_the_training_stream_for_it(alone: None) -> None:
    thread = CommunicationThread(torch.device("cuda", torch.cuda.current_device()))
    for position in range(20):
        matrix = torch.randn(2048, 2048, device="cuda")
        flat = torch.full((1 << 20,), float(position), device="cuda")
        for _ in range(10):
            matrix = matrix @ matrix.t() / 2048  # keeps the training stream busy
        flat += 1.0 + 0.0 * matrix[0, 0].nan_to_num()

        def work(flat: torch.Tensor = flat) -> None:
            distributed.all_reduce(flat, group=thread.group)
            flat.mul_(2.0)

        result = thread.submit(work, flat).wait()
        assert float(result.sum()) == (position + 1) * 2.0 * (1 << 20)
    thread.raise_failure()
    thread.close()
