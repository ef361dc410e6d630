"""The token sequences in a batch, whatever form it has, and how much of it is padding.

Forms, and what says where a sequence ends (the same as :mod:`trine.profiler.padding` counts):

* a mapping with ``input_ids`` (or ``ids``), and ``labels`` (or ``targets``): (batch, width) each. Its ``attention_mask``,
  else its ``lengths``, else targets of -100 at the end of rows where the ids repeat one id; else rows are full;
* a pair, ids and targets, (batch, width) each: targets of -100 at the end of rows, as above;
* a list of samples as a dataset gives them, not padded: tensors of token ids, pairs, or mappings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from trine.record.errors import UsageError

__all__ = ["IGNORED", "Sequences", "lengths_of", "sequences_of"]

#: A target without a loss, as ``torch.nn.functional.cross_entropy`` and Transformers have it.
IGNORED = -100
_IDS = ("input_ids", "ids")
_TARGETS = ("labels", "targets")
_LENGTHS = ("lengths", "length", "seq_lens", "seqlens")


class Sequences(NamedTuple):
    """A batch's sequences, end to end: ``fields`` are (tokens, …) each, by name; ``ids`` and ``targets`` name two of them.

    ``slots``: tokens and padding as the batch came, or as padding to the longest would make them. ``filler``: the id that
    padding has.
    """

    fields: dict[str, torch.Tensor]
    lengths: list[int]
    slots: int
    width: int
    ids: str
    targets: str
    filler: int


def sequences_of(batch: Any, key: str) -> Sequences:
    """Read a batch. Raises ``UsageError``, beginning with ``key``, for what has no sequences or holds more than them."""
    named = _named(batch, key)
    if named is None:
        return _of_samples(batch, key)
    ids_name, targets_name = _names(named, key)
    ids = named[ids_name]
    named = {name: value for name, value in named.items() if value is not None}
    lengths = torch.as_tensor(_lengths(named, ids_name, targets_name, key))
    valid = torch.arange(ids.shape[1]) < lengths[:, None]
    padding = ids[~valid.to(ids.device)]
    fields = {}
    for name, value in named.items():
        if name in _LENGTHS or name == "attention_mask":
            continue
        if name == "position_ids" and _counts_up(value):
            continue
        if not isinstance(value, torch.Tensor) or value.shape[:2] != ids.shape or name == "position_ids":
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(
                f"{key}: the batch's {name!r} ({shape}) is not one value a token, and rows hold several samples: "
                "leave it out in the loader's collate_fn"
            )
        fields[name] = value[valid.to(value.device)]
    if targets_name not in fields:
        raise UsageError(
            f"{key}: the batch has {ids_name!r} without 'labels', so the loss cannot be kept from crossing documents' "
            "borders: add labels, the ids with -100 where there is no loss"
        )
    filler = int(padding[0]) if len(padding) else 0
    return Sequences(fields, lengths.tolist(), ids.numel(), ids.shape[1], ids_name, targets_name, filler)


def lengths_of(batch: Any) -> tuple[list[int], int] | None:
    """(lengths of the sequences, slots) of a batch that says them, else ``None``."""
    try:
        named = _named(batch, "")
        if named is None:
            return None
        ids_name, targets_name = _names(named, "")
        return _lengths(named, ids_name, targets_name, ""), int(named[ids_name].numel())
    except UsageError:
        return None


def _named(batch: Any, key: str) -> Mapping[str, Any] | None:
    """The batch's tensors by name; ``None`` for a list of samples."""
    if isinstance(batch, Mapping):
        return batch
    if isinstance(batch, torch.Tensor):
        raise UsageError(
            f"{key}: a batch that is one tensor does not say what of it is padding: give a mapping with input_ids, "
            "labels and attention_mask, or a list of the samples (collate_fn=list)"
        )
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)) or not batch:
        raise UsageError(f"{key}: a batch of type {type(batch).__name__} holds no token sequences")
    first = batch[0]
    if not (isinstance(first, torch.Tensor) and first.dim() == 2):
        return None
    if len(batch) != 2 or not isinstance(batch[1], torch.Tensor) or batch[1].shape != first.shape:
        raise UsageError(
            f"{key}: a batch of {len(batch)} tensors is no pair of ids and targets of one shape: give a mapping with "
            "input_ids and labels"
        )
    return {"ids": batch[0], "targets": batch[1]}


