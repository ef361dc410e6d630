"""Exports to Colossal-AI: plugins built from the exported module, by the arguments and checks of its own classes.

Release 0.5.0 wants torch below 2.6 and does not install beside ours, so the plugins' signatures and the checks of their
constructors stand here, from ``colossalai/booster/plugin`` (github.com/hpcaitech/ColossalAI, 0.5.0).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import export_cases as cases
import pytest
from hypothesis import given, settings

from trine.optim.config import Config
from trine.optim.exports import Exported, write
from trine.optim.exports._reading import exported_of_layout

_SCALES = {
    "initial_scale",
    "min_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_scale",
}
_SHARED = _SCALES | {
    "tp_size",
    "precision",
    "max_norm",
    "enable_all_optimization",
    "enable_fused_normalization",
    "enable_flash_attention",
    "enable_jit_fused",
    "enable_sequence_parallelism",
    "use_fp8",
    "fp8_communication",
}
_STAGED = _SHARED | {
    *("pp_size", "sp_size", "zero_stage", "sequence_parallelism_mode", "parallel_output", "num_microbatches"),
    *(
        "microbatch_size",
        "broadcast_buffers",
        "ddp_bucket_cap_mb",
        "find_unused_parameters",
        "check_reduction",
    ),
    *(
        "gradient_as_bucket_view",
        "static_graph",
        "zero_bucket_size_in_m",
        "cpu_offload",
        "communication_dtype",
    ),
    *("overlap_communication", "custom_policy", "pp_style", "num_model_chunks", "scheduler_nodes"),
    *("num_layers_per_stage", "gradient_checkpoint_config", "enable_metadata_cache", "overlap_p2p"),
    *("make_vocab_size_divisible_by", "overlap_allgather"),
}
ARGUMENTS = {
    "HybridParallelPlugin": _STAGED | {"dp_outside", "inner_ring_size"},
    "MoeHybridParallelPlugin": _STAGED | {"ep_size", "moe_dp_outside"},
    "GeminiPlugin": _SHARED
    | {
        "chunk_config_dict",
        "chunk_init_device",
        "placement_policy",
        "enable_gradient_accumulation",
        "max_prefetch",
    }
    | {
        "shard_param_frac",
        "offload_optim_frac",
        "offload_param_frac",
        "warmup_non_model_data_ratio",
        "pin_memory",
    }
    | {
        "steady_cuda_cap_ratio",
        "master_weights",
        "extra_dp_size",
        "enable_async_reduce",
        "verbose",
        "norm_type",
    },
}


class Plugin:
    """Keeps its arguments, and checks them as the constructors of 0.5.0 do."""

    def __init__(self, kind: str, **arguments: Any) -> None:
        unknown = set(arguments) - ARGUMENTS[kind]
        assert not unknown, unknown
        self.kind, self.arguments = kind, arguments
        get = arguments.get
        if kind == "GeminiPlugin":
            assert get("precision") in ("fp16", "bf16")
            return
        assert get("precision") in ("fp16", "bf16", "fp32")
        style, chunks = get("pp_style", "1f1b"), get("num_model_chunks", 1)
        assert style != "zbv" or get("scheduler_nodes") is not None
        if get("enable_sequence_parallelism"):
            ring = ("ring_attn",) if kind == "HybridParallelPlugin" else ()  # experts' has no case for it
            assert get("sequence_parallelism_mode") in ("split_gather", "ring", "all_to_all", *ring)
            assert (
                get("sequence_parallelism_mode") not in ("split_gather", "ring") or arguments["tp_size"] > 1
            )
        else:
            assert get("sp_size") in (1, None)
        assert arguments["zero_stage"] in (0, 1, 2)
        if kind == "MoeHybridParallelPlugin":
            # With 2, and with overlap, it falls back to 1 with a warning.
            assert arguments["zero_stage"] <= 1 and not get("overlap_communication")
            # configure(): DistributedDataParallel reduces over one group, and experts have another.
            assert arguments["ep_size"] == 1 or arguments["pp_size"] > 1 or arguments["zero_stage"]
            # shardformer/policies/mixtral.py and deepseek.py
            assert arguments["pp_size"] == 1 or not get("enable_sequence_parallelism")
        assert arguments["zero_stage"] == 0 or get("precision") != "fp32"  # configure()
        if arguments["pp_size"] > 1:
            assert style in ("1f1b", "interleaved", "zbv")
            assert style in ("interleaved", "zbv") or chunks == 1
            assert style in ("1f1b", "interleaved") or chunks == 2
            assert style != "interleaved" or chunks > 1
            assert get("num_microbatches") is not None or get("microbatch_size") is not None
            assert arguments["zero_stage"] <= 1


def built(exported: Exported) -> Plugin:
    package = "colossalai.booster.plugin"
    modules = {name: ModuleType(name) for name in ("colossalai", "colossalai.booster", package)}
    for kind in ARGUMENTS:
        maker = type(
            kind,
            (Plugin,),
            {"__init__": lambda self, kind=kind, **given: Plugin.__init__(self, kind, **given)},
        )
        setattr(modules[package], kind, maker)
    namespace: dict[str, Any] = {}
    text = write("colossalai", exported).text
    assert not set(modules) & set(sys.modules)
    sys.modules.update(modules)
    try:
        exec(compile(text, "trine_colossalai.py", "exec"), namespace)  # noqa: S102 - it is a program
    finally:
        for name in modules:
            del sys.modules[name]
    found: Plugin = namespace["plugin"](*([["F"]] if "scheduler_nodes" in text else []))
    return found


def test_stages_and_interleaved_chunks() -> None:
    exported = exported_of_layout(
        {
            "data": 4,
            "tensor": 2,
            "sequence": 1,
            "pipeline": 4,
            "schedule": "interleaved",
            "chunks": 2,
            "microbatches": 8,
            "zero_stage": 1,
            "bucket_bytes": 2**25,
        },
        cases.DENSE,
    )
    found = built(exported)
    assert found.kind == "HybridParallelPlugin"
    assert found.arguments == {
        "tp_size": 2,
        "pp_size": 4,
        "zero_stage": 1,
        "enable_sequence_parallelism": True,
        "sequence_parallelism_mode": "split_gather",
        "pp_style": "interleaved",
        "num_model_chunks": 2,
        "num_microbatches": 8,
        "precision": "bf16",
        "zero_bucket_size_in_m": 16,  # elements of two bytes in 32 MiB
    }


def test_sharded_parameters_are_geminis() -> None:
    exported = exported_of_layout(
        {
            "data": 8,
            "shard": 4,
            "zero_stage": 3,
            "parameter_offload": "cpu",
            "optimizer_offload": "cpu",
            "microbatches": 2,
        },
        cases.DENSE,
    )
    found = built(exported)
    assert found.kind == "GeminiPlugin"
    assert found.arguments == {
        "placement_policy": "static",
        "shard_param_frac": 1.0,
        "tp_size": 1,
        "offload_optim_frac": 1.0,
        "offload_param_frac": 1.0,
        "extra_dp_size": 2,
        "enable_gradient_accumulation": True,
        "precision": "bf16",
    }


def test_state_of_one_data_rank_is_moved_as_planned() -> None:
    found = built(exported_of_layout({"tensor": 8, "optimizer_offload": "cpu"}, cases.DENSE))
    assert found.arguments["zero_stage"] == 1 and found.arguments["cpu_offload"] is True
    both = {"tensor": 2, "optimizer_offload": "cpu", "parameter_offload": "cpu"}
    assert built(exported_of_layout(both, cases.DENSE)).kind == "GeminiPlugin"


def test_experts_have_a_plugin_of_their_own() -> None:
    found = built(exported_of_layout({"data": 16, "expert": 8, "zero_stage": 2}, cases.MIXTURE))
    assert (found.kind, found.arguments["ep_size"], found.arguments["zero_stage"]) == (
        "MoeHybridParallelPlugin",
        8,
        1,
    )


@pytest.mark.parametrize(
    ("row", "arguments", "named"),
    [
        ({}, {"zero_stage": 1}, "zero.stage: experts without a pipeline"),
        ({"pipeline": 2, "microbatches": 4}, {"zero_stage": 0}, None),
        (
            {"context": 2},
            {"sequence_parallelism_mode": "all_to_all", "sp_size": 2},
            "parallel.context: experts' plugin has no ring attention",
        ),
        (
            {"context": 2, "pipeline": 2, "microbatches": 4},
            {"sequence_parallelism_mode": None, "sp_size": None},
            "parallel.context = 2: its mixtures split no sequence beside a pipeline",
        ),
        (
            {"pipeline": 2, "microbatches": 4, "schedule": "zb-v", "chunks": 2},
            {"pp_style": "zbv"},
            "scheduler_nodes",
        ),
        ({"precision": "fp32"}, {"precision": "bf16"}, "precision.dtype: its ZeRO has bf16 and fp16"),
    ],
)
def test_experts_plugin_gets_what_it_takes(
    row: dict[str, Any], arguments: dict[str, Any], named: str | None
) -> None:
    exported = exported_of_layout({"data": 16, "expert": 8, **row}, cases.MIXTURE)
    found = built(exported)
    assert found.kind == "MoeHybridParallelPlugin"
    assert {name: found.arguments.get(name) for name in arguments} == arguments
    lines = write("colossalai", exported).cannot
    assert named is None or any(line.startswith(named) for line in lines), lines


def test_experts_wait_for_no_overlap() -> None:
    config = Config().with_changes(
        {"parallel.expert": 4, "communication.overlap": True, "precision.dtype": "bf16"}
    )
    assert built(Exported(config)).arguments["overlap_communication"] is False
    assert "communication.overlap" in cases.named(write("colossalai", Exported(config)))


@settings(max_examples=60)
@given(cases.exported_layouts())
def test_any_layout_builds_a_plugin(exported: Exported) -> None:
    built(exported)


@settings(max_examples=60)
@given(cases.configurations())
def test_any_configuration_builds_a_plugin(config: Config) -> None:
    built(Exported(config))


@pytest.mark.parametrize(("schedule", "style"), [("zb-v", "zbv"), ("dualpipe-v", "1f1b"), ("gpipe", "1f1b")])
def test_schedules(schedule: str, style: str) -> None:
    row = {"pipeline": 2, "schedule": schedule, "chunks": 2 if "-v" in schedule else 1, "microbatches": 8}
    exported = exported_of_layout(row, cases.DENSE)
    assert built(exported).arguments["pp_style"] == style
    missing = cases.named(write("colossalai", exported))
    assert ("parallel.schedule" in missing) == (style == "1f1b")
