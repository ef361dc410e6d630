"""The section on memory: the curve by category, who owns the peak, what cannot be given out, what grows, what could go."""

from __future__ import annotations

from collections.abc import Sequence

from trine.analyzers.reports.document import Areas, Block, Column, Paragraph, Section, Table, clean
from trine.analyzers.results import Analysis
from trine.analyzers.studies.memory_owners import Fragmentation, Freed, MemoryOwners, OwnedMemory, RankMemory
from trine.analyzers.units import duration, percent, size

__all__ = ["ORDER", "section"]

ORDER = 42

#: A terminal shows this many owners unless told otherwise; owners below this share of the peak are summed.
LEAST_SHARE = 0.005
#: Reserved but free below this share of the peak is not worth a line of its own.
FRAGMENTED = 0.02
#: From so many rows on a table is a page's and no terminal's.
_LONG = 20

_ROLES = {
    "parameters": "computation",
    "gradients": "backward",
    "optimizer_state": "weight",
    "activations": "memory",
    "communication_buffers": "communication",
    "inputs": "computation",
    "temporary": "fault",
    "unattributed": "idle",
}


_SNAPSHOT = (
    "A memory snapshot names the lines of the program: torch.cuda.memory._record_memory_history(), later "
    "torch.cuda.memory._dump_snapshot(file)."
)
_WITHOUT_OWNERS = f"Who asked for this memory the source does not say. {_SNAPSHOT}"
_TIMELINE_ALONE = (
    "Who asked for this memory an exported timeline does not say: it holds categories and sizes alone. "
    f"{_SNAPSHOT} The trace that was taken with profile_memory=True, beside it, names operators."
)


def section(result: MemoryOwners, analysis: Analysis, most_rows: int) -> Section | None:
    """The rank with the highest peak in full; what grows or failed on any of them."""
    if not result.ranks:
        return None
    first = result.ranks[0]
    blocks: list[Block] = [Paragraph(clean(_summary(first, len(result.ranks) + result.left_out)))]
    blocks.append(_timeline(first))
    if any(owned.count for owned in first.owners):  # else the source knows categories alone
        blocks.append(_owners(first, most_rows))
    else:
        is_timeline = "memory_timeline" in (analysis.source.format, *analysis.source.formats)
        blocks.append(Paragraph(_TIMELINE_ALONE if is_timeline else _WITHOUT_OWNERS))
    if first.fragmentation is not None:
        blocks += _fragmentation(first, first.fragmentation)
    blocks += [block for part in result.ranks for block in _troubles(part)]
    if result.frees:
        blocks.append(_frees(result.frees))
    return Section("memory-owners", "Who owns the memory", tuple(blocks))


def _name(category: str) -> str:
    return category.replace("_", " ")


def _summary(part: RankMemory, ranks: int) -> str:
    where = "tensors in host memory" if part.kind == "host" else f"device {part.device}'s memory"
    more = " or more" if part.lower_bound else ""
    of_rank = f"Rank {part.rank}" + (f", the fullest of {ranks}," if ranks > 1 else "")
    first = part.times_ns[0] if part.times_ns else part.peak_ns
    after = f", {duration(part.peak_ns - first)} after the first event" if part.peak_ns > first else ""
    text = f"{of_rank} peaks at {size(part.peak_bytes)}{more} of {where}{after}."
    named = [(name, level) for name, level in part.lowest.items() if name != "unattributed"]
    if named and part.kind == "device":
        parts = ", ".join(
            f"{_name(name)} {size(level)}" for name, level in sorted(named, key=lambda p: -p[1])[:3]
        )
        text += f" At its lowest it holds {size(sum(part.lowest.values()))} ({parts})."
    return text


def _timeline(part: RankMemory) -> Areas:
    first = part.times_ns[0] if part.times_ns else 0
    layers = tuple(
        (_name(name), _ROLES.get(name, "idle"), tuple(float(value) for value in level))
        for name, level in zip(part.categories, part.levels, strict=True)
    )
    at = max(range(len(part.totals)), key=lambda place: part.totals[place], default=0)
    rows = tuple(
        (
            _name(name),
            size(level[at]),
            percent(level[at] / part.peak_bytes if part.peak_bytes else 0.0),
            size(max(level)),
        )
        for name, level in sorted(
            zip(part.categories, part.levels, strict=True), key=lambda pair: -pair[1][at]
        )
    )
    columns = (
        Column("category"),
        *(Column(title, "right") for title in ("at the peak", "of it", "its own highest")),
    )
    return Areas(
        f"Memory by category, rank {part.rank}",
        "size",
        "time",
        tuple(float(when - first) for when in part.times_ns),
        layers,
        Table(columns, rows),
    )


