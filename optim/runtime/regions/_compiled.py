"""One compilation a region and static shape, and plain PyTorch where there is no compiler."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

__all__ = ["Compiled", "compiler_missing", "find_missing"]

logger = logging.getLogger("trine")


def find_missing(device_type: str) -> str | None:
    """What ``torch.compile`` lacks here to make code for such a device; ``None`` where it can.

    The CPU's code is C++ with a Python binding: a compiler and Python's headers. CUDA's is Triton.
    """
    if device_type != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else f"Triton for {device_type} devices, which is not installed"
    wanted = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([wanted] if wanted else ["g++", "clang++", "c++", "cl"])):
        return f"a C++ compiler, and there is no {wanted or 'g++ or clang++'} here (Debian: apt install g++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers, which are missing (Debian: apt install python3-dev)"
    return None


#: :func:`find_missing`, looked up once: regions ask at every call.
compiler_missing = functools.lru_cache(maxsize=8)(find_missing)


class Compiled:
    """``body``, compiled once for each set of static sizes; the dimensions that batches change are dynamic.

    PyTorch counts recompilations of one code object against a limit over all callers, so that a model of many widths
    would drive a shared region back to eager: each set of static sizes gets a code object of its own.
    """

    def __init__(self, body: Callable[..., Any], **options: Any) -> None:
        self.name = body.__name__
        self.failure: str | None = None
        self._body = body
        self._options = options
        self._by_sizes: dict[Any, Callable[..., Any]] = {}

    def __call__(self, dynamic: Sequence[tuple[torch.Tensor, Sequence[int]]], *arguments: Any) -> Any:
        """``body(*arguments)``. ``dynamic``: tensors among them, each with its dimensions that may change a batch."""
        if self.failure is not None:
            return self._body(*arguments)
        sizes = []
        for tensor, dimensions in dynamic:
            torch._dynamo.maybe_mark_dynamic(tensor, list(dimensions))
            free = {dimension % tensor.dim() for dimension in dimensions}
            sizes.append(tuple(-1 if at in free else size for at, size in enumerate(tensor.shape)))
        key = (tuple(sizes), dynamic[0][0].dtype, dynamic[0][0].device.type)
        compiled = self._by_sizes.get(key)
        if compiled is None:
            compiled = self._by_sizes[key] = torch.compile(_copy_of(self._body), **self._options)
        try:
            with _outside_data_parallel():
                return compiled(*arguments)
        except _failures() as error:
            self.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            logger.warning(
                "compute.fuse: the region %s cannot be compiled here and runs as plain PyTorch (%s)",
                self.name,
                self.failure,
            )
            return self._body(*arguments)


@contextmanager
def _outside_data_parallel() -> Iterator[None]:
    """PyTorch cuts graphs compiled inside DDP's forward at its buckets, which a region without parameters needs not.

    It would refuse buckets below 1 MiB for that.
    """
    kind = torch.nn.parallel.DistributedDataParallel
    active = kind._active_ddp_module
    if active is None:
        yield
        return
    kind._active_ddp_module = None
    try:
        yield
    finally:
        kind._active_ddp_module = active


@functools.lru_cache(maxsize=1)
def _failures() -> tuple[type[BaseException], ...]:
    """What a compiler that does not work raises, before anything ran."""
    from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
    from torch._inductor.exc import InductorError

    return (BackendCompilerFailed, InternalTorchDynamoError, InductorError)


def _copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, FunctionType)
    copy = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
