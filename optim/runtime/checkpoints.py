"""Checkpoints: a folder written by PyTorch's distributed checkpoint (DCP), whole or not there at all.

    trine.json        what it is: schema, step, ranks, configuration; written last
    .metadata, *.distcp   DCP's: tensors by the names of :mod:`trine.optim.runtime.training_state`
    rank-00000.pt     what is a rank's own: random streams, error feedback; scheduler and groups

Everything is written under another name and renamed when all ranks are done, so a checkpoint that was cut short is never
taken for a whole one. Tensors go by name and shape, so a run sharded one way reads what was saved by another.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trine.optim.runtime.training_state import (
    masters_of,
    model_tensors,
    optimizer_slots,
    rank_state,
    require_same_groups,
    restore_rank_state,
    state_tensors,
)
from trine.record.errors import TrineError, UnreadableInput, UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["SCHEMA", "load", "load_model", "restore", "save", "snapshot"]

SCHEMA = "trine.checkpoint/1"
_DESCRIPTION = "trine.json"

#: (parameter's name, key) → optimizer state.
Slots = dict[tuple[str, str], torch.Tensor]

_Result = TypeVar("_Result")


def save(folder: str | Path, assembly: Assembly, scheduler: Any, step: int) -> Path:
    """Write the run's state to ``folder``, replacing a checkpoint that is there. Called by every rank; synchronous.

    Ranks need a file system in common. Raises ``UsageError`` on every rank when any cannot write, or when ``folder``
    holds something else; what was there before is then still there.
    """
    folder = Path(folder).resolve()
    partial = folder.with_name(folder.name + ".partial")
    rank, ranks = assembly.facts.rank, assembly.facts.ranks
    own = rank_state(assembly, scheduler)

    def prepare() -> None:
        if (
            folder.exists()
            and not (folder / _DESCRIPTION).exists()
            and (folder.is_file() or any(folder.iterdir()))
        ):
            raise UsageError(f"{folder} is there and is no checkpoint: save to another place")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    what = f"cannot write the checkpoint {folder}"
    _together(prepare if rank == 0 else _nothing, ranks, what)
    _together(lambda: _write_own(partial, rank, own), ranks, what)
    _write_tensors(partial, folder, assembly)
    described = {
        "schema": SCHEMA,
        "step": step,
        "ranks": ranks,
        "configuration": assembly.config.to_dict(),
        "torch": torch.__version__,
    }
    _together((lambda: _publish(partial, folder, described)) if rank == 0 else _nothing, ranks, what)
    return folder


def load(folder: str | Path, assembly: Assembly, scheduler: Any) -> int:
    """Take the run's state back from ``folder`` and return the step it was saved at. Called by every rank.

    Raises ``UnreadableInput`` for what is no checkpoint, is cut short, or is of another model or optimizer; where the
    names or shapes do not fit, nothing has been changed.
    """
    folder = Path(folder)
    ranks, rank = assembly.facts.ranks, assembly.facts.rank
    masters = masters_of(assembly)

    def look() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, torch.Tensor], Slots]:
        described = _described(folder)
        own = _read_own(folder, rank if described["ranks"] == ranks else 0)
        saved = _saved_tensors(folder)
        return described, own, saved, *_wanted(assembly, masters, folder, saved, own)

    # A file may be damaged for one rank alone, and the others would wait for it in DCP.
    what = f"cannot read the checkpoint {folder}"
    described, own, saved, wanted, slots = _together(look, ranks, what, UnreadableInput)
    _read_tensors(folder, wanted, ranks)
    _put_masters(assembly, masters, saved)
    _put_slots(assembly, slots)
    restore_rank_state(assembly, scheduler, own, described["ranks"] == ranks)
    return int(described["step"])


def _wanted(
    assembly: Assembly,
    masters: Mapping[str, torch.Tensor],
    source: object,
    saved: Mapping[str, Any],
    own: Mapping[str, Any],
) -> tuple[dict[str, torch.Tensor], Slots]:
    """Name → tensor to fill, and those of them that are optimizer state. Raises ``UnreadableInput`` for another run's."""
    wanted = model_tensors(assembly.model)
    wanted.update((key, value) for key, value in masters.items() if key in saved)
    _require_fitting(source, wanted, saved)
    require_same_groups(assembly, own)
    slots = _empty_slots(assembly, saved)
    for (name, key), value in slots.items():
        wanted[f"optimizer/{name}/{key}"] = value
    return wanted, slots


