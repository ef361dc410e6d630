"""DistributedDataParallel made, and made anew round the same module with other options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trine.optim.runtime.adoption import retire

__all__ = ["DdpTimes", "cannot_be_wrapped_anew", "hook_of", "wrap", "wrap_anew"]

_MIB = 2**20
#: DDP times its first ten backwards, then one in a hundred.
_SAMPLED_FIRST = 10
_SAMPLED_EVERY = 10


def wrap(model: torch.nn.Module, device: torch.device, options: Mapping[str, Any]) -> DistributedDataParallel:
    """Replicas that average their gradients. Collective: parameters and buffers become those of rank 0."""
    return DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device], **options)


def cannot_be_wrapped_anew(given: torch.nn.Module) -> str | None:
    """What a new wrapper would silently lose of one that the program made."""
    if not isinstance(given, DistributedDataParallel):
        return None
    if given.mixed_precision is not None:
        return "mixed_precision, which belongs to this wrapper: use precision.dtype instead"
    if given._delay_all_reduce_params:
        return "delay_all_reduce_named_params, whose hooks belong to this wrapper"
    hook = hook_of(given)
    if hook and not given._comm_hooks:
        return f"the built-in communication hook {hook}: use communication.compression instead"
    return None


def hook_of(given: torch.nn.Module) -> str | None:
    """The name of the communication hook that a program's own wrapper has; built-in ones are in no Python list."""
    if not isinstance(given, DistributedDataParallel):
        return None
    if given._comm_hooks:
        hook, _ = given._comm_hooks[0]
        return str(getattr(hook, "__name__", type(hook).__name__))
    known = str(_logged(given).get("comm_hook", ""))
    return known.rpartition(".")[2] if known.startswith("BuiltinCommHookType") else None


def wrap_anew(
    given: DistributedDataParallel,
    options: Mapping[str, Any],
    successor: Callable[[], torch.nn.Module] | None = None,
) -> DistributedDataParallel:
    """A new wrapper round the same module, with the old one's options where ``options`` says nothing of them.

    The old wrapper no longer averages gradients: called, it goes to ``successor()``, or says what to call instead. Its
    communication hooks go over. Parameters and buffers stay as they are on each rank. Collective.
    """
    kept: dict[str, Any] = {
        "device_ids": given.device_ids,
        "output_device": given.output_device if given.device_ids else None,
        "dim": given.dim,
        "process_group": given.process_group,
        "find_unused_parameters": given.find_unused_parameters,
        "gradient_as_bucket_view": given.gradient_as_bucket_view,
        "static_graph": given.static_graph,
        "init_sync": False,
    }
    if not given.bucket_bytes_cap_default:
        kept["bucket_cap_mb"] = given.bucket_bytes_cap / _MIB
    if given.bucket_bytes_cap_list and "bucket_cap_mb" not in options:
        kept["bucket_cap_mb_list"] = [size / _MIB for size in given.bucket_bytes_cap_list]
    wrapped = DistributedDataParallel(retire(given, successor), **{**kept, **options})
    wrapped.broadcast_buffers = given.broadcast_buffers  # as an argument it is deprecated
    wrapped.require_backward_grad_sync = given.require_backward_grad_sync
    wrapped.training = given.training
    for hook, state in given._comm_hooks:
        wrapped.register_comm_hook(state, hook)
    return wrapped


class DdpTimes:
    """What DDP itself measures of its last sampled backward, for the record; nothing between its samples."""

    def __init__(self, wrapped: Callable[[], torch.nn.Module]) -> None:
        self._wrapped = wrapped
        self._step = 0
        self._seen: Any = None
        self._data: Mapping[str, Any] = {}

    def after_step(self) -> None:
        """Count, so that DDP is asked where it can have a new sample."""
        self._step += 1

    def exposed_ns(self) -> float | None:
        """Communication of gradients behind the end of backward; asked first of the two."""
        self._data = self._fresh()
        if not self._data:
            return None
        return float(self._communication() - self._overlapped())

    def overlap(self) -> float | None:
        """The part of communication that backward hid, 0 … 1."""
        if not self._data or self._communication() <= 0:
            return None
        return self._overlapped() / self._communication()

    def _communication(self) -> int:
        return int(self._data.get("backward_comm_time", 0))

    def _overlapped(self) -> int:
        return int(self._data.get("backward_compute_comm_overlap_time", 0))

    def _fresh(self) -> Mapping[str, Any]:
        wrapped = self._wrapped()
        if not isinstance(wrapped, DistributedDataParallel):
            return {}
        if self._step > _SAMPLED_FIRST and self._step % _SAMPLED_EVERY:
            return {}
        data = _logged(wrapped)
        sample = (id(wrapped), data.get("iteration"))
        if sample == self._seen or not data.get("backward_comm_time"):
            return {}
        self._seen = sample
        return data


def _logged(wrapped: DistributedDataParallel) -> Mapping[str, Any]:
    """What DDP knows of itself: its options, its buckets, and times of its last sampled backward in nanoseconds."""
    data: Mapping[str, Any] = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    return data
