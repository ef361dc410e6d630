"""Whether the device is fed: how much launched work waits on it."""

from __future__ import annotations

from collections.abc import Sequence

from trine.analyzers.reports._cells import right, share
from trine.analyzers.reports.document import Block, Paragraph, Section, Table
from trine.analyzers.results import Analysis
from trine.analyzers.studies.launch_queue import LaunchQueue, QueuePart, RankQueue
from trine.analyzers.units import count, duration, percent

__all__ = ["ORDER", "section"]

ORDER = 24

#: A queue that is never empty needs no table.
_LEAST = 0.02
#: CUDA holds this many launches; from here on the host waits for room, which is no loss.
_FULL = 1_000


def section(result: LaunchQueue, analysis: Analysis, most_rows: int) -> Section | None:
    """A sentence, and a row a rank where the queue ran empty."""
    if not result.ranks:
        return None
    worst = result.ranks[0]
    blocks: list[Block] = [Paragraph(_summary(result, worst.queue))]
    if result.host_bound_share >= _LEAST:
        blocks.append(_table(result, most_rows))
    return Section("launch-queue", "Does the host keep the device fed?", tuple(blocks))


def _summary(result: LaunchQueue, queue: QueuePart) -> str:
    lead = f"work starts {duration(result.median_lead_ns)} after its launch (median)"
    if result.host_bound_share < _LEAST:
        full = ", and the queue was full at times" if queue.deepest >= _FULL else ""
        return f"Yes: something launched is left to run {percent(1 - result.host_bound_share)} of the time{full}; {lead}."
    return (
        f"For {percent(result.host_bound_share)} of the time nothing that was launched is left to run, and the host sets "
        f"the pace (for {percent(result.last_share)} more, one last piece of work runs with nothing behind it); {lead}, "
        f"and lasts {duration(queue.median_length_ns)}."
    )


def _table(result: LaunchQueue, most_rows: int) -> Table:
    shown = result.ranks[:most_rows]
    columns = right("rank", "starved", "last one runs", "fed", "launch to start", "slowest tenth", "deepest")
    return Table(columns, tuple(_row(one) for one in shown), note=_note(result, shown))


def _note(result: LaunchQueue, shown: Sequence[RankQueue]) -> str:
    """What the three parts sum to: less than the breakdown's window where work at its ends has no known launch."""
    first = shown[0]
    of = f"rank {first.rank}'s " if len(shown) > 1 else ""
    text = (
        f"Starved, last one and fed sum to the time from the first to the last work whose launch is known, {of}"
        f"{duration(first.queue.window_ns)}."
    )
    lost = first.queue.without_launch
    if lost:
        text += (
            f" {count(lost)} of {count(lost + first.queue.work)} pieces of work have none and are left out."
        )
    left_out = result.ranks_left_out + len(result.ranks) - len(shown)
    return f"{text} {left_out} more ranks." if left_out else text


def _row(one: RankQueue) -> tuple[str, ...]:
    queue = one.queue
    return (
        str(one.rank),
        share(queue.starved_ns, queue.window_ns),
        share(queue.last_ns, queue.window_ns),
        share(queue.fed_ns, queue.window_ns),
        duration(queue.median_lead_ns),
        duration(queue.p90_lead_ns),
        str(queue.deepest),
    )
