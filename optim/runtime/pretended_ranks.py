"""One process that trains as one rank of many: a process group that sends nothing, tensors that hold nothing.

PyTorch's ``fake`` backend answers every collective at once, and fake tensors have shapes and no memory, so the engine's
own code can apply a configuration and run its steps for any number of ranks on one CPU. Every rank is taken to say
what this one says. All of it happens in a forked copy of the process, where nothing can be spoilt: the default process
group exists once a process, and applying a configuration changes switches and modules.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trine.optim._stages import Staged
from trine.optim.runtime.memory_ledger import Ledger, tensors_in
from trine.optim.runtime.plain_tensors import PLAIN
from trine.optim.runtime.regions import structure
from trine.record.errors import TrineError, UsageError

__all__ = [
    "AsOnCuda",
    "PretendedLedger",
    "faked_batch",
    "faked_model",
    "faked_optimizer",
    "in_a_fork",
    "pretend",
]

_Result = TypeVar("_Result")

#: What a launcher tells a process about its place, which is another one here.
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
#: Files between a model and its operators.
_OURS = ("pretended_ranks.py", "memory_ledger.py")
#: Up to so many whole numbers, or so many others, are computed for real: meshes, counters, what the engine decides by.
_REAL_WHOLE, _REAL_OTHERS = 2**16, 16


# --- a copy of the process -----------------------------------------------------------------------


def in_a_fork(function: Callable[[], _Result], timeout_s: float) -> _Result:
    """What ``function()`` returns in a copy of this process, which is ended afterwards; the result is pickled.

    Raises ``UsageError`` with what it failed of, and after ``timeout_s`` seconds.
    """
    if not hasattr(os, "fork"):
        raise UsageError("memory is predicted in a forked copy of the process, and this system has no fork")
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 on: of threads, which the copy does not use
        process = os.fork()
    if process == 0:
        os.close(ours)
        _answer(function, theirs)
    os.close(theirs)
    try:
        answer = _read(ours, timeout_s)
    finally:
        os.close(ours)
        if os.waitpid(process, os.WNOHANG)[0] == 0:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    if answer is None:
        raise UsageError(f"memory could not be predicted: no result within {timeout_s:g} s")
    if not answer:
        raise UsageError("memory could not be predicted: the process that tried it ended without a word")
    failure, result = pickle.loads(answer)
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def _read(pipe: int, timeout_s: float) -> bytes | None:
    end = time.monotonic() + timeout_s
    parts: list[bytes] = []
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        part = os.read(pipe, 2**16)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _answer(function: Callable[[], Any], pipe: int) -> None:
    """Never returns: nothing of the program that was copied may go on here."""
    try:
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        for name in _LAUNCHED:
            os.environ.pop(name, None)
        torch.set_num_threads(1)
        try:
            said = pickle.dumps((None, function()))
        except TrineError as error:
            said = pickle.dumps((error, None))
        except BaseException as error:  # noqa: BLE001 - told to the process that asked
            said = pickle.dumps((UsageError(_in_words(error)), None))
        view = memoryview(said)
        while view:
            view = view[os.write(pipe, view) :]
    finally:
        os._exit(0)


def _in_words(error: BaseException) -> str:
    """What a model does that has no answer without values, and where."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in file and Path(file).name not in _OURS:
            where = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    said = " ".join(str(error).partition("\n")[0].split())
    name = type(error).__name__
    if name in ("DataDependentOutputException", "DynamicOutputShapeException") or "not allocated" in said:
        return (
            f"memory could not be predicted: {where} reads a tensor's values ({said}), and there are only shapes here: "
            "predict a model that takes no decisions by values"
        )
    return f"memory could not be predicted: {name} at {where}: {said}"


# --- the group -----------------------------------------------------------------------------------

#: What the process that was copied had: its groups must not be taken down here, where their threads are missing.
_kept: list[Any] = []


def pretend(ranks: int, rank: int, ranks_per_node: int | None = None) -> None:
    """Make this process one of so many ranks. Only in a process of its own (:func:`in_a_fork`)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from trine.optim.topology import RANKS_PER_NODE

    _forget_groups()
    if ranks_per_node is not None:
        os.environ[RANKS_PER_NODE] = str(ranks_per_node)
    structure._agree = lambda *_: (
        True
    )  # fused regions compare values, and there are none: their structure decides
    if ranks == 1:
        return
    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    Staged._require_same_batch = _nothing  # type: ignore[method-assign]
    modules: tuple[Any, ...] = (distributed, distributed_c10d)
    for module in modules:
        module.all_gather_object = _all_say_the_same
        module.broadcast_object_list = _nothing
    _exchange_at_once()


def _forget_groups() -> None:
    world = distributed_c10d._world
    kept: list[Any] = [world.default_pg]
    for groups in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.tags_to_pg,
        world.pg_to_tag,
    ):
        kept.append(dict(groups))
        groups.clear()
    _kept.append(kept)
    world.default_pg = None
    world.group_count = 0
    torch._C._distributed_c10d._unregister_all_process_groups()


def _all_say_the_same(found: list[Any], said: Any, group: Any = None) -> None:
    for place in range(len(found)):
        found[place] = said


def _nothing(*arguments: Any, **named: Any) -> None:
    """Rank 0 has what this rank has."""


def _exchange_at_once() -> None:
    """Reductions run on the calling thread: a ledger sees no other."""
    from trine.optim.runtime.exchange.thread import CommunicationThread

    def submit(
        thread: Any, work: Callable[[], None], flat: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        with torch.no_grad():
            work()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(flat)
        return future

    CommunicationThread.submit = submit  # type: ignore[method-assign, assignment]


# --- the tensors ---------------------------------------------------------------------------------


class PretendedLedger(Ledger):  # type: ignore[no-untyped-call]
    """A ledger of fake tensors. Small things that hang on no fake tensor stay real, so that the engine can decide by them."""

    def __init__(self, rounding: int = 1) -> None:
        super().__init__(rounding)
        PLAIN.add(FakeTensor)
        # DTensor asks for shapes under whatever fake mode there is: of whole tensors, which are no memory here.
        ShardingPropagator._fake_mode_lock = _Pause(self)  # type: ignore[assignment]

    def run(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The operator on shapes; a collective answers at once."""
        if function is torch.ops.c10d.allreduce_.default:
            return _reduced(arguments[0])
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return arguments[0]  # without values it would give another tensor, which a real wait does not
        given = list(tensors_in((arguments, named)))
        if not any(isinstance(tensor, FakeTensor) for tensor in given) and _is_small(
            function, given, arguments, named
        ):
            with unset_fake_temporarily():
                return function(*arguments, **named)
        return function(*arguments, **named)


class WithoutMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Around a function that makes a model: large tensors are on the meta device, whatever device it asks for."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = dict(named or {})
        given = list(tensors_in((arguments, named)))
        if not given and "device" in {argument.name for argument in function._schema.arguments}:
            meta = function(*arguments, **{**named, "device": torch.device("meta")})
            if not all(_fits(tensor) for tensor in tensors_in(meta)):
                return meta
            return function(*arguments, **{**named, "device": torch.device("cpu")})
        moved = "device" in named or function is torch.ops.aten._to_copy.default
        if moved and any(tensor.is_meta for tensor in given):
            named["device"] = torch.device("meta")
        elif "device" in named:
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        return function(*arguments, **named)


class _Pause:
    """Nothing is counted inside."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __enter__(self) -> None:
        self._ledger.paused = True

    def __exit__(self, *_: object) -> None:
        self._ledger.paused = False


def _reduced(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    """DDP reads its averaged bucket from the future, and the fake backend's holds nothing."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    core: Any = torch._C._distributed_c10d
    return tensors, core._create_work_from_future(future).boxed()


def _is_small(function: Any, given: list[torch.Tensor], arguments: Any, named: dict[str, Any]) -> bool:
    if given:
        return all(_fits(tensor) for tensor in given)
    try:
        with unset_fake_temporarily():
            shapes = function(*arguments, **{**named, "device": torch.device("meta")})
    except (RuntimeError, TypeError, NotImplementedError):  # it makes no tensor on a device of one's choice
        return False
    return all(_fits(tensor) for tensor in tensors_in(shapes))


def _fits(tensor: torch.Tensor) -> bool:
    most = _REAL_OTHERS if tensor.is_floating_point() or tensor.is_complex() else _REAL_WHOLE
    return tensor.numel() <= most


def faked_model(model: nn.Module, mode: FakeTensorMode) -> dict[int, nn.Parameter]:
    """Put fake parameters and buffers on the CPU into a model, in place. Returns id of the old → new parameter."""
    parameters: dict[int, nn.Parameter] = {}
    kept: list[Any] = []  # so that no id is given again
    buffers: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in parameters:
                fake = nn.Parameter(_faked(parameter, mode), requires_grad=parameter.requires_grad)
                fake.__dict__.update(parameter.__dict__)
                parameters[id(parameter)] = fake
                kept.append(parameter)
            module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in buffers:
                    buffers[id(buffer)] = _faked(buffer, mode)
                    kept.append(buffer)
                module._buffers[name] = buffers[id(buffer)]
    return parameters


def faked_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[int, nn.Parameter], mode: FakeTensorMode
) -> None:
    """Point an optimizer at the fake parameters, its state as well."""
    state = dict(optimizer.state)
    optimizer.state.clear()
    for parameter, values in state.items():
        if isinstance(values, dict):
            values = {key: _faked_state(value, mode) for key, value in values.items()}
        optimizer.state[parameters.get(id(parameter), parameter)] = values
    for group in optimizer.param_groups:
        group["params"] = [parameters.get(id(p), p) for p in group["params"]]


def faked_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """The batch with fake tensors on the CPU in place of its own."""
    from trine.optim.batches import with_tensors

    return with_tensors(batch, lambda tensor: _faked(tensor, mode))


def _faked_state(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:  # step counts, which the update divides by
        with unset_fake_temporarily():
            return torch.ones((), dtype=value.dtype)
    return _faked(value, mode)


def _faked(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


class AsOnCuda(TorchFunctionMode):
    """Attention and dropout keep for backward what they keep on CUDA, not what the CPU's kernels do.

    On CUDA a fused attention keeps no matrix of scores, also with a mask or with dropout (FlashAttention and the
    memory-efficient kernel); dropout keeps a mask of bytes. On the CPU both keep floats.
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = dict(named or {})
        if function is functional.scaled_dot_product_attention:
            query, key, value = (*arguments, *(named[n] for n in ("query", "key", "value") if n in named))[:3]
            kept = {name: named[name] for name in ("is_causal", "scale", "enable_gqa") if name in named}
            return function(query, key, value, **kept)
        if function is functional.dropout:
            return _dropout(*arguments, **named)
        return function(*arguments, **named)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(input, p, training)[0] if training and p > 0 else input
