"""Writing a checkpoint: planned together, written by each rank, published by the first when all have written.

Everything goes to a folder of another name. Files are flushed to the disk, then the description is written, then the
folder takes its name: a kill at any moment, of any rank, leaves the checkpoint before as it was.
"""

from __future__ import annotations

import io
import logging
import pickle
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from trine.optim.runtime.checkpoints.description import (
    COMMON,
    DESCRIPTION,
    forget_old,
    own_file,
    partial_of,
    previous_of,
    write_description,
)
from trine.optim.runtime.checkpoints.integrity import Writer, flush_folder, write_whole
from trine.optim.runtime.checkpoints.parts import Part, SavePlanner, parts_of
from trine.optim.runtime.checkpoints.ranks import Ranks
from trine.optim.runtime.training_state import (
    buffer_names,
    common_state,
    names_by_group,
    own_state,
    ranks_own,
    reordered_state,
    state_tensors,
)
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Job", "Plans", "make_place", "plain", "prepared", "renamed_when_whole", "written"]

logger = logging.getLogger("trine")


@dataclass(slots=True)
class Plans:
    """What was planned at the last save: used again while every rank holds the same tensors as then."""

    key: tuple[Any, ...] = ()
    mine: SavePlan | None = None
    metadata: Metadata | None = None  # on rank 0
    names: list[list[str]] = field(default_factory=list)  # of all ranks' optimizer groups; on rank 0


@dataclass(slots=True)
class Job:
    """One save: everything that is needed to write it, at once or in the background."""

    folder: Path
    what: str  # cannot be done, in errors
    step: int
    keep: int | None
    planner: SavePlanner
    plans: Plans
    own: bytes
    common: bytes  # on rank 0
    values: dict[str, Any]  # of the description

    @property
    def partial(self) -> Path:
        """Where it is written."""
        return partial_of(self.folder)


def prepared(
    folder: Path,
    assembly: Assembly,
    scheduler: Any,
    step: int,
    keep: int | None,
    ranks: Ranks,
    plans: Plans,
    data: Callable[[], Mapping[str, Any]],
) -> Job:
    """Plan together what each rank writes, and make place for it. Called by every rank.

    Raises ``UsageError`` on every rank when one cannot, or when ``folder`` holds something else.
    """
    what = f"cannot write the checkpoint {folder}"
    parts: list[Part] = []
    own: list[bytes] = []

    def begin() -> tuple[bool, bool, int]:
        for settle in assembly.settle:
            settle()
        if ranks.rank == 0:
            make_place(folder)
        tensors = state_tensors(assembly)
        parts.extend(parts_of(tensors, reordered_state(assembly, tensors)))
        own.append(plain({**own_state(assembly), "data": dict(data())}))
        same = plans.mine is not None and plans.key == tuple(part.key for part in parts)
        return same, bool(ranks_own(assembly)), assembly.facts.layout.data_rank

    agreed = ranks.all(begin, what)
    planner = SavePlanner(parts)
    planner.create_local_plan()
    if not all(same for same, _, _ in agreed):
        plans.key = tuple(part.key for part in parts)
        _plan(planner, partial_of(folder), assembly, ranks, plans, what)
    loose: list[Any] = []
    if any(has for _, has, _ in agreed):
        loose = ranks.gathered(lambda: ranks_own(assembly), what)
    common = b""

    def together() -> bytes:
        return plain(common_state(assembly, scheduler, plans.names, ranks.results(loose)))

    common = ranks.first(together, what) or b""
    layout = assembly.facts.layout
    values = {
        "step": step,
        "ranks": ranks.ranks,
        "layout": {name: layout.size(name) for name in ("pipeline", "expert", "context", "tensor")},
        "data_ranks": [data_rank for _, _, data_rank in agreed],
        "configuration": assembly.config.to_dict(),
        "torch": torch.__version__,
    }
    return Job(folder, what, step, keep, planner, plans, own[0], common, values)


