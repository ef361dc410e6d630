"""Model FLOPs against sums done by hand, and that counting changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from trine.profiler.conventions import convention_flops
from trine.profiler.flops import FlopCounter, attention_backward_flops, attention_flops


def count(step: Callable[[], Any], notes: list[Any] | None = None) -> dict[str, float] | None:
    counter = FlopCounter(lambda *note: None if notes is None else notes.append(note))
    counter.begin_step(0)
    assert counter.end_step(0) is None
    counter.begin_step(1)
    step()
    counted = counter.end_step(1)
    counter.begin_step(2)
    assert counter.end_step(2) is None
    return None if counted is None else dict(counted)


def both(value: int) -> dict[str, float]:
    return {"counted": float(value), "executed": float(value)}


BATCH, HEADS, LENGTH, SIZE = 2, 4, 16, 8


@pytest.mark.parametrize(
    ("backend", "recomputed"), [(SDPBackend.FLASH_ATTENTION, 1), (SDPBackend.MATH, 0)], ids=["flash", "math"]
)
def test_attention_counts_whatever_kernel_runs_it(backend: SDPBackend, recomputed: int) -> None:
    query, key, value = (torch.randn(BATCH, HEADS, LENGTH, SIZE, requires_grad=True) for _ in range(3))

    def step() -> None:
        with sdpa_kernel([backend]):
            functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    product = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE
    # Two products forward, four backward; flash computes the scores a second time.
    assert count(step) == {"counted": 6.0 * product, "executed": (6.0 + recomputed) * product}


def test_grouped_query_attention_counts_the_heads_of_the_queries() -> None:
    query = torch.randn(BATCH, 8, LENGTH, SIZE, requires_grad=True)
    key, value = (torch.randn(BATCH, 2, LENGTH, SIZE) for _ in range(2))
    counted = count(lambda: functional.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    assert counted == both(4 * BATCH * 8 * LENGTH * LENGTH * SIZE)
    assert attention_flops((1, 8, 4, 16), (1, 2, 6, 16), (1, 2, 6, 32)) == 2 * 8 * 4 * 6 * (16 + 32)
    assert attention_backward_flops((1, 1, 2, 3), (1, 1, 2, 3), (1, 1, 2, 3)) == (
        4 * 2 * 2 * 6,
        2 * 2 * 2 * 3,
    )


def test_linear_forward_and_backward() -> None:
    layer, data = torch.nn.Linear(32, 48), torch.randn(8, 32, requires_grad=True)
    assert count(lambda: layer(data).sum().backward()) == both(3 * 2 * 8 * 32 * 48)


def test_convolution() -> None:
    layer, image = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 10, 10)
    # The image needs no gradient: forward and the weight's gradient.
    assert count(lambda: layer(image).sum().backward()) == both(2 * 2 * 2 * 8 * 8 * 8 * 3 * 9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_executed_but_not_counted(reentrant: bool) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    data = torch.randn(8, 32, requires_grad=True)
    once = 2 * 8 * 32 * 32

    def step() -> None:
        checkpoint(layers, data, use_reentrant=reentrant).sum().backward()

    counted = count(step)
    assert counted is not None
    assert counted["counted"] == 6 * once
    # The first layer again; a checkpoint that may stop early leaves the last layer out.
    assert counted["executed"] == (8 if reentrant else 7) * once


def test_a_loss_inside_a_checkpoint_is_recomputation_too() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    data = torch.randn(8, 32, requires_grad=True)
    counted = count(
        lambda: checkpoint(lambda x: layers(x).pow(2).sum(), data, use_reentrant=False).backward()
    )
    assert counted is not None
    assert counted["counted"] == 6 * 2 * 8 * 32 * 32
    assert counted["executed"] > counted["counted"]


def test_second_derivatives_are_no_recomputation() -> None:
    layer, data = torch.nn.Linear(32, 32), torch.randn(8, 32, requires_grad=True)

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (gradient,) = torch.autograd.grad(layer(data).pow(2).sum(), data, create_graph=True)
            gradient.pow(2).sum().backward()

    counted = count(step)
    assert counted is not None
    assert counted["counted"] == counted["executed"] > 3 * 2 * 8 * 32 * 32


def test_counting_changes_no_number_and_draws_no_random_one() -> None:
    def train(counting: bool) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        counter = FlopCounter(lambda *note: None)
        losses = []
        for index in range(4):
            if counting:
                counter.begin_step(index)
            loss = model(torch.randn(8, 16)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if counting:
                assert (counter.end_step(index) is None) == (index != 1)
            losses.append(loss.item())
        return losses, torch.get_rng_state()

    plain, counted = train(False), train(True)
    assert plain[0] == counted[0]
    assert torch.equal(plain[1], counted[1])


def test_the_counted_step_is_named() -> None:
    notes: list[Any] = []
    layer = torch.nn.Linear(4, 4)
    count(lambda: layer(torch.ones(1, 4)), notes)
    assert [note[0] for note in notes] == ["flops-step"]
    assert "step 1" in notes[0][2]


def test_operators_without_a_formula_are_named() -> None:
    notes: list[Any] = []
    lstm = torch.nn.LSTM(4, 4)
    with torch.no_grad():
        count(lambda: lstm(torch.ones(2, 1, 4)), notes)
    incomplete = [note[2] for note in notes if note[0] == "flops-incomplete"]
    assert incomplete
    assert "mkldnn_rnn_layer" in incomplete[0]


def test_compiled_code_is_neither_counted_nor_disturbed() -> None:
    from torch._dynamo.utils import counters

    before = dict(counters["stats"])
    model = torch.compile(torch.nn.Linear(8, 8), backend="eager")
    data = torch.randn(2, 8)
    try:
        notes: list[Any] = []
        expected = model(data)
        graphs = counters["stats"]["unique_graphs"]
        assert count(lambda: torch.testing.assert_close(model(data), expected, rtol=0, atol=0), notes) is None
        assert counters["stats"]["unique_graphs"] == graphs  # no recompilation
        assert [note[0] for note in notes] == ["flops-compiled"]
    finally:
        torch._dynamo.reset()
        counters["stats"].clear()
        counters["stats"].update(before)


def test_code_that_is_compiled_while_it_is_counted_is_compiled_as_ever() -> None:
    from torch._dynamo.utils import counters

    before = dict(counters["stats"])
    torch._dynamo.reset()
    counters["stats"].clear()
    model = torch.compile(torch.nn.Linear(8, 8), backend="aot_eager")
    data = torch.randn(2, 8)
    try:
        notes: list[Any] = []
        assert count(lambda: model(data).sum().backward(), notes) is None
        assert counters["stats"]["unique_graphs"] == 1  # not left out
        model(data).sum().backward()
        assert counters["stats"]["unique_graphs"] == 1  # nor compiled again
        assert "flops-compiled" in [note[0] for note in notes]
    finally:
        torch._dynamo.reset()
        counters["stats"].clear()
        counters["stats"].update(before)


def test_a_mode_of_the_loop_that_outlives_the_counted_step_is_kept() -> None:
    from torch.utils import _python_dispatch as modes
    from torch.utils.flop_counter import FlopCounterMode

    def flags() -> dict[str, bool]:
        return {name: value for name, value in vars(modes).items() if name.startswith("_is_in_")}

    before = flags()
    layer, data = torch.nn.Linear(4, 8), torch.ones(2, 4)
    counter = FlopCounter(lambda *note: None)
    counter.begin_step(0)
    counter.end_step(0)
    counter.begin_step(1)
    theirs = FlopCounterMode(display=False)
    theirs.__enter__()
    layer(data)
    assert counter.end_step(1) == {"counted": 128.0, "executed": 128.0}
    layer(data)
    theirs.__exit__(None, None, None)
    layer(data)
    assert theirs.get_total_flops() == 256
    assert modes._get_current_dispatch_mode() is None
    assert flags() == before


def test_a_step_that_begins_under_a_mode_of_the_loop_is_not_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    layer, data = torch.nn.Linear(4, 8), torch.ones(2, 4)
    counter = FlopCounter(lambda *note: None)
    counter.begin_step(0)
    counter.end_step(0)
    theirs = FlopCounterMode(display=False)
    theirs.__enter__()
    counter.begin_step(1)
    layer(data)
    theirs.__exit__(None, None, None)
    layer(data)
    assert counter.end_step(1) is None
    assert theirs.get_total_flops() == 128
    counter.begin_step(2)
    layer(data)
    assert counter.end_step(2) == {"counted": 128.0, "executed": 128.0}


def test_a_loop_that_ends_within_the_counted_step_leaves_no_mode() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    counter = FlopCounter(lambda *note: None)
    counter.begin_step(5)
    counter.end_step(5)
    counter.begin_step(6)
    counter.begin_step(6)  # given up and begun anew
    assert _get_current_dispatch_mode() is not None
    counter.close()
    assert _get_current_dispatch_mode() is None


# --- the named conventions, against published sums ---------------------------------------------------

GPT3 = {
    "layers": 96,
    "hidden": 12288,
    "heads": 96,
    "head_size": 128,
    "kv_heads": 96,
    "ffn": 49152,
    "vocab": 51200,
    "sequence": 2048,
}
LLAMA3_8B = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "head_size": 128,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "sequence": 8192,
}


def parameters(shape: dict[str, int], matrices: int) -> int:
    attention = 2 * shape["hidden"] * shape["head_size"] * (shape["heads"] + shape["kv_heads"])
    layer = attention + matrices * shape["hidden"] * shape["ffn"]
    return shape["layers"] * layer + shape["hidden"] * shape["vocab"]


def test_conventions_agree_where_their_authors_do() -> None:
    """Equation 3 without recomputation is 6N + 12·L·h·s when N = 12·L·h² + V·h."""
    found = convention_flops(GPT3, parameters(GPT3, 2), 1000)
    assert found["palm"] == pytest.approx(found["narayanan"])
    assert found["megatron"] == pytest.approx(found["palm"] - 1000 * 6 * 96 * 12288 * 2048)
    assert found["6n"] == 6 * 1000 * parameters(GPT3, 2)


def test_llama_at_8k_is_what_torchtitan_prints() -> None:
    """57.9 GFLOP a token: 6 × 7.50e9 + 12 × 32 × 32 × 128 × 8192 (torchtitan's formula)."""
    found = convention_flops(LLAMA3_8B, parameters(LLAMA3_8B, 3), 1)
    assert found["palm"] == 6 * parameters(LLAMA3_8B, 3) + 12 * 32 * 32 * 128 * 8192
    gated = 3 * (32 * (4 * 4096 * 128 * 40 + 2 * 32 * 128 * 8192 + 2 * 3 * 4096 * 14336) + 2 * 4096 * 128256)
    assert found["megatron"] == pytest.approx(gated)


def test_what_is_unknown_gives_no_convention() -> None:
    assert convention_flops(GPT3, parameters(GPT3, 2), None) == {}
    assert convention_flops(dict.fromkeys(GPT3), 1000, 10) == {}
    experts = convention_flops(GPT3, parameters(GPT3, 16), 10)
    assert "megatron" not in experts  # neither two nor three matrices
    assert "palm" in experts
    without_sequence = convention_flops({**GPT3, "sequence": None}, parameters(GPT3, 2), 10)
    assert set(without_sequence) == {"6n"}
