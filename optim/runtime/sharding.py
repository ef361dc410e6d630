"""Shards of a live model and optimizer: ZeRO stage 1 by our own hands, stages 2 and 3 by PyTorch's FSDP2.

Stage 1 does not use PyTorch's ZeroRedundancyOptimizer. That is a second optimizer object: schedulers, hooks and
profilers go on holding the first; it cannot take over live state; it asks for one dtype; and it gives whole parameters
to ranks, so that one large embedding unbalances them. Here the *live* optimizer is pointed at shards of the parameters
(rows of each, as FSDP2 cuts them), so all of that stays, and a checkpoint of any stage loads into any other.

Shards are DTensors: their norm is that of the whole, and ``full_tensor()`` gives the whole to whoever asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from trine.optim.runtime.adoption import replace_parameters, retire, unwrapped
from trine.optim.runtime.gathering import Gathering
from trine.optim.runtime.local_steps import placed, step_on_shards
from trine.optim.runtime.meshes import alone_mesh, data_mesh, group_of
from trine.optim.runtime.shard_units import odd_dtypes, sharded_units
from trine.optim.runtime.whole_scalars import WholeScalars
from trine.optim.techniques._assembly import Effect
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = [
    "mesh_of",
    "replicate_model",
    "rows_of",
    "shard_like",
    "shard_model",
    "shard_optimizer",
    "start_alike",
]

_meshes: dict[tuple[int, str, int, int], tuple[Any, DeviceMesh]] = {}


def mesh_of(device_type: str, replicas: int, shards: int) -> DeviceMesh:
    """The mesh (shard) or (replicate, shard); made once for each shape and default group, since it makes groups.

    Neighbouring ranks share a shard group, and launchers number ranks node by node: groups lie inside nodes first.
    """
    world = distributed.group.WORLD
    key = (id(world), device_type, replicas, shards)
    if key not in _meshes:
        if replicas == 1:
            mesh = init_device_mesh(device_type, (shards,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
        _meshes[key] = (world, mesh)  # the group is kept so that its id is not given to another
    return _meshes[key][1]


def rows_of(length: int, shards: int, place: int) -> tuple[int, int]:
    """Rows [start, end) of a tensor of ``length`` rows that shard ``place`` holds: as torch.chunk cuts them."""
    size = -(-length // shards)
    return min(length, place * size), min(length, (place + 1) * size)


# --- stage 1 -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Owned:
    """One parameter of the model, and the rows of it that this rank updates."""

    whole: nn.Parameter
    held: nn.Parameter  # a DTensor over a view of the rows
    rows: tuple[int, int] | None  # None: a scalar, which every rank updates


def shard_optimizer(assembly: Assembly, replicas: int, shards: int) -> None:
    """Stage 1: the live optimizer updates this rank's rows, and ranks gather each other's after the update.

    Gradients come averaged from DistributedDataParallel. State, trained or not, is cut to the rows.
    """
    mesh = mesh_of(assembly.facts.device_type, replicas, shards)
    place = mesh.get_local_rank("shard")
    named = [p for group in assembly.optimizer.param_groups for p in group["params"]]
    owned = [_owned(p, mesh, shards, place) for p in named if p.requires_grad]
    replace_parameters(assembly, {each.whole: each.held for each in owned}, shard_like)
    step_on_shards(assembly.optimizer)
    gathering = Gathering([each.whole for each in owned if each.rows is not None], mesh.get_group("shard"))

    def collect() -> None:
        for each in owned:
            gradient = each.whole.grad
            each.held.grad = None if gradient is None else _view(gradient, each.rows, each.held)

    def after(stepped: bool) -> None:
        if stepped:
            gathering.run()
        for each in owned:
            each.whole.grad = None

    assembly.collect.append(collect)
    # Last of all: what writes to the held shards after the update (master copies) must have done so.
    assembly.finish.append(lambda ready: ready.after_update.append(after))


def _owned(whole: nn.Parameter, mesh: DeviceMesh, shards: int, place: int) -> _Owned:
    rows = rows_of(whole.shape[0], shards, place) if whole.dim() else None
    data = whole.data if rows is None else whole.data[rows[0] : rows[1]]
    kind = [Replicate() if rows is None else Shard(0)]
    placements = [*([Replicate()] * (mesh.ndim - 1)), *kind]
    held = DTensor.from_local(
        data, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return _Owned(whole, nn.Parameter(held), rows)


def _view(gradient: torch.Tensor, rows: tuple[int, int] | None, held: nn.Parameter) -> DTensor:
    return placed(gradient if rows is None else gradient[rows[0] : rows[1]], held)


def shard_like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of ``value``, placed as ``parameter`` is. A copy of its own.

    Every rank has ``value`` whole, or spread as the inner dimensions of the parameter's mesh have it already.
    """
    like = cast(DTensor, parameter)
    spread = value.device_mesh.ndim if isinstance(value, DTensor) else 0
    local: torch.Tensor = value._local_tensor if isinstance(value, DTensor) else value
    for dimension, placement in enumerate(like.placements[: like.device_mesh.ndim - spread]):
        if placement.is_shard() or isinstance(placement, _StridedShard):
            start, end = rows_of(
                local.shape[cast(Shard, placement).dim],
                like.device_mesh.size(dimension),
                like.device_mesh.get_local_rank(dimension),
            )
            local = local.narrow(cast(Shard, placement).dim, start, end - start)
    # A view would keep the whole alive.
    local = local.clone(memory_format=torch.contiguous_format)
    return placed(local.to(like._local_tensor.device), like)