def _owners(part: RankMemory, most_rows: int) -> Table:
    columns = (
        Column("bytes", "right"),
        Column("of peak", "right"),
        Column("blocks", "right"),
        Column("category"),
        Column("owner", flexible=True),
        Column("operator or module", flexible=True),
    )
    worth = [owned for owned in part.owners if owned.bytes >= LEAST_SHARE * part.peak_bytes]
    shown = worth[:most_rows]
    rows = tuple(
        (
            size(owned.bytes),
            percent(owned.bytes / part.peak_bytes if part.peak_bytes else 0.0),
            str(owned.count) if owned.count else "–",
            _name(owned.category),
            clean(owned.owner) if owned.owner else _nobody(owned),
            clean(owned.module or owned.operator or "–"),
        )
        for owned in shown
    )
    rest = part.peak_bytes - sum(owned.bytes for owned in shown)
    note = f"{size(rest)} more in smaller parts" if rest > 0 else ""
    if note and len(worth) > len(shown):
        where = "the HTML report and the JSON list" if len(shown) < _LONG else "the JSON lists"
        note += f"; {where} {len(worth) - len(shown)} more owners"
    return Table(columns, rows, title="Owners at the peak", note=note)


def _nobody(owned: OwnedMemory) -> str:
    return "no stack: older than the history" if owned.count else "not in any event"


def _fragmentation(part: RankMemory, state: Fragmentation) -> list[Block]:
    unused = state.reserved_bytes - state.active_bytes
    text = (
        f"When the snapshot was taken the allocator held {size(state.reserved_bytes)}, of which {size(unused)} "
        f"({percent(unused / state.reserved_bytes if state.reserved_bytes else 0.0)}) were free: "
        f"{size(state.free_bytes)} in whole segments, which it can give back, and {size(state.split_bytes)} between blocks in use, "
        f"which it cannot. The largest free block is {size(state.largest_free_bytes)}."
    )
    if state.pending_bytes:
        text += f" {size(state.pending_bytes)} wait for other streams."
    if state.expandable:
        text += " Segments can grow (expandable_segments is on)."
    if part.reserved_at_peak_bytes is not None:
        free = max(part.reserved_at_peak_bytes - part.peak_bytes, 0)
        text += f" At the peak {size(free)} ({percent(free / max(part.reserved_at_peak_bytes, 1))}) of what was reserved was free."
    blocks: list[Block] = [Paragraph(clean(text))]
    if len(state.pools) > 1 and unused > FRAGMENTED * max(part.peak_bytes, 1):
        columns = (
            Column("pool"),
            *(
                Column(t, "right")
                for t in (
                    "segments",
                    "reserved",
                    "in use",
                    "free between blocks",
                    "free segments",
                    "largest free",
                )
            ),
        )
        rows = tuple(
            (
                clean(pool.pool),
                str(pool.segments),
                *(
                    size(v)
                    for v in (
                        pool.reserved_bytes,
                        pool.active_bytes,
                        pool.split_bytes,
                        pool.free_bytes,
                        pool.largest_free_bytes,
                    )
                ),
            )
            for pool in state.pools
        )
        blocks.append(Table(columns, rows, title="The allocator's pools"))
    return blocks


def _troubles(part: RankMemory) -> list[Block]:
    blocks: list[Block] = []
    for failure in part.failures[-3:]:
        text = f"Rank {part.rank} failed to allocate {size(failure.requested_bytes)}"
        if failure.owner:
            text += f" for {failure.owner}"
        if failure.free_bytes is not None:
            text += f"; {size(failure.free_bytes)} were free on the device"
        if failure.unused_bytes:
            text += f", and {size(failure.unused_bytes)} reserved and unused"
        blocks.append(Paragraph(clean(text + ".")))
    if part.retries:
        text = f"Rank {part.rank}'s allocator gave segments back to get new ones {part.retries} times: each waits for the device."
        blocks.append(Paragraph(text))
    if part.leaks:
        columns = (
            Column("a step", "right"),
            Column("from", "right"),
            Column("to", "right"),
            Column("category"),
            Column("owner", flexible=True),
        )
        rows = tuple(
            (
                size(leak.per_step_bytes),
                size(leak.first_bytes),
                size(leak.last_bytes),
                _name(leak.category),
                clean(leak.owner or "–"),
            )
            for leak in part.leaks
        )
        blocks.append(
            Table(
                columns,
                rows,
                title=f"Growing from step to step, rank {part.rank}, {part.leaks[0].steps} steps",
            )
        )
    return blocks


def _frees(frees: Sequence[Freed]) -> Table:
    columns = (
        Column("change"),
        Column("frees", "right"),
        Column("peak left", "right"),
        Column("what goes", flexible=True),
    )
    rows = tuple(
        (clean(each.change), size(each.freed_bytes), size(each.peak_bytes), clean(_how(each)))
        for each in frees
    )
    note = "each alone; what is left is the highest point of the curve without it"
    ranks = next((str(each.inputs["ranks_are"]) for each in frees if "ranks_are" in each.inputs), None)
    note += f"; ranks: {ranks}" if ranks else ""
    return Table(columns, rows, title="What would lower the peak", note=note)


def _how(each: Freed) -> str:
    """``activations × 0.7``: the inner part of the formula."""
    words = each.formula.removeprefix("peak − highest point of (total − ").removesuffix(")")
    ranks = each.inputs.get("ranks")
    return words.replace("÷ ranks", f"÷ {ranks}") if ranks else words
