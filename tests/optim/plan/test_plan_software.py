"""What a software runs together: a search stays within it, and what it finds for this package's runtime passes its checks."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan_problems import DENSE, MIXTURE, cluster, problem

from trine.optim.config import Config
from trine.optim.exports import write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.layout import arranged
from trine.optim.plan.layouts import OFFLOADED, RECOMPUTATIONS, Layouts
from trine.optim.plan.planning import plan
from trine.optim.plan.problem import SEARCHABLE
from trine.optim.plan.refusals import rule_of
from trine.optim.plan.search import Searcher
from trine.optim.plan.space import savings, shapes
from trine.optim.plan.workload import Workload
from trine.record.errors import UsageError

CPU = OFFLOADED[2]
#: What the configuration says otherwise than the plan, without a loss: which operators, which blocks, which folder, and
#: whose copy the masters are.
_UNSAID = ("recompute", "optimizer_offload", "parameter_offload", "precision.master_weights")


# --- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layout", "broken"),
    [
        ("context > 1 and pipeline > 1", {"context": 2, "pipeline": 2}, True),
        ("context > 1 and pipeline > 1", {"context": 2}, False),
        ("zero_stage = 2|3 and tensor|expert > 1", {"zero_stage": 3, "expert": 2}, True),
        ("zero_stage = 2|3 and tensor|expert > 1", {"zero_stage": 1, "expert": 2}, False),
        ("activation_offload != none and recompute = none", {"activation_offload": "cpu"}, True),
        ("activation_offload != none and recompute = none", {}, False),
        ("schedule = 1f1b and microbatches < pipeline", {"pipeline": 4, "microbatches": 3}, True),
        ("schedule = 1f1b and microbatches < pipeline", {"pipeline": 4, "microbatches": 4}, False),
        ("tensor does not divide kv_heads", {"tensor": 8}, True),
        ("tensor does not divide kv_heads", {"tensor": 4}, False),
        ("expert does not divide data", {"expert": 4, "data": 6}, True),
        ("experts > 0 and pipeline > 1", {"pipeline": 2}, False),
    ],
)
def test_a_rule_is_broken_where_all_its_conditions_hold(
    text: str, layout: dict[str, Any], broken: bool
) -> None:
    assert rule_of(text).broken(Layouts.of(**layout).columns, DENSE).tolist() == [broken]


@pytest.mark.parametrize(
    "text",
    [
        "context > 1 or pipeline > 1",
        "contexts > 1",
        "experts|tensor > 1",
        "tensor >= 2",
        "tensor = pipeline",
        "tensor > expert",
    ],
)
def test_what_is_no_rule_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"no condition of layouts|only < and"):
        rule_of(text)


# --- pins that ask for something ----------------------------------------------------------------


def test_recomputed_layers_are_those_of_a_budget() -> None:
    asked = problem(80.0, "recomputed_layers=2", stack="trine")
    every, _ = savings(asked, shapes(asked), ("recompute", *OFFLOADED))
    assert (every["recomputed_layers"] == 2).all() and every.is_kind("recompute", "budget").all()
    best = Searcher(asked, shapes(asked)).fastest(3).layouts
    assert len(best) and (best["recomputed_layers"] == 2).all()
    free = problem(80.0, "recomputed_layers=0,2", stack="trine")
    every, _ = savings(free, shapes(free), ("recompute",))
    assert set(every["recomputed_layers"].tolist()) == {0, 2}


def test_recomputed_layers_beside_another_recomputation_are_refused() -> None:
    with pytest.raises(
        UsageError, match="recomputed_layers=3 is of recompute=budget, and recompute is pinned to none"
    ):
        problem(80.0, "recomputed_layers=3", "recompute=none")


@pytest.mark.parametrize("stack", ["megatron-deepspeed", "deepspeed"])
def test_deepspeed_moves_the_checkpoints_of_recomputed_blocks_alone(stack: str) -> None:
    asked = problem(80.0, stack=stack)
    every, _ = savings(asked, shapes(asked), ("recompute", *OFFLOADED))
    away = every.take(every[CPU] > 0)
    assert len(away) and (away["recompute"] != RECOMPUTATIONS.index("none")).all()
    pinned = plan(DENSE, cluster(), global_batch=8, stack=stack, top=1, pins=[f"{CPU}=cpu"])
    assert pinned.best.layout["recompute"] == "full" and pinned.best.beyond == ()
    both = plan(DENSE, cluster(), global_batch=8, stack=stack, top=1, pins=[f"{CPU}=cpu", "recompute=none"])
    assert both.best.beyond == ("activation_offload cpu beside recompute none",)


def test_what_two_pins_ask_for_is_planned_and_one_is_kept_within_the_software() -> None:
    asked = {"global_batch": 8, "stack": "trine", "top": 20}
    one = plan(DENSE, cluster(), pins=["context=2"], **asked)  # type: ignore[arg-type]
    assert {row.layout["pipeline"] for row in one.ranked} == {1}
    two = plan(DENSE, cluster(), pins=["context=2", "pipeline=2"], **asked)  # type: ignore[arg-type]
    assert two.best.beyond == ("context 2 beside pipeline 2",)
    assert any("does not offer context 2 beside pipeline 2" in text for text in two.assumptions)


def test_rules_of_mixtures_are_of_mixtures_alone() -> None:
    rule = rule_of("experts > 0 and pipeline > 1")
    rows = Layouts.of(pipeline=[1, 2])
    assert rule.broken(rows.columns, MIXTURE).tolist() == [False, True]
    assert not rule.broken(rows.columns, DENSE).any()
    row = {name: int(column[1]) for name, column in rows.columns.items()}
    assert rule.words(row, MIXTURE) == "8 experts beside pipeline 2"
    assert rule.columns == {"pipeline"} and rule.forced({"pipeline": (2,)}) and not rule.forced({})


@pytest.mark.parametrize("stack", ["deepspeed", "megatron-deepspeed"])
def test_deepspeed_spreads_no_experts_in_pipelines(stack: str) -> None:
    found = shapes(problem(workload=MIXTURE, stack=stack))
    assert (found["expert"] > 1).any() and not ((found["expert"] > 1) & (found["pipeline"] > 1)).any()
    whole = (found["expert"] == 1) & (found["pipeline"] > 1)
    assert whole.any() == (stack == "deepspeed")
    assert (shapes(problem(stack=stack))["pipeline"] > 1).any()


def test_megatron_deepspeeds_mixtures_keep_their_parameters() -> None:
    asked = problem(workload=MIXTURE, stack="megatron-deepspeed")
    every, _ = savings(asked, shapes(asked), OFFLOADED)
    assert set(every["zero_stage"].tolist()) == {0, 1, 2} and not every["parameter_offload"].any()
    assert 3 in shapes(problem(stack="megatron-deepspeed"))["zero_stage"]


def test_torchtitans_experts_are_of_ranks_that_share_shards() -> None:
    found = shapes(problem(workload=MIXTURE, stack="torchtitan"))
    spread = found.take((found["expert"] > 1) & (found["zero_stage"] == 0))
    assert len(spread) and ((spread["data"] == 1) | (spread["tensor"] % spread["expert"] == 0)).all()


def test_deepspeed_moves_no_state_of_experts_beside_tensor_ranks() -> None:
    asked = problem(workload=MIXTURE, stack="deepspeed")
    every, _ = savings(asked, shapes(asked), ("recompute", *OFFLOADED))
    moved = every.take((every["optimizer_offload"] > 0) | (every["parameter_offload"] > 0))
    assert len(moved) and not ((moved["expert"] > 1) & (moved["tensor"] > 1)).any()


@pytest.mark.parametrize("stack", ["megatron-core", "deepspeed", "megatron-deepspeed"])
def test_state_of_several_data_ranks_is_moved_where_it_is_sharded(stack: str) -> None:
    asked = problem(stack=stack)
    every, _ = savings(asked, shapes(asked), ("recompute", *OFFLOADED))
    moved = every.take(every["optimizer_offload"] > 0)
    alone = moved["data"] * moved["context"] == 1
    assert alone.any() and (moved["zero_stage"][~alone] > 0).all()


@pytest.mark.parametrize("stack", ["torchtitan", "llm-foundry"])
def test_fsdp_moves_parameters_and_state_together(stack: str) -> None:
    asked = problem(stack=stack)
    every, _ = savings(asked, shapes(asked), OFFLOADED)
    assert (every["optimizer_offload"] > 0).any()
    assert ((every["optimizer_offload"] > 0) == (every["parameter_offload"] > 0)).all()


def test_interleaved_stages_have_as_many_micro_batches_as_the_software_wants() -> None:
    ranks = {"nodes": 2, "batch": 18, "workload": DENSE.with_changes(layers=8)}
    core = shapes(problem(80.0, "schedule=interleaved", stack="megatron-core", **ranks))
    assert (core["microbatches"] >= core["pipeline"]).all()
    assert (core["microbatches"] % core["pipeline"] != 0).any()
    old = shapes(problem(80.0, "schedule=interleaved", stack="megatron-lm-2021", **ranks))
    assert (old["microbatches"] % old["pipeline"] == 0).all()


def test_megatron_splits_the_sequence_of_mixtures_beside_tensor_ranks() -> None:
    found = shapes(problem(workload=MIXTURE, stack="megatron-core"))
    assert (found["tensor"] > 1).any() and (found["sequence"] == (found["tensor"] > 1)).all()
    assert 0 in shapes(problem(80.0, "tensor=2", stack="megatron-core"))["sequence"]


# --- this package's runtime ---------------------------------------------------------------------


def _model(workload: Workload) -> Any:
    from trine.samples.gpt import GPT, GPTConfig
    from trine.samples.moe import MixtureConfig, MixtureGPT

    shape: dict[str, Any] = {
        "layers": 4,
        "hidden": 32,
        "heads": 8,
        "sequence": 32,
        "vocab": 64,
        "positions": "rotary",
    }
    if workload.is_mixture:
        return MixtureGPT(MixtureConfig(**shape, experts=8))
    return GPT(GPTConfig(**shape))


def _run_checks(layout: dict[str, int | str], workload: Workload, model: Any, per_node: int) -> None:
    """What ``trine.optimize`` asks before it changes anything. Raises ``UsageError`` at what it refuses."""
    import torch

    from trine.optim.techniques import Facts, require_applicable, techniques
    from trine.optim.topology import Topology

    written = write("pytorch", exported_of_layout(layout, workload))
    assert all(line.startswith(_UNSAID) for line in written.cannot), written.cannot
    config = Config.from_dict(tomllib.loads(written.text))
    config = config.with_changes({"offload.path": None, **_off_disk(config)})
    require_applicable(config)
    devices = int(Layouts.of(**layout).devices[0])
    facts = Facts(
        device=torch.device("cpu"),
        topology=Topology(0, devices, per_node),
        layout=arranged(config, 0, devices),
        backend="gloo",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    for technique in techniques():
        technique.check(config, facts)


def _off_disk(config: Config) -> dict[str, str]:
    """This machine need not have the disk that a plan is for."""
    return {key: "cpu" for key in ("offload.optimizer", "offload.parameters") if config[key] == "nvme"}


@pytest.mark.parametrize("workload", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("memory_gib", [80.0, 3.4])
def test_the_runtime_takes_what_is_planned_for_it(workload: Workload, memory_gib: float) -> None:
    """Every way to divide eight devices, the best first, as the runtime's own checks see it."""
    asked = problem(memory_gib, workload=workload, stack="trine", nodes=2, per_node=4, batch=32)
    searcher = Searcher(asked, shapes(asked))
    found, model = searcher.fastest(50).layouts, _model(workload)
    ways = {tuple(found[name].tolist()) for name in ("tensor", "context", "pipeline")}
    assert len(ways) == 3 and all(len(set(way)) > 1 for way in ways)
    for row in range(len(found)):
        _run_checks(found.row(row), workload, model, 4)
    front = searcher.front(offload=True).layouts
    for row in range(len(front)):
        _run_checks(front.row(row), workload, model, 4)


def test_the_runtime_takes_every_choice_of_a_small_space() -> None:
    """Not the best alone: one layout of each combination of what a rule may name."""
    asked = replace(problem(stack="trine", nodes=2, per_node=4, batch=32), searched=SEARCHABLE[1:2])
    every, _ = savings(asked, shapes(asked), ("recompute", *OFFLOADED))
    every = every.take(every[CPU] == 0)
    kinds = [every[name] > 1 for name in ("tensor", "context", "pipeline", "data")]
    kinds += [
        every[name] for name in ("schedule", "zero_stage", "compression", "parameter_offload", "two_level")
    ]
    _, first = np.unique(np.stack(kinds), axis=1, return_index=True)
    model = _model(DENSE)
    assert len(first) > 60
    for row in first:
        _run_checks(every.row(int(row)), DENSE, model, 4)
