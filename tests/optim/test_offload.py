"""Training state off the device: the same bits, within the plan's bytes, and a damaged or full disk is one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import offload_cases
import optim_cases
import pytest
import torch
from lazy_copies import LazyCopier
from offload_cases import disk, whole
from rank_pool import RankPool
from torch import nn

import trine
from trine.optim.runtime.tiers import block_parameters, tiled_step
from trine.record.errors import UsageError
from trine.samples.gpt import loss_of

CPU = {"offload.optimizer": "cpu", "offload.tile_mib": 0.01}


def by_heat(folder: Path) -> dict[str, Any]:
    return {
        "offload.optimizer": "auto",
        "offload.parameters": "auto",
        "offload.path": str(folder),
        "offload.device_bytes": 400_000,
        "offload.cpu_bytes": 300_000,
    }


# --- the same bits -----------------------------------------------------------------------------


def test_parameters_come_and_go_without_a_trace(tmp_path: Path) -> None:
    plain = offload_cases.train({}, clip_norm=0.5)
    for changes in (CPU | {"offload.parameters": "cpu"}, whole(tmp_path), by_heat(tmp_path)):
        assert plain.is_bitwise(offload_cases.train(changes, clip_norm=0.5)), changes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [
        {"accumulation.steps": 2},
        {"checkpointing.mode": "full"},
        {"checkpointing.mode": "full", "accumulation.steps": 2},
        {"checkpointing.mode": "selective"},
        {"precision.dtype": "bf16"},
        {"precision.dtype": "fp16"},
        {"precision.dtype": "bf16", "precision.master_weights": True},
        {"precision.dtype": "fp16", "precision.master_weights": True, "accumulation.steps": 2},
        {"offload.activations": "cpu"},
        {"compute.fuse": ["optimizer"]},
        {"compute.fuse": ["norm", "mlp"]},
    ],
    ids=lambda base: "+".join(f"{key}={value}" for key, value in base.items()),
)
def test_beside_other_techniques(base: dict[str, Any], tmp_path: Path) -> None:
    plain = offload_cases.train(base, optim_cases.small_gpt(layers=4, dropout=0.1))
    for changes in (CPU | {"offload.parameters": "cpu"}, whole(tmp_path), by_heat(tmp_path)):
        other = offload_cases.train({**base, **changes}, optim_cases.small_gpt(layers=4, dropout=0.1))
        assert plain.is_bitwise(other), changes


def test_frozen_and_tied_parameters(tmp_path: Path) -> None:
    """Low-rank adapters round frozen blocks, whose weights backward needs after the adapters' gradients are there."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.base = nn.Linear(32, 32).requires_grad_(False)
            self.down, self.up = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(self.down(x)) + self.base(x).tanh()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*[Adapted() for _ in range(4)])
            self.head = nn.Linear(32, 32)
            self.tail = nn.Linear(32, 32)
            self.tail.weight = self.head.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tail(self.head(self.blocks(x)))

    data = [torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def run(changes: dict[str, Any]) -> offload_cases.Trained:
        def make(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

        return offload_cases.train(changes, Model(), data, offload_cases.squares, make)

    plain = run({})
    for changes in (CPU | {"offload.parameters": "cpu"}, whole(tmp_path)):
        assert plain.is_bitwise(run(changes)), changes


class _Shared(nn.Module):
    """Four blocks, of which as many share one weight, the last ones."""

    def __init__(self, sharing: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))
        for block in self.blocks[4 - sharing :]:
            block[0].weight = self.blocks[-1][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_that_share_a_parameter_stay_on_the_device(tmp_path: Path) -> None:
    """A home of its own in each would train two copies of what is one parameter."""
    data = [torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    places = (CPU | {"offload.parameters": "cpu"}, whole(tmp_path))
    for sharing, blocks in ((0, 4), (2, 2)):
        plain = offload_cases.train({}, _Shared(sharing), data, offload_cases.squares)
        for changes in places:
            found = offload_cases.train(changes, _Shared(sharing), data, offload_cases.squares)
            assert plain.is_bitwise(found), (sharing, changes)
            assert any(f"{blocks} blocks, fetched one ahead" in effect for effect in found.effects)
    with pytest.raises(UsageError, match=r"^offload\.parameters: the model has no list of like blocks"):
        offload_cases.train(places[0], _Shared(4), data, offload_cases.squares)


def test_evaluations_and_readers_between_steps_see_the_parameters(tmp_path: Path) -> None:
    seen: list[list[Any]] = []

    def look(engine: Any, step: int) -> None:
        with torch.no_grad():
            loss = loss_of(engine.model, optim_cases.batches(5, 4)[4])
        state = {name: value.clone() for name, value in engine.model.state_dict().items()}
        moments = [v["exp_avg"].sum() for v in engine.optimizer.state.values()]
        seen[-1].append((float(loss), state, moments))

    for changes in ({}, CPU | {"offload.parameters": "cpu"}, whole(tmp_path)):
        seen.append([])
        offload_cases.train(changes, act=look)
    for other in seen[1:]:
        for (loss, state, moments), (ours, theirs, sums) in zip(seen[0], other, strict=True):
            assert loss == ours and moments == sums
            assert all(torch.equal(value, theirs[name]) for name, value in state.items())


def test_overflowing_steps_leave_the_tiers_alone(tmp_path: Path) -> None:
    moved: list[float] = []

    def run(changes: dict[str, Any]) -> offload_cases.Trained:
        huge = 2.0**40  # overflows fp16 at once
        run = offload_cases.train({"precision.dtype": "fp16", "precision.loss_scale": huge, **changes})
        moved.append(sum(step.get("offload/moved_bytes", 0.0) for step in run.metrics))
        return run

    plain = run({})
    assert not plain.state  # no step was taken
    assert plain.is_bitwise(run(disk(tmp_path)))
    assert moved[-1] == 0.0


def test_after_an_exception_in_a_step_the_engine_goes_on(tmp_path: Path) -> None:
    def run(changes: dict[str, Any], fail: bool) -> offload_cases.Trained:
        failed: list[int] = []

        def loss_fn(model: Any, batch: Any) -> Any:
            loss = loss_of(model, batch)
            if fail and not failed and threading.current_thread() is threading.main_thread():
                failed.append(1)
                loss.register_hook(lambda _: (_ for _ in ()).throw(ValueError("mine")))
            return loss

        model = optim_cases.small_gpt(layers=4)
        engine = trine.optimize(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            trine.Config().with_changes(changes),
            loss_fn=loss_fn,
        )
        data = optim_cases.batches(3, 4)
        if fail:
            with pytest.raises(ValueError, match="mine"):
                engine.train_step(data[0])
        found = offload_cases.Trained(engine, [float(engine.train_step(batch)) for batch in data], [])
        engine.close()
        return found

    assert run({}, False).is_bitwise(run(whole(tmp_path), True))


@pytest.mark.parametrize("place", [0, -1])
def test_parameters_that_are_taken_out_of_the_optimizer_are_refused(place: int) -> None:
    """Those behind one would take its state."""
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(CPU), loss_fn=loss_of)
    (batch,) = optim_cases.batches(1, 4)
    engine.train_step(batch)
    optimizer.param_groups[0]["params"].pop(place)
    with pytest.raises(UsageError, match=r"taken out of group 0 .* freeze them instead"):
        engine.train_step(batch)
    engine.close()


def test_parameters_that_are_frozen_later_stay_as_they_are() -> None:
    def run(changes: dict[str, Any]) -> offload_cases.Trained:
        model = optim_cases.small_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
        losses = []
        for step, batch in enumerate(optim_cases.batches(4, 4)):
            if step == 2:
                model.blocks[0].requires_grad_(False)
            losses.append(float(engine.train_step(batch)))
        found = offload_cases.Trained(engine, losses, [])
        engine.close()
        return found

    assert run({}).is_bitwise(run(CPU))


def test_two_ranks_are_bitwise(two_ranks: RankPool, tmp_path: Path) -> None:
    pairs: list[Any] = [
        ({}, whole(tmp_path), {"clip_norm": 0.1}),
        ({"zero.stage": 1}, disk(tmp_path), {"clip_norm": 0.1}),
        ({"zero.stage": 3}, {"offload.parameters": "cpu", **CPU}, {"clip_norm": 0.1}),
    ]
    for results in two_ranks.run("offload_cases:on_ranks", pairs):
        for same, said in results:
            assert same, said


@pytest.mark.slow
def test_two_ranks_beside_other_techniques(two_ranks: RankPool, tmp_path: Path) -> None:
    masters = {"precision.dtype": "bf16", "precision.master_weights": True}
    pairs: list[Any] = [
        ({"zero.stage": 2}, disk(tmp_path), {"clip_norm": 0.1}),
        ({"zero.stage": 3}, disk(tmp_path, **{"offload.parameters": "cpu"}), {}),
        ({"zero.stage": 3}, {"offload.parameters": "cpu"}, {}),
        ({"accumulation.steps": 2}, whole(tmp_path), {"clip_norm": 0.1}),
        (masters, whole(tmp_path), {}),
        ({**masters, "zero.stage": 1}, disk(tmp_path), {}),
        ({**masters, "zero.stage": 1, "accumulation.steps": 2}, CPU, {}),
        ({**masters, "zero.stage": 3}, {"offload.parameters": "cpu", **CPU}, {}),
        ({"precision.dtype": "fp16", "zero.stage": 1}, disk(tmp_path), {}),
        ({"accumulation.delayed": True, "accumulation.delayed_warmup_steps": 1}, whole(tmp_path), {}),
        ({"communication.compression": "int8"}, whole(tmp_path), {}),
        ({"zero.stage": 3, "communication.compression": "int8"}, disk(tmp_path), {}),
        (
            {"zero.stage": 1},
            {"offload.optimizer": "auto", "offload.path": str(tmp_path), "offload.device_bytes": 520_000},
            {},
        ),
    ]
    for results in two_ranks.run("offload_cases:on_ranks", pairs):
        for same, said in results:
            assert same, said


# --- bytes -------------------------------------------------------------------------------------


def planned(run: offload_cases.Trained) -> dict[str, float]:
    """Bytes that the plan states, by tier."""
    found = dict.fromkeys(("device", "host", "disk"), 0.0)
    for tier in found:
        for effect in run.effects:
            if effect.startswith(f"offload plan, {tier}: "):
                found[tier] = float(effect.split("→ ")[1].split(" MiB")[0]) * 2**20
    return found


@pytest.mark.parametrize("which", ["cpu", "disk", "whole", "by heat", "tiles alone"])
def test_bytes_are_those_of_the_plan(which: str, tmp_path: Path) -> None:
    changes = {
        "cpu": CPU | {"offload.parameters": "cpu"},
        "disk": disk(tmp_path),
        "whole": whole(tmp_path),
        "by heat": by_heat(tmp_path),
        "tiles alone": {"offload.tile_mib": 0.01},
    }[which]
    run = offload_cases.train(changes, optim_cases.small_gpt(layers=6))
    plan, last = planned(run), run.metrics[-1]
    for tier, metric in (("device", "device_bytes"), ("host", "cpu_bytes"), ("disk", "disk_bytes")):
        measured = last[f"offload/{metric}"]
        assert abs(measured - plan[tier]) <= 0.05 * plan[tier], (tier, measured, plan)
    if which != "tiles alone":
        moved = next(effect for effect in run.effects if effect.startswith("offload plan, traffic"))
        stated = float(moved.split("a step moves ")[1].split(" MiB")[0]) * 2**20
        assert abs(last["offload/moved_bytes"] - stated) <= 0.05 * stated, (last, moved)


def test_the_heat_decides(tmp_path: Path) -> None:
    run = offload_cases.train(by_heat(tmp_path))
    plan = planned(run)
    assert plan["device"] <= 400_000 and plan["host"] <= 300_000 and plan["disk"] > 0
    words = {effect.partition(": ")[0]: effect for effect in run.effects}
    assert "parameters" in words["offload plan, host"]
    assert "parameters" not in words["offload plan, disk"]  # colder things are there


@pytest.mark.slow
def test_what_is_on_disk_is_not_in_memory(tmp_path: Path) -> None:
    """The process's own pages (RssAnon), against the same run in memory: moments of 48 MiB are not there."""
    script = (
        "import sys, torch, trine\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(6)])\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)\n"
        "config = trine.Config().with_changes(eval(sys.argv[1]))\n"
        "engine = trine.optimize(model, optimizer, config, loss_fn=lambda m, b: m(b).square().mean())\n"
        "for _ in range(2): engine.train_step(torch.ones(1, 1024))\n"
        "print([int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('RssAnon')][0])\n"
    )

    def resident(changes: dict[str, Any]) -> int:
        done = subprocess.run(
            [sys.executable, "-c", script, repr(changes)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            # What is freed goes back at once; else the C library keeps some of it, now more, now less.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"},
        )
        return int(done.stdout) * 1024

    moments = 2 * 6 * 1025 * 1024 * 4
    saved = resident({"offload.tile_mib": 1.0}) - resident(disk(tmp_path, **{"offload.tile_mib": 1.0}))
    assert saved > 0.7 * moments, saved / moments


# --- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("disk", "whole"),
        ("by heat", "none"),
        *(
            pytest.param(saved, resumed, marks=pytest.mark.slow)
            for saved in ("none", "disk", "by heat")
            for resumed in ("none", "cpu", "whole", "by heat")
            if (saved, resumed) not in (("disk", "whole"), ("by heat", "none"))
        ),
    ],
)
def test_a_checkpoint_of_any_tier_resumes_bitwise_on_any_other(
    saved: str, resumed: str, tmp_path: Path
) -> None:
    kinds = {
        "none": {},
        "cpu": CPU | {"offload.parameters": "cpu"},
        "disk": disk(tmp_path),
        "whole": whole(tmp_path),
        "by heat": by_heat(tmp_path),
    }
    data = optim_cases.batches(4, 4)

    def keep(engine: Any, step: int) -> None:
        if step == 1:
            engine.save(tmp_path / "checkpoint")

    offload_cases.train(kinds[saved], batches=data[:2], act=keep)
    plain = offload_cases.train({}, batches=data)

    def resume(model: nn.Module) -> offload_cases.Trained:
        engine = trine.optimize(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            trine.Config().with_changes(kinds[resumed]),
            loss_fn=loss_of,
        )
        assert engine.load(tmp_path / "checkpoint") == 2
        losses = [float(engine.train_step(batch)) for batch in data[2:]]
        found = offload_cases.Trained(engine, losses, [])
        engine.close()
        return found

    found = resume(optim_cases.small_gpt(seed=9, layers=4))
    found.losses = plain.losses[:2] + found.losses
    assert plain.is_bitwise(found)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offload.path": "/tmp"}, ["offload.path", "offload.optimizer"]),
        ({"offload.cpu_bytes": 5}, ["offload.cpu_bytes", "auto"]),
        ({"offload.overlap": False}, ["offload.overlap", "offload.optimizer"]),
        ({"offload.device_bytes": 5}, ["offload.device_bytes", "accumulation.micro_batch"]),
        ({"offload.parameters": "cpu"}, ["offload.parameters", "offload.optimizer"]),
        ({"offload.optimizer": "nvme"}, ["offload.path"]),
        ({"offload.optimizer": "nvme", "offload.path": ""}, ['offload.path = ""', "names no folder"]),
        ({"offload.activations": "nvme", "offload.path": " "}, ['offload.path = " "', "names no folder"]),
        ({**CPU, "offload.path": ""}, ['offload.path = ""', "names no folder"]),
        (
            {"offload.optimizer": "nvme", "offload.path": "/no/such/folder"},
            ["/no/such/folder", "no such folder"],
        ),
        ({**CPU, "offload.parameters": "auto"}, ["offload.parameters", "offload.optimizer"]),
        (
            {**CPU, "offload.parameters": "cpu", "compute.compile": "blocks"},
            ["offload.parameters", "compute.compile"],
        ),
        (
            {"offload.optimizer": "auto", "offload.device_bytes": 1000},
            ["offload.device_bytes", "less than what stays"],
        ),
        (
            {"offload.optimizer": "auto", "offload.cpu_bytes": 20_000},
            ["offload.cpu_bytes = 20000", "less than what stays"],
        ),
        (
            {"offload.optimizer": "auto", "offload.device_bytes": 300_000, "offload.cpu_bytes": 50_000},
            ["offload.cpu_bytes", "offload.path"],
        ),
    ],
)
def test_refused_by_name(changes: dict[str, Any], words: list[str]) -> None:
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError) as raised:
        trine.optimize(
            model, torch.optim.AdamW(model.parameters(), lr=0.1), trine.Config().with_changes(changes)
        )
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)


