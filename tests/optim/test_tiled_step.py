"""The optimizer's step in tiles: the same bits as the whole one, whatever optimizer, shapes, types and tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import offload_cases
import optim_cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import trine
from trine.optim.runtime.tiers.spans import ALIGNED, Length, tiles_of
from trine.optim.runtime.tiers.tiled_step import TiledStep
from trine.record.errors import UsageError
from trine.samples.gpt import loss_of

#: Optimizers and what their constructors are given.
KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"momentum": 0.9, "foreach": True}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"fused": True}),
    (optim.Adadelta, {}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.NAdam, {"foreach": True}),
    (optim.RAdam, {}),
    (optim.ASGD, {"t0": 1}),
    (optim.ASGD, {"t0": 1, "foreach": True}),
    (optim.Rprop, {}),
]
QUICK = [kind for kind in KINDS if kind[0] in (optim.AdamW, optim.ASGD)]


def two_groups(
    kind: type[optim.Optimizer], settings: dict[str, Any]
) -> Callable[[nn.Module], optim.Optimizer]:
    def make(model: nn.Module) -> optim.Optimizer:
        parameters = list(model.parameters())
        groups = [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "lr": 2e-2}]
        return kind(groups, **settings)  # type: ignore[arg-type]

    return make


def tiers(folder: Path) -> list[dict[str, Any]]:
    disk = {"offload.optimizer": "nvme", "offload.path": str(folder)}
    return [
        {"offload.tile_mib": 0.001},
        {"offload.optimizer": "cpu", "offload.tile_mib": 0.002},
        {**disk, "offload.tile_mib": 0.001},
        {**disk, "offload.overlap": False, "offload.parameters": "nvme"},
    ]


def hold(kind: type[optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype, folder: Path) -> None:
    data = [torch.randn(8, 37, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in range(4)]
    make = two_groups(kind, settings)

    def run(changes: dict[str, Any]) -> offload_cases.Trained:
        return offload_cases.train(changes, offload_cases.Odd(dtype), data, offload_cases.squares, make)

    plain = run({})
    assert (
        any(torch.is_tensor(value) for state in plain.state for value in state.values()) or kind is optim.SGD
    )
    for changes in tiers(folder):
        assert plain.is_bitwise(run(changes)), changes


@pytest.mark.parametrize(
    ("kind", "settings"), QUICK, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_tiles_are_bitwise(kind: type[optim.Optimizer], settings: dict[str, Any], tmp_path: Path) -> None:
    hold(kind, settings, torch.float32, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "settings"), KINDS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_every_optimizer_and_type_is_bitwise(
    kind: type[optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    hold(kind, settings, dtype, tmp_path)


@pytest.mark.slow
def test_several_threads_change_no_bit(tmp_path: Path) -> None:
    """PyTorch cuts large tensors over its threads; where it does so must not show."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for settings in ({}, {"fused": True}, {"foreach": True}):
            runs = [step_of_one(changes, settings) for changes in ({}, *tiers(tmp_path)[:3])]
            assert all(torch.equal(runs[0], other) for other in runs[1:])
    finally:
        torch.set_num_threads(before)


def step_of_one(changes: dict[str, Any], settings: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(1001, 301)
    changes = {**changes, **({"offload.tile_mib": 0.3} if changes else {})}
    offload_cases.train(
        {k: v for k, v in changes.items() if k != "offload.parameters"},
        model,
        [torch.randn(4, 1001) for _ in range(3)],
        offload_cases.squares,
        lambda m: optim.AdamW(m.parameters(), lr=1e-2, **settings),
    )
    return model.weight.detach()


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([2, 4, 8]), st.booleans()), max_size=20),
    st.one_of(st.floats(1, 40_000), st.just(float("inf"))),
)
def test_tiles_hold_every_element_once(shapes: list[tuple[int, int, bool]], most: float) -> None:
    lengths = [Length(*shape) for shape in shapes]
    tiles = tiles_of(lengths, most)
    seen: dict[int, int] = {}
    for tile in tiles:
        assert tile
        size = sum((span.end - span.start) * lengths[span.slot].element_bytes for span in tile)
        alone = len([span for span in tile if span.end > span.start]) <= 1
        assert size <= most or alone
        if size > most and lengths[tile[-1].slot].divisible:
            assert tile[-1].end - tile[-1].start <= ALIGNED
        for span in tile:
            assert span.start == seen.get(span.slot, 0)
            assert span.start % ALIGNED == 0 or span.start == 0
            seen[span.slot] = span.end
    assert seen == {slot: length.elements for slot, length in enumerate(lengths)}
    order = [span.slot for tile in tiles for span in tile]
    assert order == sorted(order)


