"""Flight recorder dumps as PyTorch writes them, made by hand: one :class:`Dump` a rank.

dump = Dump(0, groups={"0": ("default_pg", [0, 1])})
dump.call("all_reduce", shapes=[[8]])
dump.write(folder)
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN_NS = 1_700_000_000_000_000_000
#: What a rank does between two calls.
STEP_NS = 1_000_000


class Dump:
    """One rank's dump. Entries are completed unless told otherwise; ``world`` makes the default group."""

    def __init__(
        self,
        rank: int,
        world: int,
        groups: dict[str, tuple[str, Sequence[int]]] | None = None,
        backend: str = "nccl",
        version: str = "2.10",
    ) -> None:
        self.rank = rank
        self.backend = backend
        self.version = version
        self.groups = {"0": ("default_pg", list(range(world))), **(groups or {})}
        self.entries: list[dict[str, Any]] = []
        self.sequences: dict[str, int] = {}
        self.now = BEGIN_NS
        self.completed: dict[str, int] = {}

    def call(
        self,
        operation: str,
        *,
        group: str = "0",
        shapes: list[list[int]] | None = None,
        out: list[list[int]] | None = None,
        dtype: str = "Float",
        state: str = "completed",
        line: int = 10,
        sequence: int | None = None,
        later_ns: int = 0,
        peer: bool = False,
    ) -> Dump:
        """Enqueue an operation; of a message, ``send 0->1`` with ``peer``."""
        if not peer:
            self.sequences[group] = sequence if sequence is not None else self.sequences.get(group, 0) + 1
        number = self.sequences.get(group, 0)
        self.now += STEP_NS + later_ns
        done = state == "completed"
        if done and not peer:
            self.completed[group] = number
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(group),
                "process_group": (group, self.groups[group][0]),
                "collective_seq_id": number,
                "p2p_seq_id": len(self.entries) if peer else 0,
                "op_id": len(self.entries) + 1,
                "profiling_name": f"{self.backend}:{operation}",
                "time_created_ns": self.now,
                "input_sizes": shapes if shapes is not None else [[8]],
                "input_dtypes": [dtype],
                "output_sizes": out if out is not None else (shapes or [[8]]),
                "output_dtypes": [dtype],
                "state": "scheduled" if self.backend == "gloo" else state,
                "time_discovered_started_ns": self.now
                if state != "scheduled" and self.backend != "gloo"
                else None,
                "time_discovered_completed_ns": self.now if done and self.backend != "gloo" else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": peer,
                "thread_id": "1",
                "thread_name": "python3",
                "frames": [
                    {
                        "name": operation.split()[0],
                        "filename": "/v/site-packages/torch/distributed/c10d.py",
                        "line": 1,
                    },
                    {"name": "train", "filename": "/job/me/train.py", "line": line},
                ],
            }
        )
        return self

    def calls(self, count: int, **how: Any) -> Dump:
        """Some all-reduces that went well."""
        for _ in range(count):
            self.call("all_reduce", **how)
        return self

    def content(self) -> dict[str, Any]:
        """The dump as the pickle holds it."""
        return {
            "version": self.version,
            "comm_lib_version": "2.21.5",
            "pg_config": {
                name: {"name": name, "desc": text, "ranks": str(list(ranks))}
                for name, (text, ranks) in self.groups.items()
            },
            "pg_status": {
                str(list(self.groups).index(name)): {
                    "last_enqueued_collective": last,
                    "last_started_collective": self.completed.get(name, -1),
                    "last_completed_collective": self.completed.get(name, -1),
                }
                for name, last in self.sequences.items()
            },
            "entries": self.entries,
        }

    def write(self, folder: Path) -> Path:
        """The pickle of a rank."""
        path = folder / f"nccl_trace_rank_{self.rank}"
        path.write_bytes(pickle.dumps(self.content()))
        return path

    def write_json(self, folder: Path) -> Path:
        """The JSON of a rank: no frames, 0 for absent times, strings in ``pg_status``."""
        content = json.loads(json.dumps(self.content()))
        for entry in content["entries"]:
            del entry["frames"]
            for name in ("time_discovered_started_ns", "time_discovered_completed_ns"):
                entry[name] = entry[name] or 0
        content["pg_status"] = {
            group: {name: str(value) for name, value in status.items()}
            for group, status in content["pg_status"].items()
        }
        path = folder / f"fr_rank_{self.rank}.json"
        path.write_text(json.dumps(content, sort_keys=True))
        return path
