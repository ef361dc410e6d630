"""Each region against PyTorch's operators, what is found in a live model, and what is refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import optim_cases
import pytest

import trine
from trine.record.errors import UsageError

torch = pytest.importorskip("torch")
functional = torch.nn.functional

import fused_models
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.optim.runtime import regions
from trine.optim.runtime.regions import _compiled, structure
from trine.optim.runtime.regions._cross_entropy import rows_of_a_chunk

LLAMA = {"norm": "rms", "mlp": "swiglu", "positions": "rotary"}
#: Regions that a CPU computes without compiling, on the sample as it is.
UNCOMPILED = ["norm", "mlp", "bias_dropout_residual", "cross_entropy", "optimizer"]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "compiler_missing", lambda device_type: "a compiler")


def _apart(a: Any, b: Any) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


def _gradients(function: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    found = function(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    weights = [torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each) for each in found]
    return [*found, *torch.autograd.grad(found, inputs, weights)]


def _inputs(*shapes: tuple[int, ...], dtype: Any = None) -> list[Any]:
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=dtype or torch.float64, requires_grad=True) for shape in shapes]


ALONE: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "layer_norm": (
        lambda x, w, b: regions.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: functional.layer_norm(x, (8,), w, b),
        [(3, 5, 8), (8,), (8,)],
    ),
    "rms_norm": (
        lambda x, w: regions.rms_norm(x, w, 1e-6),
        lambda x, w: functional.rms_norm(x, (8,), w, 1e-6),
        [(3, 5, 8), (8,)],
    ),
    "rms_norm of Gemma": (
        lambda x, w: regions.rms_norm(x, w, 1e-6, 1.0),
        lambda x, w: functional.rms_norm(x, (8,), 1 + w, 1e-6),
        [(3, 5, 8), (8,)],
    ),
    "gated": (regions.gated, lambda g, u: functional.silu(g) * u, [(3, 5, 8), (3, 5, 8)]),
    "gelu": (regions.gelu, functional.gelu, [(3, 5, 8)]),
    "bias_dropout_residual": (
        lambda x, b, r: _seeded(lambda: regions.bias_dropout_residual(x, b, r, 0.3)),
        lambda x, b, r: _seeded(lambda: r + functional.dropout(x + b, 0.3)),
        [(3, 5, 8), (8,), (3, 5, 8)],
    ),
    "rotary": (
        lambda q, k: regions.rotary(q, k, *_tables()),
        lambda q, k: fused_models.apply_rotary_pos_emb(q, k, *(table[None] for table in _tables())),
        [(3, 4, 5, 8), (3, 2, 5, 8)],
    ),
}


def _tables() -> Any:
    return regions.rotary_tables(torch.arange(5), 8, dtype=torch.float64)


def _seeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return function()


@pytest.mark.parametrize("name", ALONE)
def test_each_region_alone_in_plain_pytorch(name: str, no_compiler: None) -> None:
    ours, theirs, shapes = ALONE[name]
    inputs = _inputs(*shapes)
    for found, wanted in zip(_gradients(ours, inputs), _gradients(theirs, inputs), strict=True):
        assert _apart(found, wanted) <= 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns itself
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_each_region_alone_compiled(dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_NOT_ON_CPU", frozenset())
    for name, (ours, theirs, shapes) in ALONE.items():
        if name == "rotary" and dtype == "float32":
            continue  # its tables are in float64
        inputs = _inputs(*shapes, dtype=getattr(torch, dtype))
        if name == "bias_dropout_residual":  # compiled dropout draws others: without it, the rest is the same
            ours, theirs = (
                lambda x, b, r: regions.bias_dropout_residual(x, b, r, 0.0),
                lambda x, b, r: r + (x + b),
            )
        for found, wanted in zip(_gradients(ours, inputs), _gradients(theirs, inputs), strict=True):
            assert _apart(found, wanted) <= tolerance, name
    assert not any(region.failure for region in regions.COMPILED.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns itself
def test_a_compiled_region_is_compiled_once_for_every_length() -> None:
    from trine.optim.runtime.compile_watch import CompileWatch

    body = _compiled.Compiled(regions.bodies.gated)
    watch = CompileWatch("compute.fuse", [])
    for length in (5, 9, 2, 17):
        gate, up = _inputs((length, 8), (length, 8))
        ours = _gradients(lambda g, u: body(((g, (0,)), (u, (0,))), g, u), [gate, up])
        for found, wanted in zip(ours, _gradients(regions.bodies.gated, [gate, up]), strict=True):
            assert _apart(found, wanted) <= 1e-12
        watch.end_step()
    assert watch.seconds > 0
    assert not watch.recompiled
    assert not hasattr(gate, "_dynamo_dynamic_indices")


def test_a_region_that_cannot_be_compiled_runs_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.exc import InductorError

    def broken(function: Any, **options: Any) -> Any:
        def fail(*arguments: Any) -> Any:
            raise InductorError(RuntimeError("no such compiler"), None)

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    region = _compiled.Compiled(regions.bodies.gelu)
    x = torch.randn(4, 8)
    for _ in range(2):
        torch.testing.assert_close(region(((x, (0,)),), x), functional.gelu(x))
    assert region.failure
    assert (
        len([record for record in caplog.records if "the region gelu cannot be compiled" in record.message])
        == 1
    )


def test_dropout_keeps_a_byte_an_element() -> None:
    x, residual = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    kept: dict[str, int] = {}
    for name, function in {
        "plain": lambda: residual + functional.dropout(x, 0.5),
        "ours": lambda: regions.bias_dropout_residual(x, None, residual, 0.5),
    }.items():
        sizes: list[int] = []

        def pack(tensor: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            function()
        kept[name] = sum(sizes)
    assert kept["ours"] == 64 * 64
    assert kept["plain"] >= 4 * 64 * 64


def test_rotary_tables_keep_far_positions_apart_in_bf16() -> None:
    """Positions in bf16 have eight bits: above 256, neighbours would share an angle."""
    cosine, sine = regions.rotary_tables(torch.tensor([1000, 1001]), 8, dtype=torch.bfloat16)
    exact = torch.tensor([1000.0, 1001.0], dtype=torch.float64)
    assert float((cosine[:, 0] - exact.cos()).abs().max()) < 4e-3
    assert float((sine[:, 0] - exact.sin()).abs().max()) < 4e-3


# --- cross-entropy -----------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    vocabulary=st.integers(2, 50),
    chunk=st.integers(1, 45),
    reduction=st.sampled_from(["mean", "sum"]),
    ignored=st.integers(0, 3),
    with_bias=st.booleans(),
)
def test_linear_cross_entropy_is_exact_whatever_the_chunk(
    rows: int, vocabulary: int, chunk: int, reduction: str, ignored: int, with_bias: bool
) -> None:
    shapes: list[tuple[int, ...]] = [(rows, 6), (vocabulary, 6)]
    inputs = _inputs(*shapes, *([(vocabulary,)] if with_bias else []))
    targets = torch.randint(0, vocabulary, (rows,))
    targets[: min(ignored, rows - 1)] = -100

    def ours(hidden: Any, weight: Any, bias: Any = None) -> Any:
        return regions.linear_cross_entropy(hidden, weight, targets, bias, reduction=reduction, chunk=chunk)

    def theirs(hidden: Any, weight: Any, bias: Any = None) -> Any:
        logits = functional.linear(hidden, weight, bias)
        return functional.cross_entropy(logits, targets, reduction=reduction)

    loss, *gradients = _gradients(ours, inputs)
    wanted, *exact = _gradients(theirs, inputs)
    assert float((loss - wanted).detach().abs()) <= 1e-12 * float(wanted.detach().abs() + 1)
    for found, right in zip(gradients, exact, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


def test_linear_cross_entropy_agrees_with_pytorchs_own() -> None:
    own = getattr(functional, "linear_cross_entropy", None)
    if own is None:
        pytest.skip("PyTorch before 2.13 has none")
    hidden, weight = _inputs((30, 6), (40, 6))
    targets = torch.arange(30)
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8, chunking_method=None)
    for found, wanted in zip(
        _gradients(lambda h, w: regions.linear_cross_entropy(h, w, targets, chunk=7), [hidden, weight]),
        _gradients(lambda h, w: own(h, w, targets, options=options), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("low", "tolerance"), [("bfloat16", 1e-2), ("float16", 2e-3)])
def test_linear_cross_entropy_under_autocast(low: str, tolerance: float) -> None:
    hidden, weight = _inputs((200, 16), (300, 16), dtype=torch.float32)
    targets = torch.randint(0, 300, (200,))
    exact = _gradients(lambda h, w: functional.cross_entropy(h @ w.T, targets), [hidden, weight])
    with torch.autocast("cpu", dtype=getattr(torch, low)):
        rounded = _gradients(lambda h, w: regions.linear_cross_entropy(h, w, targets), [hidden, weight])
    assert rounded[0].dtype == rounded[2].dtype == torch.float32
    for found, wanted in zip(rounded, exact, strict=True):
        assert 0 < _apart(found, wanted) < tolerance


def test_a_batch_without_a_target_is_as_in_pytorch() -> None:
    """Its mean is not a number, and weighing it by nought leaves gradients alone."""
    hidden, weight = _inputs((4, 6), (5, 6))
    loss = regions.linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    assert torch.isnan(loss)
    (loss * 0.0).backward()
    assert float(hidden.grad.abs().sum() + weight.grad.abs().sum()) == 0.0


def test_a_second_backward_is_an_error_and_no_gradient_costs_none() -> None:
    hidden, weight = _inputs((4, 6), (5, 6))
    loss = regions.linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"cross_entropy out of compute\.fuse"):
        loss.backward()
    with torch.no_grad():
        again = regions.linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64))
    assert not again.requires_grad
    torch.testing.assert_close(again, loss.detach())
    with pytest.raises(ValueError, match="reduction"):
        regions.linear_cross_entropy(hidden, weight, torch.zeros(4), reduction="none")


def test_the_logits_are_never_whole() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            for each in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(each, torch.Tensor):
                    self.bytes = max(self.bytes, each.untyped_storage().nbytes())
            return found

    rows, width, vocabulary = 2048, 8, 1024
    assert rows_of_a_chunk(rows, width, vocabulary) == 128
    hidden, weight = _inputs((rows, width), (vocabulary, width), dtype=torch.float32)
    targets = torch.zeros(rows, dtype=torch.int64)
    largest = {}
    for name, loss_of in {
        "plain": lambda: functional.cross_entropy(hidden @ weight.T, targets),
        "chunked": lambda: regions.linear_cross_entropy(hidden, weight, targets),
    }.items():
        with Largest() as mode:
            loss_of().backward()
        largest[name] = mode.bytes
    assert largest["plain"] == rows * vocabulary * 4
    assert largest["chunked"] == 128 * vocabulary * 4


# --- in a live model ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fuse", [*(pytest.param([name], marks=pytest.mark.slow) for name in UNCOMPILED), UNCOMPILED]
)
def test_the_sample_trains_the_same(fuse: list[str]) -> None:
    shape = {"dropout": 0.2}
    plain, model = optim_cases.train_plain(steps=6, double=True, model_changes=shape)
    losses, fused, _ = optim_cases.train({"compute.fuse": fuse}, steps=6, double=True, model_changes=shape)
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)) <= 1e-10
    assert list(fused.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("changes", [{"accumulation.steps": 2}, {"precision.dtype": "bf16"}])
def test_with_another_key(changes: dict[str, Any], no_compiler: None) -> None:
    """Everything fused, against the same other key alone."""
    fused = {**changes, "compute.fuse": [*UNCOMPILED[:4], "rotary"]}
    low = "precision.dtype" in changes
    apart, _, _ = optim_cases.train(changes, steps=6, double=not low, model_changes=LLAMA)
    together, _, _ = optim_cases.train(fused, steps=6, double=not low, model_changes=LLAMA)
    worst = max(abs(a - b) / abs(b) for a, b in zip(together, apart, strict=True))
    assert worst <= (2e-3 if low else 1e-10)


def test_without_a_compiler_regions_run_as_plain_pytorch(no_compiler: None) -> None:
    changes = {"compute.fuse": ["norm", "mlp", "rotary"]}
    plain, _ = optim_cases.train_plain(steps=3, double=True, model_changes=LLAMA)
    losses, _, engine = optim_cases.train(changes, steps=3, double=True, model_changes=LLAMA)
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, plain, strict=True)) <= 1e-10
    assert [str(effect) for effect in engine.effects] == [
        "compute.fuse: norm in 5 RMSNorms → plain PyTorch (compiling needs a compiler)",
        "compute.fuse: mlp in 2 Blocks → plain PyTorch (compiling needs a compiler)",
        "compute.fuse: rotary in 2 Attentions → plain PyTorch (compiling needs a compiler)",
    ]


def test_replicas_fuse_alike(two_ranks: Any) -> None:
    by_rank = two_ranks.run("fused_models:fused_on_ranks", {"compute.fuse": ["cross_entropy", "optimizer"]})
    for effects in by_rank:
        assert effects[:2] == [
            "compute.fuse: cross_entropy in 1 GPT → chunks of rows (the logits are never whole)",
            "compute.fuse: AdamW for-loop → fused",
        ]


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_models_like_transformers_are_found_by_structure(
    offset: float, no_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_models, "apply_rotary_pos_emb", fused_models.apply_rotary_pos_emb)  # put back
    torch.manual_seed(0)
    model = fused_models.LlamaLike(offset).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    plain = model(x)
    names = list(model.state_dict())
    parts = structure.parts_of(model, ["norm", "mlp", "rotary"])
    assert sorted(part.name for part in parts) == ["mlp", "mlp", "norm", "norm", "rotary", "rotary"]
    structure.fuse(parts)
    calls: list[str] = []
    for name in ("rms_norm", "gated", "rotary"):
        body = getattr(regions.bodies, name)

        def counted(*arguments: Any, body: Any = body, name: str = name) -> Any:
            calls.append(name)
            return body(*arguments)

        monkeypatch.setattr(regions.bodies, name, counted)
    torch.testing.assert_close(model(x), plain, rtol=1e-12, atol=1e-12)
    assert sorted(calls) == ["gated", "gated", "rms_norm", "rms_norm", "rotary", "rotary"]
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.norms[0].weight.mul_(2.0)
    assert not torch.allclose(copied(x), plain)  # a copy is bound to its own weights
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), plain, rtol=1e-12, atol=1e-12)
    assert structure.parts_of(model, ["norm"]) == []  # fused already


def test_what_only_looks_alike_is_left_alone() -> None:
    model = torch.nn.Sequential(
        fused_models.SquaredRMSNorm(16),
        fused_models.SparseFeedForward(16, 24),
        fused_models.GatedFeedForward(16, 24, torch.nn.Tanh()),
    )
    assert structure.parts_of(model, ["norm", "mlp", "rotary"]) == []
    with torch.device("meta"):
        assert structure.parts_of(fused_models.GatedFeedForward(16, 24), ["mlp"]) == []
    healthy = fused_models.GatedFeedForward(16, 24)
    assert [part.function for part in structure.parts_of(healthy, ["mlp"])] == ["gated"]


@pytest.mark.parametrize("name", ["bias_dropout_residual", "mlp", "norm", "rotary", "cross_entropy"])
def test_a_model_without_such_modules_is_refused_by_name(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with pytest.raises(UsageError, match=f'has no module for "{name}"') as raised:
        trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"compute": {"fuse": [name]}})
    assert "\n" not in str(raised.value) and "compute.fuse" in str(raised.value)


def test_learned_positions_have_no_rotary() -> None:
    model = optim_cases.small_gpt()
    with pytest.raises(UsageError, match='no module for "rotary"'):
        trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"compute": {"fuse": ["rotary"]}})
    assert not model.fused


# --- the optimizer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "keys", "wanted"),
    [
        ("AdamW", {}, "fused"),
        ("Adagrad", {"initial_accumulator_value": 0.1}, "fused"),
        ("RMSprop", {"momentum": 0.9}, "foreach"),
        ("NAdam", {}, "foreach"),
        ("Adamax", {}, "foreach"),
        ("Adafactor", {}, "foreach"),
    ],
)
def test_foreach_where_there_is_no_fused_kernel(name: str, keys: dict[str, Any], wanted: str) -> None:
    from trine.samples.gpt import loss_of

    results = []
    for changes in ({}, {"compute": {"fuse": ["optimizer"]}}):
        model = optim_cases.small_gpt().double()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3, **keys)
        data = optim_cases.batches(6, 2)
        loss_of(model, data[0]).backward()  # adopted with state
        optimizer.step()
        optimizer.zero_grad()
        engine = trine.optimize(model, optimizer, changes, loss_fn=loss_of)
        results.append([float(engine.train_step(batch)) for batch in data[1:]])
    assert optimizer.param_groups[0][wanted] is True
    assert f"→ {wanted}" in str(engine.effects[0])
    assert max(abs(a - b) / abs(b) for a, b in zip(*results, strict=True)) <= 1e-10


def test_optimizers_that_can_do_neither_are_refused() -> None:
    class Own(torch.optim.SGD):
        pass

    fuse = {"compute": {"fuse": ["optimizer"]}}
    for kind in (Own, torch.optim.LBFGS):
        model = torch.nn.Linear(2, 2)
        with pytest.raises(UsageError, match=rf"compute\.fuse: {kind.__name__} has neither"):
            trine.optimize(model, kind(model.parameters(), lr=0.1), fuse)
    model = torch.nn.Linear(2, 2)
    by_tensor = torch.optim.NAdam(model.parameters())
    by_tensor.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(UsageError, match="learning rate as a tensor"):
        trine.optimize(model, by_tensor, fuse)
