"""Recomputed activations: the same bits with dropout, fewer bytes by theory, and what would not repeat is refused."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any
from unittest import mock

import memory_cases
import optim_cases
import pytest
import torch
from rank_pool import RankPool
from torch import nn
from torch.nn import functional

import trine
from trine.optim._facts import facts_of
from trine.optim._globs import matches
from trine.optim.runtime import memory_fit
from trine.optim.runtime.checkpointed import Region, checkpoint_in_place
from trine.optim.techniques import checkpointing
from trine.record.errors import UsageError
from trine.samples.gpt import loss_of

FULL = {"checkpointing.mode": "full"}
SELECTIVE = {"checkpointing.mode": "selective"}
#: Of a batch of 4 × 32 tokens with 32 hidden units in fp32.
INPUT_BYTES = 4 * 32 * 32 * 4


@pytest.fixture(scope="module")
def plain() -> memory_cases.Trained:
    return memory_cases.train({})


@pytest.mark.parametrize(
    "changes",
    [
        FULL,
        FULL | {"checkpointing.every": 3},
        FULL | {"checkpointing.modules": ["blocks.*.attention", "norm"]},
        SELECTIVE,
        SELECTIVE | {"checkpointing.operators": ["matmul", "batched_matmul", "aten.gelu"]},
        {"checkpointing.mode": "budget", "checkpointing.budget_bytes": 1_000_000},
        {"checkpointing.mode": "auto"},
        FULL | {"offload.activations": "cpu"},
    ],
    ids=str,
)
def test_the_same_bits_with_dropout(changes: dict[str, Any], plain: memory_cases.Trained) -> None:
    assert memory_cases.train(changes).is_bitwise(plain)


def test_dropout_that_is_not_repeated_would_show(plain: memory_cases.Trained) -> None:
    other = optim_cases.small_gpt(layers=4, dropout=0.1)
    for block in other.blocks:
        forward = block.forward
        block.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, forward, use_reentrant=False, preserve_rng_state=False
        )
    assert not memory_cases.train({}, other).is_bitwise(plain)


# --- bytes -------------------------------------------------------------------------------------


def saved_bytes(layers: int, **changes: Any) -> float:
    keys = {f"checkpointing.{key}": value for key, value in changes.items()}
    # SDPA: the matrices of attention by hand would be most of what is saved.
    if not keys:
        model = optim_cases.small_gpt(layers=layers, attention="sdpa")
        return memory_cases.held_by(model, optim_cases.batches(1, 4)[0]).peak_bytes
    trained = memory_cases.train(keys, layers=layers, attention="sdpa", dropout=0.0)
    return trained.metrics[0]["memory/saved_activation_bytes"]


def test_full_keeps_the_blocks_inputs_alone() -> None:
    assert saved_bytes(4, mode="full") - saved_bytes(2, mode="full") == 2 * INPUT_BYTES
    # A block saves its input, four of qkv's width (one of them attention's result), two norms' outputs, the sum
    # between them, and the feed-forward's two of four times the width.
    block = (saved_bytes(4) - saved_bytes(2)) / 2
    assert 16 * INPUT_BYTES <= block <= 17 * INPUT_BYTES


def test_every_second_block_saves_half_of_it() -> None:
    saved = {every: saved_bytes(4, mode="full", every=every) for every in (1, 2)}
    assert saved_bytes(4) > saved[2] > saved[1]
    half = (saved_bytes(4) - saved[1]) / 2
    assert saved_bytes(4) - saved[2] == pytest.approx(half, rel=0.01)


def test_selective_keeps_the_products_of_linear_layers_and_fused_attention() -> None:
    # Input; qkv, 3; attention, 1 and a log-sum-exp of one in 16; out, 1; up, 4; down, 1.
    kept = (saved_bytes(4, mode="selective") - saved_bytes(2, mode="selective")) / 2
    assert kept == (11 + 1 / 16) * INPUT_BYTES
    only = {"mode": "selective", "operators": ["attention"]}
    assert (saved_bytes(4, **only) - saved_bytes(2, **only)) / 2 == (2 + 1 / 16) * INPUT_BYTES


def test_the_peak_that_the_allocator_sees_shrinks() -> None:
    def peak(changes: dict[str, Any]) -> int:
        model = optim_cases.small_gpt(layers=8)
        engine = trine.optimize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            trine.Config().with_changes(changes),
            loss_fn=memory_cases.loss_of,
        )
        batch = optim_cases.batches(1, 8)[0]
        engine.train_step(batch)
        return memory_fit.measured_bytes(torch.device("cpu"), lambda: engine.train_step(batch))

    plain, full = peak({}), peak(FULL)
    counted = memory_cases.held_by(optim_cases.small_gpt(layers=8), optim_cases.batches(1, 8)[0]).peak_bytes
    # Seven of eight blocks' activations are never alive together; the eighth's are, when it is recomputed.
    assert plain - full > 0.6 * counted


# --- in place ----------------------------------------------------------------------------------


def test_who_listens_behind_a_decision_hears_of_every_step() -> None:
    """``auto`` decides after the first step, and then takes itself out of the list that is being gone through."""
    model = optim_cases.small_gpt(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes({"checkpointing.mode": "auto"}), loss_fn=loss_of
    )
    before = len(engine._assembly.after_step)
    heard: list[int] = []
    engine._assembly.after_step.append(lambda: heard.append(len(engine._assembly.after_step)))
    for batch in optim_cases.batches(2, 4):
        engine.train_step(batch)
    engine.close()
    assert heard == [before, before]


def test_names_stay_and_copies_are_their_own() -> None:
    model = optim_cases.small_gpt(layers=2, dropout=0.1)
    names, before = list(model.state_dict()), list(model.named_modules())
    for name, block in model.blocks.named_children():
        checkpoint_in_place(Region(f"blocks.{name}", block))
    assert list(model.state_dict()) == names and list(model.named_modules()) == before
    plain = memory_cases.train({}, layers=2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.blocks[0].forward.args[0].__self__ is other.blocks[0]
        assert memory_cases.train({}, other).is_bitwise(plain)
    assert not memory_cases.train({}, layers=2).is_bitwise(memory_cases.train({}))


def test_on_ranks_the_same_bits(two_ranks: RankPool) -> None:
    pairs = [
        ({}, FULL),
        ({}, SELECTIVE | {"communication.gradient_as_view": True}),
        ({}, FULL | {"communication.static_graph": True}),
        ({}, {"checkpointing.mode": "budget", "checkpointing.budget_bytes": 300_000}),
        ({"zero.stage": 3}, SELECTIVE | {"zero.stage": 3, "offload.activations": "cpu"}),
        ({"zero.stage": 3}, FULL | {"zero.stage": 3, "checkpointing.modules": ["blocks.*.attention"]}),
    ]
    for by_pair in two_ranks.run("memory_cases:on_ranks", pairs):
        for same, what in by_pair:
            assert same, what


# --- what would not repeat ---------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, dropout: float = 0.2, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8, momentum=momentum)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * self.dropout(functional.relu(self.norm(self.linear(x))))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("changes", [FULL, SELECTIVE], ids=str)
def test_batch_norms_count_each_batch_once(changes: dict[str, Any], momentum: float | None) -> None:
    results = []
    for keys in ({}, changes):
        torch.manual_seed(0)
        model = memory_cases.Sums([Normed(momentum=momentum) for _ in range(2)])
        batches = list(torch.randn(3, 16, 8))
        trained = memory_cases.train(keys, model, batches, memory_cases.squares)
        results.append((trained, model.state_dict()))
    assert results[0][0].is_bitwise(results[1][0])  # although the blocks are called by names
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
    assert results[1][1]["blocks.0.norm.num_batches_tracked"] == 3


class Counting(nn.Module):
    """Scales by how often it ran: recomputed, it would run twice as often."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) / self.calls


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + torch.relu_(self.linear(x))


