"""Steps from annotations: ranges called like a training step, one after the other.

``ProfilerStep#12``, ``step 12``, ``iteration12`` (Megatron, NeMo), ``train_step``, ``run_training_batch``
(Lightning), ``batch 3``: numbered ones keep their numbers, others are counted. Ranges that overlap, that come once, or
that cover little of the capture are something else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..model import HOST_KINDS, Strings, Table

__all__ = ["steps_of_annotations"]

Array = npt.NDArray[Any]

_ANNOTATION = HOST_KINDS.index("annotation")
_OPERATOR = HOST_KINDS.index("operator")

_WORD = (
    r"(?<![a-z])(?:profiler|train(?:ing|er)?|global|main)?[\s_.:#-]*(?:step|iteration|iter|batch)s?(?![a-z])"
)
_STEP = re.compile(_WORD, re.IGNORECASE)
#: ``step 12``, ``Step [12/100]``, ``epoch 1, batch=12``: the number right behind the word.
_NUMBERED = re.compile(_WORD + r"[\s_.:#=\[(-]*(\d{1,9})(?!\d)", re.IGNORECASE)
#: A part of a step.
_NO_STEP = re.compile(
    r"optim|zero_grad|scaler|sched|micro|forward|backward|load|fetch|next|val(?:id|_|\b)|eval|test|sub|layer|log|"
    r"checkpoint|save|warm|norm|clip|wait|sync|copy|callback|on_|to_|get|generator|prep|collat|hook|metric|reduce|"
    r"send|recv|transfer|stage|::",
    re.IGNORECASE,
)
#: Many steps together, where no step's number stands in the name.
_MANY = re.compile(r"epoch|\(|fit|loop", re.IGNORECASE)
#: Fewer marks than this are no regular repetition.
_FEWEST = 2
#: Numbered marks may cover little of a capture that began long before; counted ones must cover much of it.
_COVERED = 0.3


@dataclass(frozen=True, slots=True)
class _Marks:
    index: Array
    start: Array
    end: Array
    numbered: bool

    @property
    def length(self) -> int:
        return int((self.end - self.start).sum())


def steps_of_annotations(host: Table) -> tuple[Table | None, str | None]:
    """Steps of a rank, and the name of their annotation; ``None`` where no annotation repeats like one."""
    candidates: dict[tuple[str, int], list[tuple[int, int, int | None]]] = defaultdict(list)
    named = _candidates(host.strings)
    usable = np.isin(host["kind"], (_ANNOTATION, _OPERATOR)) & (host["end_ns"] > host["start_ns"])
    rows = np.flatnonzero(usable & np.isin(host["name"], list(named)))
    for row in rows.tolist():
        name, number = named[int(host["name"][row])]
        span = (int(host["start_ns"][row]), int(host["end_ns"][row]), number)
        candidates[name, int(host["thread"][row])].append(span)
    marks = {key: found for key, spans in candidates.items() if (found := _marks(spans)) is not None}
    if not marks:
        return None, None
    extent = int(host["end_ns"].max() - host["start_ns"].min())
    fit = {key: one for key, one in marks.items() if one.numbered or one.length >= extent * _COVERED}
    if not fit:
        return None, None
    best = max(fit, key=lambda key: (fit[key].length, fit[key].numbered, key[0]))
    chosen = fit[best]
    columns = {"index": chosen.index, "start_ns": chosen.start, "end_ns": chosen.end}
    return Table("steps", columns, host.strings), best[0]


def _candidates(strings: Strings) -> dict[int, tuple[str, int | None]]:
    """Code of a name → the name without its number, and the number."""
    found = {}
    for code, text in enumerate(strings.values):
        if len(text) > 80 or not _STEP.search(text) or _NO_STEP.search(_STEP.sub("", text)):
            continue
        numbered = _NUMBERED.search(text)
        if numbered is None and (_MANY.search(text) or re.search(r"\d", text)):
            continue
        plain = " ".join(re.sub(r"[\d\[\]/]+", " ", text).split()).strip(" _#:-.=,")
        found[code] = (plain, int(numbered[1]) if numbered else None)
    return found


def _marks(spans: list[tuple[int, int, int | None]]) -> _Marks | None:
    """Spans as steps in order; ``None`` where they overlap or come once."""
    spans = sorted(set(spans), key=lambda span: (span[0], -span[1]))
    start = np.array([span[0] for span in spans], np.int64)
    end = np.array([span[1] for span in spans], np.int64)
    if len(spans) < _FEWEST or (start[1:] < end[:-1]).any():
        return None
    numbers = [span[2] for span in spans]
    numbered = all(number is not None for number in numbers) and len(set(numbers)) == len(numbers)
    index = np.array(numbers if numbered else range(len(spans)), np.int64)
    return _Marks(index, start, end, numbered)
