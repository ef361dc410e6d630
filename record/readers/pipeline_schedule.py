"""Schedules of pipeline parallelism as files of times: per rank and iteration, when each forward and each
backward of a micro-batch began and ended.

    {"1": {"total": 7556.99, "memory": 84.3, "fwd_start": [0.05, ...], "fwd_end": [...],
           "bwd_start": [...], "bwd_end": [...]}, "2": {...}}

This is what the instrumented Megatron-LM of pipeline studies writes (``torch.cuda.Event.elapsed_time``, so
milliseconds, which ``"unit"`` overrides). A list within a list is one list a model chunk. Backwards that are
split come under ``bwd_input``/``dgrad`` and ``bwd_weight``/``wgrad``. Fills ``microbatches`` and ``steps``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any

from ..errors import UnreadableInput
from ..model import Job, Quality, Rank, RankSource, Strings, Table
from ._flight_dumps import head_of, whole_number
from ._names import natural, rank_of_name
from ._pickles import read_bytes

__all__ = ["FORMAT", "open_job", "open_paths", "recognizes"]

FORMAT = "pipeline_schedule"

_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "µs": 10**3, "ns": 1}

#: Prefixes of ``_start`` and ``_end`` by what they time.
_DIRECTIONS = {
    "fwd": "forward",
    "forward": "forward",
    "bwd": "backward",
    "backward": "backward",
    "bwd_input": "backward_input",
    "backward_input": "backward_input",
    "dgrad": "backward_input",
    "bwd_weight": "backward_weight",
    "backward_weight": "backward_weight",
    "wgrad": "backward_weight",
}
_MARK = re.compile(rb'"(?:fwd|forward)_start"\s*:\s*\[')
_STAGE_KEYS = ("stage", "pp_rank", "pipeline_rank", "rank")
#: No iteration takes longer than this; a greater time is no time.
_LONGEST_NS = 10**16
#: In whatever unit it was written; what is beyond is no amount of memory.
_MOST_MEMORY = 10**18

Span = tuple[int, int, str, int, int]  # chunk, index, direction, start and end in ns


def recognizes(path: Path) -> bool:
    """Whether a file holds such times, by its first bytes."""
    try:
        return path.is_file() and head_of(path)[:1] in (b"{", b"[") and bool(_MARK.search(head_of(path)))
    except OSError:
        return False


def open_job(path: Path) -> Job:
    """The job of one file."""
    return open_paths([path], path)


def open_paths(paths: Sequence[Path], origin: Path) -> Job:
    """A job of one file a pipeline rank. Raises ``UnreadableInput`` where no file holds such times."""
    notes: list[Quality] = []
    files = {path: _File(path) for path in sorted(paths, key=lambda path: natural(str(path)))}
    stages: dict[int, Path] = {}
    for path, file in files.items():
        stage = file.stage if file.stage is not None else rank_of_name(str(path))
        if stage is None or stage in stages:
            why = (
                "does not state its stage" if stage is None else f"states stage {stage}, as another file does"
            )
            stage = next(number for number in range(len(files) + 1) if number not in stages)
            notes.append(
                Quality("rank-unknown", "info", f"{path.name} {why}; taken for stage {stage}, by order")
            )
        stages[stage] = path
    if not stages:
        raise UnreadableInput(f"{origin} holds no times of a pipeline schedule")
    begins = _beginnings(list(files.values()))
    count = max(stages) + 1
    read = partial(_read, begins=begins, stages=count)
    sources = tuple(RankSource(stage, path, read) for stage, path in sorted(stages.items()))
    return Job(origin, FORMAT, sources, count, quality=notes)


class _File:
    """One rank's file: its iterations, their spans and lengths, and what was odd."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = _json(path)
        self.stage: int | None = None
        self.unit = "ms"
        if isinstance(content, dict):
            self.unit = content["unit"] if content.get("unit") in _UNITS else "ms"
            numbers = (whole_number(content.get(key)) for key in _STAGE_KEYS)
            self.stage = next((number for number in numbers if number is not None and number >= 0), None)
            content = content.get("iterations", content)
        self.dropped = 0
        self.iterations: dict[int, tuple[list[Span], int]] = {}
        self.memory: dict[int, float] = {}
        for index, entry in _entries(content):
            spans = list(self._spans(entry))
            if spans:
                total = _time(entry.get("total"), _UNITS[self.unit])
                self.iterations[index] = (spans, total if total is not None and total > 0 else 0)
                memory = entry.get("memory")
                if isinstance(memory, (int, float)) and abs(memory) < _MOST_MEMORY:
                    self.memory[index] = float(memory)
        if not self.iterations:
            raise UnreadableInput(
                f"{path} holds no iteration with starts and ends; give fwd_start, fwd_end, bwd_start, bwd_end"
            )

    def _spans(self, entry: dict[str, Any]) -> Iterator[Span]:
        factor = _UNITS[self.unit]
        for prefix, direction in _DIRECTIONS.items():
            starts, ends = entry.get(f"{prefix}_start"), entry.get(f"{prefix}_end")
            if not isinstance(starts, list) or not isinstance(ends, list):
                continue
            none: list[Any] = []
            pairs = zip_longest(_chunks(starts), _chunks(ends), fillvalue=none)
            for chunk, (begun, done) in enumerate(pairs):
                for index, (first, last) in enumerate(zip_longest(begun, done)):
                    start, end = _time(first, factor), _time(last, factor)
                    if start is None or end is None or end < start:
                        self.dropped += 1
                    else:
                        yield chunk, index, direction, start, end


