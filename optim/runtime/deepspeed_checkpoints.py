"""Checkpoints of a run by DeepSpeed: its own files, in a folder that is described, summed and renamed as all of ours.

trine.json           what it is, and the checksums of all files; written last
deepspeed/           DeepSpeed's save_checkpoint: model, and each rank's partition of the optimizer
rank-00000.pt        random streams, where the data stands
common.pt            the scheduler
"""

from __future__ import annotations

import io
import logging
import zlib
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trine.optim.runtime.checkpoints.description import (
    COMMON,
    described,
    forget_old,
    name_of,
    own_file,
    partial_of,
    require_files,
    series,
    standing,
    write_description,
)
from trine.optim.runtime.checkpoints.integrity import (
    Damaged,
    flush_file,
    flush_folder,
    read_whole,
    write_whole,
)
from trine.optim.runtime.checkpoints.ranks import Ranks
from trine.optim.runtime.checkpoints.reading import Loaded
from trine.optim.runtime.checkpoints.writing import make_place, plain, renamed_when_whole
from trine.optim.runtime.random_streams import random_streams, restore_random_streams
from trine.record.errors import UnreadableInput, UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["DeepSpeedKeeper"]

_TAG = "deepspeed"
_CHUNK = 1 << 24

logger = logging.getLogger("trine")