def test_blocks_are_needed_for_parameters() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"offload\.parameters: the model has no list of like blocks"):
        trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            trine.Config().with_changes({**CPU, "offload.parameters": "cpu"}),
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"zero.stage": 1, **CPU, "offload.parameters": "cpu"}, ["zero.stage = 1", "zero.stage = 3"]),
        ({"zero.stage": 2, **CPU, "offload.parameters": "cpu"}, ["zero.stage = 2", "zero.stage = 3"]),
        (
            {
                "zero.stage": 3,
                "offload.optimizer": "nvme",
                "offload.parameters": "nvme",
                "offload.path": "/tmp",
            },
            ["zero.stage = 3", '"cpu"'],
        ),
        (
            {"zero.stage": 3, "offload.parameters": "cpu", "zero.quantized_weights": True},
            ["zero.quantized_weights"],
        ),
    ],
)
def test_refused_on_ranks(changes: dict[str, Any], words: list[str], two_ranks: RankPool) -> None:
    for said in two_ranks.run("offload_cases:refused", changes):
        assert all(word in said for word in ["offload.parameters", *words]), said
        assert "\n" not in said


def test_what_does_not_fit_on_one_rank_is_refused_on_all(two_ranks: RankPool, tmp_path: Path) -> None:
    case = "offload_cases:refused_where_stages_are_unequal"
    own, other = two_ranks.run(case, 250_000, str(tmp_path))
    assert own.startswith("offload.device_bytes = 250000 is") and other == f"on rank 0: {own}"
    assert own.endswith("make the model anew, which has been changed")
    assert two_ranks.run(case, 600_000, str(tmp_path)) == ["", ""]


# --- beside a device ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["cpu", "disk", "masters"])
def test_copies_beside_the_computation_are_waited_for(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same code that runs on CUDA streams, with copies that happen as late as they may."""
    masters = {"precision.dtype": "bf16", "precision.master_weights": True} if which == "masters" else {}
    changes = whole(tmp_path) if which == "disk" else CPU | {"offload.parameters": "cpu"}
    plain = offload_cases.train(masters)
    made: list[LazyCopier] = []

    def lazy() -> LazyCopier:
        made.append(LazyCopier())
        return made[-1]

    monkeypatch.setattr(tiled_step, "Copier", lazy)
    monkeypatch.setattr(block_parameters, "Copier", lazy)
    assert plain.is_bitwise(offload_cases.train({**masters, **changes}))
    assert sum(copier.done for copier in made) > 50
    for copier in made:
        assert not copier.queue


def test_a_copy_that_is_not_waited_for_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless() -> LazyCopier:
        copier = LazyCopier()
        copier.wait = lambda event, stream: None  # type: ignore[method-assign]
        return copier

    plain = offload_cases.train({})
    monkeypatch.setattr(tiled_step, "Copier", careless)
    assert not plain.is_bitwise(offload_cases.train(CPU))
