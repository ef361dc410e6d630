"""A planner's layout as our own configuration, and which of its columns that cannot say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trine.optim.config import Config
from trine.optim.plan.layouts import DEFAULTS, KINDS, Layouts
from trine.optim.plan.workload import Workload
from trine.record.errors import UsageError

__all__ = ["checked_row", "config_of", "stage_layers"]

#: The planner's schedules → ours, which are PyTorch's. Those without a counterpart are written as the second.
_SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "looped-bfs": "looped_bfs",
    "zb-v": "zbv",
    "dualpipe-v": "dualpipev",
    "interleaved-zb": "interleaved_zero_bubble",
}
#: Where state goes that a layout puts on a disk, whose folder no plan knows: DeepSpeed's own example names it so.
_DISK = "/local_nvme"

#: Of software whose selective recomputation is another than ours, which keeps all matmuls: in what.
_UNLIKE = {
    "none": "what is cheap is recomputed here, more than attention's scores",
    "alternate": "all matmuls are kept here, not every second: more memory, and less is recomputed",
}

Row = Mapping[str, int | str]


@dataclass(slots=True)
class _Mapping:
    """What the row comes to so far."""

    row: Row
    workload: Workload | None
    operators: str = "none"
    changes: dict[str, Any] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)

    def number(self, column: str) -> int:
        return int(self.row[column])

    def lack(self, column: str, why: str) -> None:
        self.lacks[column] = f"{column} = {self.row[column]}: {why}"


def config_of(
    row: Row, workload: Workload | None = None, *, operators: str = "none"
) -> tuple[Config, dict[str, str]]:
    """A layout's row as ``Layouts.row`` gives it → our configuration, and column → why the configuration cannot say it.

    ``workload``: whose layers are counted and whose experts are spread. ``operators``: which matmuls the planned software's
    selective recomputation keeps (:class:`~trine.optim.plan.constants.Stack`). Where the configuration has no counterpart, its nearest
    is set. Columns that are left out have the planner's defaults. Raises ``UsageError`` for a row that is no layout.
    """
    mapping = _Mapping(checked_row(row), workload, operators)
    for part in _PARTS:
        part(mapping)
    return Config().with_changes(mapping.changes), mapping.lacks


def checked_row(row: Row) -> dict[str, int | str]:
    """All columns of a row, with defaults. Raises ``UsageError`` for one that is unknown or has a value that it cannot have."""
    if not isinstance(row, Mapping):
        raise UsageError(f"a layout is a table of columns, not {type(row).__name__}")
    unknown = sorted(str(name) for name in row if name not in DEFAULTS)
    if unknown:
        raise UsageError(f"a layout has no {unknown[0]!r}: one of {', '.join(DEFAULTS)}")
    for name, value in row.items():
        wanted = str if name in KINDS else int
        if not isinstance(value, wanted) or isinstance(value, bool):
            word = "a word" if wanted is str else "a whole number"
            raise UsageError(f"{name} of a layout takes {word}, not {value!r}")
    return Layouts.of(**row).row(0)


def stage_layers(row: Row, workload: Workload) -> int:
    """Layers of the fullest pipeline rank."""
    return -(-workload.layers // int(row["pipeline"]))


def _parallel(mapping: _Mapping) -> None:
    for column in ("tensor", "context", "pipeline"):
        if mapping.number(column) > 1:
            mapping.changes[f"parallel.{column}"] = mapping.number(column)
    if mapping.number("tensor") > 1:
        # The planner's head is cut over the vocabulary, as Megatron's (Shoeybi et al. 2019, section 3).
        mapping.changes["parallel.loss"] = True
        if mapping.number("sequence"):
            mapping.changes["parallel.sequence"] = True


def _data(mapping: _Mapping) -> None:
    """Replicas, shards and experts: degrees of their own here, where the planner counts experts and shards within ``data``."""
    data, shard, stage = (mapping.number(name) for name in ("data", "shard", "zero_stage"))
    expert = _experts(mapping, data)
    rest = data // expert
    shard = shard or data
    if stage == 0 or shard * mapping.number("context") == 1:  # one rank alone shares nothing
        mapping.changes["parallel.data"] = rest
        return
    mapping.changes["zero.stage"] = stage
    shards = max(1, min(shard // expert, rest))
    if rest % shards or shards * expert != shard:
        fitting = [n for n in range(1, rest + 1) if rest % n == 0]
        shards = min(fitting, key=lambda n: (abs(n * expert - shard), n))
        mapping.lack("shard", f"beside expert = {expert} of data = {data} ranks it is {shards * expert} here")
    if shards < rest:
        mapping.changes |= {"parallel.data": rest // shards, "parallel.shard": shards}


def _experts(mapping: _Mapping, data: int) -> int:
    expert = mapping.number("expert")
    if expert == 1:
        return 1
    if mapping.workload is not None and not mapping.workload.is_mixture:
        mapping.lack("expert", f"{mapping.workload.name} has no experts: left out")
        return 1
    found = max(n for n in range(1, min(expert, data) + 1) if data % n == 0 and expert % n == 0)
    if found != expert:
        mapping.lack(
            "expert",
            f"experts are spread over ranks with different batches here, and there are {data}: written as {found}",
        )
    if found > 1:
        mapping.changes["parallel.expert"] = found
    return found


def _schedule(mapping: _Mapping) -> None:
    count = mapping.number("microbatches")
    whole = mapping.number("data") * mapping.number("micro_batch") * count
    mapping.changes["accumulation.global_batch"] = whole
    if mapping.number("pipeline") == 1:
        mapping.changes["accumulation.micro_batch"] = mapping.number("micro_batch")
        return
    mapping.changes["parallel.microbatches"] = count
    schedule = str(mapping.row["schedule"])
    ours = _SCHEDULES.get(schedule)
    if ours is None:
        mapping.lack("schedule", 'PyTorch has no such schedule: written as "1f1b"')
    mapping.changes["parallel.schedule"] = ours or "1f1b"
    if mapping.number("chunks") > 1 and ours not in (None, "1f1b", "gpipe"):
        mapping.changes["parallel.chunks"] = mapping.number("chunks")


def _recomputation(mapping: _Mapping) -> None:
    mode = str(mapping.row["recompute"])
    if mode == "full":
        mapping.changes["checkpointing.mode"] = "full"
    elif mode == "selective":
        mapping.changes["checkpointing.mode"] = "selective"
        if mapping.operators in _UNLIKE:
            mapping.lack("recompute", _UNLIKE[mapping.operators])
    elif mode == "budget":
        _some_layers(mapping)


def _some_layers(mapping: _Mapping) -> None:
    """So many layers of each stage: every n-th block, where that comes to as many."""
    layers = mapping.number("recomputed_layers")
    if mapping.workload is None:
        mapping.changes["checkpointing.mode"] = "full"
        mapping.lack("recompute", "how many layers a stage has is not known: written as all of them")
        return
    most = stage_layers(mapping.row, mapping.workload)
    if layers == 0:
        return
    mapping.changes["checkpointing.mode"] = "full"
    every = max(1, most // layers)  # no fewer than the plan has
    if every > 1:
        mapping.changes["checkpointing.every"] = every
    if -(-most // every) != layers:
        mapping.lack(
            "recomputed_layers",
            f"one block in {every} is recomputed, {-(-most // every)} of a stage's {most}"
            if every > 1
            else f"all {most} blocks of a stage are recomputed",
        )


def _precision(mapping: _Mapping) -> None:
    """The planner's low precision keeps float32 masters, as mixed-precision optimizers do (Micikevicius et al. 2018)."""
    precision = str(mapping.row["precision"])
    if precision == "tf32":
        mapping.changes["precision.tf32"] = True
    elif precision == "fp32":
        mapping.changes["precision.tf32"] = False
    else:
        dtype = "bf16" if precision == "fp8" else precision
        mapping.changes |= {"precision.dtype": dtype, "precision.master_weights": True}
        if precision == "fp8":
            mapping.changes["precision.float8"] = True
        if precision == "fp16":
            mapping.changes["precision.loss_scale"] = "auto"


def _offload(mapping: _Mapping) -> None:
    for column, key in (
        ("optimizer_offload", "offload.optimizer"),
        ("parameter_offload", "offload.parameters"),
        ("activation_offload", "offload.activations"),
    ):
        tier = str(mapping.row[column])
        if tier == "remote":
            mapping.lack(column, "there is no tier in another node's memory: written as cpu, this node's")
            tier = "cpu"
        if tier == "none":
            continue
        mapping.changes[key] = tier
        if tier == "nvme":
            mapping.changes["offload.path"] = _DISK
            mapping.lack(column, f"a plan knows no folder: put the one on your disk in the place of {_DISK}")


def _communication(mapping: _Mapping) -> None:
    size = mapping.number("bucket_bytes")
    if size:
        mapping.changes["communication.bucket_mib"] = size / 2**20
    compression = str(mapping.row["compression"])
    if compression != "none":
        mapping.changes["communication.compression"] = compression
    if mapping.number("two_level"):
        mapping.changes["communication.algorithm"] = "two_level"


_PARTS: tuple[Callable[[_Mapping], None], ...] = (
    _parallel,
    _data,
    _schedule,
    _recomputation,
    _precision,
    _offload,
    _communication,
)
