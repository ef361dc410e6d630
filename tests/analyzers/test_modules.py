"""Time by module: forward by where it was called, backward by the number that autograd gave its forward."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_traces import Call, analyzed, mm, pointwise

import trine
from trine.analyzers.results import Analysis
from trine.analyzers.studies import result_of
from trine.analyzers.studies.modules import Modules, ModuleTime, _class_of, _components, to_json


def study(analysis: Analysis) -> Modules:
    result = result_of(analysis, "modules", Modules)
    assert result is not None
    return result


def by_path(result: Modules) -> dict[str, ModuleTime]:
    return {row.path: row for row in result.rows}


def backward(sequence: int, call: Call) -> Call:
    """The engine's operator around a backward call, as PyTorch writes it."""
    call.backward = True
    node = Call("MmBackward0", sequence=sequence, backward=True, inside=[call])
    return Call(
        "autograd::engine::evaluate_function: MmBackward0", sequence=sequence, backward=True, inside=[node]
    )


def model() -> list[Call]:
    forward = [
        mm(512, 512, 512, 30.0, module="Model_0.Block_0.Linear_0", sequence=10),
        mm(512, 512, 512, 50.0, module="Model_0.Block_1.Linear_1", sequence=11),
        pointwise(1 << 20, 7.0),
    ]
    # Writes no graph, so it bears the number of the next operator that does: another module's.
    forward.insert(
        1, Call("aten::detach", module="Model_0.Norm_0", sequence=11, kernels=[("copy_kernel", 1.0)])
    )
    return [*forward, backward(11, mm(512, 512, 512, 100.0)), backward(10, mm(512, 512, 512, 60.0))]


def test_backward_work_is_filed_under_its_forwards_module(tmp_path: Path) -> None:
    result = study(analyzed(tmp_path, model(), steps=2))
    rows = by_path(result)
    linear = rows["Model.Block.Linear"]
    assert (linear.forward_ns, linear.backward_ns, linear.instances, linear.kernels) == (
        80_000,
        160_000,
        2,
        4,
    )
    assert linear.longest == ("Model_0.Block_1.Linear_1", 150_000)
    assert (rows["Model"].ns, rows["Model"].self_ns, rows["Model.Block"].ns) == (241_000, 0, 240_000)
    assert rows["Model.Norm"].forward_ns == 1_000 and rows["Model.Norm"].backward_ns == 0
    assert result.named_by == "module" and result.total_ns - result.attributed_ns == 7_000
    assert to_json(result)["rows"][0]["module"] == "Model"


def test_without_names_there_is_no_result_and_it_is_said(tmp_path: Path) -> None:
    analysis = analyzed(tmp_path, [mm(512, 512, 512, 30.0)])
    assert result_of(analysis, "modules", Modules) is None
    assert any(note.id == "no-modules" and "with_stack" in note.message for note in analysis.data_quality)


def test_annotations_stand_in_for_modules(tmp_path: Path) -> None:
    import json

    analyzed(tmp_path, [mm(512, 512, 512, 30.0)])
    content = json.loads((tmp_path / "rank0.json").read_text())
    first = next(event for event in content["traceEvents"] if event["name"] == "aten::mm")
    content["traceEvents"].append(
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "net.encoder",
            "pid": 1,
            "tid": 1,
            "ts": first["ts"],
            "dur": 1.8,
        }
    )
    (tmp_path / "rank0.json").write_text(json.dumps(content))
    result = study(trine.analyze(trine.load(tmp_path / "rank0.json")))
    assert result.named_by == "annotation"
    assert [(row.path, row.ns) for row in result.rows] == [("net.encoder", 30_000)]


@pytest.mark.parametrize(
    ("path", "classes"),
    [
        ("Model_0.Block_12.Linear_3", ["Model", "Block", "Linear"]),
        ("TOP(Net)::forward.layer1(Sequential)::forward.0(Conv2d)::forward", ["Net", "Sequential", "Conv2d"]),
        ("@FSDP::pre_forward (blocks.12.mlp)", ["FSDP::pre_forward (blocks.*.mlp)"]),
        ("@Optimizer.step#AdamW.step", ["Optimizer.step#AdamW.step"]),
        ("@fp16 block", ["fp16 block"]),
    ],
)
def test_instances_are_counted_together(path: str, classes: list[str]) -> None:
    assert [_class_of(part) for part in _components(path)] == classes


def test_a_real_model_adds_up(data: Path) -> None:
    path = data / "traces" / "kineto" / "single" / "h100_qwen1.5_0.5b.json.gz"
    result = study(trine.analyze(trine.load(path)))
    rows = by_path(result)
    root = rows["Qwen2Model"]
    inside = [row for path, row in rows.items() if path.count(".") == 1]
    assert root.ns == root.self_ns + sum(row.ns for row in inside) == result.attributed_ns
    assert rows["Qwen2Model.Qwen2DecoderLayer"].instances == 24
    assert sum(row.self_ns for row in result.rows) == result.attributed_ns


def test_backward_of_a_real_model_finds_its_modules(data: Path) -> None:
    path = data / "traces" / "kineto" / "single" / "mi300x_resnet_act_checkpoint.json.gz"
    result = study(trine.analyze(trine.load(path)))
    convolution = next(
        row for row in result.rows if row.path.endswith("CheckpointWrapper.Sequential.BasicBlock.Conv2d")
    )
    # A convolution's backward is two of its forwards.
    assert convolution.backward_ns / convolution.forward_ns == pytest.approx(2, rel=0.2)
    assert result.attributed_ns > 0.9 * result.total_ns
