"""fp16 and its scale, master weights, TF32, float8, and what dtypes the first step really had."""

from __future__ import annotations

import logging
import math
from importlib.util import find_spec
from typing import Any

import optim_cases
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trine
from trine.optim.runtime import loss_scaling
from trine.optim.runtime.loss_scaling import LossScaler
from trine.optim.techniques import float8, tf32
from trine.record import events
from trine.record.errors import TrainingError, UsageError

torch = pytest.importorskip("torch")

MASTERS = {"precision.dtype": "bf16", "precision.master_weights": True}


def _engine(model: Any, changes: Any = None, optimizer: Any = None, **keys: Any) -> Any:
    from trine.samples.gpt import loss_of

    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    keys.setdefault("loss_fn", loss_of)
    return trine.optimize(model, optimizer, trine.Config().with_changes(changes or {}), **keys)


# --- loss scaling ------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
def test_the_scale_moves_as_pytorchs_does(finite: list[bool], interval: int) -> None:
    scale, tracker = torch.full((), loss_scaling.INITIAL), torch.zeros((), dtype=torch.int32)
    scaler = LossScaler("auto")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scaling, "GROWTH_INTERVAL", interval)
        patch.setattr(loss_scaling, "FLOOR", 0.0)
        patch.setattr(loss_scaling, "STORM", 10**6)
        for was_finite in finite:
            torch._amp_update_scale_(
                scale,
                tracker,
                torch.full((), 0.0 if was_finite else 1.0),
                loss_scaling.GROWTH,
                loss_scaling.BACKOFF,
                interval,
            )
            scaler.update(was_finite)
            assert scaler.current == float(scale)
    assert scaler.skipped == finite.count(False)


def test_the_defaults_are_pytorchs() -> None:
    theirs = torch.amp.GradScaler("cpu")
    assert (theirs._init_scale, theirs._growth_factor, theirs._backoff_factor, theirs._growth_interval) == (
        loss_scaling.INITIAL,
        loss_scaling.GROWTH,
        loss_scaling.BACKOFF,
        loss_scaling.GROWTH_INTERVAL,
    )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=8),
    st.sampled_from([1.0, 1024.0, 2.0**16]),
    st.sampled_from(["finite", "nan", "inf"]),
)
def test_unscaling_divides_exactly_and_sees_what_is_not_finite(
    values: list[float], scale: float, kind: str
) -> None:
    scaler = LossScaler(scale)
    gradients = [torch.tensor(values) * scale, torch.tensor(values, dtype=torch.float64) * scale]
    if kind != "finite":
        gradients[1][-1] = float(kind)
    assert scaler.unscale(gradients) is (kind == "finite")
    assert gradients[0].tolist() == values


def test_a_storm_ends_at_the_floor_or_after_many_steps() -> None:
    dynamic = LossScaler("auto")
    with pytest.raises(TrainingError, match=r'down to 1 .*17 steps.*precision\.dtype = "bf16"'):
        for _ in range(40):
            dynamic.update(False)
    fixed = LossScaler(64.0)
    with pytest.raises(TrainingError, match=r'precision\.loss_scale = 64: .* 25 steps in a row.*"auto"'):
        for _ in range(40):
            fixed.update(False)
    broken_up = LossScaler(64.0)
    for step in range(100):  # a sound step now and then: no storm
        broken_up.update(step % 3 == 0)


def test_the_state_of_the_scale_is_kept() -> None:
    before = LossScaler("auto")
    for was_finite in (True, False, False, True, True):
        before.update(was_finite)
    after = LossScaler("auto")
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict() and after.current == loss_scaling.INITIAL / 4
    fixed = LossScaler(8.0)
    fixed.load_state_dict(before.state_dict())
    assert fixed.current == 8.0 and fixed.skipped == 2


def test_fp16_without_a_scale_scales_dynamically_and_says_so() -> None:
    engine = _engine(optim_cases.small_gpt(), {"precision.dtype": "fp16"})
    said = [str(effect) for effect in engine.effects]
    assert any("dynamic from 65536 (fp16's default" in line for line in said)
    assert "loss_scaling" in engine._assembly.state
    fixed = _engine(optim_cases.small_gpt(), {"precision.dtype": "fp16", "precision.loss_scale": 128})
    assert any("fixed at 128" in str(effect) for effect in fixed.effects)