@pytest.mark.parametrize(
    ("block", "changes", "words"),
    [
        (Counting, FULL, ["blocks.0.calls", "checkpointing.modules"]),
        (InPlace, SELECTIVE, ["aten.addmm", "blocks.0", "inplace=False"]),
    ],
)
def test_what_a_module_changes_as_it_runs_is_refused_by_name(
    block: type[nn.Module], changes: dict[str, Any], words: list[str]
) -> None:
    model = memory_cases.Sums([block(), block()])
    with pytest.raises(UsageError) as raised:
        memory_cases.train(changes, model, [torch.randn(4, 8)], memory_cases.squares)
    assert all(word in str(raised.value) for word in words)


def test_modules_that_modify_in_place_are_recomputed_in_full() -> None:
    results = []
    for keys in ({}, FULL):
        torch.manual_seed(0)
        model = memory_cases.Sums([InPlace(), InPlace()])
        results.append(memory_cases.train(keys, model, [torch.randn(4, 8)], memory_cases.squares))
    assert results[0].is_bitwise(results[1])


def test_kept_random_numbers_would_shift_all_later_ones() -> None:
    """The trap behind the refusal of operators that draw: PyTorch skips them in recomputation, silently."""

    def region(x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rand_like(x)
        return functional.dropout(x.sin(), 0.5, True).sin()

    def gradient(kept: list[Any] | None) -> torch.Tensor:
        x = torch.ones(256, requires_grad=True)
        torch.manual_seed(0)
        if kept is None:
            region(x).sum().backward()
        else:
            contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts
            torch.utils.checkpoint.checkpoint(
                region, x, use_reentrant=False, context_fn=lambda: contexts(kept)
            ).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient([]), gradient(None))
    assert not torch.equal(gradient([torch.ops.aten.rand_like.default]), gradient(None))