def load_model(folder: str | Path, model: nn.Module) -> int:
    """Only the model's tensors, into a plain model in this process alone, as for an evaluation; returns the step.

    However the run was sharded that saved them. Raises ``UnreadableInput`` as :func:`load` does.
    """
    folder = Path(folder)
    described = _described(folder)
    wanted = model_tensors(model)
    _require_fitting(folder, wanted, _saved_tensors(folder))
    _read_tensors(folder, wanted, 1)
    return int(described["step"])


# --- in memory ---------------------------------------------------------------------------------


def snapshot(assembly: Assembly, scheduler: Any, step: int) -> dict[str, Any]:
    """``tensors`` (live, by name; DTensors where sharded), this rank's ``own``, and ``step``."""
    return {"tensors": state_tensors(assembly), "own": rank_state(assembly, scheduler), "step": step}


def restore(state: Mapping[str, Any], assembly: Assembly, scheduler: Any) -> int:
    """Copy a :func:`snapshot` back, into a run of the same sharding; the step it was taken at.

    Raises ``UnreadableInput`` where names, shapes or sharding do not fit.
    """
    saved: Mapping[str, torch.Tensor] = state["tensors"]
    masters = masters_of(assembly)
    wanted, slots = _wanted(assembly, masters, "the state", saved, state["own"])
    for key, target in wanted.items():
        if isinstance(target, DTensor) != isinstance(saved[key], DTensor):
            raise UnreadableInput(
                f"{key} is sharded on one side alone: use engine.save and engine.load to reshard"
            )
    with torch.no_grad():
        for key, target in wanted.items():
            target.copy_(saved[key])
    _put_masters(assembly, masters, saved)
    _put_slots(assembly, slots)
    restore_rank_state(assembly, scheduler, state["own"], same_ranks=True)
    return int(state["step"])


# --- writing -----------------------------------------------------------------------------------


def _nothing() -> None:
    return None


def _together(
    act: Callable[[], _Result], ranks: int, what: str, kind: type[TrineError] = UsageError
) -> _Result:
    """Run on this rank; when it fails on any, raise on all, so that none waits for the others for ever.

    ``what`` could not be done, and ``kind`` of error, are for other failures than this package's own.
    """
    failed: Exception | None = None
    try:
        result = act()
    except Exception as error:  # noqa: BLE001 - a full disk is a RuntimeError to torch.save; raised on all ranks below
        failed = error
    said = None if failed is None else _said(failed, what)
    failures: list[str | None] = [said]
    if ranks > 1:
        failures = [None] * ranks
        distributed.all_gather_object(failures, said)
    if isinstance(failed, TrineError):
        raise failed
    first = next((each for each in failures if each is not None), None)
    if first is not None:
        raise kind(first) from failed
    return result


def _said(error: Exception, what: str) -> str:
    if isinstance(error, TrineError):
        return str(error)
    return f"{what}: {error.strerror if isinstance(error, OSError) and error.strerror else _reason(error)}"


def _write_tensors(partial: Path, folder: Path, assembly: Assembly) -> None:
    """DCP's part. What fails on one rank, it raises on all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "torch.distributed is", UserWarning
            )  # of one process alone: as meant
            state_dict_saver.save(
                state_tensors(assembly),
                storage_writer=FileSystemWriter(partial),
                no_dist=assembly.facts.ranks == 1,
            )
    except (CheckpointException, OSError) as error:
        raise UsageError(f"cannot write the checkpoint {folder}: {_reason(error)}") from error


def _write_own(partial: Path, rank: int, own: Mapping[str, Any]) -> None:
    path = partial / f"rank-{rank:05}.pt"
    torch.save(dict(own), path)
    try:  # what is read without trusting it must be plain; now, not at the resume
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("GLOBAL ")[-1].split(" ")[0]
        raise UsageError(
            f"a checkpoint holds tensors, numbers and strings, and the scheduler, a parameter group or a technique has "
            f"{reason}: leave it out of its state_dict()"
        ) from error


def _publish(partial: Path, folder: Path, described: Mapping[str, Any]) -> None:
    with (partial / _DESCRIPTION).open("w", encoding="utf-8") as file:
        json.dump(described, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    before = folder.with_name(folder.name + ".previous")
    shutil.rmtree(before, ignore_errors=True)
    if folder.exists():
        folder.rename(before)
    partial.rename(folder)
    shutil.rmtree(before, ignore_errors=True)


# --- reading -----------------------------------------------------------------------------------


def _described(folder: Path) -> dict[str, Any]:
    try:
        described = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        described = None
    if not isinstance(described, dict) or not str(described.get("schema", "")).startswith(
        "trine.checkpoint/"
    ):
        raise UnreadableInput(f"{folder} holds no checkpoint that engine.save wrote{_left_behind(folder)}")
    if described["schema"] != SCHEMA:
        raise UnreadableInput(
            f"{folder} is a checkpoint of {described['schema']}, and this version reads {SCHEMA}"
        )
    return described


def _left_behind(folder: Path) -> str:
    """What an interrupted save leaves, as a hint."""
    before = folder.with_name(folder.name + ".previous")
    if (before / _DESCRIPTION).exists():
        return f": a save was interrupted; the one before is whole, in {before}"
    if folder.with_name(folder.name + ".partial").exists():
        return ": a save was interrupted before it was whole"
    return ""


def _read_own(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank-{rank:05}.pt"
    try:
        own: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UnreadableInput(
            f"{path} of the checkpoint cannot be read: {str(error).splitlines()[0]}"
        ) from error
    return own


def _saved_tensors(folder: Path) -> dict[str, Any]:
    """Name → DCP's description (``size``, ``properties.dtype``) of every tensor in the checkpoint."""
    try:
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:  # a pickle: any error can come of a damaged one
        raise UnreadableInput(f"{folder / '.metadata'} of the checkpoint cannot be read: {error}") from error
    return {key: value for key, value in found.items() if isinstance(value, TensorStorageMetadata)}


