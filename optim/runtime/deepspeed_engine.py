"""Trine's engine over DeepSpeed's: the same loop, whose forward, backward and step DeepSpeed runs.

What DeepSpeed does of itself and is of no use here is held back: its log, its timers that wait for the device, and a
communication kernel for the CPU that it would compile for a minute.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.utils._pytree import tree_map

from trine.optim.engine import Engine
from trine.optim.runtime.adoption import named_parameters
from trine.optim.runtime.deepspeed_checkpoints import DeepSpeedKeeper
from trine.optim.runtime.deepspeed_update import DeepSpeedUpdate
from trine.record.errors import TrineError, UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["DeepSpeedEngine", "can_use_disk", "hand_over"]

#: What PyTorch 2.13 says of collectives that DeepSpeed calls by their older names.
_OLD_NAMES = r"`torch\.distributed\.\w+` is deprecated"


class DeepSpeedEngine(Engine):
    """Trains one model by DeepSpeed. Made by :func:`trine.optim.optimize` where ``engine = "deepspeed"``."""

    _update: DeepSpeedUpdate
    _keeper: Any

    def _make_update(self, clip_norm: float | None, scheduler: Any, nonfinite: Any) -> DeepSpeedUpdate:
        return DeepSpeedUpdate(self._assembly, clip_norm, scheduler, nonfinite)

    def discard(self) -> None:
        """Forget the gradients since the last optimizer step.

        Raises ``UsageError`` where ZeRO has reduced some of them already, which DeepSpeed cannot take back.
        """
        self._micro = 0
        if not self._update.drop():
            self._broken = (
                "gradients of an unfinished step are in DeepSpeed's partitions, and it cannot take them back: start again "
                'from a checkpoint with a new engine, or use engine = "torch"'
            )
            raise UsageError(self._broken)

    def _fail(self, error: BaseException) -> None:
        """A step raised: usable afterwards only where this package refused, before DeepSpeed had any gradient."""
        self._stage = 0
        self._micro = 0
        if isinstance(error, TrineError) and self._update.drop():
            return
        if isinstance(error, TrineError) and self._update.is_empty:
            return
        said = str(error).partition("\n")[0]
        self._broken = (
            f"a step by DeepSpeed failed ({type(error).__name__}: {said}), so that its partitions may hold a part of it: start "
            "again from a checkpoint with a new engine"
        )

    def _keep_state(self) -> None:
        super()._keep_state()
        self._keeper = DeepSpeedKeeper(self._assembly)

    def state_dict(self) -> dict[str, Any]:
        """Not to be had: raises ``UsageError``."""
        raise UsageError(
            'engine.state_dict is of engine = "torch": use engine.save under engine = "deepspeed"'
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Not to be had: raises ``UsageError``."""
        raise UsageError(
            'engine.load_state_dict is of engine = "torch": use engine.load under engine = "deepspeed"'
        )


def hand_over(assembly: Assembly, configuration: dict[str, Any]) -> None:
    """Make DeepSpeed's engine of the assembly's model and optimizer, and put it in the model's place."""
    facts = assembly.facts
    deepspeed = imported(facts.device_type)
    assembly.closers.append(_hold_noise())
    configuration["gradient_clipping"] = assembly.clip_norm or 0.0
    if facts.backend is None:
        assembly.closers.append(_group_of_one(facts.device_type))
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(assembly.config.precision.dtype))
    if low is not None and assembly.config.precision.master_weights:
        assembly.closers += _cast_at_the_edges(assembly.model, low)
    module = assembly.model
    assembly.closers.append(_local_rank(str(facts.device.index or 0)))
    assembly.closers.append(_own_linear())
    with _no_compiled_kernel(deepspeed), _half_precision_anywhere(deepspeed):
        try:
            engine, *_ = deepspeed.initialize(
                model=module,
                optimizer=assembly.optimizer,
                model_parameters=[p for p in module.parameters() if p.requires_grad],
                config=configuration,
            )
        except (AssertionError, ValueError, RuntimeError, NotImplementedError) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(
                f'engine = "deepspeed": DeepSpeed refuses this: {said[:300]}; change it, or set engine = "torch"'
            ) from error
    assembly.model = engine
    assembly.parameters = named_parameters(module)
    assembly.synchronise = engine.set_gradient_accumulation_boundary
    assembly.engine = DeepSpeedEngine
    assembly.closers.append(engine.destroy)
    if assembly.config.precision.dtype == "fp16":
        assembly.metrics["loss_scale"] = lambda: float(engine.optimizer.cur_scale)


