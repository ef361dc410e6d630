"""Activations saved for backward in another form: ``activations.dtype``, ``offload.activations``, ``activations.pool``.

One set of hooks stands round every forward. ``activations.dtype`` rounds what is saved; ``offload.activations`` moves
it to the host's memory or to disk and fetches it back ahead of the backward that needs it; together, what is moved is
rounded first. The forward itself is untouched.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts, since_last
from trine.optim.techniques._needs import require_folder
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.host_memory import HostMemory
    from trine.optim.runtime.saved_tensors import Store
    from trine.optim.runtime.tensor_pool import TensorPool

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("activations.dtype", "activations.pool", "offload.activations")
ORDER = 35
QUANTITY = "memory/saved_activation_bytes"
NUMERICS = (
    "offload is bitwise; dtype leaves the first loss bitwise and rounds gradients: losses within 2e-3 relative with "
    "bf16, 1e-3 with fp16, 1e-2 with fp8"
)


def refusal(config: Config) -> str | None:
    """A pool for the device's own buffers, and what other offloads would need of the path."""
    activations = config.activations
    if activations.pool and activations.dtype is None and config.offload.activations == "none":
        return (
            "activations.pool keeps the buffers of offload.activations and activations.dtype for the next step: set one of "
            "them, or take the key out"
        )
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Rounding of what gradients are computed from; the first loss is exact."""
    stated = {"bf16": Tolerance(2e-3, 5e-2), "fp16": Tolerance(1e-3, 1e-2), "fp8": Tolerance(1e-2, 3e-1)}
    return stated.get(config.activations.dtype or "")


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where rounding would corrupt, or the disk's folder cannot be written."""
    if config.activations.dtype is not None:
        _check_dtype(config, facts)
    if config.offload.activations == "nvme":
        require_folder(str(config.offload.path), "offload.activations")


def apply(assembly: Assembly) -> None:
    """Give the run's saved tensors a store."""
    dtype, offload = assembly.config.activations.dtype, assembly.config.offload.activations
    if dtype is None and offload == "none":
        return
    from trine.optim.runtime.low_precision import DTYPES, LowPrecision
    from trine.optim.runtime.saved_tensors import saved_tensors_of

    saved = saved_tensors_of(assembly)
    store: Store | None = None
    pool = _pool(assembly) if assembly.config.activations.pool else None
    if offload != "none":
        from trine.optim.runtime.host_memory import ByPlan

        saved.host = _offload(assembly, offload)
        saved.host.returning = pool
        is_planned = assembly.config.checkpointing.mode in ("budget", "auto")
        store = ByPlan(saved.host) if is_planned else saved.host
    if dtype is not None:
        store = LowPrecision(DTYPES[dtype], store, pool)
        note = (
            "inputs of checkpointed modules stay exact"
            if assembly.config.checkpointing.mode != "none"
            else ""
        )
        assembly.effects.append(Effect("activations.dtype", "saved as computed", f"saved in {dtype}", note))
    saved.store = store


def _offload(assembly: Assembly, where: str) -> HostMemory:
    device = assembly.facts.device
    host: HostMemory
    if where == "nvme":
        from trine.optim.runtime.disk import Disk

        host = Disk(device, Path(str(assembly.config.offload.path)))
        after = f"on disk, under {assembly.config.offload.path}"
    else:
        from trine.optim.runtime.host_memory import HostMemory

        host = HostMemory(device)
        after = "in pinned host memory" if device.type == "cuda" else "copied within the host's memory"
    notes = []
    if device.type == "cpu" and where == "cpu":
        notes.append("the model is on the CPU: copies cost and nothing is gained")
    if assembly.config.checkpointing.mode == "selective":
        notes.append("what a selective checkpoint keeps stays on the device")
    assembly.effects.append(Effect("offload.activations", f"on {device}", after, "; ".join(notes)))
    assembly.metrics["memory/offloaded_activation_bytes"] = since_last(lambda: host.moved_bytes)
    assembly.metrics["memory/offload_buffer_bytes"] = lambda: float(host.host_bytes)
    assembly.closers.append(host.close)
    return host


def _pool(assembly: Assembly) -> TensorPool:
    from trine.optim.runtime.tensor_pool import TensorPool

    pool = TensorPool(assembly.facts.device)
    assembly.effects.append(
        Effect("activations.pool", "copies of activations allocated in each step", "kept for the next step")
    )
    assembly.metrics["memory/activation_pool_bytes"] = lambda: float(pool.total_bytes)
    assembly.metrics["memory/activation_pool_allocations"] = since_last(lambda: pool.made)
    return pool


def _check_dtype(config: Config, facts: Facts) -> None:
    dtype = config.activations.dtype
    if config.compute.compile is not False:
        raise UsageError(
            "activations.dtype and compute.compile cannot be combined: compiled code saves statistics and random "
            "state among its activations and does not say which is which, so rounding would corrupt gradients. "
            'Drop one of them, or use checkpointing.mode = "full"'
        )
    import torch

    double = next((name for name, p in facts.model.named_parameters() if p.dtype == torch.float64), None)
    if double is not None:
        raise UsageError(
            f'activations.dtype = "{dtype}": {double} is float64, and whoever computes in double precision would not '
            "have activations rounded: take the key out"
        )
    widest = max((p.element_size() for p in facts.model.parameters() if p.is_floating_point()), default=4)
    if config.precision.master_weights:
        widest = 2
    if widest <= 2 and dtype != "fp8":
        raise UsageError(
            f'activations.dtype = "{dtype}": the model computes in 16 bits already, so nothing would change: take the '
            'key out, or write "fp8"'
        )
