"""ZeRO: memory by the formula, live optimizers adopted, models that are hard to shard, the traps of FSDP2, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_pool import RankPool

from trine.optim import Config
from trine.optim.techniques.zero import bytes_per_parameter, degrees
from trine.record.errors import UsageError

torch = pytest.importorskip("torch")

# --- memory ------------------------------------------------------------------------------------


def test_the_formula_is_the_papers() -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 devices, 120, 31.4, 16.6 and 1.9 GB."""
    gigabytes = [bytes_per_parameter(stage, 64, 2, 2, 12) * 7.5 for stage in range(4)]
    assert gigabytes == pytest.approx([120.0, 31.4, 16.6, 1.9], abs=0.05)


@pytest.mark.parametrize(("ranks", "shards"), [(2, None), (4, None), (4, 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_is_the_formulas(
    stage: int, ranks: int, shards: int | None, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[ranks])
    n = shards or ranks
    for held in pool.run("zero_cases:memory", stage, shards):
        assert held["optimizer"] == pytest.approx(8 / n, rel=0.05)
        assert held["gradients"] == pytest.approx(4 / (n if stage >= 2 else 1), rel=0.05)
        assert held["parameters_between"] == pytest.approx(4 / (n if stage >= 2 else 1), rel=0.05)
        if stage < 3:  # whole while the step runs; of stage 3 the root is, at its end
            assert held["parameters_inside"] == pytest.approx(4, rel=0.05)
        else:
            assert held["parameters_inside"] < 0.75 * 4
        whole = held["parameters_inside"] if stage == 2 else held["parameters_between"]
        measured = held["optimizer"] + held["gradients"] + whole
        assert measured == pytest.approx(bytes_per_parameter(stage, n), rel=0.05)


def test_the_record_shows_it(two_ranks: RankPool, tmp_path: Path) -> None:
    for stage in (1, 3):
        for held in two_ranks.run("zero_cases:recorded_memory", stage, str(tmp_path / str(stage))):
            assert held["optimizer"] == pytest.approx(4, rel=0.05)
            assert held["gradients"] == pytest.approx(4 if stage == 1 else 2, rel=0.05)
            assert held["parameters"] == pytest.approx(4 if stage == 1 else 2, rel=0.05)


# --- the live optimizer ------------------------------------------------------------------------


_SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("amsgrad", "foreach", "adagrad", "rmsprop", "nadam")
]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["adamw", "fused", "sgd", *_SLOW])
def test_a_live_optimizer_is_adopted_with_its_state(two_ranks: RankPool, name: str, stage: int) -> None:
    answers = two_ranks.run("zero_cases:adopted", name, stage, False)
    for found in answers:
        assert found["worst"] <= 1e-10
        assert found["same_object"] and found["sharded"] and found["moments_sharded"]
        assert found["rates"] == answers[0]["rates"]
    assert answers[0]["digest"] == answers[1]["digest"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_wrapped_model_is_adopted(two_ranks: RankPool, stage: int) -> None:
    answers = two_ranks.run("zero_cases:adopted", "adamw", stage, True)
    for found in answers:
        assert found["worst"] <= 1e-10
        if stage > 1:
            assert "replaced by trine.optimize" in found["refused"]
    assert answers[0]["digest"] == answers[1]["digest"]


def test_an_optimizer_from_before_sharding_still_trains(two_ranks: RankPool) -> None:
    """Alone it trains nothing, silently; made after a bare forward, part of the model."""
    for moved in two_ranks.run("zero_cases:optimizer_from_before"):
        assert moved["pytorch"] == 0.0
        assert moved["trine"] > 0.0 and moved["trine after a bare forward"] > 0.0


# --- models that are hard to shard -------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"zero.stage": 1},
        {"zero.stage": 2},
        {"zero.stage": 3},
        {"zero.stage": 3, "parallel.shard": 2},
        {"zero.stage": 3, "accumulation.steps": 2},
    ],
    ids=str,
)
def test_an_odd_model_trains_as_under_ddp(four_ranks: RankPool, changes: dict[str, Any]) -> None:
    """Frozen, unused, scalar, shared and indivisible parameters, and running statistics."""
    optimizer = "fused" if changes["zero.stage"] != 2 else "adamw"
    for control, ours in four_ranks.run("hard_to_shard_cases:odd_run", changes, optimizer):
        if "accumulation.steps" not in changes:  # batch norms see micro-batches
            assert max(abs(a - b) for a, b in zip(control[0], ours[0], strict=True)) <= 1e-10
            assert ours[3] == pytest.approx(control[3], rel=1e-12)
            assert ours[1] == pytest.approx(control[1], rel=1e-10)


