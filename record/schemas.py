"""The tables of a rank: their columns, and what stands in them.

Times are integer nanoseconds, sizes bytes, as :mod:`trine.record.model` says, which stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

__all__ = ["DEVICE_KINDS", "HOST_KINDS", "PHASES", "SCHEMAS", "ColumnType"]

#: ``device.kind`` is an index into this.
DEVICE_KINDS = ("compute", "communication", "copy")

#: ``host.kind`` is an index into this.
HOST_KINDS = (
    "operator",
    "runtime",
    "annotation",
    "python",
    "loader",
    "sync",
    "collector",
)

#: Phases partition a step exactly, in this order of display.
PHASES = ("data", "copy", "forward", "backward", "optimizer", "exposed_communication", "other")

#: Column types: int64, float64, kind (uint8 code into a tuple above), text (int32 code into Strings).
ColumnType = Literal["int64", "float64", "kind", "text"]

SCHEMAS: Mapping[str, Mapping[str, ColumnType]] = {
    # A training step. phase_*_ns sum to end_ns - start_ns; all MISSING where phases are unknown.
    "steps": {
        "index": "int64",
        "start_ns": "int64",
        "end_ns": "int64",
        **{f"phase_{name}_ns": "int64" for name in PHASES},
        "tokens": "int64",
        "padding_tokens": "int64",  # of tokens: those that only fill sequences up
        "samples": "int64",
        "loss": "float64",
        "flops": "float64",  # model FLOPs counted in this step on this rank, NaN where not counted
    },
    # A span of device work. launch: row in host (-1 none). step: index of the launching step.
    "device": {
        "start_ns": "int64",
        "end_ns": "int64",
        "kind": "kind",
        "device": "int64",
        "stream": "int64",
        "name": "text",
        "launch": "int64",
        "step": "int64",
        "bytes": "int64",
        "correlation": "int64",
        # The launch's shape, MISSING where the source does not say: blocks in the grid, threads a block, and the
        # node of a CUDA or HIP graph that this work is. occupancy: achieved, estimated by the profiler, 0..1.
        "grid_blocks": "int64",
        "block_threads": "int64",
        "graph_node": "int64",
        "occupancy": "float64",
    },
    # A span of host work. parent: row of the enclosing span on the same thread (-1 none).
    "host": {
        "start_ns": "int64",
        "end_ns": "int64",
        "kind": "kind",
        "thread": "int64",
        "name": "text",
        "parent": "int64",
        "module": "text",
        "correlation": "int64",
        "shapes": "text",
        "stack": "text",
        "step": "int64",
        "types": "text",  # dtypes of the inputs, as the source wrote them
        "sequence": "int64",  # autograd's number: a forward operator and its backward share one
        "forward_thread": "int64",  # of a backward operator: the thread that ran its forward
        "flops": "float64",  # of the operator, as the source counted them
    },
    # One collective or point-to-point on this rank. device_row: row in device (-1 none).
    # sequence: the source's own order number in its group, else MISSING.
    # bytes: as nccl-tests counts them (all-gather output, reduce-scatter input, else the buffer).
    "collectives": {
        "operation": "text",
        "group": "text",
        "sequence": "int64",
        "peer": "int64",
        "in_bytes": "int64",
        "out_bytes": "int64",
        "bytes": "int64",
        "dtype": "text",
        "issued_ns": "int64",
        "start_ns": "int64",
        "end_ns": "int64",
        "state": "text",
        "device_row": "int64",
        "host_row": "int64",
        "step": "int64",
        "label": "text",
        "stack": "text",
    },
    # An allocation (bytes > 0) or a release (bytes < 0); totals are those after it.
    "memory": {
        "time_ns": "int64",
        "address": "int64",
        "bytes": "int64",
        "category": "text",
        "owner": "text",
        "device": "int64",  # -1 is the host
        "allocated_bytes": "int64",
        "reserved_bytes": "int64",
        # alloc, free_requested, free, segment_alloc, segment_free, out_of_memory, snapshot; None: by the sign of bytes.
        # held: alive before the first event; its time is that event's, and its stack its allocation's where known.
        # Segments count under reserved_bytes, not under allocated_bytes.
        "action": "text",
        "stream": "int64",
        "stack": "text",
    },
    # A stretch of device memory as the allocator held it when a snapshot was taken: a block, or (whole) a segment.
    "segments": {
        "segment": "int64",  # address of the segment that it belongs to
        "address": "int64",
        "bytes": "int64",
        "requested_bytes": "int64",
        "state": "text",  # segment, active, pending_free, inactive
        "device": "int64",
        "stream": "int64",
        "pool": "text",  # small, large, expandable, and the private pool where there is one
        "owner": "text",
        "stack": "text",
    },
    # A stage's work on one micro-batch.
    "microbatches": {
        "stage": "int64",
        "index": "int64",
        "direction": "text",  # forward, backward, backward_input, backward_weight
        "start_ns": "int64",
        "end_ns": "int64",
        "step": "int64",
    },
    # A wait on the device or for it. kind: stream_wait (a stream waits for an event of another), event_sync,
    # stream_sync, device_sync (the host waits). source_correlation: of the call that recorded the event.
    "synchronizations": {
        "kind": "text",
        "start_ns": "int64",
        "end_ns": "int64",
        "device": "int64",
        "stream": "int64",
        "event": "int64",
        "source_stream": "int64",
        "source_correlation": "int64",
        "correlation": "int64",
    },
    # An entry of PyTorch's flight recorder: a collective as it was enqueued, whatever became of it.
    "flight_recorder": {
        "record": "int64",
        "group": "text",
        "sequence": "int64",  # of collectives in the group
        "peer_sequence": "int64",  # of point-to-points in the group
        "is_peer": "int64",  # 1 for point-to-point, else 0
        "operation": "text",
        "in_shapes": "text",
        "out_shapes": "text",
        "in_types": "text",
        "out_types": "text",
        "state": "text",  # scheduled, started, completed
        "created_ns": "int64",
        "started_ns": "int64",
        "completed_ns": "int64",
        "timeout_ns": "int64",
        "thread": "text",
        "stack": "text",
    },
    # A dependency between rows of host ("host:12") or device ("device:7").
    "edges": {"kind": "text", "from": "text", "to": "text"},
    # A stretch of the run that trains nothing, in a step or between two: evaluation, checkpoint, profiling, setup,
    # other; and work, which is none of these whatever it looks like. name: what was called.
    "regions": {"kind": "text", "name": "text", "start_ns": "int64", "end_ns": "int64"},
    # A periodic reading. The unit ends the metric's name, for example memory/allocated_bytes.
    "samples": {"time_ns": "int64", "metric": "text", "value": "float64"},
}
