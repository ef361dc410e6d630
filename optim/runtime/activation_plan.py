"""Which blocks to keep, move or recompute: measured in the first steps, chosen by :mod:`.activation_schedule`.

In the first steps every block's activations are moved, which needs little memory and gives the same numbers. The first
forward counts what each block saves. In the two steps after it each block's forward is timed (backward is taken as
twice that, as it has two matrix products for each of the forward's), and at their end the link, by moving as many bytes
as a block does. All ranks then choose by the same figures, the largest of any, since a block
that one rank recomputes and another keeps would leave the collectives within it unanswered.

A larger batch than any before is counted anew, and scheduled when :class:`~.recompute_plan.Plan` says; its times are the
first ones, grown as its operations did.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from trine.optim.runtime.activation_schedule import Block, Choice, Link, Schedule, peak_bytes, schedule
from trine.optim.runtime.checkpointed import Region, moving
from trine.optim.runtime.recompute_plan import Measured, Plan, mib, tensors_of
from trine.optim.runtime.saved_tensors import SavedTensors, local_part
from trine.optim.runtime.weak_storage import WeakStorage
from trine.record.errors import UsageError

__all__ = ["ScheduledPlan", "names_in_short"]

logger = logging.getLogger("trine")

#: Steps whose forwards are timed; the faster counts, since the first may still warm up.
TIMED_STEPS = 2
#: Saved tensors of one block that are back on the device together: those of one operator, which are packed in a row.
AT_ONCE = 5
_LARGEST_PROBE = 64 * 2**20
_SMALLEST_PROBE = 2**16


class ScheduledPlan(Plan):
    """Measures the blocks in the first steps; then chooses, and says so.

    ``budget(least, most)`` gives the bytes that may be held, from what the least and the largest choice needs.
    """

    _decides_at_once = False

    def __init__(
        self,
        regions: Sequence[Region],
        saved: SavedTensors,
        budget: Callable[[int, int], int],
        key: str,
        told: Callable[[str], None],
        device: torch.device,
        ranks: int = 1,
    ) -> None:
        super().__init__(regions, saved, budget, key, told, ranks)
        self._costs: dict[str, _Costs] = {}
        # Of blocks' inputs → the block that was given it first, "" for several.
        self._addresses: dict[int, tuple[str, WeakStorage]] = {}
        self._shared_bytes = (
            0  # of inputs that several blocks are given: counted as held whatever becomes of them
        )
        self._clock = _Clock(device, lambda: 0 if saved.host is None else saved.host.blocked_ns)
        self._times: dict[str, int] = {}  # of a block's forward, and of what follows the last one
        self._timed_steps = 0
        self._agreed_times: dict[str, tuple[int, int]] = {}  # → and the operations it took
        self._tail_ns = (0, 0)
        self._link: Link | None = None
        #: What was chosen last; ``None`` before.
        self.schedule: Schedule | None = None
        for region in regions:
            region.active, region.moves = False, True

    # --- counting ------------------------------------------------------------------------------

    def _forget_measured(self) -> None:
        super()._forget_measured()
        self._costs, self._addresses, self._shared_bytes = {}, {}, 0

    def _save_least(self) -> None:
        for each in self._regions:
            each.active, each.moves = False, True

    def watching(
        self, region: Region, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """The context of a block's forward, or of its recomputation."""
        timed = not self._is_measuring and self._timed_steps < TIMED_STEPS
        if timed and torch._C._current_graph_task_id() == -1:
            return self._clock.timing(region.name)
        return super().watching(region, arguments, named)

    def _measured_within(
        self, region: Region, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> AbstractContextManager[None]:
        costs = self._costs.setdefault(region.name, _Costs())
        for tensor in tensors_of(arguments, named):
            weak = WeakStorage(tensor)
            first, _ = self._addresses.get(weak.address, (None, None))
            if first is None:
                self._addresses[weak.address] = (region.name, weak)
                costs.input_bytes += tensor.untyped_storage().nbytes()
            elif first not in (region.name, ""):
                self._addresses[weak.address] = ("", weak)
                self._shared_bytes += tensor.untyped_storage().nbytes()
        return super()._measured_within(region, arguments, named)

    def _count(self, measured: Measured, tensor: torch.Tensor, is_argument: bool) -> bool:
        is_new = super()._count(measured, tensor, is_argument)
        costs = self._costs[measured.name]
        storage = local_part(tensor).untyped_storage()
        costs.recent = [each for each in costs.recent if each[0] != storage._cdata][-AT_ONCE + 1 :]
        costs.recent.append((storage._cdata, storage.nbytes()))
        costs.at_once_bytes = max(costs.at_once_bytes, sum(size for _, size in costs.recent))
        costs.largest_bytes = max(costs.largest_bytes, storage.nbytes())
        if is_new:
            with moving(False):
                kept = self._saved.cost_bytes(tensor)
            with moving(True):
                left = self._saved.cost_bytes(tensor)
            costs.saved_bytes += kept
            costs.left_bytes += min(left, kept)
            costs.moved_bytes += kept - min(left, kept)
        return is_new

    def _forward_ended(self) -> None:
        was_measuring = self._is_measuring and bool(self._measured)
        if not was_measuring:
            self._clock.forward_ended()
        else:
            self._addresses.clear()
        super()._forward_ended()
        if was_measuring and not self._is_decided:
            self._require_room()

    def step_ended(self) -> None:
        """After each step: the last one to be timed decides."""
        if self._is_decided or not self.is_measured or not self._clock.has_times:
            return
        for name, took in self._clock.read().items():
            self._times[name] = min(took, self._times.get(name, took))
        self._timed_steps += 1
        if self._timed_steps == TIMED_STEPS:
            self.decide()

    # --- choosing ------------------------------------------------------------------------------

    def decide(self) -> None:
        """Choose, set the regions, say so. A larger batch that does not fit is run with the least memory, and logged."""
        figures = self._figures()
        blocks, end_bytes = figures.blocks, figures.end_bytes
        links = self._measured_links(figures)
        most, least = _kept_bytes(blocks, end_bytes), _least_bytes(blocks, links, end_bytes)
        budget = self._least_of_ranks(self._budget(least, most))
        found = self._fastest(figures, links, budget)
        if found is None:
            logger.warning("a larger batch came. %s", self._refusal(budget, len(blocks), least))
            found = self._fastest(figures, links, least)
            assert found is not None
        link, chosen = found
        self._set(blocks, link, chosen)
        self._is_decided = True
        self._told(_words(blocks, chosen, link, (least, most, budget)))

    def _fastest(self, figures: _Figures, links: Sequence[Link], budget: int) -> tuple[Link, Schedule] | None:
        found = [
            (link, each)
            for link in links
            if (each := schedule(figures.blocks, budget, link, figures.end_bytes, figures.tail_ns))
        ]
        return min(found, key=lambda pair: (pair[1].added_ns, pair[0].device_bytes)) if found else None

    def _figures(self) -> _Figures:
        """With times: those that ranks agreed on at the first decision, later grown as the operations did."""
        blocks, end_bytes = self._blocks(), self._outside_bytes()
        if not self._is_decided:
            timed = [
                replace(block, forward_ns=took, backward_ns=2 * took)
                for block in blocks
                for took in (self._times.get(block.name, 0),)
            ]
            names = tuple(block.name for block in blocks)
            figures = self._gathered(timed, end_bytes)[names]
            self._tail_ns = figures.tail_ns
            self._agreed_times = {
                block.name: (block.forward_ns, self._measured[block.name].flops) for block in figures.blocks
            }
            return figures
        grown = []
        for block in blocks:
            first, flops = self._agreed_times.get(block.name, (0, 1))
            took = first * self._measured[block.name].flops // max(flops, 1)
            grown.append(replace(block, forward_ns=took, backward_ns=2 * took))
        figures = _Figures(grown, end_bytes, self._tail_ns, self._largest_tensor())
        if self._together is None:
            return figures
        gathered = self._gathered(grown, end_bytes)[tuple(block.name for block in grown)]
        return replace(gathered, tail_ns=self._tail_ns)

    def _set(self, blocks: Sequence[Block], link: Link, chosen: Schedule) -> None:
        self.schedule = chosen
        host = self._saved.host
        if host is not None and host.copier.is_asynchronous:
            host.window_bytes = link.device_bytes
        by_name = {block.name: choice for block, choice in zip(blocks, chosen.choices, strict=True)}
        for region in self._regions:
            choice = by_name.get(region.name, Choice.RECOMPUTED_FROM_MOVED)  # it did not run
            region.active, region.moves = choice.recomputes, choice.moves

    def _refusal(self, budget: int, count: int, least: int) -> str:
        return (
            f"{self._key} = {budget}: {count} modules need {least} bytes for what they save, even moved and recomputed: "
            "give at least that, or use smaller micro-batches (accumulation.steps)"
        )

    def _require_room(self) -> None:
        """Raise ``UsageError``, on all ranks, where no choice fits on one of them; times do not matter for that."""
        if self._key != "checkpointing.budget_bytes":
            return  # "auto" always has what the least choice needs
        for figures in self._gathered(self._blocks(), self._outside_bytes()).values():
            links = self._windowed(Link(0.0, 0.0, 0.0, 0, 0), figures)
            least = _least_bytes(figures.blocks, links, figures.end_bytes)
            budget = self._budget(least, _kept_bytes(figures.blocks, figures.end_bytes))
            if least > budget:
                raise UsageError(self._refusal(budget, len(figures.blocks), least))

    def _blocks(self) -> list[Block]:
        """With every block moved, as it was while they were counted, earlier ones hold what is too small to be moved."""
        found: list[Block] = []
        left_bytes = 0
        for name, measured in self._measured.items():
            costs = self._costs[name]
            found.append(
                Block(
                    name=name,
                    input_bytes=costs.input_bytes,
                    saved_bytes=costs.saved_bytes,
                    moved_bytes=costs.moved_bytes + costs.input_bytes,
                    left_bytes=costs.left_bytes,
                    recomputed_bytes=sum(size for size, _ in measured.storages.values()),
                    at_once_bytes=costs.at_once_bytes,
                    outside_bytes=measured.before_bytes - left_bytes + self._shared_bytes,
                    forward_ns=0,
                    backward_ns=0,
                )
            )
            left_bytes += costs.left_bytes
        return found

    def _outside_bytes(self) -> int:
        """Held at the forward's end by what is no block."""
        return self._end_bytes - sum(costs.left_bytes for costs in self._costs.values()) + self._shared_bytes

    def _gathered(self, blocks: list[Block], end_bytes: int) -> dict[tuple[str, ...], _Figures]:
        """Of every set of blocks that ranks have, as with a pipeline's stages: the largest figures of those ranks."""
        mine = (blocks, end_bytes, self._times.get(_TAIL, 0), self._largest_tensor())
        found: list[Any] = [mine]
        if self._ranks > 1:
            found = [None] * self._ranks
            torch.distributed.all_gather_object(found, mine)
        by_names: dict[tuple[str, ...], list[Any]] = {}
        for each in found:
            by_names.setdefault(tuple(block.name for block in each[0]), []).append(each)
        return {names: _largest(ranks) for names, ranks in by_names.items()}

    def _largest_tensor(self) -> int:
        return max((costs.largest_bytes for costs in self._costs.values()), default=0)

    def _least_of_ranks(self, size: int) -> int:
        """What is free is another number on each rank."""
        if self._ranks == 1 or (self._is_decided and self._together is None):
            return size
        found: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(found, size)
        return int(min(found))

    def _measured_links(self, figures: _Figures) -> list[Link]:
        """One for each window that is worth trying."""
        host = self._saved.host
        assert host is not None
        if self._link is None:
            size = max((block.moved_bytes for block in figures.blocks), default=0)
            self._link = self._agreed_link(
                host.measured_link(min(max(size, _SMALLEST_PROBE), _LARGEST_PROBE))
            )
        return self._windowed(self._link, figures)

    def _windowed(self, link: Link, figures: _Figures) -> list[Link]:
        host = self._saved.host
        assert host is not None
        most = max((block.moved_bytes for block in figures.blocks), default=0)
        sizes = host.windows(figures.largest_bytes, most)
        return [replace(link, window_bytes=max(link.window_bytes, size), device_bytes=size) for size in sizes]

    def _agreed_link(self, link: Link) -> Link:
        if self._ranks == 1:
            return link
        found: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(found, link)
        return Link(
            max(each.blocking_ns for each in found),
            max(each.out_ns for each in found),
            max(each.back_ns for each in found),
            min(each.window_bytes for each in found),
            link.device_bytes,
        )


@dataclass(frozen=True, slots=True)
class _Figures:
    """What a choice is made by."""

    blocks: list[Block]
    end_bytes: int
    tail_ns: tuple[int, int]
    largest_bytes: int  # of one saved tensor


@dataclass(slots=True)
class _Costs:
    """What one block would save, beside what :class:`Measured` has."""

    input_bytes: int = 0
    saved_bytes: int = 0
    left_bytes: int = 0
    moved_bytes: int = 0
    at_once_bytes: int = 0
    largest_bytes: int = 0
    recent: list[tuple[int, int]] = field(default_factory=list)  # (storage, bytes) of the last tensors


class _Clock:
    """Times of blocks' forwards, on the device's own clock where it has one. Nothing waits before :meth:`read`."""

    def __init__(self, device: torch.device, blocked_ns: Callable[[], int]) -> None:
        self._is_cuda = device.type == "cuda"
        self._blocked_ns = blocked_ns  # that copies have taken of this thread
        self._spans: list[tuple[str, Any, Any]] = []
        self._last: Any = None

    @property
    def has_times(self) -> bool:
        """Whether anything ran since the last reading."""
        return bool(self._spans)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """A block's forward."""
        start = self._mark()
        yield
        self._last = self._mark()
        self._spans.append((name, start, self._last))

    def forward_ended(self) -> None:
        """What ran since the last block follows it."""
        if self._last is not None:
            self._spans.append((_TAIL, self._last, self._mark()))
            self._last = None

    def read(self) -> dict[str, int]:
        """Nanoseconds, the fastest of each name; waits for the device."""
        found: dict[str, int] = {}
        for name, start, end in self._spans:
            took = self._between(start, end)
            found[name] = min(took, found.get(name, took))
        self._spans.clear()
        return found

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter_ns() - self._blocked_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> int:
        if not self._is_cuda:
            return int(end - start)
        end.synchronize()
        return round(float(start.elapsed_time(end)) * 1e6)


_TAIL = "what follows the last block"


def _largest(ranks: Sequence[tuple[list[Block], int, int, int]]) -> _Figures:
    """Each figure at its largest over ranks that have the same blocks."""
    merged = []
    for same in zip(*(blocks for blocks, *_ in ranks), strict=True):
        figures = {
            each.name: max(getattr(block, each.name) for block in same)
            for each in fields(Block)
            if each.name != "name"
        }
        merged.append(Block(name=same[0].name, **figures))
    tail_ns = max(tail for _, _, tail, _ in ranks)
    ends = max(end for _, end, _, _ in ranks)
    return _Figures(merged, ends, (tail_ns, 2 * tail_ns), max(size for *_, size in ranks))


def _kept_bytes(blocks: Sequence[Block], end_bytes: int) -> int:
    return end_bytes + sum(block.held_bytes(Choice.KEPT) for block in blocks)


def _least_bytes(blocks: Sequence[Block], links: Sequence[Link], end_bytes: int) -> int:
    """The smallest budget for which there is a choice."""
    free = [replace(link, blocking_ns=0.0, out_ns=0.0, back_ns=0.0) for link in links]
    timeless = [replace(block, forward_ns=0, backward_ns=0) for block in blocks]
    low, high = (
        0,
        1
        + max(
            peak_bytes(blocks, [choice] * len(blocks), link, end_bytes)
            for link in links
            for choice in (Choice.KEPT, Choice.RECOMPUTED_FROM_MOVED)
        ),
    )
    while low < high:
        middle = (low + high) // 2
        if any(schedule(timeless, middle, link, end_bytes) for link in free):
            high = middle
        else:
            low = middle + 1
    return low


def _words(blocks: Sequence[Block], chosen: Schedule, link: Link, bounds: tuple[int, int, int]) -> str:
    """For a log line and a report."""
    least, most, budget = bounds
    by_choice: dict[Choice, list[str]] = {}
    for block, choice in zip(blocks, chosen.choices, strict=True):
        by_choice.setdefault(choice, []).append(block.name)
    parts = [
        f"{len(names)} {choice.value} ({names_in_short(names)})"
        for choice in Choice
        if (names := by_choice.get(choice))
    ]
    moved = sum(b.link_bytes(choice) for b, choice in zip(blocks, chosen.choices, strict=True))
    speed = link.blocking_ns + max(link.out_ns, link.back_ns)
    rate = f" at {1e3 / speed:.0f} MB/s" if moved and speed else ""
    return (
        f"of {len(blocks)} modules {'; '.join(parts)}; {mib(chosen.peak_bytes)} for backward at the peak, {mib(most)} "
        f"with all kept, {mib(least)} at the least, {mib(budget)} allowed; predicted {chosen.added_ns / 1e6:+.2f} ms a "
        f"step: {chosen.recomputing_ns / 1e6:.2f} recomputing, {chosen.moving_ns / 1e6:.2f} waiting for {mib(moved)} "
        f"moved each way{rate}" + ("" if chosen.is_best else "; there may be a better choice")
    )


def names_in_short(names: Sequence[str]) -> str:
    """Names that differ in one number alone as ranges: ``blocks.0-3, blocks.5``."""
    runs: list[tuple[str, int, int, str]] = []
    for name in names:
        found = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        if found is None:
            runs.append((name, -1, -1, ""))
            continue
        stem, number, rest = found[1], int(found[2]), found[3]
        if runs and runs[-1][0] == stem and runs[-1][3] == rest and runs[-1][2] == number - 1:
            runs[-1] = (stem, runs[-1][1], number, rest)
        else:
            runs.append((stem, number, number, rest))
    return ", ".join(
        stem if first < 0 else f"{stem}{first}{f'-{last}' if last > first else ''}{rest}"
        for stem, first, last, rest in runs
    )
