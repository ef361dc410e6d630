"""One DeviceMesh over all ranks, and its parts: what the kinds of parallelism communicate over.

Dimensions are those of :mod:`trine.optim.layout`, of which only those with more than one rank are made; the names of
dimensions that were flattened together are joined by underscores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trine.optim.layout import DIMENSIONS

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Facts

__all__ = ["alone_mesh", "data_mesh", "flat_mesh", "group_of", "world_mesh"]

_made: dict[tuple[Any, ...], tuple[Any, DeviceMesh]] = {}

#: A dimension of one rank.
_ALONE = "alone"
#: What dense parameters are sharded over: experts see other batches, contexts other tokens.
_SHARDED = ("shard", "expert", "context")


def world_mesh(facts: Facts) -> DeviceMesh:
    """The mesh of all ranks. Collective when it is made first; made once for each layout and default group."""
    layout = facts.layout
    names = tuple(name for name in DIMENSIONS if layout.size(name) > 1) or ("replicate",)
    sizes = tuple(layout.size(name) for name in names)
    if layout.expert > 1 and layout.size("replicate", "shard", "context") == 1:
        # FSDP2 joins the mesh of experts with the one that it averages over: both must be parts of this one.
        names, sizes = (*names, _ALONE), (*sizes, 1)
    world = distributed.group.WORLD
    key = (id(world), facts.device_type, names, sizes)
    if key not in _made:
        # The group is kept so that its id is not given to another.
        _made[key] = (world, init_device_mesh(facts.device_type, sizes, mesh_dim_names=names))
    return _made[key][1]


def flat_mesh(facts: Facts, *dimensions: str) -> DeviceMesh | None:
    """The ranks along these dimensions as a mesh of one dimension; ``None`` where this rank would be alone.

    Collective when it is made first.
    """
    world = world_mesh(facts)
    wide = _wide(facts, dimensions)
    if not wide:
        return None
    if len(wide) == 1:
        return world[wide[0]]
    name = "_".join(wide)
    key = (id(world), name)
    if key not in _made:
        _made[key] = (world, world[wide]._flatten(name))
    return _made[key][1]


def group_of(facts: Facts, *dimensions: str) -> distributed.ProcessGroup | None:
    """The process group of :func:`flat_mesh`; ``None`` where this rank would be alone."""
    mesh = flat_mesh(facts, *dimensions)
    return None if mesh is None else mesh.get_group()


def data_mesh(facts: Facts, sharded: bool, without: str | None = None) -> DeviceMesh | None:
    """What FSDP2 averages over: (replicate, shard) where ``sharded``, else one dimension; ``None`` for a rank alone.

    Shards of dense parameters lie over ``shard``, ``expert`` and ``context`` together. ``without`` leaves a dimension
    out, as for experts, which are spread over ``expert`` already.
    """
    inner = tuple(name for name in _SHARDED if name != without)
    if not sharded:
        return flat_mesh(facts, "replicate", *inner)
    shards = flat_mesh(facts, *inner)
    if shards is None or facts.layout.replicate == 1:
        return shards if shards is not None else flat_mesh(facts, "replicate")
    names = cast("tuple[str, ...]", shards.mesh_dim_names)
    return world_mesh(facts)["replicate", names[0]]


def alone_mesh(facts: Facts) -> DeviceMesh:
    """Of this rank alone, for what wants a mesh where experts have no replicas to average with."""
    return world_mesh(facts)[_ALONE]


def _wide(facts: Facts, dimensions: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in DIMENSIONS if name in dimensions and facts.layout.size(name) > 1)
