"""Constraints by hand, pins as people write them, and what is said where nothing works."""

from __future__ import annotations

import numpy as np
import pytest
from plan_problems import DENSE, MIXTURE, cluster, problem

from trine.optim.plan.abilities import abilities_of
from trine.optim.plan.constants import stack_named, stacks
from trine.optim.plan.layouts import DEFAULTS, KINDS, OFFLOADED, RECOMPUTATIONS, SCHEDULES, Layouts
from trine.optim.plan.nearest import distance, refusal
from trine.optim.plan.planning import plan
from trine.optim.plan.problem import Problem, divisors, parse_pins
from trine.optim.plan.space import NothingKept, savings, shapes
from trine.record.errors import UsageError


def values(found: Layouts, name: str) -> set[int]:
    return set(found[name].tolist())


# --- pins ---------------------------------------------------------------------------------------


def test_pins_are_read_as_people_write_them() -> None:
    found = parse_pins(["tensor=8", "schedule=1f1b,zb-v", "zero-stage = 1,1,3", "bucket_bytes=25MiB"])
    assert found["tensor"] == (8,)
    assert found["schedule"] == (SCHEDULES.index("1f1b"), SCHEDULES.index("zb-v"))
    assert found["zero_stage"] == (1, 3)
    assert found["bucket_bytes"] == (25 * 2**20,)
    assert parse_pins(["recompute=any"])["recompute"] == tuple(range(len(RECOMPUTATIONS)))
    assert parse_pins(["zero_stage=any", "sequence=any"]) == {"zero_stage": (0, 1, 2, 3), "sequence": (0, 1)}
    assert parse_pins(["tensor=any", "data=any", "micro_batch=4"]) == {"micro_batch": (4,)}
    assert parse_pins(["bucket_bytes=0"])["bucket_bytes"] == (0,)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("tensor", "no KEY=VALUE"),
        ("tensor=", "no KEY=VALUE"),
        ("tensr=8", "did you mean 'tensor'?"),
        ("tensor=0", "from 1 to"),
        ("tensor=-4", "from 1 to"),
        ("tensor=eight", "a whole number"),
        ("tensor=99999999999999", "from 1 to"),
        ("zero_stage=4", "from 0 to 3"),
        ("sequence=2", "from 0 to 1"),
        ("schedule=1f1", "did you mean '1f1b'?"),
        ("precision=", "no KEY=VALUE"),
        ("bucket_bytes=many", "no size"),
        ("bucket_bytes=25", "bucket_bytes: '25' is no bucket, but 25 bytes: write it with its unit, 25MiB"),
    ],
)
def test_what_is_no_pin_is_refused_in_one_line(word: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_pins([word])
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_pin_given_twice_names_both_values() -> None:
    with pytest.raises(UsageError, match="pinned twice, to 2 and to 4: keep one, or write tensor=2,4"):
        parse_pins(["tensor=2", "tensor=4"])
    assert parse_pins(["tensor=2", "tensor=2"]) == {"tensor": (2,)}


# --- the space ----------------------------------------------------------------------------------


def test_divisors() -> None:
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,) and divisors(49) == (1, 7, 49)


def test_tensor_ranks_divide_heads_widths_and_a_node() -> None:
    assert values(shapes(problem(per_node=4, nodes=1)), "tensor") == {1, 2, 4}
    assert values(shapes(problem(per_node=2, nodes=2)), "tensor") == {1, 2}
    six_heads = DENSE.with_changes(heads=6, kv_heads=6, hidden=1536, head_size=256)
    assert values(shapes(problem(per_node=4, nodes=1, workload=six_heads)), "tensor") == {1, 2}
    odd_width = DENSE.with_changes(ffn=8190)
    assert values(shapes(problem(per_node=4, nodes=1, workload=odd_width)), "tensor") == {1, 2}


def test_fewer_heads_of_keys_than_tensor_ranks_are_repeated() -> None:
    one_key = DENSE.with_changes(kv_heads=1)
    assert 4 in values(shapes(problem(per_node=4, nodes=1, workload=one_key)), "tensor")


def test_context_ranks_take_two_blocks_of_a_causal_sequence_each() -> None:
    short = DENSE.with_changes(sequence=4)
    found = shapes(problem(per_node=4, nodes=1, workload=short))
    assert values(found, "context") == {1, 2}
    both_ways = DENSE.with_changes(sequence=4, causal=False)
    assert values(shapes(problem(per_node=4, nodes=1, workload=both_ways)), "context") == {1, 2, 4}


