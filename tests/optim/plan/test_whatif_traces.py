"""Real traces: how far replays of recorded steps are from what was measured, on devices and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from trine.optim.plan.whatif import recorded
from trine.record.errors import UsageError

#: Trace → (basis, how far the replay of any step may be off).
TRACES = {
    "single/a100_nccl_metadata.json.gz": ("kernels", 0.01),
    "single/h100_qwen1.5_0.5b.json.gz": ("kernels", 0.05),
    "single/mi300x_qwen1.5_0.5b.json.gz": ("kernels", 0.01),
    "single/mi300x_resnet_act_checkpoint.json.gz": ("kernels", 0.03),
    "single/v100_ns_resolution.json.gz": ("kernels", 0.02),
    "single/torch1.9_resnet50_workers0.json.gz": ("kernels", 0.02),
    "torchrec_straggler_v100": ("kernels", 0.03),
    "megatron_tp8_a100": ("kernels", 0.02),
    "gloo_ddp4_cpu": ("operators", 0.10),
}


@pytest.mark.parametrize("name", TRACES)
def test_replays_are_near_what_was_measured(data: Path, name: str) -> None:
    basis, most = TRACES[name]
    run = recorded(data / "traces" / "kineto" / name)
    assert run.graph.basis == basis and run.replay_errors
    assert max(abs(error) for error in run.replay_errors.values()) <= most


def test_a_device_that_lags_its_host_does_not_count_twice(data: Path) -> None:
    run = recorded(data / "traces" / "kineto" / "single" / "v100_ns_resolution.json.gz")
    later = run.graph.recorded[1:]
    assert all(step.ranks[0].backlog_s > 0.05 for step in later)
    assert all(step.measured_s == pytest.approx(later[0].measured_s, rel=0.02) for step in later)


def test_a_loader_that_holds_the_device_up_is_found(data: Path) -> None:
    folder = data / "traces" / "kineto" / "single"
    alone = recorded(folder / "torch1.9_resnet50_workers0.json.gz").what_if({"loader_wait": False})
    beside = recorded(folder / "torch1.9_resnet50_workers4.json.gz")
    # Traced with four workers a step takes 127 ms; the replay of the run without workers says about that.
    assert alone.predicted.mid == pytest.approx(
        sorted(beside.base_s.values())[len(beside.base_s) // 2], rel=0.1
    )


def test_a_straggler_is_most_of_a_step_that_waits_for_it(data: Path) -> None:
    run = recorded(data / "traces" / "kineto" / "torchrec_straggler_v100")
    assert run.what_if({"straggler": False}).gain.mid > 0.5 * run.what_if({"straggler": False}).step.mid


def test_files_without_steps_say_what_to_record(data: Path) -> None:
    with pytest.raises(UsageError, match="holds no whole step of every rank to replay: record a few steps"):
        recorded(data / "traces" / "kineto" / "odd" / "cpu_only.json.gz")
