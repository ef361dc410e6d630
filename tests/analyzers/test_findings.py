"""Every rule: silent on a healthy run, found where its fault is injected, silent without its signal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from analysis_builders import (
    GIB,
    METADATA,
    MS,
    all_reduce,
    breakdown,
    build,
    communication,
    rank_result,
    shares,
    statistics,
    steps_table,
)

from trine.analyzers.diagnose import diagnose
from trine.analyzers.findings import rules
from trine.analyzers.results import Analysis, Finding, Hardware, LateActivity, MemorySummary, NamedTime
from trine.optim.config import Config

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = {
    **METADATA,
    "device": {"type": "cuda", "name": "Test GPU", "memory_bytes": 80 * GIB},
    "backend": "nccl",
}


def metadata(base: dict[str, Any] = METADATA, **changes: Any) -> dict[str, Any]:
    return {**base, **changes}


def found(analysis: Analysis) -> dict[str, Finding]:
    return {finding.id: finding for finding in diagnose(analysis).findings}


def two(shares_of_step: Any = None, **changes: Any) -> Analysis:
    """Two ranks alike."""
    changes = {"part": communication(), **changes}
    table = steps_table(shares_of_step if shares_of_step is not None else shares())
    return build([rank_result(rank, steps=table, **changes) for rank in (0, 1)])


def test_ids_are_those_of_the_design_and_documented() -> None:
    faults = {rule.ID for rule in rules() if rule.KIND == "fault"}
    assert faults >= {  # later ones follow the pattern
        "input-bound",
        "host-bound",
        "exposed-communication",
        "straggler",
        "optimizer-bound",
        "memory-near-limit",
        "fragmentation",
    }
    documented = (REPOSITORY / "docs" / "findings.md").read_text(encoding="utf-8")
    for rule in rules():
        assert f"`{rule.ID}`" in documented, rule.ID


def test_a_healthy_run_yields_nothing_and_says_what_it_is_not_bound_by() -> None:
    analysis = diagnose(build())
    assert analysis.findings == ()
    assert {item.id for item in analysis.not_bound_by} == {
        "exposed-communication",
        "host-bound",
        "input-bound",
        "optimizer-bound",
        "straggler",
    }
    assert all(any(digit in item.statement for digit in "0123456789") for item in analysis.not_bound_by)


# --- input -----------------------------------------------------------------------------------------


def test_a_slow_loader_is_found_with_workers_that_keep_up() -> None:
    finding = found(two(shares(data=0.5), metadata=metadata(loader={"workers": 0})))["input-bound"]
    assert finding.kind == "fault"
    assert finding.severity == pytest.approx(0.5)
    assert finding.recommendation is not None and finding.recommendation.change["data.workers"] == 2
    gain = finding.recommendation.predicted and finding.recommendation.predicted.gain_ns
    assert gain is not None and gain.low < gain.mid < gain.high <= 50 * MS


def test_one_long_fetch_is_an_event_not_a_bound() -> None:
    rows = [shares(data=0.01)] * 9 + [shares(data=0.9)]
    assert "input-bound" not in found(two(rows))


def test_a_stall_every_few_steps_is_found_though_the_median_step_is_fine() -> None:
    rows = ([shares(data=0.01)] * 3 + [shares(data=0.8)]) * 5
    assert found(two(rows))["input-bound"].severity == pytest.approx(0.2, abs=0.03)


def test_warm_up_steps_do_not_count() -> None:
    table = steps_table([shares(data=0.9)] * 3 + [shares(data=0.01)] * 10)
    ranks = [rank_result(r, steps=table, part=communication(), warm_up=(0, 1, 2)) for r in (0, 1)]
    assert "input-bound" not in found(build(ranks))
    ranks = [rank_result(r, steps=table, part=communication()) for r in (0, 1)]
    assert "input-bound" in found(build(ranks)), "the control: without warm-up the same steps are a fault"


def test_two_steps_are_no_evidence() -> None:
    assert (
        found(
            build(
                [rank_result(0, steps=steps_table(shares(data=0.5), count=2))],
                steps=2,
                step_statistics=statistics(2),
            )
        )
        == {}
    )


def test_a_host_that_loads_while_its_device_works_is_no_input_bound() -> None:
    busy = two(shares(data=0.3), metadata=CUDA, window=breakdown(idle={"data": 0.01}))
    assert "input-bound" not in found(busy)
    idle = two(shares(data=0.3), metadata=CUDA, window=breakdown(idle={"data": 0.3}))
    assert found(idle)["input-bound"].evidence["basis"] == "breakdown"


def test_one_slow_loader_of_two_is_a_straggler_not_the_run() -> None:
    slow = shares(data=0.35, exposed_communication=0.01)
    waiting = shares(data=0.01, exposed_communication=0.35)
    late = communication(caused_wait_ns=680 * MS, lateness_ns=680 * MS, wait_ns=5 * MS)
    ranks = [
        rank_result(
            0, steps=steps_table(waiting), part=communication(wait_ns=680 * MS, caused_wait_ns=5 * MS)
        ),
        rank_result(1, steps=steps_table(slow), part=late),
    ]
    result = found(build(ranks))
    assert set(result) == {"straggler"}
    assert result["straggler"].evidence["ranks"][0]["doing"] == "loader"
    assert result["straggler"].recommendation is not None
    assert "data.workers" in result["straggler"].recommendation.change


# --- host ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cause", "changes"), [("host", True), ("sync", False)])
def test_a_device_that_idles_for_its_host(cause: str, changes: bool) -> None:
    analysis = two(metadata={**CUDA, "compile": False}, window=breakdown(idle={cause: 0.4}))
    finding = found(analysis)["host-bound"]
    assert finding.severity == pytest.approx(0.4)
    assert finding.recommendation is not None
    assert bool(finding.recommendation.change) is changes, "a blocking call is mended by hand"


def test_idle_for_other_reasons_is_not_the_host() -> None:
    assert found(two(metadata=CUDA, window=breakdown(idle={"dependency": 0.4}))) == {}
    assert found(two(metadata=CUDA, window=breakdown(idle={"host": 0.1}))) == {}


def test_python_between_operators_is_normal_on_a_cpu() -> None:
    assert found(two(window=breakdown(basis="host", idle={"host": 0.4}))) == {}
    assert "host-bound" in found(two(window=breakdown(basis="host", idle={"host": 0.6})))


def test_what_the_profiler_adds_is_not_the_program() -> None:
    """Steps of 100 ms take 140 ms in the deep window: of 60 % idle there, 40 ms are the profiler's."""
    window = breakdown(window_ns=420 * MS, basis="host", idle={"host": 0.6})
    assert found(two(window=window)) == {}
    undisturbed = replace(window, steps=(1, 2, 3, 4))
    assert "host-bound" in found(two(window=undisturbed))
    disturbed = diagnose(two(window=breakdown(window_ns=900 * MS, basis="host", idle={"host": 0.9})))
    assert disturbed.findings == (), "three times the usual step: the window shows the profiler"