def test_an_overflow_is_left_out_and_told() -> None:
    from trine.samples.gpt import loss_of

    seen: list[tuple[str, float]] = []
    stop = events.listen(
        lambda kind, told: seen.append((told["name"], told["value"])) if kind == "metric" else None
    )
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def loss_fn(given: Any, batch: Any) -> Any:
        return loss_of(given, batch) * (1e30 if engine.step_index == 1 else 1.0)

    engine = _engine(model, {"precision.dtype": "fp16"}, optimizer, loss_fn=loss_fn, scheduler=scheduler)
    kept = []
    for batch in optim_cases.batches(3, 2):
        before = [p.detach().clone() for p in model.parameters()]
        engine.train_step(batch)
        kept.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
    stop()
    assert kept == [False, True, False]
    assert scheduler.last_epoch == 2
    assert [value for name, value in seen if name == "loss_scale"] == [65536.0, 32768.0, 32768.0]
    assert [value for name, value in seen if name == "skipped_steps"] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation.steps": 2},
        {"zero.stage": 1},
        {"zero.stage": 3},
        {"precision.master_weights": True},
        {"communication.compression": "fp16"},
        {"communication.compression": "int8"},
    ],
    ids=str,
)
def test_an_overflow_on_one_rank_is_left_out_on_both(two_ranks: Any, changes: Any) -> None:
    by_rank = two_ranks.run("precision_cases:overflow_on_one_rank", {"precision.dtype": "fp16", **changes})
    for scales, taken, kept, skipped, _ in by_rank:
        assert scales == [65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
        assert taken == [1, 2, 2, 3, 4]
        assert kept == [False, False, True, False, False]
        assert skipped == 1.0
    assert by_rank[0][4] == by_rank[1][4]


def test_a_delayed_gradient_would_be_unscaled_wrong() -> None:
    with pytest.raises(UsageError, match=r"accumulation\.delayed and precision\.dtype"):
        _engine(optim_cases.small_gpt(), {"precision.dtype": "fp16", "accumulation.delayed": True})


def test_fp16_needs_the_loop() -> None:
    from trine.optim.techniques._unedited import refusals_without_code

    found = refusals_without_code(trine.Config().with_changes({"precision.dtype": "fp16"}))
    assert "trine.optimize" in found["precision.dtype"]


# --- master weights ----------------------------------------------------------------------------


def test_masters_start_from_the_parameters_before_rounding_and_keep_small_updates() -> None:
    model = optim_cases.small_gpt()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    engine = _engine(model, MASTERS, optimizer)
    rounded = model.norm.weight.detach().clone()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, master in engine.parameters().items():
        assert master.dtype == torch.float32 and torch.equal(master, before[name])
    for batch in optim_cases.batches(3, 2):
        engine.train_step(batch)
    moved = [not torch.equal(master, before[name]) for name, master in engine.parameters().items()]
    assert all(moved)
    assert torch.equal(model.norm.weight, rounded)  # by less than bf16's last bit: bare, it would be lost
    assert [group["params"][0].dtype for group in optimizer.param_groups] == [torch.float32]


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_live_optimizer_is_taken_over_with_its_state(stored: str) -> None:
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt().to(getattr(torch, stored))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in optim_cases.batches(3, 2):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = {name: optimizer.state[p]["exp_avg"].float() for name, p in model.named_parameters()}
    engine = _engine(model, MASTERS, optimizer)
    for name, master in engine.parameters().items():
        state = optimizer.state[master]
        assert state["exp_avg"].dtype == torch.float32 and torch.equal(state["exp_avg"], moments[name])
        assert float(state["step"]) == 3.0
    losses = [float(engine.train_step(batch)) for batch in optim_cases.batches(3, 2)]
    assert all(map(math.isfinite, losses))
    assert float(optimizer.state[master]["step"]) == 6.0


def test_masters_are_in_the_checkpoint() -> None:
    model = optim_cases.small_gpt()
    engine = _engine(model, MASTERS)
    for batch in optim_cases.batches(2, 2):
        engine.train_step(batch)
    state = {name: value.clone() for name, value in engine._assembly.state["masters"].state_dict().items()}
    other = optim_cases.small_gpt(seed=1)
    resumed = _engine(other, MASTERS)
    resumed._assembly.state["masters"].load_state_dict(state)
    for (name, master), parameter in zip(resumed.parameters().items(), other.parameters(), strict=True):
        assert torch.equal(master, state[name])
        assert torch.equal(parameter, state[name].bfloat16())


def test_sums_of_micro_batches_are_kept_in_fp32() -> None:
    """Sixty-four micro-batches: a sum in bf16 stops growing; in fp32 the gradient is the whole batch's."""
    gradients = []
    for steps in (1, 64):
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.constant_(model.weight, 0.5)
        kept: list[Any] = []
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = trine.optimize(
            model,
            optimizer,
            trine.Config().with_changes({**MASTERS, "accumulation.steps": steps}),
            loss_fn=lambda given, x: given(x).float().mean(),
        )
        engine._assembly.inspect.append(
            lambda kept=kept, engine=engine: kept.extend(p.grad.clone() for p in engine.parameters().values())
        )
        torch.manual_seed(0)
        engine.train_step(torch.rand(64, 4) + 0.5)
        gradients += kept
    torch.testing.assert_close(gradients[1], gradients[0], rtol=4e-3, atol=0.0)


@pytest.mark.parametrize(
    ("changes", "wrapped"),
    [({}, False), ({}, True), ({"accumulation.steps": 2}, False), ({"zero.stage": 1}, False)],
    ids=str,
)
def test_masters_on_ranks(two_ranks: Any, changes: Any, wrapped: bool) -> None:
    by_rank = two_ranks.run("precision_cases:masters_of", {**MASTERS, **changes}, wrapped)
    whole = sum(p.numel() for p in optim_cases.small_gpt().parameters())
    for stored, held, rounded, unused, losses, elements, sums in by_rank:
        assert stored == ["torch.bfloat16"] and held == ["torch.float32"] and rounded
        assert all(map(math.isfinite, losses))
        assert sums == by_rank[0][-1]
        if wrapped:
            assert unused is True  # the wrapper that was given had this option
        if changes.get("zero.stage") == 1:
            assert elements <= whole / 2 + 64  # masters are sharded with the state


def test_batch_norms_stay_wide() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    )
    engine = trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        trine.Config().with_changes(MASTERS),
        loss_fn=lambda given, batch: given(batch).float().square().mean(),
    )
    engine.train_step(torch.randn(4, 1, 8, 8))
    assert [p.dtype for p in model.parameters()] == [
        *([torch.bfloat16] * 2),
        *([torch.float32] * 2),
        *([torch.bfloat16] * 2),
    ]


