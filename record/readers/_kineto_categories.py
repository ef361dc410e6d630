"""What an event is: its category, old names and new, and what a host span's name adds."""

from __future__ import annotations

import re
from typing import Any

from ..model import DEVICE_KINDS, HOST_KINDS

__all__ = [
    "ANNOTATION",
    "CATEGORIES",
    "COMMUNICATION",
    "COPY",
    "DEVICE",
    "IGNORED",
    "MEMORY",
    "OPERATOR",
    "PYTHON",
    "RECORDING_END",
    "RUNTIME",
    "SILENT",
    "SYNC_MARK",
    "action_of",
    "host_kind_of_name",
]

COMPUTE, COMMUNICATION, COPY = range(len(DEVICE_KINDS))
OPERATOR, RUNTIME, ANNOTATION, PYTHON, LOADER, SYNC, COLLECTOR = range(len(HOST_KINDS))

DEVICE = 100
MEMORY = 200
SYNC_MARK = 250
IGNORED = 300
RECORDING_END = 320

#: Flow arrows, names of threads and counters.
SILENT = ("s", "f", "t", "M", "C")

#: Categories in lower case, old names (torch 1.8, 1.9) and new.
CATEGORIES = {
    "kernel": DEVICE + COMPUTE,
    "gpu_memcpy": DEVICE + COPY,
    "gpu_memset": DEVICE + COPY,
    "memcpy": DEVICE + COPY,
    "memset": DEVICE + COPY,
    "concurrent_kernel": DEVICE + COMPUTE,
    "collective_comm": DEVICE + COMMUNICATION,
    "mtia_ccp_events": DEVICE + COMPUTE,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "runtime": RUNTIME,
    "driver": RUNTIME,
    "xpu_runtime": RUNTIME,
    "xpu_driver": RUNTIME,
    "mtia_runtime": RUNTIME,
    "glow_runtime": RUNTIME,
    "hpu_op": RUNTIME,  # the host side of a call, as Kineto's ActivityType.h has it
    "privateuse1_runtime": RUNTIME,
    "privateuse1_driver": RUNTIME,
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
    "cuda_sync": SYNC_MARK,
    "cuda_event": SYNC_MARK,
    "xpu_sync": SYNC_MARK,
    "trace": RECORDING_END,
    # Copies of host spans on device rows, markers and counters: no work of their own.
    **dict.fromkeys(
        (
            "gpu_user_annotation",
            "cuda_profiler_range",
            "external_correlation",
            "overhead",
            "mtia_insight",
            "mtia_counters",
            "xpu_scope_profiler",
            "hardware_counters",
            "cpu_instant_event",
            "ac2g",
            "async",
            "async_cpu_to_gpu",
            "async_gpu",
            "fwdbwd",
        ),
        IGNORED,
    ),
}

#: Devices that Kineto does not know have plug-ins of their own, which name their calls like the others.
_ENDINGS = (("_runtime", RUNTIME), ("_driver", RUNTIME), ("_sync", SYNC_MARK))


def action_of(category: Any) -> int | None:
    """What becomes of an event by its category as written, ``None`` of an unknown one."""
    name = str(category).lower()
    action = CATEGORIES.get(name)
    if action is None:
        action = next((found for ending, found in _ENDINGS if name.endswith(ending)), None)
    return action


#: Runtime calls that block the host until the device is done.
_BLOCKING = frozenset(
    {
        "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaThreadSynchronize",
        "cudaStreamSynchronize_ptsz", "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
        "cudaMemcpy", "cudaMemcpy2D", "cudaMemcpy3D", "cudaMemcpyToSymbol", "cudaMemcpyFromSymbol",
        "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoD_v2", "cuMemcpy",
        "hipDeviceSynchronize", "hipStreamSynchronize", "hipEventSynchronize", "hipCtxSynchronize",
        "hipMemcpy", "hipMemcpyWithStream", "hipMemcpyDtoH", "hipMemcpyHtoD", "hipMemcpyDtoD",
        "zeCommandQueueSynchronize", "zeEventHostSynchronize", "zeFenceHostSynchronize",
        "zeCommandListHostSynchronize", "urQueueFinish", "urEventWait", "piQueueFinish", "piEventsWait",
    }
)  # fmt: skip


#: Waiting for the next batch: torch's own mark, Lightning's, what people call it, and the call itself in stacks.
_LOADING = re.compile(
    r"^enumerate\(DataLoader\)|(?:^|[^a-z])(?:train_)?data_?load(?:er|ing)?(?:_next)?$", re.IGNORECASE
)
_LOADING_CALL = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): __next__$")


def host_kind_of_name(name: str, kind: int) -> int:
    """The host kind of a span whose category says ``kind``; its name may say more."""
    if kind == RUNTIME:
        return SYNC if name in _BLOCKING else kind
    if (_LOADING_CALL if kind == PYTHON else _LOADING).search(name):
        return LOADER
    if name.startswith("Python GC") or name in ("gc.collect", "<built-in function collect>"):
        return COLLECTOR
    if kind == OPERATOR and name.startswith(("ProfilerStep#", "Optimizer.")):
        return ANNOTATION  # torch 1.8 and 1.9 have one category for both
    return kind