def test_toy_steps_on_a_cpu_are_no_host_fault() -> None:
    ranks = [
        rank_result(
            r,
            steps=steps_table(step_ns=3 * MS),
            part=communication(),
            window=breakdown(window_ns=9 * MS, basis="host", idle={"host": 0.6}),
        )
        for r in (0, 1)
    ]
    assert "host-bound" not in found(build(ranks, step_ns=3 * MS))


def test_time_outside_the_training_is_found_without_a_deep_window() -> None:
    finding = found(two(shares(other=0.4)))["host-bound"]
    assert finding.severity == pytest.approx(0.4, abs=0.01)
    assert "outside loader, forward, backward and optimizer" in finding.title


def test_an_evaluation_every_few_steps_is_no_fault() -> None:
    rows = ([shares(other=0.02)] * 3 + [shares(other=0.85)]) * 5
    assert "host-bound" not in found(two(rows))


def test_a_tiny_trace_is_no_evidence() -> None:
    tiny = breakdown(idle={"host": 0.6}, events=20, window_ns=MS)
    analysis = build([rank_result(0, window=tiny, metadata=CUDA)], steps=0, step_statistics=None)
    assert found(analysis) == {}
    assert diagnose(analysis).verdict.bound_by is None


# --- communication and stragglers --------------------------------------------------------------------


