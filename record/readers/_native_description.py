"""What a rank's ``rank.json`` may hold, so that a damaged one is refused where it is read and not where it is used."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ._names import MOST_RANKS

__all__ = ["why_damaged"]

Facts = dict[str, Any] | None
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
_WorldSize = Annotated[int, msgspec.Meta(ge=0, le=MOST_RANKS)]


class _Group(msgspec.Struct):
    id: str | int
    ranks: list[int]
    name: str | None = None
    description: str | None = None


class _Device(msgspec.Struct):
    index: int
    name: str
    memory_bytes: int | None = None


class _Note(msgspec.Struct):
    id: str
    severity: Literal["info", "warning", "error"]
    message: str


class _DeviceFacts(msgspec.Struct):
    type: str | None = None
    name: str | None = None
    memory_bytes: int | None = None
    threads: int | None = None
    cores: str | None = None


class _Metadata(msgspec.Struct):
    device: _DeviceFacts | None = None
    model: Facts = None
    precision: Facts = None
    flops: Facts = None
    loader: Facts = None
    optimizer: Facts = None
    data_parallel: Facts = None
    configuration: Facts = None
    versions: Facts = None


class _Description(msgspec.Struct):
    """Keys that are not named here are let through: a later version may know more."""

    rank: _Rank | None = None
    world_size: _WorldSize | None = None
    start: str | int | None = None
    host: str | None = None
    process: int | None = None
    started_ns: int | None = None
    groups: list[_Group] = msgspec.field(default_factory=list)
    devices: list[_Device] = msgspec.field(default_factory=list)
    notes: list[_Note] = msgspec.field(default_factory=list)
    overflow: dict[str, int] = msgspec.field(default_factory=dict)
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


def why_damaged(content: dict[str, Any]) -> str | None:
    """What in a decoded ``rank.json`` has a wrong type, with its place; ``None`` when all is sound."""
    try:
        msgspec.convert(content, _Description)
    except msgspec.ValidationError as error:
        return str(error)
    return None
