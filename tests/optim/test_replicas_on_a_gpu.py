"""Replicas over NCCL: ``pytest -m gpu``. One device shows the parts, two or more the whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import device_replicas
import optim_cases
import pytest
import torch
from torch import distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # PyTorch's DDP and NCCL warn themselves
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CONFIGURATIONS: list[dict[str, Any]] = [
    {},
    {"communication.algorithm": "ring"},
    {"communication.algorithm": "tree"},
    {"communication.algorithm": "auto"},
    {"communication.bucket_mib": "auto"},
    {"communication.overlap": False},
    {"communication.nccl": {"algo": "Ring", "proto": "Simple", "min_channels": 2, "max_channels": 4}},
]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_hints_make_a_communicator_and_leave_the_environment(alone: None) -> None:
    from trine.optim.runtime.nccl_hints import hinted_group

    device = torch.device("cuda", 0)
    distributed.all_reduce(torch.ones(1, device=device))  # the program's own communicator exists already
    group = hinted_group({"algo": "Ring", "proto": "Simple", "min_channels": 2, "max_channels": 4}, device)
    options = group._get_backend(device).options
    assert (options.config.min_ctas, options.config.max_ctas) == (2, 4)
    assert "NCCL_ALGO" not in os.environ
    assert "NCCL_PROTO" not in os.environ
    values = torch.ones(8, device=device)
    distributed.all_reduce(values, group=group)
    assert values.tolist() == [1.0] * 8


def test_gradients_are_timed_by_events_and_buckets_decided(alone: None) -> None:
    from torch.nn.parallel import DistributedDataParallel

    import trine
    from trine.optim._facts import facts_of
    from trine.optim.runtime.bucket_tuning import MEASURED_STEPS, WARM_UP_STEPS, BucketTuning
    from trine.optim.techniques import Assembly
    from trine.samples.gpt import loss_of

    model = DistributedDataParallel(optim_cases.small_gpt().cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assembly = Assembly(model, optimizer, trine.Config(), facts_of(model, optimizer))
    tuning = BucketTuning(assembly, 2**24, lambda size: size / 1e8, "a test")
    for ids, targets in optim_cases.batches(WARM_UP_STEPS + MEASURED_STEPS, 2):
        loss_of(assembly.model, (ids.cuda(), targets.cuda())).backward()
        optimizer.step()
        optimizer.zero_grad()
        tuning.after_step()
    assert tuning.chosen is not None
    assert tuning.chosen.buckets > 1
    assert assembly.model is not model
    assert "gradients ready over" in str(assembly.effects[-1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_way_between_devices_trains_the_same() -> None:
    by_rank = device_replicas.losses_on_devices(2, CONFIGURATIONS)
    for position, changes in enumerate(CONFIGURATIONS):
        (plain, _, _), (losses, effects, checksum) = by_rank[0][0], by_rank[0][position]
        assert losses == pytest.approx(plain, rel=1e-10), changes
        assert by_rank[1][position][2] == checksum, changes
        assert all(any(effect.startswith(key) for effect in effects) for key in changes)