def exposed(share: float, wait: float, base: dict[str, Any] = CUDA, **changes: Any) -> Analysis:
    """Two ranks that wait and move bytes alike: ``wait`` is the waiting part of communication."""
    total = round(20 * 100 * MS * share)
    part = communication(
        transfer_ns=round(total * (1 - wait)), wait_ns=round(total * wait), caused_wait_ns=total // 2
    )
    return two(shares(exposed_communication=share), part=part, metadata={**base, **changes})


def test_bytes_in_the_open_are_found_with_their_collective() -> None:
    finding = found(exposed(0.3, wait=0.1))["exposed-communication"]
    assert finding.evidence["cause"] == "bytes"
    assert finding.evidence["collectives"][0]["op"] == "all_reduce"
    assert finding.severity == pytest.approx(0.27, abs=0.01)
    assert finding.recommendation is not None
    assert finding.recommendation.change["communication.compression"] == "bf16"


def test_the_first_steps_waiting_does_not_hide_bytes() -> None:
    """Warm-up waits of two seconds would make all communication look like waiting."""
    part = replace(
        communication(transfer_ns=600 * MS, wait_ns=2_100 * MS),
        steady_transfer_ns=540 * MS,
        steady_wait_ns=60 * MS,
    )
    analysis = two(shares(exposed_communication=0.3), part=part, metadata=CUDA)
    assert found(analysis)["exposed-communication"].evidence["cause"] == "bytes"


def test_hidden_or_short_transfers_are_healthy() -> None:
    assert "exposed-communication" not in found(exposed(0.08, wait=0.1))


def test_a_cpu_pays_for_transfers_with_the_cores_that_compute() -> None:
    assert "exposed-communication" not in found(exposed(0.2, wait=0.1, base=METADATA))
    assert "exposed-communication" in found(exposed(0.4, wait=0.1, base=METADATA))


def test_waits_without_a_culprit_are_not_called_bandwidth() -> None:
    finding = found(exposed(0.4, wait=0.9))["exposed-communication"]
    assert finding.evidence["cause"] == "waiting"
    assert "straggler" not in found(exposed(0.4, wait=0.9))


def test_scheduling_noise_on_shared_cores_is_no_fault() -> None:
    """Two ranks on two cores take turns at being late; neither is behind in most steps."""
    first = [shares(exposed_communication=0.05 if n % 2 else 0.25) for n in range(20)]
    second = [shares(exposed_communication=0.25 if n % 2 else 0.05) for n in range(20)]
    noisy = communication(
        transfer_ns=100 * MS, wait_ns=200 * MS, caused_wait_ns=200 * MS, lateness_ns=200 * MS
    )
    ranks = [rank_result(n, steps=steps_table(rows), part=noisy) for n, rows in enumerate((first, second))]
    assert found(build(ranks)) == {}


def straggling(doing: tuple[LateActivity, ...] = (), share: float = 0.3, **changes: Any) -> Analysis:
    """Rank 1 of two computes ``share`` of a step longer; rank 0 waits that long."""
    waiting, late = shares(exposed_communication=share + 0.02), shares(exposed_communication=0.02)
    wait_ns = round(20 * 100 * MS * share)
    ranks = [
        rank_result(
            0,
            steps=steps_table(waiting),
            part=communication(
                transfer_ns=40 * MS, wait_ns=wait_ns, caused_wait_ns=2 * MS, lateness_ns=2 * MS
            ),
            **changes,
        ),
        rank_result(
            1,
            steps=steps_table(late),
            part=communication(
                transfer_ns=40 * MS,
                wait_ns=2 * MS,
                caused_wait_ns=wait_ns,
                lateness_ns=wait_ns,
                last_in=58,
                doing=doing,
            ),
            **changes,
        ),
    ]
    rows = (all_reduce(caused_by={0: 2 * MS, 1: wait_ns}, wait_ns=wait_ns + 2 * MS),)
    return build(ranks, collectives=rows)


