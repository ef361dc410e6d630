"""Operations and bytes from shapes, against PyTorch's own counter where it counts."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.analyzers.studies._operator_work import work_of
from trine.analyzers.studies._products import Product, conv_outputs
from trine.analyzers.studies._shapes import broadcast, short_shapes, tensors_of

SIDE = st.integers(1, 300)
BF16, FP32 = "c10::BFloat16", "float"


def work(operator: str, dims: list[Any], types: list[Any], outputs: Any = None) -> Any:
    return work_of(operator, json.dumps(dims), json.dumps(types), outputs or {})


@settings(max_examples=40, deadline=None)
@given(m=SIDE, n=SIDE, k=SIDE, batch=st.integers(1, 8))
def test_products_are_counted_as_mathematics_says(m: int, n: int, k: int, batch: int) -> None:
    for found, times in (
        (work("aten::mm", [[m, k], [k, n]], [BF16, BF16]), 1),
        (work("aten::addmm", [[n], [m, k], [k, n], [], []], [BF16, BF16, BF16, "Scalar", "Scalar"]), 1),
        (work("aten::bmm", [[batch, m, k], [batch, k, n]], [BF16, BF16]), batch),
        (work("aten::baddbmm", [[batch, m, n], [batch, m, k], [batch, k, n]], [BF16] * 3), batch),
        (work("aten::linear", [[batch, m, k], [n, k], [n]], [BF16] * 3), batch),
        (work("aten::matmul", [[batch, m, k], [k, n]], [BF16, BF16]), batch),
    ):
        assert found.flops == 2 * times * m * n * k
        assert found.product.batch * found.product.m * found.product.n * found.product.k == times * m * n * k
        assert found.dtype == "bf16" and found.write_bytes == 2 * times * m * n


def test_a_product_moves_its_operands_and_its_result_once() -> None:
    found = work("aten::addmm", [[1024], [8944, 1024], [1024, 2816]], [BF16] * 3)
    assert found.product == Product(1, 8944, 2816, 1024)
    assert found.read_bytes == 2 * (1024 + 8944 * 1024 + 1024 * 2816) and found.write_bytes == 2 * 8944 * 2816


@pytest.mark.parametrize(
    ("operator", "dims"),
    [
        ("aten::mm", [[4, 5], [6, 7]]),
        ("aten::mm", [[4, 5]]),
        ("aten::bmm", [[2, 4, 5], [4, 5]]),
        ("aten::something_new", [[4, 4]]),
        ("aten::mm", []),
        ("aten::cudnn_convolution", [[8, 3, 32, 32], [16, 3, 3, 3]]),
        ("aten::_flash_attention_forward", [[100, 8, 64], [100, 8, 64], [100, 8, 64]]),
    ],
)
def test_what_shapes_do_not_tell_is_not_said(operator: str, dims: list[Any]) -> None:
    assert work(operator, dims, [FP32] * len(dims)) is None


@pytest.mark.parametrize("text", [None, "", "not json", "{}", '"text"', '[{"a": 1}]', "[[[1, [2]]]]"])
def test_broken_shapes_are_none_or_nothing(text: str | None) -> None:
    assert not tensors_of(text, '["float"]')
    assert work_of("aten::mm", text, None, {}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(dims=JSON, types=JSON, operator=st.sampled_from(["mm", "addmm", "bmm", "mul", "cat", "copy_", "embedding", "native_dropout",
       "_flash_attention_forward", "convolution_backward", "conv2d", "_fused_adamw_", "sum", "triton_poi_x", "_grouped_mm"]))  # fmt: skip
def test_no_shapes_however_odd_break_anything(dims: Any, types: Any, operator: str) -> None:
    found = work(f"aten::{operator}", dims, types)
    assert found is None or found.flops is None or found.flops >= 0
    short_shapes(json.dumps(dims))


def test_shapes_of_no_device_and_endless_nesting_are_none() -> None:
    assert work("aten::mm", [[2**40, 2**40], [2**40, 2]], [FP32, FP32]) is None
    assert tensors_of("[" * 100_000, None) is None


def test_a_convolution_takes_its_output_from_its_backward() -> None:
    backward = (
        "aten::convolution_backward",
        json.dumps([[8, 32, 16, 16], [8, 16, 32, 32], [32, 16, 3, 3]]),
        json.dumps([FP32] * 3),
    )
    outputs = conv_outputs([backward])
    forward = work("aten::cudnn_convolution", [[8, 16, 32, 32], [32, 16, 3, 3]], [FP32, FP32], outputs)
    assert forward.flops == 2 * (8 * 32 * 16 * 16) * (16 * 3 * 3)
    both = work_of(*backward, outputs)
    assert both is not None and both.flops == 2 * forward.flops
    image = work("aten::convolution_backward", [[8, 32, 16, 16], [8, 3, 32, 32], [32, 3, 3, 3]], [FP32] * 3)
    assert image.flops == 2 * (8 * 32 * 16 * 16) * (3 * 3 * 3)  # nothing needs the gradient of an image


def test_elementwise_work_reads_inputs_and_writes_the_broadcast() -> None:
    found = work("aten::mul", [[16, 1, 64], [1, 32, 64]], [BF16, FP32])
    assert found.read_bytes == 2 * 16 * 64 + 4 * 32 * 64 and found.write_bytes == 4 * 16 * 32 * 64
    assert work("aten::eq", [[1000]], ["long int"]).write_bytes == 1000
    assert work("aten::copy_", [[1000], [1000]], [FP32, BF16]).read_bytes == 2000
    assert work("aten::exp", [[1000], [1000]], [FP32, FP32]).read_bytes == 4000  # the second is out=
    assert work("aten::fill_", [[1000], []], [FP32, "Scalar"]).read_bytes == 0
    assert work("aten::sum", [[1000]], [FP32]).outputs is None


def test_compiled_kernels_and_experts_have_work() -> None:
    found = work("triton_poi_fused_add_mul_0", [[1000], [1000], [1000], []], [BF16, BF16, BF16, "Scalar"])
    assert (found.kind, found.read_bytes, found.write_bytes) == ("fused", 6000, 0)
    assert work("aten::_grouped_mm", [[512, 64], [8, 64, 256]], [BF16, BF16]).flops == 2 * 512 * 64 * 256


def test_types_that_are_unknown_leave_bytes_unknown() -> None:
    found = work_of("aten::mm", "[[4, 8], [8, 4]]", None, {})
    assert found is not None and found.flops == 256 and found.read_bytes is None and found.dtype is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 4), max_size=4), min_size=1, max_size=3))
def test_broadcast_agrees_with_numpy(shapes: list[list[int]]) -> None:
    import numpy as np

    try:
        expected: tuple[int, ...] | None = np.broadcast_shapes(*(tuple(dims) for dims in shapes))
    except ValueError:
        expected = None
    assert broadcast([tuple(dims) for dims in shapes]) == expected


def test_shapes_in_words() -> None:
    assert short_shapes("[[8, 4], [4], [], [[2, 3], [2, 3]]]") == "[8, 4] × [4] × 2 of [2, 3]"
    assert short_shapes(None) == "" and short_shapes("[[], []]") == ""


def test_pytorch_counts_the_same() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    def counted(call: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            call()
        return int(counter.get_total_flops())

    a, b = torch.ones(12, 20), torch.ones(20, 7)
    assert counted(lambda: a @ b) == work("aten::mm", [[12, 20], [20, 7]], [FP32] * 2).flops
    x, weight = torch.ones(2, 6, 10, 10, requires_grad=True), torch.ones(9, 6, 3, 3, requires_grad=True)
    convolution = torch.nn.functional.conv2d
    gradient = (
        "aten::convolution_backward",
        json.dumps([[2, 9, 8, 8], [2, 6, 10, 10], [9, 6, 3, 3]]),
        json.dumps([FP32] * 3),
    )
    forward = work("aten::conv2d", [[2, 6, 10, 10], [9, 6, 3, 3]], [FP32] * 2, conv_outputs([gradient]))
    backward = work_of(*gradient, {})
    assert counted(lambda: convolution(x, weight)) == forward.flops and backward is not None
    assert counted(lambda: convolution(x, weight).sum().backward()) == forward.flops + backward.flops
    shape = [2, 3, 5, 8]
    attention = work("aten::_scaled_dot_product_flash_attention", [shape] * 3, [FP32] * 3)
    assert attention.flops == sdpa_flop_count(shape, shape, shape) == 4 * math.prod((2, 3, 5, 5, 8))
    back = work("aten::_scaled_dot_product_flash_attention_backward", [shape] * 4, [FP32] * 4)
    assert back.flops == sdpa_backward_flop_count(shape, shape, shape, shape)
