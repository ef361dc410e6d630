"""What compiling costs is told, recompilations are warned about by name, and compiled training is the same."""

from __future__ import annotations

import logging
from typing import Any

import optim_cases
import pytest

import trine
from trine.record import events

torch = pytest.importorskip("torch")

from trine.optim.runtime.compile_watch import CompileWatch

# PyTorch's compiler warns itself.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def forget() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _run(function: Any, watch: CompileWatch, arguments: list[tuple[Any, ...]]) -> list[int]:
    """Recompilations of each step."""
    found = []
    for each in arguments:
        function(*each)
        found.append(watch.step_recompilations())
        watch.end_step()
    return found


def _multiplied(x: Any, flavour: str) -> Any:
    return torch.sin(x) * len(flavour)


def test_a_function_that_compiles_every_step_is_named(caplog: pytest.LogCaptureFixture) -> None:
    effects: list[Any] = []
    watch = CompileWatch("compute.compile", effects)
    compiled = torch.compile(_multiplied, backend="eager")
    x = torch.randn(4)
    with caplog.at_level(logging.INFO, "trine"):
        steps = _run(compiled, watch, [(x, "a" * n) for n in range(1, 7)])
    assert steps == [0, 1, 1, 1, 1, 1]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "_multiplied (optim/test_compilation.py:" in warning
    assert "compiled anew in 3 of 4 steps" in warning and "no longer held: flavour == 'aaa'; " in warning
    assert "keep what that names the same" in warning and "\n" not in warning
    assert watch.seconds > 0


def test_lengths_that_are_compiled_one_by_one_are_told_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch("compute.compile", [])
    compiled = torch.compile(_multiplied, backend="eager", dynamic=False)
    _run(compiled, watch, [(torch.randn(n), "a") for n in range(2, 8)])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "data.shape_buckets, data.packing" in warning


def test_the_limit_after_which_nothing_is_compiled_is_told(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch("compute.compile", [])
    compiled = torch.compile(_multiplied, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=5):
        _run(compiled, watch, [(torch.randn(4), "a" * n) for n in range(1, 9)])
    endless, ours = [record.getMessage() for record in caplog.records if record.name == "trine"]
    assert "compiled anew in 3 of 4 steps" in endless
    assert "_multiplied (optim/" in ours and "runs it uncompiled from now on" in ours


def _added(x: Any, flavour: str) -> Any:
    return torch.cos(x) + len(flavour)


def _both(*arguments: Any) -> None:
    for function in (_multiplied, _added):
        torch.compile(function, backend="eager")(*arguments)


def test_functions_that_compile_anew_together_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    watch = CompileWatch("compute.compile", [])
    _run(_both, watch, [(torch.randn(4), "a" * n) for n in range(1, 7)])
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "trine"]
    assert "_multiplied (optim/" in warning and warning.endswith("(and 1 other function in this step)")


def test_that_one_of_them_is_given_up_is_told_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    """Where one function has compiled anew too often, another may be given up in the same step."""
    watch = CompileWatch("compute.compile", [])
    x = torch.randn(4)
    late, early = (torch.compile(each, backend="eager") for each in (_multiplied, _added))
    for n in range(1, 3):  # two of its five before the watched steps
        early(x, "b" * n)
    watch.end_step()
    with torch._dynamo.config.patch(recompile_limit=5):
        for n in range(1, 5):
            late(x, "a" * n)
            early(x, "b" * (2 + n))
            watch.end_step()
    told = [record.getMessage() for record in caplog.records if record.name == "trine"]
    assert any("_multiplied (optim/" in each and "s of compiling so far" in each for each in told)
    assert any("_added (optim/" in each and "runs it uncompiled from now on" in each for each in told)


