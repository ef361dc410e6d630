"""What a host-bound job is told to do: nothing that it does already, and nothing that it has no use for."""

from __future__ import annotations

from pathlib import Path

import pytest
from analysis_builders import MS, breakdown, build, rank_result

from trine import analyze, load
from trine.analyzers.diagnose import diagnose
from trine.analyzers.findings.straggler import REMEDIES, _of_several
from trine.analyzers.results import Analysis, Finding, NamedTime


def _trace(*operators: str, kernels: tuple[str, ...] = ("gemm",)) -> Analysis:
    """Two ranks of a foreign trace whose devices idle 40 % of the time for their hosts."""

    def named(names: tuple[str, ...]) -> tuple[NamedTime, ...]:
        return tuple(NamedTime(name, "compute", 10, MS) for name in names)

    ranks = [
        rank_result(
            rank,
            window=breakdown(idle={"host": 0.4}),
            kernels=named(kernels),
            operators=named(operators),
            format="kineto",
            metadata={},
        )
        for rank in (0, 1)
    ]
    return diagnose(build(ranks))


def _host_bound(analysis: Analysis) -> Finding:
    return next(finding for finding in analysis.findings if finding.id == "host-bound")


def test_training_is_compiled_and_its_optimizer_fused() -> None:
    advice = _host_bound(_trace("aten::mm", "MmBackward0")).recommendation
    assert advice is not None
    assert advice.change == {"compute.compile": "blocks", "compute.fuse": ["optimizer"]}


def test_without_a_backward_pass_there_is_no_optimizer_to_fuse() -> None:
    advice = _host_bound(_trace("aten::mm")).recommendation
    assert advice is not None and advice.change == {"compute.compile": "blocks"}
    assert "optimizer" not in advice.why


@pytest.mark.parametrize(
    "seen",
    [
        {"kernels": ("gemm", "triton_poi_fused_add_0")},
        {"kernels": ("gemm", "triton__0d1d2d3de")},
        {"operators": ("aten::mm", "MmBackward0", "Torch-Compiled Region: 0/0")},
    ],
)
def test_what_is_compiled_is_not_told_to_compile(seen: dict[str, tuple[str, ...]]) -> None:
    operators = seen.get("operators", ("aten::mm", "MmBackward0"))
    advice = _host_bound(_trace(*operators, kernels=seen.get("kernels", ("gemm",)))).recommendation
    assert advice is not None and advice.change == {} and "compiled already" in advice.why


def test_a_kernel_written_in_triton_by_hand_is_not_compilation() -> None:
    advice = _host_bound(_trace("aten::mm", kernels=("triton_attention_fwd",))).recommendation
    assert advice is not None and "compute.compile" in advice.change


def test_several_ranks_have_several_hosts() -> None:
    assert "held back by its hosts" in _trace("aten::mm").verdict.sentence


def test_remedies_of_several_ranks_speak_of_several() -> None:
    for _, _, why in REMEDIES.values():
        assert not {"Its", "its", "that", "this"} & set(_of_several(why).split()[:8])


def test_one_figure_in_the_verdict_and_in_the_tables(data: Path) -> None:
    analysis = analyze(load(data / "traces" / "kineto" / "megatron_tp8_a100"))
    finding = _host_bound(analysis)
    shown = analysis.ranks[0].summary.breakdown
    assert shown is not None
    assert finding.evidence["stall_ns"] == pytest.approx(shown.idle.host + shown.idle.sync, rel=1e-3)
    assert finding.recommendation is not None and finding.recommendation.change == {}