# --- stages 2 and 3 ----------------------------------------------------------------------------


def shard_model(assembly: Assembly, replicas: int, shards: int) -> None:
    """Stages 2 and 3: FSDP2 over each repeated block and the root; the live optimizer is pointed at the shards."""
    config, facts = assembly.config, assembly.facts
    reshard: bool | int | None = config.zero.reshard_after_forward
    inside = {"reshard_after_forward": (config.zero.stage == 3) if reshard is None else reshard}
    # Of the root, the first thing that backward needs is what forward used last: freeing it saves nothing.
    outside = {"reshard_after_forward": reshard if config.zero.stage == 3 else False}
    if facts.layout.is_hybrid:
        mesh = data_mesh(facts, sharded=True)
        assert mesh is not None, "zero's check wants two ranks to shard over"
    else:
        mesh = mesh_of(facts.device_type, replicas, shards)
    everywhere: dict[str, Any] = {}
    if config.offload.parameters == "cpu":  # offload_state's check wants stage 3
        everywhere["offload_policy"] = CPUOffloadPolicy(pin_memory=facts.device_type != "cpu")
    _distribute(assembly, _Wrapping(fully_shard, mesh, inside, outside, everywhere))


def replicate_model(assembly: Assembly) -> None:
    """Data parallelism beside other kinds: PyTorch's ``replicate``, which is FSDP2 without shards.

    DistributedDataParallel knows neither DTensors nor several backward passes of a stage (pytorch#144530).
    """
    start_alike(assembly)
    mesh = data_mesh(assembly.facts, sharded=False)
    if mesh is None:
        return
    from torch.distributed._composable.replicate_with_fsdp import replicate

    _distribute(assembly, _Wrapping(replicate, mesh, {}, {}))


@dataclass(frozen=True, slots=True)
class _Wrapping:
    """How a module is made one whose gradients are averaged."""

    wrap: Callable[..., Any]
    mesh: DeviceMesh
    inside: Mapping[str, Any]  # of blocks
    outside: Mapping[str, Any]  # of the root
    everywhere: Mapping[str, Any] = field(default_factory=dict)


def _distribute(assembly: Assembly, wrapping: _Wrapping) -> None:
    """Wrap each repeated block and the root of every stage, and point the live optimizer at what they hold now."""
    start_alike(assembly)
    facts = assembly.facts
    if isinstance(assembly.model, DistributedDataParallel):
        assembly.model = retire(assembly.model)
    model = assembly.model
    policies = _policies(assembly, model)
    before = dict(model.named_parameters())
    group = group_of(facts, "replicate", "shard", "expert", "context") if facts.layout.is_hybrid else None
    scalars = WholeScalars([p for p in before.values() if p.dim() == 0], wrapping.mesh, group)
    for spread, dimension in assembly.spread.items():
        _wrap_spread(assembly, wrapping, spread, dimension, policies)
    blocks: list[nn.Module] = []
    for stage in assembly.stages:
        blocks += _wrap_stage(stage, wrapping, policies, scalars.ignored)
    _adopt(assembly, before, scalars)
    if assembly.config.zero.stage:
        _prefetch([cast(FSDPModule, block) for block in blocks], assembly.config.zero.prefetch)
    _keep_in_step(assembly, [cast(FSDPModule, stage) for stage in assembly.stages], scalars)
    for stage in assembly.stages:
        _keep_statistics_alike(stage, group)