class Cached(nn.Module):
    """Looks like a model of Transformers."""

    def __init__(self, use_cache: bool, recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.config = mock.Mock(use_cache=use_cache)
        self.is_activation_checkpointing = recomputes


class Names(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (None, {"checkpointing.every": 2}, ["checkpointing.every", "checkpointing.mode"]),
        (None, {"checkpointing.modules": ["norm"]}, ["checkpointing.modules", "checkpointing.mode"]),
        (None, {"checkpointing.mode": "budget"}, ["checkpointing.budget_bytes"]),
        (None, FULL | {"checkpointing.operators": ["matmul"]}, ["checkpointing.operators", "selective"]),
        (None, FULL | {"checkpointing.every": 9}, ["checkpointing.every = 9", "4 blocks"]),
        (
            None,
            FULL | {"checkpointing.every": 2, "checkpointing.modules": ["norm"]},
            ["checkpointing.every", "checkpointing.modules"],
        ),
        (None, FULL | {"checkpointing.modules": ["layers.*"]}, ['"layers.*"', "blocks.0"]),
        (None, FULL | {"checkpointing.modules": ["blocks"]}, ["blocks is a list", '"blocks.*"']),
        (None, FULL | {"checkpointing.modules": ["blocks.0", "**.attention"]}, ["inside blocks.0"]),
        (None, SELECTIVE | {"checkpointing.operators": ["matmull"]}, ['"matmull"', '"matmul"']),
        (None, SELECTIVE | {"checkpointing.operators": ["aten.rand_like"]}, ["aten.rand_like", "random"]),
        (Names, FULL, ["Names", "checkpointing.modules"]),
        (lambda: Cached(True, False), FULL, ["use_cache = False"]),
        (lambda: Cached(False, True), FULL, ["gradient_checkpointing_disable"]),
        (
            lambda: memory_cases.Sums([Normed(), Normed()]),
            FULL | {"compute.compile": "blocks"},
            ["compute.compile", "blocks.0", "batch norms"],
        ),
    ],
)
def test_refused_by_name(model: Any, changes: dict[str, Any], words: list[str]) -> None:
    model = optim_cases.small_gpt(layers=4) if model is None else model()
    before = [(name, module.forward) for name, module in model.named_modules()]
    with pytest.raises(UsageError) as raised:
        trine.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), trine.Config().with_changes(changes)
        )
    assert all(word in str(raised.value) for word in words), raised.value
    assert "\n" not in str(raised.value)
    assert [(name, module.forward) for name, module in model.named_modules()] == before


def test_twice_is_refused() -> None:
    model = optim_cases.small_gpt(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = trine.Config().with_changes(FULL)
    trine.optimize(model, optimizer, config)
    with pytest.raises(UsageError, match=r"blocks\.0 is checkpointed already"):
        trine.optimize(model, optimizer, config)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.*", "blocks.3", True),
        ("blocks.*", "blocks.3.attention", False),
        ("blocks.**", "blocks.3.attention", True),
        ("**.attention", "blocks.3.attention", True),
        ("**.attention", "attention", True),
        ("blocks.[01].*", "blocks.1.up", True),
        ("blocks.[01].*", "blocks.2.up", False),
        ("*.*.att*", "blocks.2.attention", True),
    ],
)
def test_globs_match_by_the_parts_of_a_name(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


# --- the compiler ------------------------------------------------------------------------------


def test_the_compilers_own_budget_is_refused_with_dropout() -> None:
    from torch._functorch import config as compiler

    config = trine.Config().with_changes(FULL | {"compute.compile": "blocks"})
    for dropout, budget, refused in ((0.1, 0.5, True), (0.0, 0.5, False), (0.1, 1.0, False)):
        model = optim_cases.small_gpt(layers=2, dropout=dropout)
        facts = facts_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with compiler.patch(activation_memory_budget=budget):
            if refused:
                with pytest.raises(UsageError, match=r"activation_memory_budget = 0\.5"):
                    checkpointing.check(config, facts)
            else:
                checkpointing.check(config, facts)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns itself
@pytest.mark.parametrize("mode", ["full", "selective", "budget"])
def test_compiled_blocks_have_the_gradients_of_their_own_dropout(mode: str) -> None:
    """Where the compiler's budget corrupts, checkpointing under compile and our budget do not."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(torch.sin(self.linear(x)), 0.5, self.training)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Drops() for _ in range(3))
            self.outputs: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.outputs = []
            for block in self.blocks:
                x = block(x)
                self.outputs.append(x)
            return x

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack()
    weights = copy.deepcopy(model)
    changes: dict[str, Any] = {"compute.compile": "blocks", "checkpointing.mode": mode}
    if mode == "budget":
        changes["checkpointing.budget_bytes"] = 5 * 64 * 32 * 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = trine.optimize(
        model, optimizer, trine.Config().with_changes(changes), loss_fn=lambda m, b: m(b).sum()
    )
    gradients: dict[str, torch.Tensor] = {}
    engine._assembly.inspect.append(
        lambda: gradients.update(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    )
    x = torch.randn(64, 32)
    for _ in range(2):  # the first step of a budget runs uncompiled
        engine.train_step(x)
    hidden = x
    for block, output in zip(weights.blocks, model.outputs, strict=True):
        hidden = torch.sin(block.linear(hidden)) * (output != 0) * 2
    hidden.sum().backward()
    for name, parameter in weights.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)
