"""Real text that every machine has: the sources of Python's own standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
from torch.utils.data import Dataset

__all__ = ["SourceText", "standard_library"]

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