class DeepSpeedKeeper:
    """Saves and loads by DeepSpeed; offers what :class:`trine.optim.runtime.checkpoints.Keeper` does, but in the
    background. Every rank calls the same at the same time.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._ranks = Ranks(assembly.facts.rank, assembly.facts.ranks)

    def save(
        self,
        folder: Path,
        scheduler: Any,
        step: int,
        data: Callable[[], Mapping[str, Any]],
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> Path:
        """Write the run's state to ``folder``, or with ``keep`` to ``step-…`` in it, of which so many stay."""
        if asynchronous:
            raise UsageError(
                'engine.save: asynchronous=True is of engine = "torch"; DeepSpeed writes at once: leave it out'
            )
        folder = folder.resolve() if keep is None else folder.resolve() / name_of(step)
        what = f"cannot write the checkpoint {folder}"
        partial, ranks = partial_of(folder), self._ranks
        ranks.first(lambda: make_place(folder), what)
        ranks.all(lambda: self._write(partial), what)

        def finish_own() -> dict[str, Any]:
            own = {"random": random_streams(self._assembly.facts.device), "data": dict(data())}
            name = own_file(ranks.rank)
            files = {name: write_whole(partial / name, plain(own))}
            if ranks.rank == 0:
                state = None if scheduler is None else scheduler.state_dict()
                files[COMMON] = write_whole(partial / COMMON, plain({"scheduler": state}))
            return files | self._flushed(partial)

        by_rank = ranks.all(finish_own, what)
        ranks.first(lambda: self._publish(partial, folder, step, by_rank, keep), what)
        return folder

    def _write(self, partial: Path) -> None:
        self._assembly.model.save_checkpoint(str(partial), tag=_TAG, save_latest=False)  # type: ignore[operator]

    def _flushed(self, folder: Path) -> dict[str, Any]:
        """Sizes and checksums of this rank's share of DeepSpeed's files, which do not say who wrote them; they last now.

        DeepSpeed leaves them to the system, which may lose them after the folder has taken its name.
        """
        paths = sorted(path for path in (folder / _TAG).rglob("*") if path.is_file())
        mine = paths[self._ranks.rank :: self._ranks.ranks]
        for path in mine:
            flush_file(path)
        return {str(path.relative_to(folder)): _summed(path) for path in mine}

    def _publish(
        self, partial: Path, folder: Path, step: int, by_rank: list[dict[str, Any]], keep: int | None
    ) -> None:
        files: dict[str, Any] = {}
        for described_files in by_rank:
            files |= described_files
        for script in partial.glob("*.py"):  # which DeepSpeed puts beside them, to read them with
            flush_file(script)
        for each in {partial / _TAG, *(path.parent for path in (partial / _TAG).rglob("*"))}:
            flush_folder(each)
        write_description(
            partial,
            {
                "engine": "deepspeed",
                "deepspeed": version("deepspeed"),
                "step": step,
                "ranks": self._ranks.ranks,
                "configuration": self._assembly.config.to_dict(),
                "torch": torch.__version__,
                "files": files,
            },
        )
        renamed_when_whole(partial, folder)
        if keep is not None:
            forget_old(folder, keep)

    def load(self, folder: Path, scheduler: Any, newest: bool, begins: Callable[[], None]) -> Loaded:
        """Take it back; ``begins`` is called when things begin to change.

        Raises ``UnreadableInput`` on every rank for what is no such checkpoint, is damaged, or is of another number of
        ranks or another ZeRO stage, which DeepSpeed's partitions do not fit.
        """
        folder = folder.resolve()
        what = f"cannot read the checkpoint {folder}"
        if not newest:
            found = self._ranks.told(lambda: standing(folder), what, UnreadableInput)
            return self._load(found, scheduler, begins)
        candidates = self._ranks.told(lambda: series(folder), what, UnreadableInput)
        for each in candidates:
            try:
                return self._load(each, scheduler, begins)
            except Damaged as error:
                if each == candidates[-1]:
                    raise
                if self._ranks.rank == 0:
                    logger.warning("%s; the one before is tried instead", error)
        raise UnreadableInput(f"{folder} holds no checkpoint step-… that engine.save(folder, keep=…) wrote")

    def _load(self, folder: Path, scheduler: Any, begins: Callable[[], None]) -> Loaded:
        what = f"cannot read the checkpoint {folder}"
        found: dict[str, Any] = {}
        small: dict[str, Any] = {}

        def look() -> None:
            found.update(described(folder))
            self._require_fitting(folder, found)
            files = found["files"]
            require_files(folder, found)
            for name in (own_file(self._ranks.rank), COMMON):
                data = read_whole(folder / name, files[name])
                small[name] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            for name, said in list(files.items())[self._ranks.rank :: self._ranks.ranks]:
                if _summed(folder / name)["items"][0] != list(said["items"][0]):
                    raise Damaged(
                        f"the checkpoint is damaged: {folder / name} is not what was written, by its checksum"
                    )

        self._ranks.all(look, what, UnreadableInput)
        begins()
        self._ranks.all(lambda: self._read(folder), what, UnreadableInput)
        own = small[own_file(self._ranks.rank)]
        state = small[COMMON]["scheduler"]
        if scheduler is not None and state is not None:
            scheduler.load_state_dict(state)
        restore_random_streams(self._assembly.facts.device, own["random"])
        return Loaded(folder, int(found["step"]), own["data"], True)

    def _require_fitting(self, folder: Path, found: Mapping[str, Any]) -> None:
        if found.get("engine") != "deepspeed":
            raise UnreadableInput(
                f'{folder} was written by engine = "torch", and this run is by DeepSpeed: load it there, or take the weights '
                "with trine.optim.runtime.checkpoints.load_model before trine.optimize"
            )
        if found["ranks"] != self._ranks.ranks:
            raise UnreadableInput(
                f"{folder} is of {found['ranks']} ranks and this run has {self._ranks.ranks}: DeepSpeed's partitions resume on "
                'as many; checkpoints of engine = "torch" resume on any'
            )
        stage = found["configuration"].get("zero", {}).get("stage", 0)
        if stage != self._assembly.config.zero.stage:
            raise UnreadableInput(
                f"{folder} is of zero.stage = {stage} and this run of {self._assembly.config.zero.stage}: DeepSpeed's partitions "
                "resume in the same stage: set it"
            )

    def _read(self, folder: Path) -> None:
        path, _ = self._assembly.model.load_checkpoint(str(folder), tag=_TAG)  # type: ignore[operator]
        if path is None:
            raise UnreadableInput(f"DeepSpeed finds no checkpoint of its own in {folder / _TAG}")

    def settle(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held."""


def _summed(path: Path) -> dict[str, Any]:
    """Size and checksum of a file, as descriptions have them."""
    checksum = size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return {"bytes": size, "items": [[0, size, checksum]]}