def _shape(described: Any) -> tuple[int, ...]:
    return tuple(described.size if isinstance(described, TensorStorageMetadata) else described.shape)


def _dtype(described: Any) -> torch.dtype:
    if isinstance(described, TensorStorageMetadata):
        return described.properties.dtype
    found: torch.dtype = described.dtype
    return found


def _require_fitting(source: object, wanted: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """The checkpoint's model is this model: the same names and shapes."""
    missing = [key for key in wanted if key not in saved]
    if missing:
        raise UnreadableInput(f"{source} is of another model: it has no {missing[0].partition('/')[2]}")
    for key, target in wanted.items():
        if _shape(saved[key]) != tuple(target.shape):
            raise UnreadableInput(
                f"{source} is of another model: {key.partition('/')[2]} is {_shape(saved[key])} there and "
                f"{tuple(target.shape)} here"
            )
    extra = [key for key in saved if key.startswith("model/") and key not in wanted]
    if extra:
        raise UnreadableInput(f"{source} is of another model: this one has no {extra[0].partition('/')[2]}")


def _read_tensors(folder: Path, wanted: dict[str, torch.Tensor], ranks: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            state_dict_loader.load(wanted, storage_reader=FileSystemReader(folder), no_dist=ranks == 1)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise UnreadableInput(f"the checkpoint {folder} is damaged: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    inner = getattr(error, "failures", None)
    if inner:
        first = next(iter(inner.values()))
        error = first[0] if isinstance(first, tuple) else first
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


def _empty_slots(assembly: Assembly, saved: Mapping[str, Any]) -> Slots:
    """(parameter's name, key) → a tensor to read optimizer state into, placed as the parameter is.

    Made from what the checkpoint holds: a new optimizer has no state yet, and only its own step would make some.
    """
    slots: Slots = {}
    by_name = dict(optimizer_slots(assembly))
    group_of = {id(p): group for group in assembly.optimizer.param_groups for p in group["params"]}
    for full, described in saved.items():
        if not full.startswith("optimizer/"):
            continue
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        parameter = by_name.get(name)
        if parameter is None:
            raise UnreadableInput(
                f"the checkpoint holds optimizer state of {name}, which this optimizer does not have"
            )
        shape, dtype = _shape(described), _dtype(described)
        if shape == tuple(parameter.shape) and shape:
            slots[name, key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            continue
        group = group_of[id(parameter)]
        # As torch.optim.Optimizer has it: the step count lies on the device only for kernels that read it there.
        on_device = key != "step" or group.get("capturable") or group.get("fused")
        slots[name, key] = torch.empty(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
    return slots


def _put_slots(assembly: Assembly, slots: Slots) -> None:
    by_name = dict(optimizer_slots(assembly))
    assembly.optimizer.state.clear()
    for (name, key), value in slots.items():
        assembly.optimizer.state[by_name[name]][key] = value


def _put_masters(assembly: Assembly, masters: Mapping[str, torch.Tensor], saved: Mapping[str, Any]) -> None:
    """Masters that the checkpoint does not have are the parameters themselves, in the masters' precision."""
    values = model_tensors(assembly.model)
    with torch.no_grad():
        for key, master in masters.items():
            if key not in saved:
                master.copy_(values[f"model/{key.removeprefix('masters/')}"])