def test_bare_fp16_parameters_turn_to_nan_in_pytorch_and_are_refused() -> None:
    """The trap itself, then what Trine says to it, then the way out that it names."""
    from trine.samples.gpt import loss_of

    model = optim_cases.small_gpt().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in optim_cases.batches(2, 2):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not all(bool(torch.isfinite(p).all()) for p in model.parameters())

    model = optim_cases.small_gpt().half()
    with pytest.raises(UsageError, match=r"AdamW holds float16 parameters.*precision\.master_weights"):
        _engine(model)
    way_out = {"precision.dtype": "fp16", "precision.master_weights": True}
    losses = [
        float(loss)
        for engine in [_engine(model, way_out)]
        for loss in map(engine.train_step, optim_cases.batches(8, 4))
    ]
    plain, _ = optim_cases.train_plain(8, 4)
    assert max(abs(a - b) / b for a, b in zip(losses, plain, strict=True)) < 2e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision.master_weights": True}, r"the model's are torch\.float32: set precision\.dtype"),
        ({"precision.master_weights": True, "precision.dtype": "fp32"}, r'precision\.dtype = "fp32"'),
    ],
)
def test_masters_of_nothing(changes: Any, words: str) -> None:
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError, match=words):
        _engine(model, changes)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_masters_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="float64"):
        _engine(optim_cases.small_gpt().double(), MASTERS)
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError, match="LBFGS"):
        _engine(model, MASTERS, torch.optim.LBFGS(model.parameters()))


