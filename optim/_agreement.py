"""All ranks are given the same configuration, and refuse it together; else the first collective would hang or mix things up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from trine.optim._schema import spell
from trine.record.errors import TrineError, UsageError

__all__ = ["agreed"]


@contextmanager
def agreed(model: Any, given: dict[str, Any]) -> Iterator[None]:
    """Around checks that every rank makes by itself: what one refuses, all refuse, before anything is changed.

    ``given`` is filled inside, name → what must be the same on all ranks. Raises ``UsageError`` on every rank with the
    first refusal, or with the first name whose values differ. One exchange of a few hundred bytes a rank; none without a
    process group.
    """
    try:
        yield
    except Exception as error:
        others = _gathered(model, (_said(error), {}))
        _raise_first(others, error)
        raise
    _compare(_gathered(model, (None, given)))


def _said(error: Exception) -> str:
    return (
        str(error) if isinstance(error, TrineError) else f"{type(error).__name__}: {error}".partition("\n")[0]
    )


def _gathered(model: Any, mine: tuple[str | None, Mapping[str, Any]]) -> list[Any]:
    """Each rank's refusal and values, by rank."""
    from torch import cuda, distributed

    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return [mine]
    parameters = model.parameters() if hasattr(model, "parameters") else ()
    device = next((parameter.device for parameter in parameters), None)
    found: list[Any] = [None] * distributed.get_world_size()
    with cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
        distributed.all_gather_object(found, mine)
    return found


def _raise_first(by_rank: list[Any], cause: Exception | None) -> None:
    """Raise with the first refusal; this rank's own goes on as it is where all say the same."""
    refusals = [said for said, _ in by_rank]
    first = next(rank for rank, said in enumerate(refusals) if said is not None)
    if all(said == refusals[first] for said in refusals):
        return
    raise UsageError(f"on rank {first}: {refusals[first]}") from cause


def _compare(by_rank: list[Any]) -> None:
    if any(said is not None for said, _ in by_rank):
        _raise_first(by_rank, None)
    _, first = by_rank[0]
    for rank, (_, values) in enumerate(by_rank):
        for name in [*first, *(name for name in values if name not in first)]:
            if first.get(name) != values.get(name):
                raise UsageError(
                    f"{name} differs between ranks, {_spelled(first.get(name))} on rank 0 and "
                    f"{_spelled(values.get(name))} on rank {rank}: give trine.optimize the same on every rank"
                )


def _spelled(value: Any) -> str:
    return "not set" if value is None else spell(value)
