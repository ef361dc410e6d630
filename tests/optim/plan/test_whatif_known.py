"""What is known of a step's work and of its machine: its sizes, its precision, its threads; and what is said where it is not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from whatif_steps import LAUNCH_S, RATES, calibration, product, run, run_on_device

from trine.optim.plan.whatif import recorded
from trine.optim.plan.whatif.graph import HOST, Task
from trine.optim.plan.whatif.operators import Operator, Product, operator_of
from trine.optim.plan.whatif.predict import Recorded, replayed
from trine.optim.plan.whatif.replay import replay
from trine.optim.plan.whatif.times import OperationTimes
from trine.optim.plan.whatif.transforms._pace import pace_of
from trine.record.errors import UsageError
from trine.record.hardware import store_calibration

BF16, FP16 = {"precision.dtype": "bf16"}, {"precision.dtype": "fp16"}
#: Multiplications a second in TF32.
TF32 = 2e9


def with_tf32() -> OperationTimes:
    return calibration(further=[
        {"operation": "product", "dtype": "tf32", "shape": [1, side, side, side], "seconds": side**3 / TF32}
        for side in (64, 256, 1024)
    ])  # fmt: skip


def in_tf32(times: OperationTimes, name: str = "aten::mm", **facts: Any) -> Recorded:
    """A step on a device whose products took what they take in TF32."""
    found = run_on_device(**facts)
    step = found.graph.steps[0]

    def faster(task: Task) -> Task:
        return replace(task.times(RATES["fp32"] / TF32), name=name) if task.kind == "product" else task

    ranks = tuple(replace(each, tasks=tuple(map(faster, each.tasks))) for each in step.ranks)
    step = replace(step, ranks=ranks)
    step = replace(step, ranks=tuple(replace(each, measured_s=replay(step).seconds) for each in ranks))
    return replayed(replace(found.graph, steps=(step,), recorded=(step,)), found.steady, times)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("aten::mm", {"precision": {"float32_matmul": "high"}}),
        ("ampere_sgemm_tf32_128x64_tn", {}),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x4_nt_align4", {}),
    ],
)
def test_products_in_tf32_are_scaled_from_what_they_take_in_tf32(name: str, facts: dict[str, Any]) -> None:
    found = in_tf32(with_tf32(), name, **facts)
    products = sum(task.seconds for task in found.graph.steps[0].ranks[0].tasks if task.kind == "product")
    # What is between products gains what its casts cost (test_whatif_transforms), but for their launches.
    gain = found.what_if(BF16).gain.mid
    assert gain == pytest.approx(products * (1 - TF32 / RATES["bf16"]), rel=0.01, abs=50 * LAUNCH_S)


def test_a_calibration_without_tf32_has_no_answer_for_a_run_in_tf32() -> None:
    found = in_tf32(calibration(), precision={"float32_matmul": "medium"})
    with pytest.raises(
        UsageError, match=r"products in tf32 is not in .* run trine hardware --calibrate again"
    ):
        found.what_if(BF16)
    # On a host nothing is rounded, whatever is allowed.
    assert run(precision={"float32_matmul": "high"}).what_if(BF16).gain.mid == run().what_if(BF16).gain.mid


def test_a_convolution_tells_no_pace() -> None:
    shapes, types = "[[32, 64, 56, 56], [64, 64, 3, 3], [], []]", '["float", "float", "", ""]'
    operator = operator_of("aten::cudnn_convolution", shapes, types)
    assert operator.kind == "product" and operator.product is not None
    times = calibration()
    true_s = 32 * 56 * 56 * 64 * 64 * 9 / RATES["fp32"]  # of all windows, which overlap
    convolution = Task(true_s, "forward", operator=operator, name="aten::cudnn_convolution")
    assert pace_of([convolution], times).product == 1.0
    assert pace_of(
        [convolution, product(128, 256, 64, "forward", 0).times(2.0)], times
    ).product == pytest.approx(2.0)


def test_a_convolutions_backward_has_the_rows_of_its_output() -> None:
    sizes = "[32, 128, 28, 28]", "[32, 64, 56, 56]", "[128, 64, 3, 3]"
    whole = Product(1, 32 * 28 * 28, 128, 64 * 9)
    gradient, image, weight = sizes
    found = operator_of("aten::convolution_backward", f"[{gradient}, {image}, {weight}, [128]]", '["float"]')
    assert found.product == whole
    old = operator_of("aten::cudnn_convolution_backward", f"[{image}, {gradient}, {weight}]", '["float"]')
    assert old.product == whole


def test_optimizers_on_lists_of_tensors_are_as_large_as_the_lists() -> None:
    lists = "[[[64, 32], [32]], [[64, 32], [32]], []]"
    for name in ("aten::_foreach_lerp_", "aten::_fused_adamw_", "aten::_foreach_sqrt"):
        found = operator_of(name, lists, '["TensorList", "TensorList", "Scalar"]')
        assert found.kind == "memory" and found.elements == 64 * 32 + 32
    # A trace that does not say how large they are says nothing.
    assert (
        operator_of("aten::_foreach_add_", "[[], [], []]", '["TensorList", "TensorList", "Scalar"]').kind
        == "glue"
    )
    norm = operator_of("aten::cudnn_batch_norm", "[[32, 64, 56, 56], [64], [64]]", '["float"]')
    assert (norm.work, norm.elements) == ("layer_norm", 32 * 64 * 56 * 56)


def without(found: Recorded, kinds: tuple[str, ...], from_number: int = -1) -> Recorded:
    """The same step, of whose work of these kinds what has autograd's number, or a higher one, lacks its shapes."""
    step = found.graph.steps[0]
    unknown = Operator("glue", None, None, 0, "fp32")

    def blank(task: Task) -> Task:
        lacks = task.kind in kinds and task.sequence >= from_number
        return replace(task, operator=unknown) if lacks else task

    ranks = tuple(replace(each, tasks=tuple(map(blank, each.tasks))) for each in step.ranks)
    return replace(found, graph=replace(found.graph, steps=(replace(step, ranks=ranks),)))