def _wrap_stage(
    stage: nn.Module, wrapping: _Wrapping, policies: _Policies, ignored: set[nn.Parameter] | None
) -> list[nn.Module]:
    """One root and its blocks; returns the blocks."""
    wrap, inside = wrapping.wrap, wrapping.inside
    keys: dict[str, Any] = {"mesh": wrapping.mesh, "ignored_params": ignored, **wrapping.everywhere}
    if policies.wide is not None:
        for norm in [m for m in stage.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]:
            wrap(norm, mp_policy=policies.wide, **keys, **inside)
    blocks = sharded_units(stage)
    for block in blocks:
        for odd in odd_dtypes(block):
            if not isinstance(odd, FSDPModule):
                wrap(odd, mp_policy=policies.inner, **keys, **inside)
        if not isinstance(block, FSDPModule):
            wrap(block, mp_policy=policies.inner, **keys, **inside)
    for odd in odd_dtypes(stage, blocks):
        if not isinstance(odd, FSDPModule):
            wrap(odd, mp_policy=policies.inner, **keys, **inside)
    wrap(stage, mp_policy=policies.root, **keys, **wrapping.outside)
    return blocks


def _wrap_spread(
    assembly: Assembly, wrapping: _Wrapping, spread: nn.Module, dimension: str, policies: _Policies
) -> None:
    """A module whose parameters differ along ``dimension``: averaged, or sharded, over the other ranks alone.

    Its gradients are means over that dimension's ranks already, by its own backward: FSDP2's divide factor needs an operation
    that gloo has not (PREMUL_SUM), and is applied twice where a rank is alone and in fp16 or fp64.
    """
    mesh = data_mesh(assembly.facts, sharded=assembly.config.zero.stage > 0, without=dimension)
    if mesh is None:  # nobody else holds them: over this rank alone, so that everything has one form
        mesh = alone_mesh(assembly.facts)
    placed_by = {"shard_placement_fn": _across(spread, mesh)} if wrapping.wrap is fully_shard else {}
    keys = {**wrapping.everywhere, **wrapping.inside, **placed_by}
    wrapping.wrap(spread, mesh=mesh, mp_policy=policies.inner, **keys)


def _across(spread: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard] | None:
    """Shards of the second dimension where the first, of which each rank has few, does not divide evenly."""
    shards = mesh.size(mesh.ndim - 1)
    local = [cast(DTensor, parameter)._local_tensor for parameter in spread.parameters()]
    if all(part.shape[0] % shards == 0 for part in local) or any(part.shape[1] % shards for part in local):
        return None
    return lambda parameter: Shard(1)


@dataclass(frozen=True, slots=True)
class _Policies:
    inner: MixedPrecisionPolicy
    root: MixedPrecisionPolicy
    #: Of modules that keep fp32, such as batch norms, whose statistics are fp32.
    wide: MixedPrecisionPolicy | None = None


def _policies(assembly: Assembly, model: nn.Module) -> _Policies:
    """What parameters are gathered in and gradients reduced in. The shards are the fp32 master weights themselves."""
    precision = assembly.config.precision
    if not precision.master_weights:
        return _Policies(MixedPrecisionPolicy(), MixedPrecisionPolicy())
    stored: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.element_size() < 4:
            stored[parameter.dtype] += parameter.numel()
    if precision.dtype is None:
        # A stage of a pipeline may hold nothing in half precision.
        low = stored.most_common(1)[0][0] if stored else torch.float32
    else:
        low = torch.float16 if precision.dtype == "fp16" else torch.bfloat16
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            parameter.data = parameter.data.float()
    for values in assembly.optimizer.state.values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() < 4:
                values[key] = value.float()
    name = str(low).removeprefix("torch.")
    assembly.effects.append(
        Effect(
            "precision.master_weights",
            "parameters in float32",
            f"gathered in {name}",
            "the shards are the masters",
        )
    )
    # Outputs in fp32 at the root alone: blocks that hand fp32 on would meet the root's norm in half precision.
    return _Policies(
        MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
        MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=torch.float32),
        MixedPrecisionPolicy(cast_forward_inputs=False),
    )


def start_alike(assembly: Assembly) -> None:
    """Once, before anything is cut: every rank has the parameters and buffers of rank 0."""
    if not assembly.started_alike:
        _same_start(unwrapped(assembly.model))
        assembly.started_alike = True


