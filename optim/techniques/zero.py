"""ZeRO: optimizer state, gradients and parameters live in shards, one a rank (Rajbhandari et al., SC 2020).

Stage 1 shards the optimizer's state beside DistributedDataParallel; stages 2 and 3 are PyTorch's FSDP2, which keeps a
block's parameters between forward and backward (2) or frees and gathers them again (3). With ``parallel.shard`` below
the number of ranks the shards stay inside a group, best a node, and the groups replicate each other (hybrid sharding).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.layout import degrees, fitting
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_no_gradient_hooks, require_plain_layout
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "KEYS",
    "NUMERICS",
    "ORDER",
    "QUANTITY",
    "apply",
    "bytes_per_parameter",
    "check",
    "degrees",
    "refusal",
    "tolerance",
]

KEYS = ("zero.stage", "zero.reshard_after_forward", "zero.prefetch", "parallel.shard")
ORDER = 41  # after data_parallel, which wraps the model for stage 1 and leaves it alone from stage 2 on
QUANTITY = "optimizer, gradient and parameter bytes per rank"
NUMERICS = "unchanged but for the order of summation: losses within 1e-10 in fp64, 1e-5 relative in fp32"

#: What DistributedDataParallel would do with its buckets; FSDP2 has one bucket a block instead.
_OF_DDP = (
    "communication.bucket_mib",
    "communication.first_bucket_mib",
    "communication.gradient_as_view",
    "communication.static_graph",
    "communication.overlap",
)
#: Optimizers whose update of one element needs others of the same parameter, or none of whose state can be cut.
_NOT_BY_SHARD = {
    "Adafactor": "its second moments are factored over whole matrices",
    "LBFGS": "its line search runs over all parameters as one vector",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "its gradients are sparse",
}


def refusal(config: Config) -> str | None:
    """Everything of these keys can be applied; which other keys they go with is ``check``'s."""
    return None


def bytes_per_parameter(
    stage: int, shards: int, parameter: float = 4, gradient: float = 4, optimizer: float = 8
) -> float:
    """Bytes that a rank holds per parameter of the model, by the formula of Rajbhandari et al. 2020, figure 1.

    ``parameter``, ``gradient`` and ``optimizer`` are the bytes of each per parameter, 4 + 4 + 8 for Adam in fp32
    (2 + 2 + 12 in the paper's mixed precision). ``stage`` 1 divides the optimizer's by ``shards``, 2 gradients as
    well, 3 parameters too.
    """
    return (
        parameter / (shards if stage >= 3 else 1)
        + gradient / (shards if stage >= 2 else 1)
        + optimizer / (shards if stage >= 1 else 1)
    )


def tolerance(config: Config) -> Tolerance | None:
    """Shards are summed in another order, and divided after the sum instead of before it."""
    return Tolerance(1e-6, 1e-5) if config.zero.stage else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the stage, the ranks, the model, the optimizer or other keys forbid it."""
    stage = config.zero.stage
    if stage == 0:
        _require_stage(config)
        return
    if facts.ranks == 1:
        raise UsageError(
            f"zero.stage = {stage} shards over several ranks, and this process is alone: start it with torchrun "
            "(and torch.distributed.init_process_group), or take the key out"
        )
    if facts.layout.is_hybrid:
        _check_hybrid(config, facts)
        shards = facts.layout.size("shard", "expert", "context")
    else:
        _, shards = degrees(config, facts.ranks)
    if shards == 1:
        raise UsageError(
            f"parallel.data = {config.parallel.data} and parallel.shard = {config.parallel.shard or 1} leave one rank "
            f"to shard over, and zero.stage = {stage} needs two or more: {fitting(facts.ranks)}"
        )
    _check_resharding(config, shards)
    _check_other_keys(config)
    _check_model(config, facts)
    if stage > 1:
        require_no_gradient_hooks(f"zero.stage = {stage}", facts)
    _check_wrapper(config, facts)
    _check_optimizer(config, facts)


def _check_hybrid(config: Config, facts: Facts) -> None:
    """Beside tensor, pipeline, expert and context parallelism the shards are FSDP2's."""
    layout = facts.layout
    if config.zero.stage == 1:
        require_plain_layout(
            "zero.stage = 1",
            facts,
            "it stands beside DistributedDataParallel, which these cannot use",
            "use zero.stage = 2 or 3, which keep no more a rank",
        )
    if config.parallel.shard == "auto":
        require_plain_layout(
            'parallel.shard = "auto"',
            facts,
            "it measures links between all ranks",
            "write the number of shards",
        )
    if layout.size("shard", "expert", "context") == 1:
        sizes = {name: layout.size(name) for name in ("pipeline", "tensor")}  # the others shard by themselves
        keys = " × ".join(f"parallel.{name} = {size}" for name, size in sizes.items() if size > 1)
        if layout.replicate > 1:
            left, instead = "replicas of one shard", "take zero.stage out, or write a larger parallel.shard"
        else:
            left, instead = "one", "take zero.stage out, or start more ranks"
        raise UsageError(
            f"zero.stage = {config.zero.stage} shards over data-parallel ranks, and {keys} on {facts.ranks} ranks leave "
            f"{left}: {instead}"
        )


