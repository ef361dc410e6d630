"""What kind of work a device kernel does, from its name.

Collective metadata, where a trace has it, comes first; this table is for the rest: communication
libraries whose kernels carry no metadata, and one-sided or fused communication that no process
group ever sees. Adding a library is one line here and one in the test.

Names were taken from the libraries' sources: NCCL and RCCL (``ncclKernel_``, ``ncclDevKernel_``,
``ncclSymk``), oneCCL, HCCL (``hcom_``), MSCCL and MSCCL++, NVSHMEM and rocSHMEM, DeepEP, PyTorch's
symmetric memory (``multimem_…``, ``one_shot_…``), the custom all-reduces of vLLM, TensorRT-LLM, FlashInfer and
quick-reduce, and TransformerEngine's userbuffers.
"""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["is_communication", "is_launch", "operation_of"]

#: Compiled kernels of TorchInductor are named after the operators they fuse, collectives included,
#: yet never communicate themselves.
_COMPUTE = re.compile(r"^triton_(?:poi|red|per|tem|mm|for|spl)_|^(?:aten|prims)::")

_COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|\bccl::|hccl|hcom_|mscclk|mscclpp|msccl_|nvshmem|rocshmem|deep_ep|"
    r"multimem_|symm_mem|symmetric_memory|"
    r"(?:one|two)_?shot_(?:all_?reduce|reduce_?scatter|all_?gather|all_?to_?all)|"
    r"cross_device_reduce|quickreduce|quick_all_?reduce|all_?reduce_(?:fusion|prototype|kernel|lamport)|"
    r"lamport_?style|allreduce_?lamport|trtllm_?(?:mnnvl_)?all_?(?:reduce|to_?all)|twoshot_all_?reduce|oneshot_all_?reduce|"
    r"userbuffers_|moe_?all_?to_?all|all_to_all_vdev|"
    r"\b(?:put|wait|stream_write)_signal_kernel|nccl_symm",
    re.IGNORECASE,
)

#: First match wins, so that "reduce" comes after what contains it.
_OPERATIONS = tuple(
    (re.compile(pattern, re.IGNORECASE), operation)
    for pattern, operation in (
        (r"all_?reduce|cross_device_reduce|quickreduce|userbuffers_\w*sum", "all_reduce"),
        (r"reduce_?scatter", "reduce_scatter"),
        (r"all_?gather", "all_gather"),
        (r"all_?to_?all|deep_ep.*(?:dispatch|combine)", "all_to_all"),
        (r"broadcast|bcast", "broadcast"),
        (r"send_?recv", "send_recv"),
        (r"nccl\w*_reduce|hcom_reduce|oneccl_reduce", "reduce"),
        (r"nccl\w*_gather", "gather"),
        (r"nccl\w*_scatter", "scatter"),
        (r"barrier|wait_signal|put_signal", "barrier"),
        (r"send\b", "send"),
        (r"recv\b", "recv"),
    )
)


#: Calls that put work on a device: cudaLaunchKernelExC, cuLaunchKernel, hipExtModuleLaunchKernel, cudaGraphLaunch,
#: hipMemcpyWithStream, cudaMemsetAsync, cudaMemcpyBatchAsync, urEnqueueKernelLaunch, zeCommandListAppendMemoryCopy.
_LAUNCH = re.compile(
    r"Launch(?!HostFunc)|Mem(?:cpy|set)|Enqueue(?!EventsWait)|Append(?!Wait|Signal|Barrier|Event)"
)


@lru_cache(maxsize=4096)
def is_launch(name: str) -> bool:
    """Whether a runtime or driver call of this name puts work on a device."""
    return _LAUNCH.search(name) is not None


@lru_cache(maxsize=65536)
def is_communication(name: str) -> bool:
    """Whether a kernel of this name moves data between devices of a group."""
    return _COMMUNICATION.search(name) is not None and _COMPUTE.match(name) is None


@lru_cache(maxsize=65536)
def operation_of(name: str) -> str | None:
    """The collective that a communication kernel's name tells, or ``None``.

    ``send_recv`` is what NCCL calls every point-to-point kernel, an all-to-all's included.
    """
    for pattern, operation in _OPERATIONS:
        if pattern.search(name):
            return operation
    return None
