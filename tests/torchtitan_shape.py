"""torchtitan's configuration in its public shape, for tests where the package is not installed.

Fields that exports set, with their defaults, from ``torchtitan/config/configs.py``, ``torchtitan/trainer.py`` and
``torchtitan/distributed/activation_checkpoint.py`` of 0.3.0 (github.com/pytorch/torchtitan), with the checks that
``Trainer.Config`` makes when it is built. Where the package is installed, a slow test reads the same exports by it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["loaded", "stages_of"]


@dataclass(kw_only=True, slots=True)
class Parallelism:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    fsdp_reshard_after_forward: str = "default"
    tensor_parallel_degree: int = 1
    enable_sequence_parallel: bool = True
    pipeline_parallel_degree: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
    pipeline_parallel_layers_per_stage: int | None = None
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_microbatch_size: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1


@dataclass(kw_only=True, slots=True)
class Training:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    enable_cpu_offload: bool = False
    disable_cuda_graphs: bool = False
    dtype: str = "float32"
    mixed_precision_param: str = "bfloat16"


@dataclass(kw_only=True, slots=True)
class Compile:
    enable: bool = False


@dataclass(kw_only=True, slots=True)
class Policy:
    kind: str = ""


@dataclass(kw_only=True, slots=True)
class Configuration:
    parallelism: Parallelism = field(default_factory=Parallelism)
    training: Training = field(default_factory=Training)
    compile: Compile = field(default_factory=Compile)
    activation_checkpoint: Policy | None = None

    def __post_init__(self) -> None:
        parallelism, training = self.parallelism, self.training
        piped = parallelism.pipeline_parallel_degree > 1
        if piped and training.local_batch_size % parallelism.pipeline_parallel_microbatch_size:
            raise ValueError("training.local_batch_size must be evenly divisible by the microbatch size")
        if not training.disable_cuda_graphs and (piped or parallelism.expert_parallel_degree > 1):
            raise ValueError("CUDA graphs do not support this. Set --training.disable_cuda_graphs.")


def stages_of(parallelism: Parallelism, layers: int) -> int:
    """How many stages its pipeline gets (``_get_pipeline_metadata`` in ``torchtitan/distributed/pipeline_parallel.py``)."""
    ranks = parallelism.pipeline_parallel_degree
    several = parallelism.pipeline_parallel_schedule not in ("1F1B", "GPipe")
    stages = ranks * (1 + several)
    each = parallelism.pipeline_parallel_layers_per_stage
    if each is not None:
        stages = math.ceil((layers + 2) / each)
        if stages % ranks or (stages // ranks > 1) != several:
            raise ValueError(f"Number of virtual stages ({stages}) must be divisible by {ranks}, {several=}")
    if parallelism.module_fqns_per_model_part is not None:
        stages = len(parallelism.module_fqns_per_model_part)
    if stages > layers + 2:
        raise ValueError(
            f"Number of stages ({stages}) cannot be greater than effective layers ({layers + 2})"
        )
    return stages


def _policy(kind: str) -> Any:
    return SimpleNamespace(Config=lambda: Policy(kind=kind))


@contextmanager
def loaded(*models: tuple[str, str]) -> Iterator[None]:
    """``import torchtitan…`` finds this shape, and these models' functions."""
    names: dict[str, dict[str, Any]] = {
        "torchtitan": {},
        "torchtitan.trainer": {"Trainer": SimpleNamespace(Config=Configuration)},
        "torchtitan.distributed": {},
        "torchtitan.distributed.activation_checkpoint": {
            kind: _policy(kind) for kind in ("FullAC", "SelectiveAC", "MemoryBudgetAC")
        },
        "torchtitan.models": {},
    }
    for module, function in models:
        names[f"torchtitan.models.{module}"] = {}
        names.setdefault(f"torchtitan.models.{module}.config_registry", {})[function] = Configuration
    before = {name: sys.modules.get(name) for name in names}
    for name, content in names.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