def _require_stage(config: Config) -> None:
    for key in ("zero.reshard_after_forward", "zero.prefetch", "parallel.shard"):
        if config[key] is not None:
            raise UsageError(
                f"{key} says how ZeRO shards, and zero.stage is 0: set zero.stage as well, or drop it"
            )


def _check_resharding(config: Config, shards: int) -> None:
    stage, reshard = config.zero.stage, config.zero.reshard_after_forward
    for key in ("zero.reshard_after_forward", "zero.prefetch"):
        if stage == 1 and config[key] is not None:
            raise UsageError(
                f"{key} is about sharded parameters, and zero.stage = 1 keeps them whole: drop it"
            )
    if stage == 2 and reshard not in (None, False):
        raise UsageError(
            f"zero.stage = 2 keeps parameters from forward to backward, and zero.reshard_after_forward = "
            f"{str(reshard).lower()} frees them: that is zero.stage = 3"
        )
    if type(reshard) is int and (shards % reshard or reshard in (1, shards)):
        fitting = [str(n) for n in range(2, shards) if shards % n == 0]
        rest = f"use one of {', '.join(fitting)}, or true" if fitting else "use true or false"
        raise UsageError(
            f"zero.reshard_after_forward = {reshard} must divide the {shards} ranks of a shard group and lie "
            f"between: {rest}"
        )


def _check_other_keys(config: Config) -> None:
    stage = config.zero.stage
    if config.accumulation.delayed:
        raise UsageError(
            f"accumulation.delayed and zero.stage = {stage} cannot be combined: the delayed gradient would be kept "
            "whole on every rank. Drop one of them"
        )
    if stage == 1:
        return
    for key in _OF_DDP:
        if config[key] is not None:
            raise UsageError(
                f"{key} is an option of DistributedDataParallel, and zero.stage = {stage} is FSDP2, which exchanges "
                "one bucket a block: drop one of them, or use zero.stage = 1"
            )
    if config.compute.compile == "model":
        raise UsageError(
            f'compute.compile = "model" and zero.stage = {stage} cannot be combined: parameters are gathered block by '
            'block, which one graph would undo. Use compute.compile = "blocks"'
        )


def _check_model(config: Config, facts: Facts) -> None:
    stage = config.zero.stage
    for name, parameter in facts.model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UsageError(
                f"zero.stage = {stage}: {name} is sharded already (a DTensor): give trine.optimize the model as it was "
                "before fully_shard, or take the key out"
            )
        if hasattr(parameter, "_is_flat_param") or type(parameter).__name__ == "FlatParameter":
            raise UsageError(
                f"zero.stage = {stage}: {name} belongs to FSDP1: give trine.optimize the plain model"
            )
        is_empty = stage > 1 and not parameter.numel()  # FSDP2 fails on it in the first step
        if parameter.is_sparse or parameter.device.type == "meta" or is_empty:
            kind = (
                "sparse" if parameter.is_sparse else "without elements" if is_empty else "on the meta device"
            )
            raise UsageError(
                f"zero.stage = {stage}: {name} is {kind} and cannot be sharded: take the key out"
            )


def _check_wrapper(config: Config, facts: Facts) -> None:
    """What a program's own DistributedDataParallel has that could not go over, and would be lost silently."""
    from torch.nn.parallel import DistributedDataParallel

    from trine.optim.runtime.replicas import hook_of

    stage, given = config.zero.stage, facts.model
    if not isinstance(given, DistributedDataParallel):
        return
    if given.process_group.size() != facts.ranks:
        raise UsageError(
            f"zero.stage = {stage} shards over all {facts.ranks} ranks, and this DistributedDataParallel averages over "
            f"{given.process_group.size()}: give the model without the wrapper, or take the key out"
        )
    if given.find_unused_parameters and stage >= 2:
        raise UsageError(
            f"zero.stage = {stage} and find_unused_parameters = True: ranks that use different blocks would gather "
            "different ones into each other. If all ranks use the same, give the model without the wrapper; else use "
            "zero.stage = 1"
        )
    hook = hook_of(given)
    if hook and stage >= 2:
        raise UsageError(
            f"zero.stage = {stage} replaces this DistributedDataParallel, and its communication hook, {hook}, with it: "
            "give the model without the hook (communication.compression compresses under FSDP2), or use zero.stage = 1"
        )