def make_place(folder: Path) -> None:
    """Room to write ``folder`` beside it. Raises ``UsageError`` where something else is there."""
    before, partial = previous_of(folder), partial_of(folder)
    if not (folder / DESCRIPTION).exists():
        if folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there and is no checkpoint: save to another place")
        if (before / DESCRIPTION).exists():  # a kill between two names: it is the only one that is whole
            if folder.exists():
                folder.rmdir()
            before.rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def plain(values: Mapping[str, Any]) -> bytes:
    """Pickled; it is read without trusting it, so it must be plain: that is found now, and not at the resume."""
    buffer = io.BytesIO()
    torch.save(_without_tensors(values), buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("GLOBAL ")[-1].split(" ")[0]
        raise UsageError(
            f"a checkpoint holds tensors, numbers and strings, and the scheduler, a parameter group, a technique or the "
            f"loader has {reason}: leave it out of its state_dict()"
        ) from error
    buffer = io.BytesIO()
    torch.save(dict(values), buffer)
    return buffer.getvalue()


def _without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return None
    if type(value) is dict:
        return {key: _without_tensors(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(each) for each in value)
    return value


def _plan(
    planner: SavePlanner, partial: Path, assembly: Assembly, ranks: Ranks, plans: Plans, what: str
) -> None:
    """DCP's plan of who writes what: made by rank 0, which is told what each rank holds."""
    found = ranks.gathered(lambda: (planner.plan, names_by_group(assembly), buffer_names(assembly)), what)
    made: list[SavePlan] = []

    def globally() -> None:
        results = ranks.results(found)
        buffers = {name for _, _, names in results for name in names}
        finished, plans.metadata = planner.create_global_plan(
            _buffers_of_the_first([plan for plan, _, _ in results], buffers)
        )
        made.extend(Writer(partial).prepare_global_plan(finished))
        plans.names = _union([names for _, names, _ in results])

    ranks.first(globally, what)
    plans.mine = ranks.scattered(made)


def _buffers_of_the_first(plans: list[SavePlan], buffers: set[str]) -> list[SavePlan]:
    """The plans with each buffer in that of the first rank which has it.

    Of what several ranks hold DCP has any of them write it, by size. Running statistics of batch norms differ between
    ranks, and the first's are those that all take over before the next forward.
    """
    seen: set[MetadataIndex] = set()
    kept: list[SavePlan] = []
    for plan in plans:
        kept.append(replace(plan, items=[item for item in plan.items if item.index not in seen]))
        seen.update(item.index for item in plan.items if item.index.fqn in buffers)
    return kept


def _union(by_rank: list[list[list[str]]]) -> list[list[str]]:
    """Each group's names on any rank, in the ranks' order, each once."""
    groups: list[dict[str, None]] = [{} for _ in by_rank[0]]
    for names in by_rank:
        for group, more in zip(groups, names, strict=True):
            group.update(dict.fromkeys(more))
    return [list(group) for group in groups]


def written(job: Job, ranks: Ranks) -> Path:
    """Write what was prepared; every rank calls it, at once or in the background. The checkpoint's folder.

    Raises ``UsageError`` on every rank when any cannot write; what was there before is still there.
    """
    writer = Writer(job.partial)

    def write() -> tuple[list[Any], dict[str, Any]]:
        assert job.plans.mine is not None
        writer.set_up_storage_writer(ranks.rank == 0, rank=ranks.rank)
        results = writer.write_data(job.planner.finish_plan(job.plans.mine), job.planner).wait()
        name = own_file(ranks.rank)
        files = {name: write_whole(job.partial / name, job.own)}
        if ranks.rank == 0:
            files[COMMON] = write_whole(job.partial / COMMON, job.common)
        flush_folder(job.partial)
        return results, files | writer.described

    try:
        outcomes = ranks.gathered(write, job.what)
        ranks.first(lambda: _publish(job, writer, ranks.results(outcomes)), job.what)
    except UsageError:
        if ranks.rank == 0:  # every rank has ended its part, and what it wrote would only fill the disk
            shutil.rmtree(job.partial, ignore_errors=True)
        raise
    return job.folder


def _publish(job: Job, writer: Writer, results: list[Any]) -> None:
    assert job.plans.metadata is not None
    writer.finish(job.plans.metadata, [found for found, _ in results])
    files: dict[str, Any] = {}
    for _, described in results:
        files |= described
    files |= writer.described
    write_description(job.partial, job.values | {"files": files})
    renamed_when_whole(job.partial, job.folder)
    if job.keep is not None:
        forget_old(job.folder, job.keep)


def renamed_when_whole(partial: Path, folder: Path) -> None:
    """Put what was written in its place; a kill at any moment leaves it, or the one before."""
    before = previous_of(folder)
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    partial.rename(folder)
    flush_folder(folder.parent)
    shutil.rmtree(before, ignore_errors=True)
