"""What changed between two sides: what appeared, vanished, became slower or faster, by contribution.

    RunFacts … ─┐
                ├─ differ ──► RunDifference ──► reports
    RunFacts … ─┘

Times are means a rank and *unit*: a step where both sides mark steps. Traces without marks are windows of a
run, cut somewhere; two windows of equal length hold different amounts of work, and their plain times say
nothing. So where the kernels agree on how many times more often they ran (an hour of one program holds twice
the calls of half an hour), the first side's times are stated for as much work as the second's window holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import numpy as np

from trine.analyzers.kernel_names import pair_names
from trine.analyzers.run_facts import Part, RunFacts
from trine.analyzers.units import percent
from trine.record.kernels import is_communication

__all__ = ["Change", "RunDifference", "State", "Unit", "differ", "equal_work", "mean_parts", "scaled"]

State = Literal["appeared", "vanished", "slower", "faster", "same"]

#: Changes below this share of the second side's unit are not listed: nobody acts on them.
SMALLEST_CHANGE = 0.001
#: The whole changed by less than this: shares of the change would be shares of noise.
_SMALLEST_TOTAL = 0.005
#: How far the ratio of a kernel's calls may lie from the others', and how much of the kernel time must agree.
_AGREEING_RATIO = 0.1
_AGREEING_TIME = 0.8

_PARTITION = ("compute", "exposed_communication", "exposed_copy", "idle")


@dataclass(frozen=True, slots=True)
class Unit:
    """What times are means of: ``step``, ``work`` (as much of it as the second side's window holds) or ``window``.

    ``ratio``: work in the first side's window over that in the second's, by which the first side's times
    are divided; ``agreement``: the share of the kernel time whose calls have that ratio; ``uncertainty``: how
    far one call more or less of the longest kernel, where each window was cut, would move it. All are None
    where nothing was scaled.
    """

    name: Literal["step", "work", "window"]
    ratio: float | None = None
    agreement: float | None = None
    uncertainty: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One part on both sides, ns and calls a unit and rank; 0 where a side has no such part.

    ``other_name`` is what the second side calls it, where that differs. ``of_unit`` is the change over the
    second side's unit, ``of_change`` over the whole change (None where the whole hardly changed).
    ``by_calls_ns`` + ``by_each_ns`` = the change: more or fewer calls at the old duration, and each call's
    new duration.
    """

    kind: str
    name: str
    state: State
    first_ns: float
    second_ns: float
    of_unit: float
    of_change: float | None
    first_calls: float | None = None
    second_calls: float | None = None
    by_calls_ns: float | None = None
    by_each_ns: float | None = None
    other_name: str | None = None

    @property
    def change_ns(self) -> float:
        """First less second."""
        return self.first_ns - self.second_ns


@dataclass(frozen=True, slots=True)
class RunDifference:
    """``partition`` divides the unit on both sides, so its changes sum to the whole change; ``changes`` are
    kernels, collectives and causes of idle time (operators where the host does the work) in order of effect,
    ``host`` what changed in the host's operators beside a device's work. ``basis`` is where the work is."""

    unit: Unit
    basis: str | None
    first_ns: float | None
    second_ns: float | None
    partition: tuple[Change, ...]
    changes: tuple[Change, ...]
    host: tuple[Change, ...]
    notes: tuple[str, ...] = ()

    @property
    def change_ns(self) -> float | None:
        """How much longer a unit takes on the first side."""
        if self.first_ns is None or self.second_ns is None:
            return None
        return self.first_ns - self.second_ns


def differ(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> RunDifference:
    """What changed from ``second`` (usually the old) to ``first`` (usually the new); several runs a side are averaged."""
    means = [mean_parts(side) for side in (first, second)]
    unit = _unit(first, second, means[0], means[1])
    scale = 1 / unit.ratio if unit.ratio else 1.0
    new = {key: scaled(part, scale) for key, part in means[0].items()}
    old = means[1]
    basis = _basis(first, second)
    whole = _whole(first, second, new, old, scale)
    listed = _Listing(new, old, whole, _cut(first, scale), _cut(second, 1.0), unit.name == "work")
    partition = listed.partition()
    on_host = basis == "host"
    kinds = ["collective", "idle", "operator"] if on_host else ["kernel", "collective", "idle"]
    return RunDifference(
        unit=unit,
        basis=basis,
        first_ns=whole[0],
        second_ns=whole[1],
        partition=partition,
        changes=listed.changes(kinds),
        host=() if on_host else listed.changes(["operator"]),
        notes=_notes(first, second, unit),
    )


def mean_parts(side: Sequence[RunFacts]) -> dict[tuple[str, str], Part]:
    """Mean over the runs that have parts of a kind; a name that one of them lacks is 0 there."""
    runs_of_kind: dict[str, int] = {}
    for run in side:
        for kind in {part.kind for part in run.parts}:
            runs_of_kind[kind] = runs_of_kind.get(kind, 0) + 1
    sums: dict[tuple[str, str], list[Part]] = {}
    for run in side:
        for part in run.parts:
            sums.setdefault((part.kind, part.name), []).append(part)
    means = {}
    for (kind, name), parts in sums.items():
        calls = [part.calls for part in parts if part.calls is not None]
        count = runs_of_kind[kind]
        means[kind, name] = Part(
            kind, name, sum(part.ns for part in parts) / count, sum(calls) / count if calls else None
        )
    return means


# --- the unit ------------------------------------------------------------------------------------


def _marks_steps(run: RunFacts) -> bool:
    return run.window.steps > 0 if run.window is not None else bool(run.step_ns)


def _unit(
    first: Sequence[RunFacts],
    second: Sequence[RunFacts],
    new: dict[tuple[str, str], Part],
    old: dict[tuple[str, str], Part],
) -> Unit:
    if all(_marks_steps(run) for run in (*first, *second)):
        return Unit("step")
    return equal_work(new, old) or Unit("window")


def equal_work(new: dict[tuple[str, str], Part], old: dict[tuple[str, str], Part]) -> Unit | None:
    """How many times as much work the first side's window holds, by kernels, by operators where there are none.
    None where too little is common or does not agree.

    First the median of the ratios of calls, each weighing as much as its time: no single kernel decides, and
    those that a change made more or fewer do not count. Then all that agree with it, each call at its mean
    duration: a window cut in the middle of a layer holds some of its kernels once less.
    """
    for kind in ("kernel", "operator"):
        mine = {name: part for (one, name), part in new.items() if one == kind and part.calls}
        theirs = {name: part for (one, name), part in old.items() if one == kind and part.calls}
        named = [(name, name) for name in mine if name in theirs]
        lacking = [[name for name in a if name not in b] for a, b in ((mine, theirs), (theirs, mine))]
        pairs = [(mine[a], theirs[b]) for a, b in (*named, *pair_names(lacking[0], lacking[1]))]
        if not pairs:
            continue
        calls = np.array([[a.calls or 0, b.calls or 0] for a, b in pairs])
        time = np.array([[a.ns, b.ns] for a, b in pairs])
        ratios = calls[:, 0] / calls[:, 1]
        order = np.argsort(ratios)
        reach = np.cumsum(time.sum(axis=1)[order])
        median = ratios[order[min(int(np.searchsorted(reach, reach[-1] / 2)), len(order) - 1)]]
        agreeing = np.abs(ratios / median - 1) <= _AGREEING_RATIO
        everything = sum(part.ns for part in (*mine.values(), *theirs.values()))
        if not everything or not time[agreeing].sum():
            continue
        each = time[agreeing].sum(axis=1) / calls[agreeing].sum(axis=1)
        work = (calls[agreeing] * each[:, None]).sum(axis=0)
        cut = float((each.max() / work).sum())
        agreement = float(time[agreeing].sum() / everything)
        if agreement >= _AGREEING_TIME:
            return Unit("work", float(work[0] / work[1]), agreement, cut)
    return None


def scaled(part: Part, scale: float) -> Part:
    """A part whose time and calls are multiplied."""
    calls = None if part.calls is None else part.calls * scale
    return part if scale == 1.0 else Part(part.kind, part.name, part.ns * scale, calls, part.bytes)


def _basis(first: Sequence[RunFacts], second: Sequence[RunFacts]) -> str | None:
    found = {run.window.basis for run in (*first, *second) if run.window is not None}
    return found.pop() if len(found) == 1 else ("device" if "device" in found else None)


def _cut(side: Sequence[RunFacts], scale: float) -> dict[str, float]:
    """Kind → the least that was listed, where lists were cut."""
    kinds = {kind for run in side for kind in run.least_ns}
    return {kind: max(run.least_ns.get(kind, 0.0) for run in side) * scale for kind in kinds}


def _whole(
    first: Sequence[RunFacts],
    second: Sequence[RunFacts],
    new: dict[tuple[str, str], Part],
    old: dict[tuple[str, str], Part],
    scale: float,
) -> tuple[float | None, float | None]:
    """Mean ns a unit on both sides: of what the partition divides, else of the steady steps."""
    for kind in ("breakdown", "phase"):
        sums = [sum(part.ns for (one, _), part in parts.items() if one == kind) for parts in (new, old)]
        if all(sums):
            return sums[0], sums[1]
    steps = [np.mean([np.mean(run.step_ns) for run in side if run.step_ns]) if any(run.step_ns for run in side) else None
             for side in (first, second)]  # fmt: skip
    if steps[0] is not None and steps[1] is not None:
        return float(steps[0]) * scale, float(steps[1])
    return None, None


# --- changes -------------------------------------------------------------------------------------


class _Listing:
    """The parts of both sides, and what changes they make."""

    def __init__(
        self,
        new: dict[tuple[str, str], Part],
        old: dict[tuple[str, str], Part],
        whole: tuple[float | None, float | None],
        new_cut: dict[str, float],
        old_cut: dict[str, float],
        scaled: bool,
    ) -> None:
        self._new, self._old = new, old
        self._scaled = scaled
        self._cuts = (new_cut, old_cut)
        self._unit = whole[1] or whole[0] or 0.0
        change = whole[0] - whole[1] if whole[0] is not None and whole[1] is not None else 0.0
        self._change = change if self._unit and abs(change) >= _SMALLEST_TOTAL * self._unit else None

    def _both(self, kind: str) -> bool:
        return all(any(one == kind for one, _ in parts) for parts in (self._new, self._old))

    def partition(self) -> tuple[Change, ...]:
        """How the unit is divided on both sides: the breakdown, else the phases."""
        for kind, names in (("breakdown", _PARTITION), ("phase", None)):
            if self._both(kind):
                present = dict.fromkeys(
                    name for parts in (self._old, self._new) for one, name in parts if one == kind
                )
                order = [name for name in names if name in present] if names else list(present)
                nothing = [Part(kind, name, 0.0) for name in order]
                return tuple(
                    self._made(self._new.get((kind, part.name), part), self._old.get((kind, part.name), part))
                    for part in nothing
                )
        return ()

    def changes(self, kinds: Sequence[str]) -> tuple[Change, ...]:
        """What changed of these kinds, in order of effect."""
        found = [change for kind in kinds if self._both(kind) for change in self._of_kind(kind)]
        told = self._both("collective") and "collective" in kinds
        shown = [
            change
            for change in found
            if change.state != "same"
            and not (told and change.kind == "kernel" and is_communication(change.name))
        ]
        return tuple(sorted(shown, key=lambda one: (-abs(one.change_ns), one.name)))

    def _of_kind(self, kind: str) -> list[Change]:
        mine = {name: part for (one, name), part in self._new.items() if one == kind}
        theirs = {name: part for (one, name), part in self._old.items() if one == kind}
        changes = [self._made(mine[name], theirs[name]) for name in mine if name in theirs]
        only = [name for name in mine if name not in theirs]
        lacking = [name for name in theirs if name not in mine]
        if kind == "kernel":
            for name, other in pair_names(only, lacking):
                changes.append(self._made(mine[name], theirs[other]))
                only.remove(name)
                lacking.remove(other)
        # A list that was cut says only that the name took no more than the least that it holds.
        changes += [
            self._made(mine[name], None) for name in only if mine[name].ns > self._cuts[1].get(kind, 0.0)
        ]
        changes += [
            self._made(None, theirs[name])
            for name in lacking
            if theirs[name].ns > self._cuts[0].get(kind, 0.0)
        ]
        return changes

    def _made(self, new: Part | None, old: Part | None) -> Change:
        one = new or old
        assert one is not None
        first, second = (new.ns if new else 0.0), (old.ns if old else 0.0)
        change = first - second
        calls = (new.calls if new else 0.0), (old.calls if old else 0.0)
        by_calls = by_each = None
        if calls[0] is not None and calls[1] is not None and calls[0] > 0 and calls[1] > 0:
            by_calls = (calls[0] - calls[1]) * second / calls[1]
            by_each = change - by_calls
        known = one.calls is not None
        return Change(
            kind=one.kind,
            name=one.name,
            state=self._state(new, old, self._effect(change, by_each, calls)),
            first_ns=first,
            second_ns=second,
            of_unit=change / self._unit if self._unit else 0.0,
            of_change=None if self._change is None else change / self._change,
            first_calls=calls[0] if known else None,
            second_calls=calls[1] if known else None,
            by_calls_ns=by_calls,
            by_each_ns=by_each,
            other_name=old.name if new and old and new.name != old.name else None,
        )

    def _effect(
        self, change: float, by_each: float | None, calls: tuple[float | None, float | None]
    ) -> float:
        """What of a change counts: of kernels that ran in the windows' proportion only each call's, since where a
        window was cut decides about one call more or less."""
        if by_each is None or not self._scaled or calls[0] is None or not calls[1]:
            return change
        in_proportion = abs(calls[0] / calls[1] - 1) <= _AGREEING_RATIO or abs(calls[0] - calls[1]) <= 1
        return by_each if in_proportion else change

    def _state(self, new: Part | None, old: Part | None, change: float) -> State:
        if self._unit <= 0 or abs(change) < SMALLEST_CHANGE * self._unit:
            return "same"
        if old is None or (old.ns == 0 and not old.calls and change > 0):
            return "appeared"
        if new is None or (new.ns == 0 and not new.calls and change < 0):
            return "vanished"
        return "slower" if change > 0 else "faster"


def _notes(first: Sequence[RunFacts], second: Sequence[RunFacts], unit: Unit) -> tuple[str, ...]:
    if unit.name == "step":
        return ()
    runs = (*first, *second)
    silent = next(_file(run) for run in runs if not _marks_steps(run))
    if unit.ratio is not None and unit.agreement is not None and unit.uncertainty is not None:
        times = "" if abs(unit.ratio - 1) < 0.0005 else f"{unit.ratio:.3g} times "
        said = (
            f"{silent} marks no steps, so times are for equal work: by the calls of its kernels {_file(first[0])} holds"
            f" {times}as much as {_file(second[0])} ({percent(unit.agreement)} of the kernel time agrees),"
            f" and its times are divided by that; where the windows were cut leaves it uncertain by {percent(unit.uncertainty)}"
        )
    else:
        said = (
            f"{silent} marks no steps, and the two sides' kernels do not run in one proportion, so times are those of"
            " whole windows, which hold different work; mark steps (profiler.step(), or an NVTX range named step 12)"
        )
    return (said,)


def _file(run: RunFacts) -> str:
    return PurePath(run.source).name or run.source