def imported(device_type: str) -> Any:
    """The package, for this kind of device. Raises ``UsageError`` where the program imported it for another."""
    kind = {"cpu": "cpu"}.get(device_type)  # else what it finds by itself
    environment = {} if kind is None else {"DS_ACCELERATOR": kind}
    with mock.patch.dict(os.environ, environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own old spellings, at import
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        found = get_accelerator().device_name()
    if found != device_type:
        raise UsageError(
            f'engine = "deepspeed": DeepSpeed was imported for {found} devices, and the model is on {device_type}: set '
            f"DS_ACCELERATOR={device_type} in the environment before it is imported"
        )
    return deepspeed


def can_use_disk(device_type: str) -> bool:
    """Whether DeepSpeed's asynchronous I/O is built, or can be."""
    imported(device_type)
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible(verbose=False))


def _hold_noise() -> Callable[[], None]:
    """DeepSpeed's log only where something went wrong, and no word of old names; what undoes it."""
    log = logging.getLogger("DeepSpeed")
    before = log.level
    log.setLevel(max(before, logging.ERROR))
    warnings.filterwarnings("ignore", _OLD_NAMES, FutureWarning)
    added = warnings.filters[0]

    def undo() -> None:
        log.setLevel(before)
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    return undo


def _own_linear() -> Callable[[], None]:
    """ZeRO's third stage puts a function of its own in the place of ``torch.nn.functional.linear``, for good."""
    before = nn.functional.linear

    def undo() -> None:
        nn.functional.linear = before

    return undo


def _local_rank(rank: str) -> Callable[[], None]:
    """Set what DeepSpeed takes its device from, also in its steps, where no launcher has; what takes it back."""
    if "LOCAL_RANK" in os.environ:
        return lambda: None
    os.environ["LOCAL_RANK"] = rank

    def undo() -> None:
        os.environ.pop("LOCAL_RANK", None)

    return undo


def _group_of_one(device_type: str) -> Callable[[], None]:
    """A process group for a program that has none, as DeepSpeed needs one; what takes it down again."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)

    def destroy() -> None:
        import deepspeed.comm.comm as communication

        if distributed.is_initialized():
            communication.destroy_process_group()
        communication.cdb = None

    return destroy


@contextmanager
def _no_compiled_kernel(deepspeed: ModuleType) -> Iterator[None]:
    """Its all-reduce through shared memory is compiled on first use, by a compiler that may be missing."""
    with mock.patch.dict(deepspeed.ops.__compatible_ops__, deepspeed_shm_comm=False):
        yield


@contextmanager
def _half_precision_anywhere(deepspeed: ModuleType) -> Iterator[None]:
    """PyTorch computes fp16 on any CPU, slowly; DeepSpeed wants one with instructions for it, and nothing else of them."""
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() != "cpu":
        yield
        return
    with mock.patch.object(accelerator, "is_fp16_supported", lambda: True):
        yield


def _cast_at_the_edges(module: nn.Module, low: torch.dtype) -> list[Callable[[], None]]:
    """Inputs in the parameters' precision, outputs in float32, so that losses are computed in that."""

    def before(_: nn.Module, arguments: Any, named: Any) -> Any:
        return _cast(arguments, low), _cast(named, low)

    def after(_: nn.Module, __: Any, result: Any) -> Any:
        return _cast(result, torch.float32)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True).remove,
        module.register_forward_hook(after).remove,
    ]


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_real and value.dtype != torch.float64 else value

    return tree_map(one, values)