# --- what the first step had -------------------------------------------------------------------


def test_the_first_steps_dtypes_are_said() -> None:
    configurations: list[list[str]] = []
    stop = events.listen(
        lambda kind, told: configurations.append(told["effects"]) if kind == "configuration" else None
    )
    engine = optim_cases.train({"precision.dtype": "bf16"}, steps=3)[2]
    stop()
    said = (
        "precision.dtype: asked for bfloat16 → computed in matrix products bfloat16 in 9 of 9 modules; "
        "parameters float32; gradients float32; optimizer state float32"
    )
    assert str(engine.effects[-1]) == said
    assert [said in effects for effects in configurations] == [False, True]  # once more, with what was seen
    assert not any(module._forward_hooks for module in engine.model.modules())


class _Stubborn(torch.nn.Module):
    """Switches autocast off inside, as some models do for stability."""

    def __init__(self) -> None:
        super().__init__()
        self.obedient = torch.nn.Linear(8, 8)
        self.stubborn = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        x = self.obedient(x)
        with torch.autocast("cpu", enabled=False):
            return self.stubborn(x.float())


def test_a_model_that_switches_autocast_off_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = _Stubborn()
    with caplog.at_level(logging.INFO, "trine"):
        engine = _engine(
            model, {"precision.dtype": "bf16"}, loss_fn=lambda given, x: given(x).float().square().mean()
        )
        engine.train_step(torch.randn(4, 8))
        engine.train_step(torch.randn(4, 8))
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "1 of 2 modules that multiply matrices computed in float32, stubborn first" in warned[0]
    assert "bfloat16 in 1, float32 in 1 of 2 modules" in str(engine.effects[-1])


def test_an_obedient_model_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    optim_cases.train({"precision.dtype": "fp16"}, steps=2)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- TF32 and float8 ---------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [True, False])
def test_tf32_is_switched_and_put_back(wanted: bool) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    restore = tf32.switch(wanted)
    try:
        assert torch.backends.cuda.matmul.allow_tf32 is wanted
        assert torch.backends.cudnn.allow_tf32 is wanted
    finally:
        restore()
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_the_engine_puts_tf32_back_when_it_closes() -> None:
    before = torch.backends.cudnn.allow_tf32
    engine = _engine(optim_cases.small_gpt(), {"precision.tf32": False})
    assert torch.backends.cudnn.allow_tf32 is False
    engine.close()
    assert torch.backends.cudnn.allow_tf32 is before


@pytest.mark.parametrize(
    ("key", "words"),
    [("precision.tf32", "compute capability 8.0"), ("precision.float8", "compute capability 8.9")],
)
def test_what_a_cpu_has_not(key: str, words: str) -> None:
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError, match=f"{key}.*{words}.*cpu: take the key out"):
        _engine(model, {key: True})
    assert type(model.blocks[0].up) is torch.nn.Linear


def test_float8_leaves_the_output_layer_and_odd_sizes_alone() -> None:
    model = optim_cases.small_gpt()
    names = ["attention.qkv", "attention.out", "up", "down"]
    assert float8.fitting(model) == [f"blocks.{block}.{name}" for block in range(2) for name in names]
    untied = torch.nn.Sequential(
        torch.nn.Embedding(48, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 20), torch.nn.Linear(32, 48)
    )
    assert float8.fitting(untied) == ["1"]


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.filterwarnings("ignore")
def test_float8_emulated_trains_the_same_within_its_tolerance() -> None:
    plain, _ = optim_cases.train_plain(30)
    model = optim_cases.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert len(float8.convert(model, emulate=True)) == 8
    engine = _engine(model, optimizer=optimizer)
    losses = [float(engine.train_step(batch)) for batch in optim_cases.batches(30, 4)]
    worst = max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
    assert 0 < worst < 2e-2
