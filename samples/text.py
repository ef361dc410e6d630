"""Real text that every machine has: the sources of Python's own standard library, byte by byte."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

__all__ = ["SourceDocuments", "SourceText", "pad_documents", "standard_library"]

#: What a window of text and the one shifted by a byte need as type.
Pair = tuple[torch.Tensor, torch.Tensor]


@lru_cache(maxsize=2)
def standard_library(limit_bytes: int = 4 << 20) -> bytes:
    """The standard library's modules in the order of their paths, joined, cut at ``limit_bytes``.

    The same on every run on one Python; site-packages and tests are left out. Raises
    ``FileNotFoundError`` where a Python ships without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(path.parts):
            continue
        parts.append(path.read_bytes())
        total += len(parts[-1])
        if total >= limit_bytes:
            break
    if total < 1 << 16:
        raise FileNotFoundError(f"the standard library's sources are not in {root}: give --text FILE instead")
    return b"".join(parts)[:limit_bytes]


class SourceText(Dataset[Pair]):
    """Windows of ``sequence`` bytes, not overlapping: ids and the ids one byte later, int64."""

    def __init__(self, text: bytes, sequence: int) -> None:
        """Raises ``ValueError`` when the text is shorter than one window."""
        if len(text) <= sequence:
            raise ValueError(f"{len(text)} bytes of text are too short for windows of {sequence}")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.sequence

    def __getitem__(self, index: int) -> Pair:
        start = index * self.sequence
        window = self.text[start : start + self.sequence + 1].long()
        return window[:-1], window[1:]


#: Where a function, method or class begins, with what decorates it.
_BEGINS = re.compile(
    rb"^[ \t]*(?:(?:async def|class|def)\b|@.*\n[ \t]*(?:async def|class|def)\b)", re.MULTILINE
)


class SourceDocuments(Dataset[dict[str, torch.Tensor]]):
    """The text's functions, methods and class headers, byte by byte, each a document of its own length; longer ones are cut.

    A sample is a mapping of ``input_ids`` and ``labels``, both the document's bytes, (length,), int64. ``lengths`` says how
    long each is.
    """

    def __init__(self, text: bytes, longest: int) -> None:
        """Raises ``ValueError`` for a text without any."""
        begins = [0, *(found.start() for found in _BEGINS.finditer(text)), len(text)]
        self.spans = [
            (start, min(start + longest, end))
            for first, end in pairwise(begins)
            for start in range(first, end, longest)
        ]
        if not self.spans:
            raise ValueError("the text is empty")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.lengths = [end - start for start, end in self.spans]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start, end = self.spans[index]
        ids = self.text[start:end].long()
        return {"input_ids": ids, "labels": ids}


def pad_documents(samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as people collate it: rows as wide as the longest document, (batch, width).

    ``input_ids`` with 0 behind the end, ``labels`` with -100, ``attention_mask`` with 1 where there is a token.
    """
    ids = [sample["input_ids"] for sample in samples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence([sample["labels"] for sample in samples], True, -100),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
    }
