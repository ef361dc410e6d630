"""Scalar parameters beside FSDP2, which shards none: whole on every rank, their gradients averaged here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from trine.optim.runtime.local_steps import placed

__all__ = ["WholeScalars"]


class WholeScalars:
    """``scalars`` in the order of the model's names, which is that of every rank."""

    def __init__(
        self,
        scalars: Sequence[nn.Parameter],
        mesh: DeviceMesh,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        self._group = group  # None: all ranks
        #: Scalar → what the optimizer holds for it.
        self.replicas = {scalar: _replica(scalar, mesh) for scalar in scalars}
        self._by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for scalar in scalars:
            if scalar.requires_grad:
                self._by_dtype.setdefault(scalar.dtype, []).append(scalar)

    @property
    def ignored(self) -> set[nn.Parameter] | None:
        """What ``fully_shard`` is to leave alone; ``None`` where there is nothing."""
        return set(self.replicas) or None

    def collect(self) -> None:
        """Give the replicas the mean gradients: one all-reduce a dtype, the same on every rank, used there or not.

        Where no rank used a scalar it has no gradient, and the optimizer leaves it alone.
        """
        for dtype, scalars in self._by_dtype.items():
            missing = [place for place, scalar in enumerate(scalars) if scalar.grad is None]
            count = len(scalars)
            flat = torch.ones(
                2 * count, dtype=dtype, device=scalars[0].device
            )  # gradients, whether there is one
            flat[:count] = torch.stack(
                [flat.new_zeros(()) if scalar.grad is None else scalar.grad for scalar in scalars]
            )
            for place in missing:
                flat[count + place] = 0.0
            flat /= distributed.get_world_size(self._group)
            distributed.all_reduce(flat, group=self._group)
            # A device is waited for only where this rank lacks one.
            unused = {place for place in missing if not float(flat[count + place])}
            for place, scalar in enumerate(scalars):
                replica = self.replicas[scalar]
                replica.grad = None if place in unused else placed(flat[place].clone(), replica)

    def forget(self) -> None:
        """After the update."""
        for scalar in self.replicas:
            scalar.grad = None


def _replica(scalar: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """Optimizers take no mixture of DTensors and others: a DTensor over the scalar's storage."""
    whole = DTensor.from_local(scalar.data, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return nn.Parameter(whole, requires_grad=scalar.requires_grad)