def _json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path).decode("utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} is not valid JSON ({error}); copy it again") from None


def _entries(content: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterations by number: the key where it is one, else the place."""
    pairs = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content if isinstance(content, list) else ())
    )
    for place, (key, entry) in enumerate(pairs):
        if isinstance(entry, dict):
            number = whole_number(key)
            yield (place if number is None else number), entry


def _chunks(values: list[Any]) -> list[list[Any]]:
    return (
        [value for value in values if isinstance(value, list)]
        if any(isinstance(v, list) for v in values)
        else [values]
    )


def _time(value: Any, factor: int) -> int | None:
    """Nanoseconds; None for what is no time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    scaled = value * factor
    return round(scaled) if abs(scaled) < _LONGEST_NS else None  # NaN compares as false


def _beginnings(files: Sequence[_File]) -> dict[int, int]:
    """When each iteration began, ns: 0 throughout where the times run on from one to the next, else each
    iteration's own clock begins where the longest rank's last one ended."""
    numbers = sorted({index for file in files for index in file.iterations})
    ends = {
        n: max(max(s[4] for s in f.iterations[n][0]) for f in files if n in f.iterations) for n in numbers
    }
    starts = {
        n: min(min(s[3] for s in f.iterations[n][0]) for f in files if n in f.iterations) for n in numbers
    }
    if all(starts[later] >= ends[earlier] for earlier, later in pairwise(numbers)):
        return dict.fromkeys(numbers, 0)
    begins, now = {}, 0
    for number in numbers:
        begins[number] = now - min(starts[number], 0)
        total = max((f.iterations[number][1] for f in files if number in f.iterations), default=0)
        now = begins[number] + max(ends[number], total)
    return begins


def _read(source: RankSource, *, begins: dict[int, int], stages: int) -> Rank:
    """The rank of one file. ``stages``: ranks of the pipeline; chunk c of rank r is stage c × ranks + r."""
    file = _File(source.path)
    strings = Strings()
    rank = Rank(source.rank, str(source.path), FORMAT, strings, world_size=stages)
    work: dict[str, list[int]] = {
        n: [] for n in ("stage", "index", "direction", "start_ns", "end_ns", "step")
    }
    steps: dict[str, list[int]] = {"index": [], "start_ns": [], "end_ns": []}
    for number in sorted(file.iterations):
        spans, total = file.iterations[number]
        begin = begins.get(number, 0)
        for chunk, index, direction, start, end in spans:
            row = (
                chunk * stages + source.rank,
                index,
                strings.code(direction),
                begin + start,
                begin + end,
                number,
            )
            for column, value in zip(work.values(), row, strict=True):
                column.append(value)
        first, last = min(span[3] for span in spans), max(span[4] for span in spans)
        begun = begin if begin or (first >= 0 and total >= last) else begin + first
        steps["index"].append(number)
        steps["start_ns"].append(begun)
        steps["end_ns"].append(begin + max(last, total if begun == begin else last))
    rank.microbatches = Table("microbatches", work, strings)
    rank.steps = Table("steps", steps, strings)
    rank.metadata = {"pipeline": {"stage": source.rank, "memory_as_written": file.memory}}
    if file.dropped:
        text = f"{file.dropped} times of micro-batches lack their start or end, or end before they start; they are left out"
        rank.note("pipeline-times-odd", "warning", text)
    return rank