def test_a_healthy_run_is_only_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Two lengths cost one compilation more, in which PyTorch makes the length dynamic; then it is over."""
    effects: list[Any] = []
    watch = CompileWatch("compute.compile", effects)
    compiled = torch.compile(_multiplied, backend="eager")
    with caplog.at_level(logging.INFO, "trine"):
        steps = _run(compiled, watch, [(torch.randn(n), "a") for n in (4, 6, 9, 3, 5, 8)])
    assert steps == [0, 1, 0, 0, 0, 0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    (effect,) = effects
    assert "1 function → compiled in" in str(effect) and "within the first 2 steps (1 of them anew)" in str(
        effect
    )


def test_widths_of_shape_buckets_are_expected(caplog: pytest.LogCaptureFixture) -> None:
    model = optim_cases.small_gpt()
    config = {"compute": {"compile": "blocks"}, "data": {"shape_buckets": [4, 8, 16, 32]}}
    with torch._dynamo.config.patch(recompile_limit=8):
        engine = trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        compiled = torch.compile(_multiplied, backend="eager", dynamic=False)
        for length in (4, 8, 16, 32):
            compiled(torch.randn(length), "a")
            for after in engine._assembly.after_step:
                after()
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        engine.close()


def test_a_watch_that_is_gone_hears_nothing() -> None:
    from torch._dynamo.callback import callback_handler

    before = len(callback_handler.start_callbacks)
    watch = CompileWatch("compute.compile", [])
    assert len(callback_handler.start_callbacks) == before + 1
    watch.close()
    watch.close()
    del watch
    other = CompileWatch("compute.compile", [])
    del other
    assert len(callback_handler.start_callbacks) == before


def test_blocks_of_one_kind_are_found() -> None:
    from trine.optim.techniques.compilation import repeated_blocks

    model = torch.nn.ModuleDict(
        {
            "small": torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(4)),
            "large": torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9)),
            "mixed": torch.nn.Sequential(torch.nn.Linear(99, 99), torch.nn.ReLU()),
        }
    )
    assert repeated_blocks(model) == list(model["large"])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["blocks", "model"])
def test_compiled_training_is_the_same_with_its_dropout_and_its_cost_in_the_record(
    compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the random numbers are the eager ones; regions are left to the outer compiler."""
    shape = {"dropout": 0.2, "norm": "rms", "mlp": "swiglu", "positions": "rotary"}
    told: dict[str, list[float]] = {}
    stop = events.listen(
        lambda kind, values: (
            told.setdefault(values["name"], []).append(values["value"]) if kind == "metric" else None
        )
    )
    plain, _ = optim_cases.train_plain(steps=5, model_changes=shape)
    try:
        changes = {
            "compute.compile": compiled,
            "compute.fuse": ["norm", "mlp", "rotary", "bias_dropout_residual", "cross_entropy"],
        }
        losses, model, engine = optim_cases.train(changes, steps=5, model_changes=shape)
    finally:
        stop()
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)) <= 1e-5
    assert not any("_orig_mod" in name for name in model.state_dict())
    assert any("left to compute.compile" in str(effect) for effect in engine.effects)
    assert "compiled in" in str(engine.effects[-1])
    seconds = [value for value in told["compile_seconds"] if value]
    assert 1 <= len(seconds) <= 2 and sum(seconds) > 0.1
    assert "recompilations" not in told


@pytest.mark.slow
def test_dropout_under_recomputation_is_drawn_again_alike() -> None:
    """Gradients of a compiled, recomputed block against eager ones: a mask drawn anew would be far off."""
    from torch.utils.checkpoint import checkpoint

    def gradients(compiled: bool) -> Any:
        torch.manual_seed(0)
        inner = torch.nn.Sequential(
            torch.nn.Linear(8, 8), torch.nn.Dropout(0.4), torch.nn.Tanh(), torch.nn.Linear(8, 8)
        )
        model = torch.nn.Sequential(inner, torch.nn.Linear(8, 8))
        model.forward = lambda x: model[1](checkpoint(inner, x, use_reentrant=False))
        engine = trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            {"compute": {"compile": "model" if compiled else False}},
            loss_fn=lambda model, x: model(x).square().sum(),
        )
        before = [p.detach().clone() for p in model.parameters()]
        torch.manual_seed(1)
        engine.train_step(torch.linspace(-1, 1, 32).view(4, 8))
        return torch.cat(
            [(a - b).detach().flatten() for a, b in zip(before, model.parameters(), strict=True)]
        )

    eager, compiled = gradients(False), gradients(True)
    assert float((eager - compiled).norm() / eager.norm()) < 1e-5