def test_tiles_that_fall_elsewhere_would_show() -> None:
    """The control: kernels round the rest after whole vectors otherwise, for some optimizer and type."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    whole = torch.lerp(values, values.flip(0), 0.1)
    pieces = torch.cat(
        [torch.lerp(a, b, 0.1) for a, b in zip(values.split(7), values.flip(0).split(7), strict=True)]
    )
    aligned = torch.cat(
        [
            torch.lerp(a, b, 0.1)
            for a, b in zip(values.split(ALIGNED), values.flip(0).split(ALIGNED), strict=True)
        ]
    )
    assert torch.equal(whole, aligned)
    assert torch.allclose(whole, pieces)


def test_memory_is_bounded_by_the_tiles_in_flight(tmp_path: Path) -> None:
    """Three slabs, however long the model is; one where nothing overlaps."""
    for overlap, slabs in ((None, 3), (False, 1)):
        changes = {"offload.optimizer": "nvme", "offload.path": str(tmp_path), "offload.tile_mib": 0.01}
        run = offload_cases.train({**changes, **({} if overlap is None else {"offload.overlap": overlap})})
        tile = 0.01 * 2**20
        held = run.metrics[-1]["offload/cpu_bytes"]
        assert slabs * 1.5 * tile < held <= slabs * 2 * (tile + 64 * 20)  # two moments a parameter


@pytest.mark.parametrize("place", [1, 3])
def test_a_step_that_fails_leaves_nothing_behind(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out in the update of one tile: no slab is lost, and the state is that of parameters alone."""
    tiled: list[TiledStep] = []
    update = TiledStep._update

    def fail_once(self: TiledStep, tile: Any) -> None:
        tiled.append(self)
        step = self._step
        if len(tiled) == place:
            monkeypatch.setattr(self, "_step", out_of_memory)
        try:
            update(self, tile)
        finally:
            monkeypatch.setattr(self, "_step", step)

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("out of memory")

    model = optim_cases.small_gpt(layers=4)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    config = trine.Config().with_changes(offload_cases.disk(tmp_path))
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # there is state of which parts can be left
    monkeypatch.setattr(TiledStep, "_update", fail_once)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert set(optimizer.state) <= set(model.parameters())
    optimizer.step()  # finds as many slabs as there were
    assert set(optimizer.state) == set(model.parameters())
    slabs = tiled[0].slabs
    assert len(slabs._free) == slabs._made
    engine.close()


def test_hooks_and_schedulers_see_one_step(tmp_path: Path) -> None:
    model = offload_cases.Odd()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    optimizer.register_step_post_hook(
        lambda o, *_: seen.append(sum(p.grad is not None for g in o.param_groups for p in g["params"]))
    )
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = trine.optimize(
        model,
        optimizer,
        trine.Config().with_changes({"offload.tile_mib": 0.001}),
        loss_fn=offload_cases.squares,
        scheduler=scheduler,
    )
    for seed in range(2):
        torch.manual_seed(seed)
        engine.train_step(torch.randn(4, 37))
    assert optimizer.param_groups[0]["lr"] == 2.5e-3
    assert len(seen) == 2
    engine.close()


def test_state_that_the_program_puts_there_is_taken_over(tmp_path: Path) -> None:
    """``load_state_dict`` gives the optimizer other tensors; they go to their tier with the next step."""

    def reload(engine: Any, step: int) -> None:
        if step == 0:
            kept = {
                "param_groups": engine.optimizer.state_dict()["param_groups"],
                "state": {
                    place: {k: v.clone() + 1.0 if k != "step" else v.clone() for k, v in values.items()}
                    for place, values in engine.optimizer.state_dict()["state"].items()
                },
            }
            engine.optimizer.load_state_dict(kept)
        if step == 1:
            with torch.no_grad():
                for values in engine.optimizer.state.values():
                    values["exp_avg_sq"].mul_(2.0)  # in place, in the file where it lies there

    plain = offload_cases.train({}, act=reload)
    for changes in tiers(tmp_path)[1:]:
        assert plain.is_bitwise(offload_cases.train(changes, act=reload)), changes


def test_a_live_optimizer_is_moved(tmp_path: Path) -> None:
    runs = []
    for changes in ({}, *tiers(tmp_path)):
        model = offload_cases.Odd()
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(2):
            torch.manual_seed(seed)
            offload_cases.squares(model, torch.randn(4, 37)).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(
            offload_cases.train(
                changes, model, [torch.ones(4, 37)] * 2, offload_cases.squares, lambda _, o=optimizer: o
            )
        )
    assert all(runs[0].is_bitwise(other) for other in runs[1:])


@pytest.mark.parametrize(
    ("optimizer_of", "words"),
    [
        (lambda m: optim.LBFGS(m.parameters()), ["LBFGS"]),
        (lambda m: type("Mine", (optim.SGD,), {})(m.parameters(), lr=0.1), ["Mine", "element by element"]),
        (lambda m: optim.Adam(m.parameters(), differentiable=True), ["differentiable"]),
    ],
)
def test_optimizers_that_cannot_be_cut_are_refused(optimizer_of: Any, words: list[str]) -> None:
    for changes in ({"offload.tile_mib": 1.0}, {"offload.optimizer": "cpu"}):
        with pytest.raises(UsageError) as raised:
            offload_cases.train(changes, optimizer_of=optimizer_of)
        assert all(word in str(raised.value) for word in [*words, next(iter(changes))]), raised.value
        assert "\n" not in str(raised.value)


def test_sparse_gradients_are_refused_before_anything_is_changed() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(UsageError, match="0 makes sparse gradients"):
        trine.optimize(model, optim.SGD(model.parameters(), lr=0.1), {"offload": {"tile_mib": 1.0}})
