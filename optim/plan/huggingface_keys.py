"""What a ``config.json`` says, read through the table of its model type: its values, and what it calls them in messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trine.optim.plan._tables import packaged
from trine.record.errors import UsageError

__all__ = ["Dialect", "Reading", "dialect_of", "is_positive", "tables"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model type's table, with what it is like filled in."""

    keys: Mapping[str, Sequence[str]]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """A configuration seen through its dialect. ``where`` begins messages."""

    config: Mapping[str, Any]
    dialect: Dialect
    where: str

    def raw(self, field: str) -> Any:
        """The first key that holds something, else the dialect's value, else None."""
        held = (value for _, value in self._held(field) if value is not None)
        return next(held, self.dialect.values.get(field))

    def _held(self, field: str) -> Iterator[tuple[str, Any]]:
        """A field's keys that the configuration has, with what they hold, which may be None."""
        for key in self.dialect.keys.get(field, ()):
            *folders, last = key.split(".")
            table: Any = self.config
            for folder in folders:
                table = table.get(folder) if isinstance(table, Mapping) else None
            if isinstance(table, Mapping) and last in table:
                yield key, table[last]

    def size(self, field: str) -> int:
        """A whole number that is not negative; 0 where nothing says. Raises ``UsageError``."""
        value = self.raw(field)
        if value is None:
            return 0
        return self.whole(self.name(field), value)

    def whole(self, key: str, value: Any) -> int:
        """What a key holds, where it is a whole number that is not negative. Raises ``UsageError``."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{self.where}: {key} must be a whole number, not {value!r}")
        return value

    def number(self, field: str) -> float:
        """A number above nought; 0 where nothing says. Raises ``UsageError``."""
        value = self.raw(field)
        if value is None:
            return 0.0
        if not is_positive(value) or isinstance(value, bool):
            raise UsageError(f"{self.where}: {self.name(field)} must be a number above 0, not {value!r}")
        return float(value)

    def needed(self, field: str) -> int:
        """A size that must be there. Raises ``UsageError`` naming the key."""
        value = self.size(field)
        if self.raw(field) == 0:
            raise UsageError(f"{self.where}: {self.name(field)} must be at least 1, not 0")
        if not value:
            raise self._missing(self.name(field))
        return value

    def said(self, field: str, *, or_null: bool = False) -> int:
        """A size that must be there but may be 0, and null with ``or_null``. Raises ``UsageError`` naming the key.

        A key that is left out has the default of the type's class, which is no size of this model to be guessed.
        """
        is_null = or_null and any(value is None for _, value in self._held(field))
        if self.dialect.keys.get(field) and self.raw(field) is None and not is_null:
            raise self._missing(self.name(field))
        return self.size(field)

    def listed(self, key: str) -> list[int] | None:
        """The layers that a key lists; None where it is not there. Raises ``UsageError``."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise UsageError(f"{self.where}: {key} must be a list of layers, not {value!r}")
        return [self.whole(f"a layer of {key}", layer) for layer in value]

    def _missing(self, key: str) -> UsageError:
        return UsageError(f"{self.where} has no {key}: add it, or describe the model in TOML")

    def flag(self, field: str) -> bool:
        """Whether a field is on. Raises ``UsageError`` for words, since "false" would be on."""
        value = self.raw(field)
        if isinstance(value, str):
            raise UsageError(f"{self.where}: {self.name(field)} must be true or false, not {value!r}")
        return bool(value)

    def switch(self, field: str) -> bool:
        """Whether the key that a field of the dialect names is on."""
        key = self.dialect.values.get(field)
        value = None if key is None else self.config.get(key)
        if isinstance(value, str):
            raise UsageError(f"{self.where}: {key} must be true or false, not {value!r}")
        return bool(value)

    def name(self, field: str) -> str:
        """What the configuration calls a field, by the first key that it has, else by the first that it may have."""
        held = (key for key, value in self._held(field) if value is not None)
        return next(held, next(iter(self.dialect.keys.get(field, ())), field))


def is_positive(value: Any) -> bool:
    """Whether a value is a number above nought."""
    return isinstance(value, int | float) and value > 0


def dialect_of(model_type: str) -> Dialect:
    """A known type's table, with what it is like filled in."""
    table = tables()[model_type]
    base = dialect_of(table["like"]) if "like" in table else Dialect({}, {})
    own = _flat(table.get("keys", {}))
    keys = {field: [names] if isinstance(names, str) else list(names) for field, names in own.items()}
    return Dialect({**base.keys, **keys}, {**base.values, **table.get("values", {})})


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= {f"{name}.{part}": inner for part, inner in value.items()}
        else:
            found[name] = value
    return found


def tables() -> Mapping[str, Mapping[str, Any]]:
    """``huggingface.toml``, a table a model type."""
    return packaged("huggingface.toml")