def _names(named: Mapping[str, Any], key: str) -> tuple[str, str]:
    ids = next((name for name in _IDS if name in named), None)
    if ids is None:
        raise UsageError(f"{key}: the batch has no input_ids: its keys are {', '.join(map(str, named))}")
    tokens = named[ids]
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise UsageError(f"{key}: the batch's {ids!r} is no tensor of token ids, (batch, width)")
    return ids, next((name for name in _TARGETS if name in named), "labels")


def _lengths(named: Mapping[str, Any], ids_name: str, targets_name: str, key: str) -> list[int]:
    ids = named[ids_name]
    mask = named.get("attention_mask")
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
            raise UsageError(f"{key}: the batch's attention_mask is not of its ids' shape {tuple(ids.shape)}")
        counts = mask.ne(0).sum(1)
        if not torch.equal(mask.ne(0), torch.arange(ids.shape[1], device=mask.device) < counts[:, None]):
            raise UsageError(f"{key}: the batch is padded on the left or within rows: pad it on the right")
        return _numbers(counts)
    for name in _LENGTHS:
        stated = named.get(name)
        if stated is not None:
            return [int(length) for length in stated]
    targets = named.get(targets_name)
    if targets is None or targets.shape != ids.shape or not ids.numel():
        return [ids.shape[1]] * ids.shape[0]
    return _by_targets(ids, targets)


def _by_targets(ids: torch.Tensor, targets: torch.Tensor) -> list[int]:
    """Ignored targets at the end of rows are padding as far as the ids there repeat the longest such end's last."""
    ignored = _trailing(targets == IGNORED)
    longest = int(ignored.argmax())
    if int(ignored[longest]) == 0:
        return [ids.shape[1]] * ids.shape[0]
    padding = torch.minimum(ignored, _trailing(ids == ids[longest, -1]))
    return _numbers(ids.shape[1] - padding)


def _numbers(counts: torch.Tensor) -> list[int]:
    return [int(count) for count in counts.tolist()]


def _trailing(flags: torch.Tensor) -> torch.Tensor:
    """How many at the end of each row are true."""
    return flags.flip(1).to(torch.int64).cumprod(1).sum(1)


def _counts_up(positions: Any) -> bool:
    return isinstance(positions, torch.Tensor) and bool(
        (positions == torch.arange(positions.shape[-1], device=positions.device)).all()
    )


def _of_samples(samples: Sequence[Any], key: str) -> Sequences:
    """Not padded yet."""
    read = [_sample(sample, key) for sample in samples]
    names = read[0].keys()
    if any(sample.keys() != names for sample in read):
        raise UsageError(f"{key}: samples of one batch differ in what they hold")
    ids, targets = _names_of_sample(names, key)
    lengths = [len(sample[ids]) for sample in read]
    for name in names:
        if [len(sample[name]) for sample in read] != lengths:
            raise UsageError(
                f"{key}: a sample's {name!r} is not one value a token: leave it out of the dataset"
            )
    fields = {name: torch.cat([sample[name] for sample in read]) for name in names}
    if targets not in fields:  # token ids alone: each is predicted from those before it
        fields[targets] = fields[ids].clone()
    width = max(lengths)
    return Sequences(fields, lengths, width * len(lengths), width, ids, targets, 0)


def _names_of_sample(names: Any, key: str) -> tuple[str, str]:
    ids = next((name for name in _IDS if name in names), None)
    if ids is None:
        raise UsageError(f"{key}: samples have no input_ids: their keys are {', '.join(map(str, names))}")
    return ids, next((name for name in _TARGETS if name in names), "labels")


def _sample(sample: Any, key: str) -> dict[str, torch.Tensor]:
    if isinstance(sample, Mapping):
        named = {name: torch.as_tensor(value) for name, value in sample.items() if name != "attention_mask"}
        return {name: value for name, value in named.items() if name not in _LENGTHS}
    if isinstance(sample, torch.Tensor) and sample.dim() == 1:
        return {"input_ids": sample}
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        ids, targets = (torch.as_tensor(part) for part in sample)
        if ids.dim() == 1 and ids.shape == targets.shape:
            return {"ids": ids, "targets": targets}
    raise UsageError(
        f"{key}: a sample of type {type(sample).__name__} is no sequence of token ids, no pair of ids and targets, and no "
        "mapping with input_ids"
    )