def test_stages_are_no_more_than_layers_and_chunks_are_even() -> None:
    found = shapes(problem(nodes=4, stack="megatron-core", batch=16))
    assert values(found, "pipeline") == {1, 2, 4}
    interleaved = found.take(found.is_kind("schedule", "interleaved"))
    stages = interleaved["pipeline"] * interleaved["chunks"]
    assert len(interleaved) and set(stages.tolist()) <= {4, 6}  # 4 layers, or 6 with a lighter first and last
    assert (interleaved["chunks"] > 1).all()
    assert (found["schedule"][found["pipeline"] == 1] == SCHEDULES.index("1f1b")).all()


def test_experts_divide_and_lie_inside_a_stage() -> None:
    found = shapes(problem(workload=MIXTURE))
    assert values(found, "expert") == {1, 2, 4}
    ranks = found["data"] * found["context"] * found["tensor"]
    assert (ranks % found["expert"] == 0).all()
    assert values(shapes(problem()), "expert") == {1}


def test_experts_that_tensor_ranks_split_are_spread_over_whole_groups() -> None:
    found = shapes(problem(workload=MIXTURE, stack="megatron-core"))
    assert ((found["data"] * found["context"]) % found["expert"] == 0).all()
    whole = shapes(problem(workload=MIXTURE, stack="megatron-bridge"))
    assert ((whole["data"] * whole["context"]) % whole["expert"] != 0).any()
    odd = MIXTURE.with_changes(expert_ffn=2047)
    assert values(shapes(problem(workload=odd, stack="megatron-core")), "tensor") == {1}
    assert values(shapes(problem(workload=odd, stack="megatron-bridge")), "tensor") == {1, 2}


def test_state_is_sharded_only_where_there_are_ranks_for_it() -> None:
    found = shapes(problem(stack="trine"))
    alone = found["data"] * found["context"] == 1
    assert (found["zero_stage"][alone] == 0).all()
    assert values(found.take(~alone), "zero_stage") == {0, 1, 2, 3}
    piped = found["pipeline"] > 1
    assert values(found.take(piped), "zero_stage") == {0, 2, 3}  # FSDP2 is beside stages, not ZeRO 1


def test_shard_groups_are_a_nodes_ranks_under_zero_3() -> None:
    found = shapes(problem(nodes=4, stack="torchtitan", batch=16))
    hybrid = found.take(found["shard"] > 0)
    assert len(hybrid) and (hybrid["zero_stage"] == 3).all()
    assert (hybrid["shard"] * hybrid["tensor"] * hybrid["context"] == 2).all()  # the two of a node


def test_a_search_stays_within_what_the_software_offers() -> None:
    found = shapes(problem(stack="megatron-core"))
    assert {SCHEDULES[code] for code in values(found, "schedule")} <= {"1f1b", "interleaved"}
    assert values(found, "zero_stage") == {0, 1}
    assert values(shapes(problem(stack="pytorch")), "tensor") == {1}
    assert values(shapes(problem(80.0, "zero_stage=3", stack="megatron-core")), "zero_stage") == {3}


