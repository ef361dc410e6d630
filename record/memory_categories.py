"""What an allocation was for: inferred from the stacks of its allocation and release, and from how long it lived.

An allocator does not know what it allocates. What can be said, in this order:

==================== ==================================================================================
communication_buffers allocated under ``c10d``, NCCL or ``torch.distributed``
optimizer_state      allocated in the optimizer's step and alive after it; or, from before the history, replaced in one
parameters           allocated while a model was built, moved or loaded, and never released
gradients            allocated in a backward pass and alive after it; or released by ``zero_grad``
activations          allocated outside those and released in a backward pass; or alive where the history ends before one has ended
temporary            released in the same phase
unattributed         everything else
==================== ==================================================================================

Blocks from before the history have no stack of their own. Gradients tell more about them: each has the size
of its parameter. Where nearly all gradients of a pass find a block of their size that was held throughout,
those blocks are the parameters; where they find a second and a third, those are optimizer state (Adam's two
moments). ``sized`` says that this was used.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["CATEGORIES", "MEMORY_OF", "Inferred", "Trait", "infer"]

#: Key of ``Rank.metadata``: the format that a rank's table ``memory`` is of, where another one leads.
MEMORY_OF = "memory_of"

Array = npt.NDArray[Any]

#: In order of display.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "communication_buffers",
    "temporary",
    "unattributed",
)
_PARAMETERS, _GRADIENTS, _STATE, _ACTIVATIONS, _COMMUNICATION, _TEMPORARY, _UNKNOWN = range(len(CATEGORIES))

#: Of the gradients' bytes, how much must find a block of the same size.
_MATCHED = 0.9
#: In a backward pass that had not ended, a block older than this many allocations of that pass is a gradient.
_OLD = 64

#: A phase's code; 0 is none of them.
_FORWARD, _BACKWARD, _OPTIMIZER = 1, 2, 3


class Trait(IntFlag):
    """What a stack shows of the program's state."""

    NONE = 0
    STACK = 1  # there is a stack at all
    PYTHON = 2
    MODULE = 4  # in a module's call
    BACKWARD = 8  # in autograd's engine
    OPTIMIZER = 16
    ZERO_GRAD = 32
    COMMUNICATION = 64
    SETUP = 128  # building, moving or loading a model
    ACCUMULATES = 256  # adds to a parameter's gradient
    RECOMPUTES = 512  # activation checkpointing runs a forward again
    NATIVE = 1024
    EMPTIES_CACHE = 2048


@dataclass(frozen=True, slots=True)
class Inferred:
    """``categories`` (index into :data:`CATEGORIES`) by allocation; ``sized`` bytes were told by size alone;
    ``step_rows``: the last event of each optimizer step, else of each backward pass."""

    categories: Array
    sized: int
    step_rows: Array


def infer(traits: Array, allocates: Array, start: Array, end: Array, size: Array, alive: Array) -> Inferred:
    """Categories of allocations.

    ``traits`` (events,) are of the events' stacks in order; ``allocates`` (events,) says which are no releases.
    ``start`` and ``end`` are event rows of each allocation and its release; ``start`` is -1 where it was before the
    history, ``end`` is ``len(traits)`` where there is none. ``size`` in bytes; ``alive`` (allocations,) traits of the
    stack that the snapshot gives a block from before the history, 0 where it gives none.
    """
    phase, run = _phases(traits, allocates)
    count = len(traits)
    known = start >= 0
    at_start = np.where(known, traits[np.maximum(start, 0)] if count else 0, alive)
    freed = end < count
    at_end = np.where(freed, traits[np.minimum(end, count - 1)] if count else 0, 0)
    run_of_start = np.where(known, run[np.maximum(start, 0)] if count else 0, -1)
    run_of_end = np.where(freed, run[np.minimum(end, count - 1)] if count else 0, np.iinfo(np.int64).max)
    same_run = known & freed & (run_of_start == run_of_end)
    phase_of_start = np.where(known, phase[np.maximum(start, 0)] if count else 0, _phase_of(alive))
    phase_of_end = np.where(freed, phase[np.minimum(end, count - 1)] if count else 0, 0)
    last = int(phase[-1]) if count else 0
    ends = _ends_of_runs(phase, run, _BACKWARD)
    # Whether a backward pass that had ended lies between allocation and the end of the history.
    passed = np.searchsorted(ends, np.maximum(start, 0)) < len(ends)

    found = np.full(len(start), _UNKNOWN, dtype=np.int64)
    unset = np.ones(len(start), dtype=bool)

    def put(rows: Array, category: int) -> None:
        rows = rows & unset
        found[rows] = category
        unset[rows] = False

    put(_has(at_start, Trait.COMMUNICATION) & ~_has(at_start, Trait.OPTIMIZER), _COMMUNICATION)
    in_optimizer, in_backward = phase_of_start == _OPTIMIZER, phase_of_start == _BACKWARD
    put(in_optimizer & same_run, _TEMPORARY)
    put(in_optimizer, _STATE)
    recomputed = _has(at_start, Trait.RECOMPUTES) & in_backward
    put(recomputed & (phase_of_end == _BACKWARD), _ACTIVATIONS)
    put(in_backward & same_run, _TEMPORARY)
    unended = in_backward & ~freed & (run_of_start == (run[-1] if count else 0)) & (last == _BACKWARD)
    put(unended & ~_has(at_start, Trait.ACCUMULATES) & ~_older(start, _OLD), _UNKNOWN)
    put(in_backward, _GRADIENTS)
    put(_has(at_start, Trait.SETUP) & ~freed, _PARAMETERS)
    put(_has(at_end, Trait.ZERO_GRAD), _GRADIENTS)
    put(~known & (phase_of_end == _OPTIMIZER), _STATE)
    put(phase_of_end == _BACKWARD, _ACTIVATIONS)
    modular = _has(at_start, Trait.MODULE)
    put(modular & known & ~freed & ~passed & bool((phase == _BACKWARD).any()), _ACTIVATIONS)
    put(modular & known & freed & _passed_between(ends, start, end), _ACTIVATIONS)
    put(same_run & bool(phase.any()), _TEMPORARY)
    sized = _by_size(found, unset & ~known & ~freed, run_of_start, size)
    optimizer = _ends_of_runs(phase, run, _OPTIMIZER)
    return Inferred(found, sized, optimizer if len(optimizer) else ends)


