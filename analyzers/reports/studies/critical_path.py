"""What decides how long a step takes: the path's parts, who holds it, and what each part would gain if it were gone."""

from __future__ import annotations

from trine.analyzers.kernel_names import short_name
from trine.analyzers.reports._cells import left, right, share
from trine.analyzers.reports.document import Bars, Block, Paragraph, Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies.critical_path import CriticalPath, Entry, JobPath, RankPath
from trine.analyzers.units import duration, percent, rank_list

__all__ = ["ORDER", "section"]

ORDER = 20

#: Category → in words.
_PARTS = {
    "kernel": "kernels",
    "communication": "communication",
    "waiting": "waiting for other ranks",
    "copy": "copies",
    "operator": "operators on the host",
    "python": "Python on the host",
    "loader": "the loader",
    "synchronization": "blocking calls",
    "launch": "launch delay",
    "gap": "gaps between kernels",
    "unexplained": "unexplained time",
}
#: Part of a bar → (in words, colour role, its categories).
_DRAWN = {
    "kernel": ("kernels", "computation", ("kernel",)),
    "communication": ("communication", "communication", ("communication",)),
    "waiting": ("other ranks", "fault", ("waiting",)),
    "copy": ("copies", "memory", ("copy",)),
    "host": ("host", "idle", ("operator", "python", "loader", "synchronization")),
    "rest": ("launches, gaps", "idle", ("launch", "gap")),
    "unexplained": ("unexplained", "idle", ("unexplained",)),
}
#: Rows of the table of entries: the JSON has more.
_MOST = 10
#: What would gain less than this share of the path is not worth a row, nor a word.
_LEAST = 0.01


def section(result: CriticalPath, analysis: Analysis, most_rows: int) -> Section | None:
    """A bar a rank, the ranks' shares of the job's path, and what would gain most."""
    if not result.ranks:
        return None
    rank = result.ranks[0]
    blocks: list[Block] = [Paragraph(_summary(result, rank)), _bars(result, most_rows)]
    if result.job is not None:
        blocks.append(_shares(result.job, most_rows))
    entries = _entries(rank, min(most_rows, _MOST), len(result.ranks) > 1)
    if entries is not None:
        blocks.append(entries)
    return Section("critical-path", "Critical path", tuple(blocks))


def _summary(result: CriticalPath, rank: RankPath) -> str:
    largest = sorted(rank.segments_ns.items(), key=lambda item: -item[1])[:3]
    steps = f"{rank.step_count} step{'' if rank.step_count == 1 else 's'}"
    text = (
        f"Of rank {rank.rank}'s {duration(rank.length_ns)} ({steps}), the chain that decides it is "
        + ", ".join(f"{percent(amount / rank.length_ns)} {_PARTS[name]}" for name, amount in largest)
    )
    job = result.job
    if job is not None and job.ranks:
        first = job.ranks[0]
        text += f". Across ranks, rank {first.rank} holds {percent(first.on_path_ns / max(job.length_ns, 1))} of the job's path"
        if first.doing not in (None, "unknown"):
            text += f" ({clean(str(first.doing))})"
        text += _without(job)
    return f"{text}. {_basis(rank)}"


def _without(job: JobPath) -> str:
    """What the costliest ranks cost; of a pair also what its costlier one does alone, so that neither is blamed for both."""
    if not job.without or job.without[-1].gain_ns <= _LEAST * job.length_ns:
        return ""
    first, last = job.without[0], job.without[-1]
    alone = f" (for {rank_list(first.ranks)} alone {duration(first.gain_ns)})" if last is not first else ""
    return f"; had nobody waited for {rank_list(last.ranks)}, the job would have been {duration(last.gain_ns)} shorter{alone}"


def _basis(rank: RankPath) -> str:
    if rank.basis == "host":
        return "Operators stand in for kernels; waits for collectives are read off where no operator ran."
    links = (
        f"{rank.given} given by the trace"
        if rank.given
        else f"{rank.inferred} inferred"
        if rank.inferred
        else "none"
    )
    off = (
        f"{abs(rank.replay_error) * 100:.2g} % {'longer' if rank.replay_error > 0 else 'shorter'} than it was"
    )
    as_long = abs(rank.replay_error) < 0.0005
    return (
        f"Dependencies between streams: {links}; replayed from launches, durations and dependencies alone, the window "
        f"comes out {'as long as it was' if as_long else off}."
    )


def _bars(result: CriticalPath, most_rows: int) -> Bars:
    shown = result.ranks[:most_rows]
    drawn = [{key: _together(rank, names) for key, (_, _, names) in _DRAWN.items()} for rank in shown]
    keys = [
        key
        for key in _DRAWN
        if any(one[key] >= rank.length_ns / 200 for one, rank in zip(drawn, shown, strict=True))
    ]
    cells = tuple(
        (str(rank.rank), duration(rank.length_ns), *(share(one[key], rank.length_ns) for key in keys))
        for one, rank in zip(drawn, shown, strict=True)
    )
    left_out = result.left_out + len(result.ranks) - len(shown)
    return Bars(
        "What the path runs through",
        {key: _DRAWN[key][0] for key in keys},
        {key: _DRAWN[key][1] for key in keys},
        tuple(
            (f"rank {rank.rank}", {key: one[key] for key in keys})
            for one, rank in zip(drawn, shown, strict=True)
        ),
        Table(
            right("rank", "path", *(_DRAWN[key][0] for key in keys)),
            cells,
            note=f"{left_out} more ranks" if left_out else "",
        ),
    )


def _together(rank: RankPath, names: tuple[str, ...]) -> float:
    return float(sum(rank.segments_ns.get(name, 0) for name in names))


def _shares(job: JobPath, most_rows: int) -> Table:
    length = max(job.length_ns, 1)
    cells = tuple(
        (
            str(one.rank),
            share(one.on_path_ns, length),
            "–" if one.gain_ns is None else share(one.gain_ns, length),
            _largest(one.segments_ns),
            "–" if one.doing in (None, "unknown") else clean(str(one.doing)),
        )
        for one in job.ranks[:most_rows]
        if one.on_path_ns >= length / 200
    )
    columns = (
        *right("rank", "on the job's path", "shorter without it"),
        left("mostly"),
        left("before collectives", flexible=True),
    )
    note = f"inside collectives: {share(job.communication_ns, length)}"
    return Table(columns, cells, "Who holds the path of the job", note)


def _largest(segments: object) -> str:
    assert isinstance(segments, dict)
    name = max(segments, key=lambda key: segments[key], default=None)
    return "–" if name is None else _PARTS[name]


def _entries(rank: RankPath, most: int, several: bool) -> Table | None:
    found = [entry for entry in rank.entries if (entry.gain_ns or 0) >= _LEAST * rank.length_ns]
    if not found:
        return None
    cells = tuple(
        (
            entry.kind,
            clean(_named(entry)),
            str(entry.count) if entry.count else "–",
            share(entry.on_path_ns, rank.length_ns),
            duration(entry.total_ns),
            share(entry.gain_ns or 0, rank.length_ns),
        )
        for entry in found[:most]
    )
    columns = (
        left("what"),
        left("name", flexible=True),
        *right("times", "on the path", "in all", "shorter without it"),
    )
    title = "What would shorten the window most if it took no time"
    return Table(columns, cells, f"{title} (rank {rank.rank})" if several else title)


def _named(entry: Entry) -> str:
    if entry.kind == "kernel":
        return short_name(entry.name)
    return entry.name if entry.where is None else f"{entry.name} in {entry.where}"