def _same_start(model: nn.Module) -> None:
    """Parameters and buffers of rank 0 on all ranks, as DistributedDataParallel does; fully_shard does not.

    Without it, ranks that were seeded apart train a model that is pieced together from all of them, silently.
    """
    ours = [(name, tuple(t.shape), str(t.dtype)) for name, t in _tensors(model)]
    theirs: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(theirs, ours)
    for rank, other in enumerate(theirs):
        if other != theirs[0]:
            at = next(
                (a for a, b in zip(other, theirs[0], strict=False) if a != b), (other + theirs[0])[-1:][0]
            )
            raise UsageError(
                f"rank {rank} has another model than rank 0, from {at[0]} on: make the same on every rank"
            )
    works = [distributed.broadcast(t.detach(), 0, async_op=True) for _, t in _tensors(model)]
    for work in works:
        work.wait()


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _adopt(assembly: Assembly, before: dict[str, nn.Parameter], scalars: WholeScalars) -> None:
    """Before any forward: after one, the root's parameters are gathered, and not what the optimizer must hold."""
    after = dict(assembly.model.named_parameters())
    replaced: dict[torch.Tensor, nn.Parameter] = {
        old: scalars.replicas.get(old, after[name]) for name, old in before.items()
    }
    replace_parameters(assembly, replaced, shard_like)
    step_on_shards(assembly.optimizer)
    held = [p for group in assembly.optimizer.param_groups for p in group["params"]]
    plain = sum(not isinstance(p, DTensor) for p in held)
    if plain:  # it would train nothing, silently
        raise RuntimeError(f"{plain} parameters of the optimizer were not replaced by their shards")


def _prefetch(blocks: Sequence[FSDPModule], depth: int | None) -> None:
    """Gather ``depth`` blocks ahead, in forward and in backward. ``None``: PyTorch's own way, about one ahead."""
    if depth is None:
        return
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(list(blocks[place + 1 : place + 1 + depth]))
        behind = list(reversed(blocks[max(0, place - depth) : place]))
        # An empty list means PyTorch's default, one behind; the block itself is gathered already: nothing more.
        block.set_modules_to_backward_prefetch(behind if depth and behind else [block])


def _keep_in_step(assembly: Assembly, roots: Sequence[FSDPModule], scalars: WholeScalars) -> None:
    """Synchronise when the engine says, average what FSDP2 was told to ignore, and forget gathered parameters."""

    def synchronise(wanted: bool) -> None:
        for root in roots:
            root.set_requires_gradient_sync(wanted)

    assembly.synchronise = synchronise
    assembly.closers.append(lambda: synchronise(True))
    modules = [
        module
        for root in roots
        for module in cast(nn.Module, root).modules()
        if isinstance(module, FSDPModule)
    ]

    def after(stepped: bool) -> None:
        for module in modules:
            # A forward without a backward (an evaluation) leaves parameters gathered, and they are old from now on.
            module.reshard()
        scalars.forget()

    if scalars.ignored:
        assembly.collect.append(scalars.collect)
    assembly.after_update.append(after)
    assembly.discard.append(lambda: _forget_unreduced(modules, roots))


def _forget_unreduced(modules: Sequence[FSDPModule], roots: Sequence[FSDPModule]) -> None:
    """Micro-batches that were not synchronised leave whole gradients inside FSDP2, which ``zero_grad`` does not see.

    Nor does ``reset_iter_state``, whatever its documentation says; it ends what an exception left half done.
    """
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
    for root in roots:
        reset = getattr(root, "reset_iter_state", None)  # from PyTorch 2.13 on
        # Before its first forward there is nothing to reset, and PyTorch stumbles over that.
        if reset is not None and root._get_fsdp_state()._is_root is not None:
            reset()
    if not hasattr(FSDPModule, "reset_iter_state"):
        for module in modules:
            module.reshard()


def _keep_statistics_alike(model: nn.Module, group: distributed.ProcessGroup | None) -> None:
    """Running statistics of the group's first rank before a forward, as DistributedDataParallel does; FSDP2 does not."""
    kinds = torch.nn.modules.batchnorm._NormBase
    tracked = [m for m in model.modules() if isinstance(m, kinds) and m.track_running_stats]
    buffers = [b for m in tracked for b in m.buffers(recurse=False)]
    if not buffers:
        return

    since = {"trained": False}
    first = 0 if group is None else distributed.get_global_rank(group, 0)

    def broadcast(module: nn.Module, arguments: Any) -> None:
        if module.training or since["trained"]:  # also before the first evaluation after training
            since["trained"] = module.training
            works = [distributed.broadcast(buffer, first, group=group, async_op=True) for buffer in buffers]
            for work in works:
                work.wait()

    model.register_forward_pre_hook(broadcast)
