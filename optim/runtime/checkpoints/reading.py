"""Reading a checkpoint: verified, by name and place, into whatever layout this run has."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trine.optim.runtime.adoption import first_names
from trine.optim.runtime.checkpoints.description import (
    COMMON,
    described,
    own_file,
    require_files,
    series,
    standing,
)
from trine.optim.runtime.checkpoints.integrity import Damaged, Reader, read_whole
from trine.optim.runtime.checkpoints.parts import LoadPlanner, parts_of
from trine.optim.runtime.checkpoints.ranks import Ranks
from trine.optim.runtime.checkpoints.slots import (
    Rounded,
    empty_slots,
    put_masters,
    put_slots,
    require_fitting,
    require_no_others,
    rounded,
    tell_of_rounding,
)
from trine.optim.runtime.training_state import (
    masters_of,
    match_twins,
    model_tensors,
    names_by_group,
    reordered_state,
    require_same_groups,
    restore_common_state,
    restore_own_state,
)
from trine.record.errors import UnreadableInput

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["Loaded", "load", "load_model"]

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, and where the data stood."""

    folder: Path
    step: int
    data: Mapping[str, Any]
    same_ranks: bool  # as many, and laid out alike


def load(
    folder: Path,
    assembly: Assembly,
    scheduler: Any,
    ranks: Ranks,
    newest: bool,
    begins: Callable[[], None],
) -> Loaded:
    """Take a run's state back. Called by every rank; ``begins`` when things begin to change.

    ``newest``: the newest of the checkpoints in ``folder`` that is not damaged. Raises ``UnreadableInput`` on every rank
    for what is no checkpoint, is damaged, or is of another model or optimizer; nothing has been changed where names,
    shapes or groups do not fit, or files are missing.
    """
    what = f"cannot read the checkpoint {folder}"
    if not newest:
        found = ranks.told(lambda: standing(folder), what, UnreadableInput)
        return _load(found, assembly, scheduler, ranks, begins)
    candidates = ranks.told(lambda: series(folder), what, UnreadableInput)
    for place, each in enumerate(candidates):
        try:
            return _load(each, assembly, scheduler, ranks, begins)
        except Damaged as error:
            if place + 1 == len(candidates):
                raise
            if ranks.rank == 0:
                logger.warning("%s; %s is tried instead", error, candidates[place + 1].name)
    raise UnreadableInput(
        f"{folder} holds no checkpoint step-… that engine.save(folder, keep=…) wrote and that is whole"
    )


class _Source:
    """An opened checkpoint, as this rank reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.described = described(folder)
        if self.described.get("engine") == "deepspeed":
            raise UnreadableInput(
                f'{folder} was written by engine = "deepspeed": load it under that engine, with the same zero.stage and ranks'
            )
        self.files: dict[str, Any] | None = self.described.get("files")
        self.reader = Reader(folder, self.files)
        self.saved = _saved_tensors(self.reader)

    def small(self, name: str) -> dict[str, Any]:
        """A file of small things, verified."""
        if self.files is not None and name not in self.files:
            raise Damaged(f"the checkpoint is damaged: {self.folder / name} is not in its description")
        data = read_whole(self.folder / name, None if self.files is None else self.files[name])
        try:
            found: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise Damaged(f"{self.folder / name} of the checkpoint cannot be read: {reason}") from error
        return found

    def is_laid_out_as(self, assembly: Assembly) -> bool:
        """Whether each rank has what the same rank had."""
        layout = assembly.facts.layout
        before = self.described.get("layout", {})
        return self.described["ranks"] == layout.ranks and all(
            layout.size(name) == before.get(name, 1) for name in ("pipeline", "expert", "context", "tensor")
        )

    def rank_for(self, assembly: Assembly) -> int:
        """The rank that saved what is this rank's own: itself, or the first that saw the same part of the data."""
        if self.is_laid_out_as(assembly):
            return assembly.facts.rank
        places: list[int] = self.described.get("data_ranks") or list(range(self.described["ranks"]))
        return places.index(assembly.facts.layout.data_rank % (max(places) + 1))

    def own_of_all(self) -> list[Mapping[str, Any]]:
        """What every rank that saved had of its own."""
        return [self.small(own_file(rank)) for rank in range(self.described["ranks"])]


