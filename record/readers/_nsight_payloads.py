"""Typed payloads of NVTX ranges: what NCCL says of its calls (communicator, bytes, peer).

NCCL registers a schema for each kind of call (``src/include/nvtx_payload_schemas.h``); the export holds the
schemas in ``NVTX_PAYLOAD_SCHEMA_ENTRIES`` and the values as ``NVTX_EVENTS.binaryData`` (``--include-blobs``) or,
already spelled out, as ``jsonText`` (``--include-json``). Neither is exported by default.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..model import MISSING
from ._nsight_database import Database

__all__ = ["NcclPayload", "Payloads"]

#: Domain, reserved, schema, reserved (uint32 each), payload's size, whole size (uint64).
_HEADER = struct.Struct("<IIIIQQ")

#: ``NVTX_PAYLOAD_ENTRY_TYPE_*`` of ``nvToolsExtPayload.h`` → how struct reads it.
_TYPES = {
    3: "h", 4: "H", 5: "i", 6: "I", 7: "q", 8: "Q", 9: "q", 10: "Q",
    11: "b", 12: "B", 13: "h", 14: "H", 15: "i", 16: "I", 17: "q", 18: "Q", 22: "Q",
}  # fmt: skip

#: A part of the field's name in lower case → ours, the first match wins.
_FIELDS = (
    ("communicator", "communicator"),
    ("message size", "bytes"),
    ("peer", "peer"),
    ("root", "root"),
    ("no. of ranks", "ranks"),
    ("nranks", "ranks"),
    ("cuda device", "device"),
    ("rank", "rank"),
)


@dataclass(frozen=True, slots=True)
class NcclPayload:
    """Fields of one call, :data:`MISSING` where it has none. ``bytes`` are those of one rank's own buffer."""

    communicator: int = MISSING
    bytes: int = MISSING
    peer: int = MISSING
    root: int = MISSING
    ranks: int = MISSING
    rank: int = MISSING
    device: int = MISSING


class Payloads:
    """Decodes payloads by the schemas of one export."""

    def __init__(self, database: Database) -> None:
        self._schemas: dict[tuple[int, int], dict[str, tuple[str, int]]] = {}
        columns = ("domainId", "schemaId", "type", "name", "offset")
        for domain, schema, kind, name, offset in database.rows("NVTX_PAYLOAD_SCHEMA_ENTRIES", columns):
            field = _field(name)
            if field and kind in _TYPES and isinstance(offset, int | None):
                self._schemas.setdefault((domain, schema), {})[field] = (_TYPES[kind], offset or 0)

    @property
    def domains(self) -> frozenset[int]:
        """Domains whose schemas speak of communicators: NCCL's."""
        return frozenset(
            domain
            for (domain, _), fields in self._schemas.items()
            if "communicator" in fields or "bytes" in fields
        )

    def decode(self, blob: Any, text: Any) -> NcclPayload | None:
        """A payload from ``binaryData`` or ``jsonText``; ``None`` where neither says anything that is known."""
        if isinstance(text, str) and text.startswith("{"):
            found = _from_json(text)
            if found:
                return NcclPayload(**found)
        if isinstance(blob, bytes) and len(blob) >= _HEADER.size:
            found = self._from_blob(blob)
            if found:
                return NcclPayload(**found)
        return None

    def _from_blob(self, blob: bytes) -> dict[str, int]:
        domain, _, schema, _, _, _ = _HEADER.unpack_from(blob)
        found = {}
        for field, (kind, offset) in self._schemas.get((domain, schema), {}).items():
            place = _HEADER.size + offset
            if offset >= 0 and place + struct.calcsize("<" + kind) <= len(blob):
                found[field] = int(struct.unpack_from("<" + kind, blob, place)[0])
        return found


def _field(name: Any) -> str | None:
    lower = name.lower() if isinstance(name, str) else ""
    return next((field for part, field in _FIELDS if part in lower), None)


def _from_json(text: str) -> dict[str, int]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    found: dict[str, int] = {}
    _collect(content, found, 4)
    return found


def _collect(content: Any, found: dict[str, int], depth: int) -> None:
    if not isinstance(content, Mapping) or depth == 0:
        return
    for name, value in content.items():
        if isinstance(value, Mapping):
            _collect(value, found, depth - 1)
            continue
        field = _field(name)
        if field and field not in found and not isinstance(value, bool):
            try:
                found[field] = int(value, 0) if isinstance(value, str) else int(value)
            except (TypeError, ValueError, OverflowError):
                continue  # a word where a number was expected says nothing