def test_a_straggler_is_named_with_what_it_did_and_not_counted_as_bandwidth() -> None:
    doing = (LateActivity("python", 500 * MS, "time.sleep"), LateActivity("compute", 10 * MS))
    result = found(straggling(doing))
    assert set(result) == {"straggler"}, "the wait it causes is no second fault"
    finding = result["straggler"]
    assert finding.title.startswith("Rank 1 arrives late")
    row = finding.evidence["ranks"][0]
    assert (row["rank"], row["doing"], row["example"]) == (1, "python", "time.sleep")
    assert finding.evidence["waited_in"][0]["op"] == "all_reduce"
    gain = (
        finding.recommendation
        and finding.recommendation.predicted
        and finding.recommendation.predicted.gain_ns
    )
    assert gain is not None and 0.5 * 30 * MS <= gain.mid <= 30 * MS


def test_waiting_in_messages_without_peers_may_be_a_pipelines_bubble() -> None:
    """Gloo's traces without shapes name no peer, so no pipeline is recognised; its bubble is nobody's fault."""
    analysis = straggling()
    rows = tuple(replace(row, op="send_recv") for row in analysis.collectives)
    assert "straggler" not in found(replace(analysis, collectives=rows))
    assert "straggler" in found(analysis)


def test_what_a_straggler_did_comes_from_its_phases_where_collectives_do_not_say() -> None:
    assert found(straggling())["straggler"].evidence["ranks"][0]["doing"] == "compute"


def test_a_rank_that_is_slower_at_everything_has_a_slower_processor() -> None:
    slow = {"forward": 0.36, "backward": 0.52, "optimizer": 0.08, "exposed_communication": 0.02}
    fast = {"forward": 0.24, "backward": 0.34, "optimizer": 0.05, "exposed_communication": 0.35}
    analysis = straggling()
    ranks = [
        replace(rank, summary=replace(rank.summary, steps=steps_table(rows)))
        for rank, rows in zip(analysis.ranks, (fast, slow), strict=True)
    ]
    finding = found(replace(analysis, ranks=tuple(ranks)))["straggler"]
    assert finding.evidence["ranks"][0]["doing"] == "slower"
    assert "1.5 to 1.6 times the others'" in finding.title


def test_a_small_lateness_is_healthy_and_said() -> None:
    analysis = diagnose(straggling(share=0.05))
    assert "straggler" not in {finding.id for finding in analysis.findings}
    said = next(item.statement for item in analysis.not_bound_by if item.id == "straggler")
    assert "fault from 10 %" in said


def test_a_late_first_step_is_warm_up_not_a_straggler() -> None:
    """The first step's skew fills the sums; the median step shows that nobody is late."""
    even = shares(exposed_communication=0.02)
    first = communication(transfer_ns=40 * MS, wait_ns=2_000 * MS, caused_wait_ns=0, lateness_ns=0)
    skewed = communication(transfer_ns=40 * MS, wait_ns=0, caused_wait_ns=2_000 * MS, lateness_ns=2_000 * MS)
    ranks = [
        rank_result(0, steps=steps_table(even), part=first, warm_up=(0,)),
        rank_result(1, steps=steps_table(even), part=skewed, warm_up=(0,)),
    ]
    assert "straggler" not in found(build(ranks))


def trace(costs: dict[int, int], base: dict[str, Any], world: int = 8) -> Analysis:
    """A foreign trace of ``world`` ranks without phases: ``costs`` is rank → lateness in ms of a 600 ms step."""
    total = sum(costs.values())
    ranks = []
    for rank in range(world):
        late = costs.get(rank, 0)
        part = communication(
            transfer_ns=50 * MS,
            wait_ns=(total - late) * MS,
            caused_wait_ns=late * (world - 1) * MS,
            lateness_ns=late * MS,
        )
        window = breakdown(window_ns=600 * MS, communication=(50 + total - late) / 600, steps=(3,))
        ranks.append(
            rank_result(rank, window=window, part=part, metadata=base, world_size=world, format="kineto")
        )
    return build(ranks, steps=1, step_statistics=statistics(1, 600 * MS))