def _load(
    folder: Path, assembly: Assembly, scheduler: Any, ranks: Ranks, begins: Callable[[], None]
) -> Loaded:
    what = f"cannot read the checkpoint {folder}"
    opened: list[Any] = []

    def look() -> tuple[list[str], list[list[str]], Rounded]:
        for settle in assembly.settle:
            settle()
        source = _Source(folder)
        if ranks.rank == 0:
            require_files(folder, source.described)
        own = source.small(own_file(source.rank_for(assembly)))
        common = own if source.files is None else source.small(COMMON)
        wanted = model_tensors(assembly.model, assembly.first_names)
        masters = masters_of(assembly)
        wanted.update((key, value) for key, value in masters.items() if key in source.saved)
        require_fitting(folder, wanted, source.saved)
        opened.extend((source, own, common, wanted, masters))
        keys = [key for key in wanted if key.startswith("model/")]
        return keys, names_by_group(assembly), rounded(wanted, source.saved)

    # A file may be damaged for one rank alone, and the others would wait for it.
    found = ranks.all(look, what, UnreadableInput)
    source, own, common, wanted, masters = opened

    def compare() -> None:
        require_no_others(folder, {key for keys, _, _ in found for key in keys}, source.saved)
        ours = [
            [name for names in group for name in names]
            for group in zip(*(n for _, n, _ in found), strict=True)
        ]
        require_same_groups(assembly, ours, common)
        slots.update(empty_slots(assembly, source.saved))  # one rank alone may have no memory for it

    slots: dict[str, Any] = {}
    ranks.all(compare, what, UnreadableInput)
    wanted.update((full, each[0].value) for full, each in slots.items())
    if ranks.rank == 0:
        tell_of_rounding(folder, {name: types for _, _, own in found for name, types in own.items()})
    begins()
    planner = LoadPlanner(parts_of(wanted, reordered_state(assembly, wanted)))
    ranks.all(lambda: _read(source, planner), what, UnreadableInput)
    put_masters(assembly, masters, source.saved)
    put_slots(assembly, slots)
    match_twins(assembly)
    for take_over in assembly.filled:
        take_over()
    same = source.is_laid_out_as(assembly)
    restore_common_state(assembly, scheduler, common)
    ranks.all(
        lambda: restore_own_state(assembly, own, None if same else source.own_of_all), what, UnreadableInput
    )
    data = own.get("data", {}) if source.files is not None else {}
    return Loaded(folder, int(source.described["step"]), data, same)


def _read(source: _Source, planner: LoadPlanner) -> None:
    try:
        source.reader.read_into(planner)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Damaged(f"the checkpoint {source.folder} is damaged: {reason}") from error


def load_model(folder: str | Path, model: nn.Module) -> int:
    """Only the model's tensors, into a plain model in this process alone, as for an evaluation; returns the step.

    However the run was laid out that saved them. Raises ``UnreadableInput`` as :func:`load` does.
    """
    source = _Source(standing(Path(folder)))
    wanted = model_tensors(model, first_names(model))
    require_fitting(folder, wanted, source.saved)
    require_no_others(folder, set(wanted), source.saved)
    tell_of_rounding(folder, rounded(wanted, source.saved))
    _read(source, LoadPlanner(parts_of(wanted, {})))
    return int(source.described["step"])


def _saved_tensors(reader: Reader) -> dict[str, TensorStorageMetadata]:
    """Name → DCP's description (``size``, ``properties.dtype``) of every tensor in the checkpoint."""
    try:
        found = reader.read_metadata().state_dict_metadata
    except Damaged:
        raise
    except Exception as error:  # a pickle of an old checkpoint: any error can come of a damaged one
        raise Damaged(f"{reader.path}/.metadata of the checkpoint cannot be read: {error}") from error
    return {key: value for key, value in found.items() if isinstance(value, TensorStorageMetadata)}
