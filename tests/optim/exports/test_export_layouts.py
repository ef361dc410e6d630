"""A planner's layout as our own configuration, and what holds for every dialect."""

from __future__ import annotations

import tomllib
from typing import Any

import export_cases as cases
import pytest
from hypothesis import given, settings

from trine.optim.config import Config
from trine.optim.exports import Exported, config_of, dialect_names, write
from trine.optim.exports._reading import exported_of_layout
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import DEFAULTS, Layouts
from trine.optim.techniques import refusals
from trine.record.errors import UsageError


def changes_of(workload: Any = cases.DENSE, **row: Any) -> tuple[dict[str, Any], dict[str, str]]:
    config, lacks = config_of({"precision": "fp32", **row}, workload)
    changes = dict(config.changes())
    assert changes.pop("precision.tf32") is False
    return changes, lacks


def test_data_parallelism_alone() -> None:
    changes, lacks = changes_of(data=8, micro_batch=2, microbatches=4)
    assert changes == {"accumulation.global_batch": 64, "accumulation.micro_batch": 2, "parallel.data": 8}
    assert not lacks


def test_three_dimensions_with_interleaved_stages() -> None:
    changes, lacks = changes_of(
        data=2, tensor=4, sequence=1, pipeline=4, chunks=2, schedule="interleaved", microbatches=16
    )
    assert changes == {
        "accumulation.global_batch": 32,
        "parallel.data": 2,
        "parallel.tensor": 4,
        "parallel.sequence": True,
        "parallel.loss": True,
        "parallel.pipeline": 4,
        "parallel.schedule": "interleaved",
        "parallel.chunks": 2,
        "parallel.microbatches": 16,
    }
    assert not lacks


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # every rank shards: nothing to say but the stage
        ({"data": 8, "zero_stage": 3}, {"zero.stage": 3}),
        # groups of 4 that shard, 2 of them
        (
            {"data": 8, "shard": 4, "zero_stage": 2},
            {"zero.stage": 2, "parallel.data": 2, "parallel.shard": 4},
        ),
        # one rank alone shares nothing
        ({"data": 1, "zero_stage": 1}, {"parallel.data": 1}),
        # ... but shards over the ranks that share a sequence
        ({"data": 1, "context": 2, "zero_stage": 3}, {"zero.stage": 3, "parallel.context": 2}),
    ],
)
def test_shards_and_replicas(row: dict[str, Any], expected: dict[str, Any]) -> None:
    changes, _ = changes_of(**row)
    assert {key: value for key, value in changes.items() if not key.startswith("accumulation.")} == expected


def test_experts_are_ranks_of_their_own_here_and_within_data_in_a_plan() -> None:
    exported = exported_of_layout({"data": 16, "expert": 8, "zero_stage": 1, "tensor": 2}, cases.MIXTURE)
    assert exported.config.parallel.expert == 8
    grid = exported.grid
    assert grid is not None
    assert (grid.expert, grid.shard, grid.replicate, grid.data_ranks, grid.ranks) == (8, 2, 1, 16, 32)


def test_what_the_runtime_has_not_is_named_by_column() -> None:
    changes, lacks = changes_of(
        data=2,
        expert=4,
        pipeline=2,
        schedule="zb-h1",
        optimizer_offload="remote",
        recompute="selective",
        zero_stage=1,
    )
    assert set(lacks) == {"expert", "schedule", "optimizer_offload", "recompute"}
    assert changes["parallel.schedule"] == "1f1b" and changes["offload.optimizer"] == "cpu"
    assert all(line.startswith(f"{column} = ") for column, line in lacks.items())


@pytest.mark.parametrize(("layers", "every", "recomputed"), [(16, 1, 16), (8, 2, 8), (5, 3, 6), (1, 16, 1)])
def test_a_budget_of_layers_is_every_nth_block_and_never_fewer(
    layers: int, every: int, recomputed: int
) -> None:
    changes, lacks = changes_of(pipeline=2, recompute="budget", recomputed_layers=layers)  # 16 of 32 a stage
    assert changes.get("checkpointing.every", 1) == every
    assert ("recomputed_layers" in lacks) == (recomputed != layers)
    if recomputed != layers:
        assert (
            f"one block in {every} is recomputed, {recomputed} of a stage's 16" in lacks["recomputed_layers"]
        )


def test_a_budget_of_more_than_half_of_the_layers_is_all_of_them() -> None:
    _, lacks = changes_of(pipeline=2, recompute="budget", recomputed_layers=12)
    assert lacks["recomputed_layers"].endswith("all 16 blocks of a stage are recomputed")


@settings(max_examples=60)
@given(cases.exported_layouts())
def test_a_layout_is_applicable_on_its_devices_with_its_batch(exported: Exported) -> None:
    assert exported.layout is not None and exported.devices is not None
    assert exported.devices == int(Layouts.of(**exported.layout).devices[0])
    assert exported.data_ranks == exported.layout["data"]
    batch = exported.batch
    assert batch.micro is not None and batch.count is not None
    assert (
        batch.whole
        == exported.config.accumulation.global_batch
        == batch.micro * batch.count * exported.data_ranks
    )
    written = write("pytorch", exported)
    adapted = Config.from_dict(tomllib.loads(written.text))
    assert refusals(adapted) == {}
    # The configuration by itself comes to the same, without the plan.
    alone = Exported(exported.config, devices=exported.devices)
    assert alone.data_ranks == exported.data_ranks
    assert alone.batch == batch