def test_two_of_eight_that_are_late_are_both_named() -> None:
    result = found(trace({0: 167, 2: 22, 6: 135}, {"device": {"type": "cuda"}}))
    assert [row["rank"] for row in result["straggler"].evidence["ranks"]] == [0, 6]
    assert result["straggler"].severity == pytest.approx(302 / 600, abs=0.01)


def test_cpu_ranks_that_take_turns_in_a_short_trace_are_no_stragglers() -> None:
    cpu = {"device": {"type": "cpu"}}
    assert "straggler" not in found(trace({1: 90, 2: 110}, cpu, world=4))
    assert "straggler" in found(trace({1: 10, 2: 200}, cpu, world=4))


def test_missing_ranks_leave_wait_and_transfer_unsplit() -> None:
    window = breakdown(communication=0.5)
    analysis = build([rank_result(0, window=window, metadata=CUDA)], world_size=8, steps=3)
    finding = found(analysis)["exposed-communication"]
    assert finding.evidence["cause"] == "unknown"
    assert finding.recommendation is not None and finding.recommendation.predicted is None


def test_one_rank_has_no_communication_to_find() -> None:
    analysis = build([rank_result(0, steps=steps_table(shares(exposed_communication=0.4)))])
    assert "exposed-communication" not in found(analysis)


# --- optimizer -------------------------------------------------------------------------------------