@pytest.mark.parametrize("key", ["precision.dtype", "compute.compile"])
def test_a_record_without_shapes_has_no_answer_instead_of_no_gain(key: str) -> None:
    change = {"precision.dtype": "bf16", "compute.compile": "blocks"}
    blank = without(run_on_device(), ("product", "memory"))
    with pytest.raises(
        UsageError, match=re.escape(f"{key}: this record does not say which of its work is a matrix")
    ):
        blank.what_if({key: change[key]})


def test_nothing_that_could_be_joined_is_no_answer_for_compiling() -> None:
    with pytest.raises(
        UsageError, match="no operators of forward or backward were found that a compiler would join"
    ):
        without(run(), ("memory",)).what_if({"compute.compile": "blocks"})


def test_the_devices_unknown_time_is_told() -> None:
    said = "of the device's forward and backward is work that no operator with shapes tells of"
    partly = without(run_on_device(), ("product",), from_number=10).what_if(BF16)
    assert sum(said in note for note in partly.notes) == 1
    assert not any(said in note for note in run_on_device().what_if(BF16).notes)


def test_casts_on_a_device_are_launched_by_its_host() -> None:
    # A host that is never ahead: the device waits for it, and each cast for a launch.
    found = run_on_device()
    step = found.graph.steps[0]
    launch_s = 0.1

    def slow(task: Task) -> Task:
        return replace(task, seconds=launch_s) if task.lane == HOST and task.seconds == LAUNCH_S else task

    ranks = tuple(replace(each, tasks=tuple(map(slow, each.tasks))) for each in step.ranks)
    step = replace(step, ranks=ranks)
    step = replace(step, ranks=tuple(replace(each, measured_s=replay(step).seconds) for each in ranks))
    bound = replayed(replace(found.graph, steps=(step,), recorded=(step,)), found.steady, calibration())
    # Of each block's two products and the head's: one cast of the input of a block and of the head, one of each weight; and
    # those of their gradients in backward.
    casts = 2 * ((3 + 1) + (3 * 2 + 1))
    assert bound.what_if(BF16).gain.mid == pytest.approx(-casts * launch_s, rel=0.1)


def test_on_a_cpu_fp16_is_not_what_a_calibration_would_add() -> None:
    with pytest.raises(
        UsageError, match=re.escape('a CPU is calibrated in fp32 and bf16 alone: ask for "bf16"')
    ):
        run().what_if(FP16)
    with pytest.raises(
        UsageError, match=r"products in fp16 are not calibrated .* run trine hardware --calibrate"
    ):
        replace(run(), times=OperationTimes(None)).what_if(FP16)


def test_ranks_with_other_threads_take_the_nearest_calibration_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    peaks = calibration()._peaks
    assert peaks is not None
    for threads in (1, 16):
        store_calibration(replace(peaks, threads=threads, source=f"{threads} threads"))
    found = run()
    for threads, near in ((4, "1 thread;"), (8, "16 threads;"), (16, None)):
        graph = replace(found.graph, facts={"device": {"type": "cpu", "name": "cpu", "threads": threads}})
        answer = replayed(graph, found.steady).what_if(BF16)
        notes = [note for note in answer.notes if "calibrated with" in note]
        assert len(notes) == (near is not None) and all(near in note for note in notes if near)


@pytest.mark.parametrize(
    ("facts", "change", "said"),
    [
        ({}, {"precision.dtype": "fp32"}, "so nothing would change"),
        (
            {"precision": {"autocast_dtype": "bfloat16"}},
            {"precision.dtype": "fp32"},
            "computes in bfloat16 already",
        ),
        ({}, {"compute.compile": False}, "so nothing would change"),
        ({"compile": True}, {"compute.compile": False}, "the recorded run is compiled already"),
        ({}, {"communication.compression": "none"}, "so nothing would change"),
        (
            {"configuration": {"communication": {"compression": "int8"}}},
            {"communication.compression": "none"},
            "has communication.compression = int8 already",
        ),
    ],
)
def test_what_is_undone_or_changes_nothing_is_refused(
    facts: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as caught:
        run(**facts).what_if(change)
    assert "\n" not in str(caught.value)


def test_a_trace_finds_its_devices_calibration(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path))
    peaks = calibration()._peaks
    assert peaks is not None
    traces = data / "traces" / "kineto" / "single"
    store_calibration(replace(peaks, name="Tesla V100-DGXS-32GB", threads=None))
    store_calibration(replace(peaks, name="Tesla V100-SXM2-32GB", threads=None))
    assert recorded(traces / "torch1.9_resnet50_workers0.json.gz").times
    # One without shapes has no answer, where it had one of exactly no gain.
    blank = recorded(traces / "v100_ns_resolution.json.gz")
    assert blank.times
    for change in (BF16, {"compute.compile": "blocks"}, {"accumulation.steps": 2}):
        with pytest.raises(UsageError, match="does not say which of its work is a matrix product"):
            blank.what_if(change)