def _has(traits: Array, trait: Trait) -> Array:
    return np.asarray((traits & int(trait)) != 0)


def _phase_of(traits: Array) -> Array:
    """A phase by the stack alone; the optimizer's own products never run under autograd's engine."""
    optimizer = _has(traits, Trait.OPTIMIZER) & ~_has(traits, Trait.ZERO_GRAD)
    backward = _has(traits, Trait.BACKWARD)
    forward = _has(traits, Trait.MODULE)
    return np.select([backward, optimizer, forward], [_BACKWARD, _OPTIMIZER, _FORWARD], 0)


def _phases(traits: Array, allocates: Array) -> tuple[Array, Array]:
    """Phase of each event, and the number of the stretch of events with one phase that it lies in.

    An event whose stack shows no phase lies in the stretch before it; one without any stack has its phase too.
    """
    phase = _phase_of(traits)
    if not _has(traits, Trait.NATIVE).any():
        # Only Python's frames were recorded. An event without any, where its like have some, came from a
        # thread without Python: autograd's, on a device.
        for kind in (allocates, ~allocates):
            if _has(traits[kind], Trait.PYTHON).any():
                phase = np.where(kind & (traits == 0), _BACKWARD, phase)
    shown = np.flatnonzero(phase)
    if not len(shown):
        return phase, np.zeros(len(traits), dtype=np.int64)
    changes = np.flatnonzero(np.diff(phase[shown])) + 1
    run = np.searchsorted(shown[changes], np.arange(len(traits)), side="right")
    of_run = phase[shown[np.append(0, changes)]]
    return np.where((traits == 0) & (phase == 0), of_run[run], phase), run


def _ends_of_runs(phase: Array, run: Array, which: int) -> Array:
    """The last event of each stretch of a phase that another phase follows."""
    rows = np.flatnonzero(phase == which)
    if not len(rows):
        return rows
    last = rows[np.append(np.flatnonzero(np.diff(run[rows])), len(rows) - 1)]
    shown = np.flatnonzero(phase)
    return np.asarray(last[last < shown[-1]] if which == _BACKWARD else last)


def _older(start: Array, count: int) -> Array:
    """Whether at least ``count`` allocations came after."""
    order = np.sort(start)
    return np.asarray(len(order) - np.searchsorted(order, start, side="right") >= count)


def _passed_between(ends: Array, start: Array, end: Array) -> Array:
    """Whether a pass ended between two events."""
    return np.asarray(np.searchsorted(ends, start) < np.searchsorted(ends, end))


def _by_size(found: Array, held: Array, run: Array, size: Array) -> int:
    """Parameters and optimizer state among blocks ``held`` throughout, by the gradients' sizes. Returns bytes told so."""
    gradients = np.flatnonzero((found == _GRADIENTS) & (run >= 0))
    if not len(gradients) or not held.any():
        return 0
    runs, counts = np.unique(run[gradients], return_counts=True)
    whole = gradients[run[gradients] == runs[counts.argmax()]]
    sizes, wanted = np.unique(size[whole], return_counts=True)
    told = 0
    # Gradients of 16 bits: master weights and moments have twice their size.
    for factor, categories in ((1, (_PARAMETERS, _STATE, _STATE)), (2, (_STATE, _STATE, _STATE))):
        for category in categories:
            rows = _matching(np.flatnonzero(held), size, sizes * factor, wanted)
            if size[rows].sum() < _MATCHED * factor * (sizes * wanted).sum():
                break
            found[rows] = category
            held[rows] = False
            told += int(size[rows].sum())
    return told


def _matching(rows: Array, size: Array, sizes: Array, wanted: Array) -> Array:
    """Of ``rows``, at most ``wanted`` of each of ``sizes``."""
    order = rows[np.argsort(size[rows], kind="stable")]
    ordered = size[order]
    first = np.searchsorted(ordered, ordered, side="left")
    nth = np.arange(len(ordered)) - first
    place = np.searchsorted(sizes, ordered)
    place = np.minimum(place, len(sizes) - 1)
    return np.asarray(order[(sizes[place] == ordered) & (nth < wanted[place])])