def _check_optimizer(config: Config, facts: Facts) -> None:
    stage, optimizer = config.zero.stage, facts.optimizer
    kind = type(optimizer).__name__
    for ancestor in type(optimizer).__mro__:
        if ancestor.__name__ in _NOT_BY_SHARD:
            raise UsageError(
                f"zero.stage = {stage}: {kind} cannot be sharded, since {_NOT_BY_SHARD[ancestor.__name__]}: take the "
                "key out, or use an optimizer that updates element by element, such as AdamW"
            )
    if kind == "ZeroRedundancyOptimizer":
        raise UsageError(
            f"zero.stage = {stage}: ZeroRedundancyOptimizer shards already: give trine.optimize the optimizer that it "
            "wraps, or take the key out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            f"zero.stage = {stage}: a differentiable optimizer cannot be sharded: drop differentiable=True"
        )
    own = {id(parameter) for parameter in facts.model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(id(parameter) not in own for parameter in held)
    if strange:
        raise UsageError(
            f"zero.stage = {stage}: {strange} of the optimizer's parameters are not the model's, and would neither be "
            "sharded nor averaged: put them into the model, or into an optimizer of their own"
        )
    _check_state(stage, optimizer)


def _check_state(stage: int, optimizer: torch.optim.Optimizer) -> None:
    """State that is neither one number nor shaped like its parameter cannot be cut."""
    for parameter, values in optimizer.state.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            shape = getattr(value, "shape", None)
            if shape is not None and value.numel() > 1 and shape != getattr(parameter, "shape", None):
                raise UsageError(
                    f"zero.stage = {stage}: {type(optimizer).__name__} keeps {key} of shape {tuple(shape)} for a "
                    f"parameter of shape {tuple(parameter.shape)}, which cannot be sharded: take the key out"
                )


def apply(assembly: Assembly) -> None:
    """Shard the live model and optimizer; groups, state and schedulers stay."""
    config, facts = assembly.config, assembly.facts
    stage = config.zero.stage
    if stage == 0:
        return
    from trine.optim.runtime import sharding

    if facts.layout.is_hybrid:
        replicas, shards = facts.layout.replicate, facts.layout.size("shard", "expert", "context")
    else:
        replicas, shards = degrees(config, facts.ranks)
    note = str(facts.layout) if facts.layout.is_hybrid else _nodes(facts, shards)
    if config.parallel.shard == "auto" and config.parallel.data == "auto":
        from trine.optim.runtime.shard_groups import automatic_shards

        decision = automatic_shards(assembly)
        shards, note = decision.shards, decision.why
        replicas = facts.ranks // shards
    where = f"{shards} shards" if replicas == 1 else f"{replicas} replicas × {shards} shards"
    if config.parallel.shard is not None:
        assembly.effects.append(Effect("parallel.shard", "one group of all ranks", where, note))
    if stage == 1:
        sharding.shard_optimizer(assembly, replicas, shards)
    else:
        sharding.shard_model(assembly, replicas, shards)
        _say_how(assembly)
    whole = sum(p.numel() for p in facts.model.parameters())
    each = bytes_per_parameter(stage, shards)
    assembly.effects.append(
        Effect(
            "zero.stage",
            "replicated",
            f"{stage}: {where}",
            f"by the formula {each:.3g} instead of 16 bytes a parameter with Adam in fp32, {whole:,} parameters",
        )
    )


def _say_how(assembly: Assembly) -> None:
    zero = assembly.config.zero
    if zero.reshard_after_forward is not None:
        shown: Any = zero.reshard_after_forward
        assembly.effects.append(Effect("zero.reshard_after_forward", "the stage's", str(shown).lower()))
    if zero.prefetch is not None:
        assembly.effects.append(Effect("zero.prefetch", "PyTorch's", f"{zero.prefetch} blocks ahead"))


def _nodes(facts: Facts, shards: int) -> str:
    size = facts.topology.ranks_per_node
    if shards <= size and size % shards == 0:
        return "each group inside a node"
    return f"a group spans nodes of {size} ranks"