def test_a_heavy_optimizer_loop_is_found_and_fused() -> None:
    optimizer = {"class": "AdamW", "implementation": "for-loop"}
    finding = found(two(shares(optimizer=0.4), metadata=metadata(optimizer=optimizer)))["optimizer-bound"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {"compute.fuse": ["optimizer"]}
    predicted = finding.recommendation.predicted
    # 40 ms for-loop at 2.5 times: 24 ms.
    assert predicted is not None and predicted.gain_ns is not None
    assert predicted.gain_ns.mid == pytest.approx(24 * MS, rel=0.01)
    assert predicted.step_time_ns is not None
    assert predicted.step_time_ns.mid + predicted.gain_ns.mid == 100 * MS


def test_a_fused_optimizer_is_sharded_instead() -> None:
    change = found(two(shares(optimizer=0.4)))["optimizer-bound"].recommendation
    assert change is not None and change.change == {"zero.stage": 1}


# --- memory ----------------------------------------------------------------------------------------


def device_memory(peak: float, reserved: float | None = None, **changes: Any) -> MemorySummary:
    base = MemorySummary(
        round(peak * GIB),
        round((reserved or peak) * GIB),
        80 * GIB,
        {},
        False,
        changes.pop("retries", 0),
        "device",
    )
    return replace(base, **changes)


BIG = metadata(
    CUDA,
    model={"parameter_bytes": 8 * GIB, "gradient_bytes": 8 * GIB, "optimizer_bytes": 16 * GIB},
)


def test_memory_near_its_limit_is_found_and_sharding_would_free() -> None:
    result = found(two(memory=device_memory(77), metadata=BIG))
    assert result["memory-near-limit"].kind == "fault"
    assert result["memory-near-limit"].recommendation is not None
    assert result["memory-near-limit"].recommendation.change == {"zero.stage": 2}
    zero = result["zero-would-free"].recommendation
    assert zero is not None and zero.predicted is not None
    assert zero.predicted.peak_bytes_change == -(16 + 8) * GIB // 2
    checkpointing = result["checkpointing-would-free"].recommendation
    assert checkpointing is not None and checkpointing.predicted is not None
    # 77 − 32 GiB of states are activations; 70 % of them go, for one more forward pass.
    assert checkpointing.predicted.peak_bytes_change == pytest.approx(-45 * GIB * 0.7, rel=0.01)
    assert checkpointing.predicted.gain_ns is not None and checkpointing.predicted.gain_ns.mid < 0


def test_memory_with_room_is_healthy() -> None:
    analysis = diagnose(two(memory=device_memory(60), metadata=BIG))
    assert analysis.findings == ()
    assert any(item.id == "memory-near-limit" for item in analysis.not_bound_by)


def test_allocator_retries_are_a_fault_at_any_fill() -> None:
    assert "memory-near-limit" in found(two(memory=device_memory(60, retries=3), metadata=BIG))


def test_ranks_of_a_host_share_its_memory() -> None:
    half = MemorySummary(45 * GIB, None, 80 * GIB, {}, False, None, "host")
    assert "memory-near-limit" in found(two(memory=half))
    apart = [
        rank_result(r, steps=steps_table(), part=communication(), memory=half, host_name=f"node-{r}")
        for r in (0, 1)
    ]
    assert found(build(apart)) == {}


def test_fragmentation_needs_memory_to_be_short() -> None:
    assert "fragmentation" in found(two(memory=device_memory(50, 68), metadata=BIG))
    assert "fragmentation" not in found(two(memory=device_memory(30, 50), metadata=BIG)), "an idle cache"
    assert "fragmentation" not in found(two(memory=device_memory(66, 68), metadata=BIG))


# --- opportunities ---------------------------------------------------------------------------------

FULL_PRECISION = {"parameter_dtype": "float32", "autocast_dtype": None, "float32_matmul": "highest"}


def test_fp32_products_where_bf16_is_measured_faster() -> None:
    fast = Hardware(
        "CPU", 2, {"fp32": 60e9, "bf16": 400e9}, provenance={"peak_flops_per_s": "measured: trine hardware"}
    )
    analysis = replace(two(metadata=metadata(precision=FULL_PRECISION)), hardware=fast)
    finding = found(analysis)["low-precision-unused"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {"precision.dtype": "bf16"}
    assert finding.evidence["matmul_share_is"] == "assumed"
    gain = finding.recommendation.predicted and finding.recommendation.predicted.gain_ns
    # Half of forward and backward (0.45 of the step), at 0.7 × 6.67 = 4.7 times.
    assert gain is not None and gain.mid == pytest.approx(0.45 * 100 * MS * (1 - 1 / 4.67), rel=0.02)


def test_fp32_products_where_bf16_is_no_faster() -> None:
    slow = Hardware("CPU", 2, {"fp32": 60e9, "bf16": 40e9}, provenance={"peak_flops_per_s": "measured"})
    analysis = replace(two(metadata=metadata(precision=FULL_PRECISION)), hardware=slow)
    assert found(analysis) == {}


@pytest.mark.parametrize(("calls", "found_it"), [(30, True), (30_000, False)], ids=["long", "short"])
def test_short_products_of_a_cpu_are_calls_and_not_arithmetic(calls: int, found_it: bool) -> None:
    fast = Hardware("CPU", 2, {"fp32": 60e9, "bf16": 400e9}, provenance={"peak_flops_per_s": "measured"})
    products = (NamedTime("aten::addmm", "operator", calls, 240 * MS),)
    seen = two(window=breakdown(), operators=products, metadata=metadata(precision=FULL_PRECISION))
    assert ("low-precision-unused" in found(replace(seen, hardware=fast))) == found_it


def test_half_precision_is_fp16_where_there_is_no_fast_bf16() -> None:
    volta = Hardware("Tesla V100", 1, {"fp32": 15.7e12, "fp16": 125e12})
    finding = found(replace(two(metadata=metadata(precision=FULL_PRECISION)), hardware=volta))
    change = finding["low-precision-unused"].recommendation
    assert change is not None and change.change["precision.dtype"] == "fp16"


def operators(elementwise: int) -> tuple[NamedTime, ...]:
    return (
        NamedTime("aten::addmm", "operator", 100, (100 - elementwise) * MS),
        NamedTime("aten::gelu", "operator", 100, elementwise * MS),
    )


def test_eager_elementwise_work_is_worth_fusing() -> None:
    eager = metadata(compile=False, attention="eager")
    window = breakdown(basis="host", idle={"host": 0.02})
    finding = found(two(window=window, operators=operators(40), metadata=eager))["unfused-elementwise"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {"compute.compile": "blocks", "compute.attention": "sdpa"}
    assert found(two(window=window, operators=operators(5), metadata=eager)) == {}
    assert found(two(window=window, operators=operators(40))) == {}, "compiled already"


def test_an_unfused_optimizer_is_worth_fusing_before_it_is_a_fault() -> None:
    loop = metadata(optimizer={"class": "AdamW", "implementation": "for-loop"})
    finding = found(two(shares(optimizer=0.12), metadata=loop))["unfused-elementwise"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {"compute.fuse": ["optimizer"]}
    assert found(two(shares(optimizer=0.04), metadata=loop)) == {}


def test_recomputation_that_is_not_needed() -> None:
    wasteful = metadata(
        CUDA,
        flops={"counted": 3e12, "executed": 4e12},
        configuration={"checkpointing": {"mode": "full"}},
    )
    finding = found(two(memory=device_memory(20), metadata=wasteful))["memory-headroom"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {"checkpointing.mode": "none"}
    # A quarter of the FLOPs were recomputed, of the 90 % in forward and backward.
    assert finding.severity == pytest.approx(0.9 / 4, abs=0.01)
    assert "memory-headroom" not in found(two(memory=device_memory(60), metadata=wasteful))


def test_small_micro_batches_with_memory_to_spare() -> None:
    small = metadata(CUDA, accumulation=1, configuration={"accumulation": {"steps": 8}})
    window = breakdown(idle={"host": 0.14})
    finding = found(two(memory=device_memory(20), window=window, metadata=small))["memory-headroom"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {"accumulation.steps": 4}
    # A loop that gathers eight batches is no business of the key, which cuts a batch.
    gathers = metadata(CUDA, accumulation=8)
    finding = found(two(memory=device_memory(20), window=window, metadata=gathers))["memory-headroom"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {} and "4 instead of 8" in finding.recommendation.why


def test_gradients_sent_with_every_micro_batch() -> None:
    rows = (all_reduce(bytes=4 * 20 * 50_400_000),)
    analysis = replace(exposed(0.3, wait=0.1, accumulation=4), collectives=rows)
    finding = found(analysis)["accumulation"]
    assert finding.evidence["times_sent"] == pytest.approx(4.0)
    assert finding.recommendation is not None
    assert finding.recommendation.change == {} and "no_sync" in finding.recommendation.why
    once = replace(exposed(0.3, wait=0.1, accumulation=4), collectives=(all_reduce(),))
    assert "accumulation" not in found(once)


def test_what_tensor_ranks_exchange_is_not_counted_as_gradients() -> None:
    rows = (all_reduce(bytes=4 * 20 * 50_400_000),)
    layout = {"parallel": {"data": 2, "tensor": 2}}
    for several in (1, 4):
        run = replace(exposed(0.4, wait=0.1, accumulation=several, configuration=layout), collectives=rows)
        assert "accumulation" not in found(run)
        alone = {"parallel": {"data": 2, "tensor": 1}}
        run = replace(exposed(0.4, wait=0.1, accumulation=several, configuration=alone), collectives=rows)
        assert "accumulation" in found(run)


def test_the_runtimes_accumulation_alone_is_not_said_to_save_communication() -> None:
    """It cuts one batch; a batch sends its gradients once, cut or not."""
    finding = found(exposed(0.4, wait=0.1, accumulation=1, data_parallel=None))["accumulation"]
    assert finding.recommendation is not None
    assert finding.recommendation.change == {}
    assert "4 times the batch" in finding.recommendation.why
    assert finding.recommendation.numerics is not None
    assert "4 times the global batch" in finding.recommendation.numerics
    cut = exposed(0.4, wait=0.1, accumulation=1, configuration={"accumulation": {"steps": 4}})
    assert "accumulation" not in found(cut), "the engine sends once already"


def test_few_large_buckets_leave_nothing_to_overlap() -> None:
    rows = (all_reduce(calls=20),)
    analysis = replace(exposed(0.3, wait=0.05), collectives=rows)
    finding = found(analysis)["bucket-size"]
    assert finding.recommendation is not None
    assert finding.recommendation.change["communication.bucket_mib"] == 4
    assert "bucket-size" not in found(replace(exposed(0.08, wait=0.05), collectives=rows))


def test_many_small_buckets_are_ruled_by_latency() -> None:
    rows = (
        all_reduce(calls=2_000, bytes=2_000 * 100_000, busbw_bytes_per_s=1e9),
        all_reduce(op="all_gather", calls=20, bytes=20 * 50_000_000, busbw_bytes_per_s=10e9),
    )
    finding = found(replace(exposed(0.3, wait=0.05), collectives=rows))["bucket-size"]
    assert finding.recommendation is not None
    assert finding.recommendation.change["communication.bucket_mib"] == 25


# --- all of them -----------------------------------------------------------------------------------


def everything() -> list[Finding]:
    """Findings of all injected faults above."""
    loop = metadata(optimizer={"class": "AdamW", "implementation": "for-loop"})
    analyses = [
        two(shares(data=0.5), metadata=metadata(loader={"workers": 0})),
        two(metadata={**CUDA, "compile": False}, window=breakdown(idle={"host": 0.4})),
        exposed(0.3, wait=0.1),
        exposed(0.4, wait=0.9),
        exposed(0.3, wait=0.1, data_parallel={"kind": "fsdp2"}),
        exposed(0.3, wait=0.1, accumulation=1, data_parallel=None),
        *(
            straggling((LateActivity(doing, 500 * MS),))
            for doing in ("loader", "copy", "launching", "compute")
        ),
        two(shares(optimizer=0.4), metadata=loop),
        two(shares(optimizer=0.12), metadata=loop),
        two(shares(optimizer=0.4)),
        two(shares(other=0.4)),
        two(memory=device_memory(77), metadata=BIG),
        two(memory=device_memory(50, 68), metadata=BIG),
        two(metadata=metadata(precision=FULL_PRECISION)),
        replace(exposed(0.3, wait=0.05), collectives=(all_reduce(calls=20),)),
    ]
    return [finding for analysis in analyses for finding in diagnose(analysis).findings]


def test_every_change_is_one_the_configuration_knows() -> None:
    """A key or value that no configuration has would be worse than none; what the runtime applies yet is its own affair."""
    for finding in everything():
        if finding.recommendation is not None and finding.recommendation.change:
            Config().with_changes(dict(finding.recommendation.change))


def test_every_prediction_is_ordered_traceable_and_within_the_step() -> None:
    for finding in everything():
        predicted = finding.recommendation.predicted if finding.recommendation is not None else None
        if predicted is None:
            continue
        assert predicted.formula, finding.id
        if predicted.gain_ns is not None:
            gain, after = predicted.gain_ns, predicted.step_time_ns
            assert gain.low <= gain.mid <= gain.high <= 100 * MS, finding.id
            assert after is not None and after.low <= after.mid <= after.high
            assert after.mid + gain.mid == 100 * MS
            assert predicted.inputs["step_time_ns"] == 100 * MS
        if finding.kind == "opportunity" and predicted.peak_bytes_change is None:
            assert predicted.gain_ns is not None and predicted.gain_ns.mid >= 5 * MS, finding.id


def test_nothing_recorded_gives_no_finding_and_no_error() -> None:
    for ranks in ([], [rank_result(0, metadata={})], [rank_result(r, metadata={}) for r in range(3)]):
        analysis = diagnose(build(ranks, steps=0, step_statistics=None, collectives=()))
        assert analysis.findings == ()
        assert analysis.verdict.bound_by is None
        assert analysis.verdict.confidence == "low"
