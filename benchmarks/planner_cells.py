"""Cells of a table of published runs: numbers as people write them, and a note of what had to be assumed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Missing", "Row"]

#: Commas part thousands; one with other than three digits behind it is a decimal one, as half the world writes it.
_DIGITS = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:[.,][0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
#: A number, and the unit or multiple behind it, if any.
_NUMBER = re.compile(rf"({_DIGITS})(?:\s?([A-Za-zµμ]+)(\s?tok)?)?")
#: A sign is one at a cell's beginning alone: between numbers it makes a range, and behind a letter a name (``zero-1``).
_NEGATIVE = re.compile(r"[~≈<>=\s]*[-−–]\s*\.?\d")

#: Multiples of a column, as a factor; the rest have ``_BINARY``, since devices, sequences and widths are mostly powers of two.
_BINARY = {"k": 1024.0, "ki": 1024.0, "m": 1024.0**2, "mi": 1024.0**2}
_DECIMAL = {"k": 1e3, "m": 1e6}
_MULTIPLES = {
    "step_time_s": {
        **dict.fromkeys(("us", "µs", "μs"), 1e-6),
        **dict.fromkeys(("ms", "msec", "millisecond", "milliseconds"), 1e-3),
        **dict.fromkeys(("min", "mins", "minute", "minutes", "m"), 60.0),
        **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    },
    "tokens_per_s_gpu": _DECIMAL,
    "vocab": _DECIMAL,
    "params_b": {"m": 1e-3, "million": 1e-3, "t": 1e3, "trillion": 1e3},
    "mem_gib": dict.fromkeys(("mb", "mib"), 1 / 1024),
    "gpu_mem_gb": dict.fromkeys(("mb", "mib"), 1 / 1024),
    "gbs": {"k": 1024.0, "ki": 1024.0},
}
#: Multiples of a batch that is counted in tokens.
_OF_TOKENS = {"m": 1024.0**2, "mi": 1024.0**2, "million": 1e6, "mtok": 1024.0**2}

#: What a column can be: smallest and largest, and what a number outside is not. None has been published that comes near them; 0 is
#: how some tables leave a cell out.
_BOUNDS = {
    "step_time_s": (1e-3, 7 * 86400.0, "time of a step"),
    "tokens_per_s_gpu": (1e-3, 1e8, "throughput of a device"),
    "mem_gib": (1e-2, 1e4, "memory of a device"),
    "gpu_mem_gb": (1.0, 1e4, "memory of a device"),
    "params_b": (1e-5, 1e6, "number of billions"),
    "oom": (0.0, 1e6, "mark of an out-of-memory"),
    "n_gpus": (1.0, 1e7, "number of devices"),
    "gpus_per_node": (1.0, 1e5, "number of devices"),
    "layers": (1.0, 1e4, "number of layers"),
    "hidden": (1.0, 1e6, "width"),
    "ffn": (1.0, 1e7, "width"),
    "heads": (1.0, 1e4, "number of heads"),
    "kv_heads": (1.0, 1e4, "number of heads"),
    "vocab": (1.0, 1e7, "vocabulary"),
    "seq_len": (1.0, 2.0**23, "length of a sequence"),
    "experts": (0.0, 1e5, "number of experts"),
    "topk": (0.0, 1e4, "number of experts"),
    "gbs": (1.0, 1e7, "batch"),
    "mbs": (1.0, 1e5, "batch"),
    "ga": (1.0, 1e6, "number of micro-batches"),
    "vpp": (0.0, 1e4, "number of chunks"),
    **dict.fromkeys(("tp", "pp", "cp", "ep", "dp"), (0.0, 1e7, "number of ranks")),
}


class Missing(Exception):
    """A row lacks what no assumption can replace."""


@dataclass
class Row:
    """Cells of a row, and what had to be assumed. ``sequence``: its model's, once that is known: what batches of tokens are cut into."""

    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list)
    sequence: int | None = None

    def text(self, name: str) -> str:
        """A cell without blanks around it; empty where there is none."""
        return (self.cells.get(name) or "").strip()

    def number(self, name: str) -> float | None:
        """The first number in a cell, in the column's unit; the middle of a range; None where there is none.

        Raises ``Missing`` for one that the column cannot have.
        """
        text = self.text(name)
        found = _NUMBER.findall(text)
        if not found:
            return None
        value = self._scaled(name, *found[0])
        if len(found) >= 2 and re.search(r"\d\s*(?:-|–|\.\.|to)\s*\d", text):
            self.assume(f"{name} {text} as its middle")
            value = (value + self._scaled(name, *found[1])) / 2
        smallest, largest, what = _BOUNDS.get(name, (0.0, float("inf"), "amount"))
        if _NEGATIVE.match(text) or not (value == 0 or smallest <= value <= largest):
            raise Missing(f"{name} {text[:30]} is no {what}")
        return value

    def count(self, name: str) -> int | None:
        """A whole number from one on; None where there is none. Raises ``Missing`` as :meth:`number`."""
        found = self.number(name)
        return None if found is None or found < 1 else round(found)

    def needed(self, name: str) -> int:
        """A count without which nothing is predicted. Raises ``Missing``."""
        found = self.count(name)
        if found is None:
            raise Missing(f"no {name}")
        return found

    def assume(self, text: str) -> None:
        """Note what the row does not say, once."""
        if text not in self.assumed:
            self.assumed.append(text)

    def _scaled(self, name: str, digits: str, unit: str, tokens: str) -> float:
        """A number with its unit or multiple."""
        whole = re.sub(r",(?=[0-9]{3}(?![0-9]))", "", digits)
        value, unit = float(whole.replace(",", ".")), unit.casefold()
        if name == "gbs" and (tokens or unit in _OF_TOKENS or unit.startswith("tok")):
            return self._sequences(value * {**_BINARY, **_OF_TOKENS}.get(unit, 1.0))
        factor = _MULTIPLES.get(name, _BINARY).get(unit, 1.0)
        if factor != 1.0 or "," in whole:
            self.assume(f"{name} {self.text(name)} as {value * factor:g}")
        return value * factor

    def _sequences(self, tokens: float) -> float:
        """Sequences of a batch that is told in tokens. Raises ``Missing`` where their length is not known."""
        length = self.sequence or self.count("seq_len")
        if length is None:
            raise Missing(f"gbs {self.text('gbs')[:30]} is in tokens, and no seq_len")
        self.assume(f"gbs {self.text('gbs')} as {round(tokens / length)} sequences of {length}")
        return tokens / length
