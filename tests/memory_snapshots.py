"""Memory snapshots made by a small model of the caching allocator: what PyTorch would have written, without a device.

run = Allocator()
weight = run.alloc(4 << 20, run.setup())
saved = run.alloc(8 << 20, run.forward(10))
run.free(saved, run.backward("MmBackward0"))
pickle.dumps(run.snapshot())
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

__all__ = ["MIB", "Allocator", "Frames", "python_only", "training"]

MIB = 1 << 20

Frames = list[dict[str, Any]]

_SITE = "/usr/lib/python3/site-packages/torch"


def frame(name: str, file: str = "??", line: int = 0) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


_ALLOCATE = [frame("c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long)")]
_ENGINE = [
    frame("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"),
    frame("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)"),
]
_CALL = [frame("_call_impl", f"{_SITE}/nn/modules/module.py", 1790)]
_LOOP = [frame("<module>", "/job/me/train.py", 40)]


def python_only(frames: Frames) -> Frames:
    """The same stack as recorded with ``stacks="python"``."""
    return [each for each in frames if each["line"] > 0]


class Allocator:
    """Events and blocks of one device. Every allocation has a segment of its own unless ``segment`` is given."""

    def __init__(self, device: int = 0, start_us: int = 1_700_000_000_000_000) -> None:
        self.device = device
        self.now_us = start_us
        self.events: list[dict[str, Any]] = []
        self.blocks: dict[int, dict[str, Any]] = {}
        self.annotations: list[dict[str, Any]] = []
        self._next = 0x7F00_0000_0000

    # --- stacks ---------------------------------------------------------------------------------

    @staticmethod
    def setup() -> Frames:
        return [*_ALLOCATE, frame("_apply", f"{_SITE}/nn/modules/module.py", 900), *_LOOP]

    @staticmethod
    def forward(line: int = 10, operator: str = "mm") -> Frames:
        return [
            *_ALLOCATE,
            frame(f"at::_ops::{operator}::call(at::Tensor const&)"),
            frame("forward", f"{_SITE}/nn/modules/linear.py", 125),
            *_CALL,
            frame("forward", "/job/me/model.py", line),
            *_CALL,
            *_LOOP,
        ]

    @staticmethod
    def backward(node: str = "MmBackward0") -> Frames:
        name = f"torch::autograd::generated::{node}::apply(std::vector<at::Tensor>&&)"
        if node == "AccumulateGrad":
            name = "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)"
        return [*_ALLOCATE, frame("at::_ops::mm::call(at::Tensor const&)"), frame(name), *_ENGINE]

    @staticmethod
    def optimizer(line: int = 80) -> Frames:
        return [*_ALLOCATE, frame("step", f"{_SITE}/optim/adamw.py", line), *_LOOP]

    @staticmethod
    def zero_grad() -> Frames:
        return [frame("zero_grad", f"{_SITE}/optim/optimizer.py", 900), *_LOOP]

    @staticmethod
    def communication() -> Frames:
        return [
            *_ALLOCATE,
            frame("foreach_all_gather", f"{_SITE}/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 160),
            *_CALL,
            *_LOOP,
        ]

    @staticmethod
    def plain(line: int = 50) -> Frames:
        return [*_ALLOCATE, frame("main", "/job/me/train.py", line)]

    # --- events ---------------------------------------------------------------------------------

    def event(self, action: str, address: int, size: int, frames: Frames | None = None, **more: Any) -> None:
        self.now_us += 10
        key = "device_free" if action == "oom" else "addr"
        self.events.append(
            {
                "action": action,
                key: address,
                "size": size,
                "stream": 0,
                "time_us": self.now_us,
                "frames": frames or [],
                **more,
            }
        )

    def alloc(
        self, size: int, frames: Frames | None = None, *, segment: bool = False, address: int | None = None
    ) -> int:
        rounded = -(-size // 512) * 512
        if address is None:
            address, self._next = self._next, self._next + max(rounded, 2 * MIB)
        if segment:
            self.event("segment_alloc", address, rounded, frames)
        self.event("alloc", address, size, frames)
        self.blocks[address] = {
            "address": address,
            "size": rounded,
            "requested_size": size,
            "state": "active_allocated",
            "frames": frames or [],
        }
        return address

    def free(self, address: int, frames: Frames | None = None, *, complete: bool = True) -> None:
        block = self.blocks[address]
        self.event("free_requested", address, block["requested_size"], frames)
        if complete:
            self.event("free_completed", address, block["requested_size"], frames)
            block["state"] = "inactive"
        else:
            block["state"] = "active_pending_free"

    def out_of_memory(self, size: int, free: int, frames: Frames | None = None) -> None:
        self.event("oom", free, size, frames)

    def optimizer_step(self) -> None:
        """Mark the end of an optimizer step, as PyTorch's annotations do."""
        for stage in ("START", "END"):
            self.now_us += 1
            self.annotations.append(
                {
                    "stage": stage,
                    "name": "Optimizer.step#AdamW.step",
                    "device": self.device,
                    "time_us": self.now_us,
                }
            )

    # --- the snapshot ---------------------------------------------------------------------------

    def segments(self, kind: str = "large", expandable: bool = False) -> list[dict[str, Any]]:
        """A segment for each block that was ever allocated."""
        return [
            {
                "device": self.device,
                "address": block["address"],
                "total_size": block["size"],
                "allocated_size": block["size"] if block["state"] == "active_allocated" else 0,
                "active_size": block["size"] if block["state"] != "inactive" else 0,
                "requested_size": block["requested_size"],
                "stream": 0,
                "segment_type": kind,
                "segment_pool_id": (0, 0),
                "is_expandable": expandable,
                "frames": [],
                "blocks": [dict(block)],
            }
            for block in self.blocks.values()
        ]

    def snapshot(self, forget: int = 0, expandable: bool = False) -> dict[str, Any]:
        """The snapshot; ``forget`` drops that many first events, as a full ring does."""
        return {
            "segments": self.segments(expandable=expandable),
            "device_traces": [[] for _ in range(self.device)] + [self.events[forget:]],
            "allocator_settings": {"expandable_segments": expandable, "max_split_size": -1},
            "external_annotations": list(self.annotations),
        }

    def write(self, path: Path, **options: Any) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot(**options)))
        return path


def training(steps: int = 3, leak: int = 0, annotated: bool = True) -> Allocator:
    """A training run of one 4 MiB and one 2 MiB parameter with Adam: 32 MiB of activations a step, freed in the backward
    pass; ``leak`` bytes of each step's forward are never freed."""
    run = Allocator()
    sizes = (4 * MIB, 2 * MIB)
    for size in sizes:
        run.alloc(size, run.setup())
    gradients: list[int] = []
    for step in range(steps):
        for gradient in gradients:
            run.free(gradient, run.zero_grad())
        saved = [run.alloc(8 * MIB, run.forward(10 + layer)) for layer in range(4)]
        scratch = run.alloc(MIB, run.forward(30))
        run.free(scratch, run.forward(30))
        if leak:
            run.alloc(leak, run.forward(77))
        gradients = []
        for number, block in enumerate(reversed(saved)):
            temporary = run.alloc(3 * MIB, run.backward())
            if number < len(sizes):
                gradients.append(run.alloc(sizes[number], run.backward("AccumulateGrad")))
            run.free(block, run.backward())
            run.free(temporary, run.backward())
        for size in sizes if step == 0 else ():
            run.alloc(size, run.optimizer(70))
            run.alloc(size, run.optimizer(71))
        work = run.alloc(MIB, run.optimizer(80))
        run.free(work, run.optimizer(80))
        if annotated:
            run.optimizer_step()
    return run