def test_every_rank_starts_as_rank_0(two_ranks: RankPool) -> None:
    """As under DistributedDataParallel. FSDP2 alone would piece a model together from differently seeded ranks."""
    for stage in (1, 3):
        answers = two_ranks.run("hard_to_shard_cases:odd_run", {"zero.stage": stage}, "adamw", True)
        for control, ours in answers:
            assert max(abs(a - b) for a, b in zip(control[0], ours[0], strict=True)) <= 1e-10
        assert answers[0][1][2] == answers[1][1][2]


def test_ranks_with_different_models_are_told(two_ranks: RankPool) -> None:
    assert all("differs between ranks" in said for said in two_ranks.run("hard_to_shard_cases:other_models"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_of_several_dtypes(two_ranks: RankPool, stage: int) -> None:
    for plain, ours in two_ranks.run("hard_to_shard_cases:mixed_dtypes", stage):
        assert ours == pytest.approx(plain, rel=1e-5)


def test_ranks_that_use_different_blocks(two_ranks: RankPool) -> None:
    """FSDP2 would gather one rank's block into another's, without a word."""
    for plain, ours, apart, said in two_ranks.run("hard_to_shard_cases:branches_apart"):
        assert ours == pytest.approx(plain, rel=1e-5)
        assert apart > 1e-3
        assert "zero.stage = 3 and find_unused_parameters = True" in said


# --- traps -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_evaluation_before_the_update_leaves_nothing_old(two_ranks: RankPool, stage: int) -> None:
    assert max(two_ranks.run("zero_cases:evaluated_before_the_update", stage)) <= 1e-10


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_discarded_micro_batch_leaves_nothing(two_ranks: RankPool, stage: int) -> None:
    assert max(two_ranks.run("zero_cases:discarded_micro_batch", stage)) <= 1e-10


@pytest.mark.parametrize(
    "changes",
    [
        {"zero.stage": 1},
        {"zero.stage": 2, "accumulation.steps": 2},
        {"zero.stage": 3},
        {"zero.stage": 3, "parallel.shard": 2},
    ],
    ids=str,
)
def test_clipping_takes_the_norm_of_the_whole(four_ranks: RankPool, changes: dict[str, Any]) -> None:
    for apart, moved, ours in four_ranks.run("zero_cases:clipped", changes, "sgd"):
        assert apart <= 1e-10
        assert ours == pytest.approx(moved, rel=1e-9)


@pytest.mark.parametrize("stage", [2, 3])
def test_masters_are_the_shards(two_ranks: RankPool, stage: int) -> None:
    for found in two_ranks.run("zero_cases:stored_low", stage):
        assert found["weight"] == "torch.bfloat16" and found["held"] == ["torch.float32"]
        assert found["handed_on"] == "torch.bfloat16"  # outputs go to fp32 at the root alone
        assert found["output"] == "torch.float32"
        assert any(effect.startswith("precision.master_weights") for effect in found["effects"])


def test_one_shard_that_overflows_stops_all_ranks(two_ranks: RankPool) -> None:
    for stage in (1, 3):
        for left_out, unchanged, scale in two_ranks.run("zero_cases:overflow_on_one_shard", stage):
            assert left_out and not unchanged
            assert scale == 2.0**15


def test_blocks_are_gathered_ahead(two_ranks: RankPool) -> None:
    assert two_ranks.run("zero_cases:prefetched", None)[0] == [([], [])] * 4
    assert two_ranks.run("zero_cases:prefetched", 2)[0] == [
        ([1, 2], [0]),  # nothing behind: itself, which is gathered already
        ([2, 3], [0]),
        ([3], [1, 0]),
        ([], [2, 1]),
    ]
    assert two_ranks.run("zero_cases:prefetched", 0)[0] == [([], [place]) for place in range(4)]


# --- how many shards ---------------------------------------------------------------------------


def test_groups_are_sized_by_measured_links(four_ranks: RankPool) -> None:
    answers = four_ranks.run("zero_cases:automatic", 2)
    for effects in answers:
        assert len(effects) == 1 and effects == answers[0]
        for word in ("ms a step over all", "inside nodes of 2", "MiB of state", "α", "β"):
            assert word in effects[0]
    assert "one node" in four_ranks.run("zero_cases:automatic", 4)[0][0]


def _links(whole: float, inside: float, across: float) -> Any:
    from trine.optim.runtime.links import Link, Links

    return Links(*(Link(1e-6, rate, "gloo", 2, "stated") for rate in (whole, inside, across)))


def test_slow_crossing_keeps_shards_inside_nodes() -> None:
    from trine.optim.runtime.shard_groups import decide

    fast, slow = 100e9, 5e9
    size = 10**9
    inside = decide(3, 16, 8, _links(slow, fast, slow), size, 80e9)
    assert inside.shards == 8 and "faster" in inside.why
    assert decide(3, 16, 8, _links(fast, fast, slow), size, 80e9).shards == 16  # crossing costs nothing here
    full = decide(3, 16, 8, _links(slow, fast, slow), size, 0.5 * size)
    assert full.shards == 16 and "does not fit" in full.why
    assert decide(3, 8, 8, None, size, 80e9).shards == 8
    assert decide(3, 8, 1, None, size, 80e9).shards == 8


@given(
    stage=st.sampled_from([1, 2, 3]),
    nodes=st.integers(2, 8),
    per_node=st.integers(2, 8),
    rates=st.tuples(*(st.floats(1e8, 1e12) for _ in range(3))),
    size=st.integers(10**3, 10**11),
)
def test_the_decision_divides_the_ranks(
    stage: int, nodes: int, per_node: int, rates: tuple[float, float, float], size: int
) -> None:
    from trine.optim.runtime.shard_groups import decide

    decision = decide(stage, nodes * per_node, per_node, _links(*rates), size, 80e9)
    assert decision.shards in (per_node, nodes * per_node) and decision.why


@given(length=st.integers(0, 300), shards=st.integers(1, 17))
def test_rows_are_those_of_torch_chunk(length: int, shards: int) -> None:
    from trine.optim.runtime.sharding import rows_of

    rows = [rows_of(length, shards, place) for place in range(shards)]
    found = [list(range(*each)) for each in rows]
    expected = [chunk.tolist() for chunk in torch.arange(length).chunk(shards)] if length else []
    assert found == expected + [[]] * (shards - len(expected))


@given(
    ranks=st.integers(2, 64), shard=st.integers(1, 64), data=st.one_of(st.just("auto"), st.integers(1, 64))
)
def test_degrees_make_the_ranks_or_are_refused(ranks: int, shard: int, data: Any) -> None:
    config = Config().with_changes({"zero.stage": 3, "parallel.shard": shard, "parallel.data": data})
    try:
        replicas, shards = degrees(config, ranks)
    except UsageError as error:
        assert "parallel.data" in str(error) and "parallel.shard" in str(error)
        assert ranks % shard or (data != "auto" and data * shard != ranks)
    else:
        assert replicas * shards == ranks and shards == shard


# --- refusals ----------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"zero.stage": 3, "parallel.data": 3, "parallel.shard": 2},
        ("parallel.data = 3", "parallel.shard = 2", "2 ranks"),
    ),
    ({"zero.stage": 3, "parallel.shard": 3}, ("parallel.shard = 3", "use one of 1 × 2")),
    ({"zero.stage": 3, "parallel.shard": 1}, ("parallel.shard = 1", "zero.stage = 3")),
    ({"zero.stage": 3, "parallel.data": 2}, ("parallel.data = 2", "zero.stage = 3")),
    ({"parallel.shard": 2}, ("parallel.shard", "zero.stage")),
    ({"zero.prefetch": 1}, ("zero.prefetch", "zero.stage")),
    ({"zero.reshard_after_forward": True}, ("zero.reshard_after_forward", "zero.stage")),
    ({"zero.stage": 1, "zero.prefetch": 1}, ("zero.prefetch", "zero.stage = 1")),
    (
        {"zero.stage": 1, "zero.reshard_after_forward": False},
        ("zero.reshard_after_forward", "zero.stage = 1"),
    ),
    (
        {"zero.stage": 2, "zero.reshard_after_forward": True},
        ("zero.stage = 2", "zero.reshard_after_forward = true"),
    ),
    (
        {"zero.stage": 3, "zero.reshard_after_forward": 2},
        ("zero.reshard_after_forward = 2", "use true or false"),
    ),
    *(
        ({"zero.stage": stage, key: value}, (key, f"zero.stage = {stage}"))
        for stage in (2, 3)
        for key, value in (
            ("communication.bucket_mib", 5.0),
            ("communication.first_bucket_mib", 1.0),
            ("communication.gradient_as_view", True),
            ("communication.static_graph", True),
            ("communication.overlap", True),
            ("communication.algorithm", "ring"),
            ("compute.compile", "model"),
        )
    ),
    *(
        ({"zero.stage": stage, "accumulation.delayed": True}, ("accumulation.delayed", "zero.stage"))
        for stage in (1, 3)
    ),
]


