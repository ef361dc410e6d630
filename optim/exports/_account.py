"""What has been said of a configuration's keys, so that none is dropped without a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trine.optim._schema import spell
from trine.optim.exports._exported import Exported

__all__ = ["Account", "Written"]

#: Keys of ranks that do one thing together, each a kind of parallelism.
_DEGREES = ("parallel.tensor", "parallel.context", "parallel.pipeline", "parallel.expert")


@dataclass(frozen=True, slots=True)
class Written:
    """Files by name, what they cannot say, and the keys of the configuration that they do say.

    ``lost``: degrees of parallelism that are left out; ``left``: those that the program or another file has to say. ``kind``: of
    the file, where a dialect has several for several tools. ``elsewhere``: what the layout of a plan takes under the tool, where
    it was planned for other software; "" where it was not.
    """

    files: Mapping[str, str]
    cannot: tuple[str, ...]
    said: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    kind: str = ""
    elsewhere: str = ""

    @property
    def text(self) -> str:
        """Of all files; where there are several, each under its name."""
        if len(self.files) == 1:
            return next(iter(self.files.values()))
        return "\n".join(f"# {name}\n{text}" for name, text in self.files.items())


class Account:
    """One export's bookkeeping: every key that the configuration sets is said, or missed with a reason.

        account = Account(exported, "Megatron-LM")
        if account.takes("parallel.tensor"):
            flags.add("--tensor-model-parallel-size", config.parallel.tensor)
        account.misses("compute.compile", "regions are compiled by the program")
        account.written({"flags.txt": text})

    ``takes`` and ``says`` cross a key off; ``misses`` crosses it off with a line; who comes first decides. What is left when the export is written is
    named as what the tool has no key for. Columns of a layout that our own configuration cannot say
    (:attr:`Exported.lacks`) are crossed off by ``says_column``.
    """

    def __init__(self, exported: Exported, tool: str) -> None:
        self._changes = exported.config.changes()
        self._left = dict(self._changes)
        self._columns = dict(exported.lacks)
        self._tool = tool
        self._lines: list[str] = []
        self._said: list[str] = []
        self._lost: list[str] = []
        self._beside: list[str] = []

    def takes(self, key: str) -> bool:
        """Whether the configuration sets this key; it counts as said from here on, if it was not named before."""
        self.says(key)
        return key in self._changes

    def says(self, *keys: str) -> None:
        """These keys are in the text, or mean there what the tool does anyway."""
        for key in keys:
            if key in self._left:
                del self._left[key]
                self._said.append(key)

    def says_column(self, column: str) -> None:
        """The tool can say this of the layout, where our own configuration cannot."""
        self._columns.pop(column, None)

    def has_column(self, column: str) -> bool:
        """Whether our own configuration cannot say this of the layout."""
        return column in self._columns

    def misses(self, key: str, why: str) -> None:
        """Name a key, and why it is not in the text. Silent for one that is not set, or that has been said or named."""
        self._miss(key, why, self._lost)

    def leaves(self, key: str, why: str) -> None:
        """As :meth:`misses`, of a key that the program or another file has to say."""
        self._miss(key, why, self._beside)

    def _miss(self, key: str, why: str, where: list[str]) -> None:
        if key not in self._left:
            return
        del self._left[key]
        self._lines.append(f"{key} = {spell(self._changes[key])}: {why}")
        if key in _DEGREES:
            where.append(key)

    def notes(self, line: str) -> None:
        """Something else that the text cannot say."""
        self._lines.append(line)

    def written(self, files: Mapping[str, str], kind: str = "") -> Written:
        """The export, with what is left named."""
        for key in tuple(self._left):
            self.misses(key, f"{self._tool} has no such key")
        lines = (*self._lines, *self._columns.values())
        return Written(dict(files), lines, tuple(self._said), tuple(self._lost), tuple(self._beside), kind)