def test_savings_keep_what_offload_and_budgets_ask_for() -> None:
    asked = problem(stack="trine")
    found, of = savings(asked, shapes(asked), ("recompute", *OFFLOADED))
    away = found.take(found["parameter_offload"] > 0)
    assert ((away["zero_stage"] == 3) | (away["data"] * away["context"] == 1)).all()
    budget = found.take(found.is_kind("recompute", "budget"))
    assert len(budget) and (budget["recomputed_layers"] >= 1).all()
    assert (budget["recomputed_layers"] < -(-4 // budget["pipeline"])).all()
    rest = found.take(~found.is_kind("recompute", "budget"))
    assert (rest["recomputed_layers"] == 0).all()
    assert set(of.tolist()) == set(range(len(shapes(asked))))
    every = np.stack(list(found.columns.values()))
    assert np.unique(every, axis=1).shape[1] == len(found), "no configuration is weighed twice"


def test_the_usual_batch_is_divisible() -> None:
    for nodes in (1, 3, 7):
        asked = Problem.of(DENSE, cluster(nodes=nodes), stack_named("torchtitan"))
        assert asked.batch_is_usual and asked.global_batch % nodes == 0
        assert 2**21 <= asked.global_batch * DENSE.sequence <= 2**23


def test_no_stack_offers_schedules_that_were_published_after_it() -> None:
    for name in ("megatron-lm-2020", "megatron-lm-2021", "megatron-lm-2022", "megatron-lm-2023", "megascale"):
        found = abilities_of(stack_named(name))
        assert set(found.choices["schedule"]) <= {"1f1b", "interleaved"}, name
        assert "fp8" not in found.choices["precision"] and found.only_one("context"), name


def test_every_stack_has_abilities_in_words_that_layouts_know() -> None:
    for stack in stacks().values():
        found = abilities_of(stack)
        for column, offered in found.choices.items():
            assert offered and column in DEFAULTS
            assert column not in KINDS or set(offered) <= set(KINDS[column])
        assert found.source
    assert abilities_of(stack_named("nemo-23")).name == "megatron-core"


# --- what is said where nothing works -----------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "changes", "told"),
    [
        (["tensor=4"], {}, "tensor 4 does not divide a node's 2 devices"),
        (["tensor=3"], {"per_node": 3, "batch": 6}, "tensor 3 does not divide 8 attention heads"),
        (["pipeline=3"], {}, "pipeline 3 does not divide the 4 devices"),
        (["data=2", "pipeline=4"], {}, "data 2 x pipeline 4 = 8 does not divide the 4 devices"),
        (["pipeline=8"], {"nodes": 4, "batch": 8}, "pipeline 8 is more than 4 layers"),
        (["expert=2"], {}, "small has no experts"),
        (["expert=3"], {"workload": MIXTURE}, "expert 3 does not divide 8 experts"),
        (
            ["expert=4", "tensor=2", "pipeline=2"],
            {"workload": MIXTURE, "stack": "megatron-core"},
            "expert 4 does not divide the 1 tensor group of a stage (data x context): megatron-core splits each expert over",
        ),
        (
            ["tensor=2"],
            {"workload": MIXTURE.with_changes(expert_ffn=2047), "stack": "megatron-core"},
            "tensor 2 does not divide an expert's width 2047",
        ),
        (["data=4"], {"batch": 6}, "does not divide the global batch of 6"),
        (["microbatches=5"], {}, "is not the global batch of 8"),
        (["schedule=zb-v", "pipeline=1"], {}, "needs a pipeline of at least 2 ranks"),
        (["chunks=5", "pipeline=2"], {}, "4 layers do not make 10 equal stages"),
        (["zero_stage=2", "data=1", "context=1"], {}, "no ranks to shard over"),
        (["shard=3", "zero_stage=3", "data=4"], {}, "shard 3 does not divide data 4"),
        (["shard=2", "zero_stage=0"], {}, "needs a zero_stage of 1 or more"),
        (["sequence=1", "tensor=1"], {}, "tensor is 1"),
        (["two_level=1", "zero_stage=1"], {}, "two_level needs zero_stage 0"),
        (["precision=fp8"], {}, "no peak for precision fp8"),
        (["compression=int8", "data=1", "context=1"], {}, "nothing to compress"),
    ],
)
def test_a_broken_constraint_is_named_with_the_nearest_that_works(
    pins: list[str], changes: dict[str, object], told: str
) -> None:
    asked = problem(80.0, *pins, **changes)  # type: ignore[arg-type]
    with pytest.raises(NothingKept) as caught:
        shapes(asked)
    assert told in str(caught.value)
    message = str(refusal(asked, str(caught.value)))
    assert "; nearest that works: " in message and "\n" not in message


def test_what_fits_nowhere_says_how_much_it_lacks_and_how_many_devices_would_do() -> None:
    big = DENSE.with_changes(
        name="big", layers=32, hidden=8192, heads=64, kv_heads=8, head_size=128, ffn=28672
    )
    with pytest.raises(UsageError) as caught:
        plan(big, cluster(20.0), global_batch=16)
    message = str(caught.value)
    assert "the leanest layout does not fit: " in message and "of 18.0 GiB" in message
    devices = int(message.partition("nearest that works: ")[2].split()[0])
    assert devices > 4
    assert plan(big, cluster(20.0), devices=devices, global_batch=16).best.peak.value <= 18 * 2**30
    with pytest.raises(UsageError, match="does not fit"):
        plan(big, cluster(20.0), devices=devices // 2, global_batch=16)


def test_one_node_without_links_beyond_asks_for_a_larger_device() -> None:
    alone = cluster(1.2, nodes=1).with_changes(between=None)
    with pytest.raises(UsageError, match="use a device with more memory, or give the cluster a link"):
        plan(DENSE, alone, global_batch=8)


@pytest.mark.slow
def test_more_devices_keep_what_was_pinned_of_memory_where_they_can() -> None:
    pins = {"optimizer_offload": "none", "recompute": "none"}
    with pytest.raises(UsageError) as caught:
        plan("llama3-405b", "dgx-h100", devices=16, pins=pins)
    words = str(caught.value).partition("nearest that works: ")[2]
    assert "recompute" not in words and "on cpu" not in words
    devices = int(words.split()[0])
    assert devices > 16
    assert plan("llama3-405b", "dgx-h100", devices=devices, pins=pins).best.layout["recompute"] == "none"


def test_a_headroom_that_nothing_leaves_is_met_with_one_that_something_does() -> None:
    with pytest.raises(UsageError, match=r"nearest that works: a memory headroom of 0\.\d+$") as caught:
        plan("llama3-8b", "dgx-h100", devices=16, memory_headroom=0.99)
    share = float(str(caught.value).rpartition(" ")[2])
    assert (
        plan("llama3-8b", "dgx-h100", devices=16, memory_headroom=share).best.peak.value
        <= (1 - share) * 80 * 2**30
    )


def test_a_sequence_that_fits_no_number_of_devices_is_met_with_a_shorter_one() -> None:
    with pytest.raises(UsageError, match=r"nothing fits up to \d+ devices; nearest that works: ") as caught:
        plan("llama3-8b", "dgx-h100", devices=16, sequence=100_000_000)
    tokens = int(str(caught.value).partition("sequences of ")[2].split()[0])
    assert plan("llama3-8b", "dgx-h100", devices=16, sequence=tokens).best.peak.value <= 72 * 2**30


def test_a_pin_that_makes_it_too_large_names_a_layout_without_it() -> None:
    with pytest.raises(UsageError) as caught:
        plan(DENSE, cluster(8.0), global_batch=64, pins={"micro_batch": 16, "recompute": "none"})
    assert "does not fit" in str(caught.value) and "nearest that works" in str(caught.value)


def test_what_hosts_do_not_hold_is_said_of_hosts() -> None:
    small = cluster(4.0, host_memory_bytes=2**30)
    with pytest.raises(
        UsageError, match=r"what is offloaded takes [0-9]+ of the 1 GiB of a node's host; nearest"
    ):
        plan(DENSE, small, global_batch=8, stack="deepspeed")


def test_the_nearest_keeps_pins_of_what_saves_memory() -> None:
    with pytest.raises(UsageError) as caught:
        plan(DENSE, cluster(), global_batch=8, pins=["recomputed_layers=40"])
    assert str(caught.value).endswith("recompute budget 4 layers") and "not 40; nearest" in str(caught.value)
    with pytest.raises(
        UsageError, match=r"needs zero_stage 3.*nearest that works: .*ZeRO 3.*parameter on cpu"
    ):
        plan(
            DENSE,
            cluster(),
            global_batch=8,
            stack="deepspeed",
            pins=["parameter_offload=cpu", "zero_stage=1"],
        )


@pytest.mark.parametrize(
    ("stack", "precisions", "chosen"),
    [("megatron-lm-2020", ("bf16", "fp16"), "fp16"), ("torchtitan", ("fp16", "fp32"), "fp32")],
)
def test_precision_is_one_that_the_software_and_the_device_have(
    stack: str, precisions: tuple[str, ...], chosen: str
) -> None:
    asked = problem(stack=stack)
    device = asked.cluster.device.with_changes(flops_per_s=dict.fromkeys(precisions, 1e14))
    node = asked.cluster.with_changes(device=device)
    assert plan(DENSE, node, global_batch=8, stack=stack, top=1).best.layout["precision"] == chosen


def test_a_device_without_any_precision_of_the_software_is_named() -> None:
    asked = problem(stack="megatron-lm-2020")
    device = asked.cluster.device.with_changes(flops_per_s={"bf16": 1e14})
    with pytest.raises(UsageError, match="test device has no peak for precision fp32: it has bf16"):
        plan(DENSE, asked.cluster.with_changes(device=device), global_batch=8, stack="megatron-lm-2020")


def test_a_batch_that_nothing_divides_names_the_nearest_one() -> None:
    # 8 micro-batches of one for four stages alone; a batch of 1 over 3 nodes of two has nothing that divides.
    few = DENSE.with_changes(layers=1, heads=1, kv_heads=1, head_size=2048, sequence=5)
    with pytest.raises(UsageError, match="nearest that works: a global batch of 8"):
        plan(few, cluster(80.0), global_batch=7)


def test_the_nearest_keeps_what_can_be_kept() -> None:
    asked = problem(80.0, "tensor=4", "micro_batch=2", "schedule=gpipe")
    message = str(refusal(asked, "…")).partition("nearest that works: ")[2]
    assert message.startswith("tensor 2 · ") and "micro-batches of 2" in message and "gpipe" in message


def test_distance_counts_doublings_and_kinds() -> None:
    layouts = Layouts.of(tensor=[1, 2, 8], schedule=["1f1b", "zb-v", "1f1b"])
    pins = parse_pins(["tensor=4", "schedule=zb-v"])
    assert distance(layouts, pins).tolist() == [3.0, 1.0, 2.0]