@pytest.mark.parametrize(
    ("changes", "words"), REFUSED, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_what_cannot_work_is_refused_by_name(
    two_ranks: RankPool, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    for said in two_ranks.run("zero_cases:refused", changes):
        assert all(word in said for word in words), said
        assert "\n" not in said and not said.startswith("changed something")


@pytest.mark.parametrize("optimizer", ["Adafactor", "LBFGS", "Muon"])
def test_optimizers_that_need_whole_parameters_are_refused(two_ranks: RankPool, optimizer: str) -> None:
    for said in two_ranks.run("zero_cases:refused", {"zero.stage": 3}, optimizer):
        assert f"zero.stage = 3: {optimizer} cannot be sharded" in said


def test_models_and_optimizers_that_cannot_be_sharded(two_ranks: RankPool) -> None:
    expected = (
        (1, "sharded already"),
        (1, "2 of the optimizer's parameters are not the model's"),
        (1, "ZeroRedundancyOptimizer"),
        (1, "factors"),
        (3, "nothing is without elements"),
    )
    for answers in two_ranks.run("zero_cases:refused_models"):
        for said, (stage, word) in zip(answers, expected, strict=True):
            assert f"zero.stage = {stage}" in said and word in said, said


def test_wrappers_with_what_would_be_lost(two_ranks: RankPool) -> None:
    for hooked, partial in two_ranks.run("zero_cases:refused_wrappers"):
        assert "zero.stage = 3" in hooked and "fp16_compress_hook" in hooked
        assert "zero.stage = 1 shards over all 2 ranks" in partial and "averages over 1" in partial


def test_one_process_alone_has_nobody_to_shard_over() -> None:
    import trine

    model = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match=r"zero\.stage = 2 shards over several ranks"):
        trine.optimize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"zero": {"stage": 2}})