@settings(max_examples=30)
@given(cases.exported_layouts())
def test_no_dialect_drops_a_layouts_key_without_a_word(exported: Exported) -> None:
    for name in dialect_names():
        written = write(name, exported)
        assert set(exported.config.changes()) == set(written.said) | (
            cases.named(written) & set(exported.config.changes())
        ), name
        assert not set(written.said) & cases.named(written), name
        assert all("\n" not in line for line in written.cannot)


@settings(max_examples=60)
@given(cases.configurations())
def test_no_dialect_drops_a_key_without_a_word(config: Config) -> None:
    exported = Exported(config)
    for name in dialect_names():
        written = write(name, exported)
        lost = set(config.changes()) - set(written.said) - cases.named(written)
        assert not lost, (name, lost)
        assert not set(written.said) & cases.named(written), name


def test_selective_recomputation_of_our_own_is_no_loss() -> None:
    row = {"data": 8, "recompute": "selective"}
    for stack, words in (
        ("trine", None),
        ("torchtitan", "all matmuls are kept here, not every second"),
        ("megatron-core", "more than attention's scores"),
    ):
        cannot = write("pytorch", exported_of_layout(row, cases.DENSE, stack=stack_named(stack))).cannot
        about = [line for line in cannot if line.startswith("recompute = selective")]
        assert len(about) == (words is not None) and all(words in line for line in about if words)


def test_columns_are_all_of_a_layout() -> None:
    config, lacks = config_of({})
    assert not lacks
    assert config == config_of(dict(Layouts.of().row(0)))[0]
    assert set(Layouts.of().row(0)) == set(DEFAULTS)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tensors": 2}, "a layout has no 'tensors'"),
        ({"tensor": "two"}, "tensor of a layout takes a whole number, not 'two'"),
        ({"tensor": True}, "tensor of a layout takes a whole number"),
        ({"tensor": 0}, "tensor must be at least 1, not 0"),
        ({"schedule": "2f2b"}, "no schedule is called '2f2b'"),
        ({"schedule": 1}, "schedule of a layout takes a word"),
        ([], "a layout is a table of columns, not list"),
    ],
)
def test_what_is_no_layout_is_named(row: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_of(row)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("microbatches", "written", "named"),
    [
        (8, 2, "parallel.microbatches"),
        (2, 1, "parallel.microbatches"),
        (1, None, "accumulation.global_batch"),
    ],
)
def test_a_degree_that_is_left_out_leaves_a_batch_that_divides(
    microbatches: int, written: int | None, named: str
) -> None:
    row = {"data": 2, "tensor": 2, "context": 4 if microbatches > 2 else 2, "pipeline": 2}
    exported = exported_of_layout({**row, "zero_stage": 0, "microbatches": microbatches}, cases.DENSE)
    found = write("pytorch", exported)
    config = Config.from_dict(tomllib.loads(found.text))
    assert config.parallel.context == 1 and not refusals(config)
    batch = Exported(config, devices=exported.devices).batch  # raises where it does not divide
    assert batch.count == written or written is None
    assert {"parallel.context", "parallel.data", named} <= cases.named(found)


def test_degrees_that_do_not_fit_the_devices_are_named() -> None:
    config = Config().with_changes({"parallel.tensor": 4, "accumulation.micro_batch": 1})
    with pytest.raises(UsageError, match=r"parallel\.tensor = 4 must divide the 6 ranks"):
        write("megatron", Exported(config, devices=6))
    with pytest.raises(UsageError, match="6 devices do not divide over 4 nodes"):
        Exported(config, devices=6, nodes=4)
    batch = Config().with_changes({"accumulation.global_batch": 10, "accumulation.micro_batch": 3})
    with pytest.raises(
        UsageError, match=r"accumulation\.global_batch = 10 is not made of micro-batches of 3"
    ):
        write("deepspeed", Exported(batch, devices=2))


def test_a_dialect_that_nobody_speaks() -> None:
    with pytest.raises(UsageError, match=r"there is no dialect 'torchtitain'.*did you mean torchtitan"):
        write("torchtitain", Exported(Config()))


def test_the_runtimes_refusals_are_heeded_by_name() -> None:
    exported = exported_of_layout(
        {
            "data": 2,
            "tensor": 2,
            "zero_stage": 1,
            "bucket_bytes": 2**25,
            "compression": "int8",
            "two_level": 1,
        },
        cases.DENSE,
    )
    written = write("pytorch", exported)
    assert cases.named(written) == {
        "zero.stage",
        "communication.bucket_mib",
        "communication.compression",
        "communication.algorithm",
    }
    assert "[communication]" not in written.text and "stage = 2" in written.text
