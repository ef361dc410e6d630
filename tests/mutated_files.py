"""Feeds a reader with mutated and cut real files, in a process of its own, and prints what went wrong as JSON.

    python tests/mutated_files.py FORMAT FIRST CASES FOLDER SEED_FILE...

A case goes wrong where anything but a ``TrineError`` of one line comes out, where it takes longer than ``CASE_S``, or
where the process grows by more than four times the uncompressed bytes and 64 MiB. Cases are numbered, so that one can
be run again alone. The peak of each case is the kernel's own (``VmHWM``, set back before each); where there is none,
memory is not measured, which the report says.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import random
import shutil
import signal
import sqlite3
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import trine
from trine.analyzers.contract import to_json
from trine.record.errors import TrineError
from trine.record.model import Table

CASE_S = 20
SPARE_BYTES = 64 << 20

#: What a mutation may put in: fragments of the formats, numbers that do not fit, opcodes.
TOKENS = (
    b"NaN", b'"', b"\\", b"\0", b"\xff\xfe", b"{", b"}", b"[", b"]", b",", b"null", b"1e999", b"9" * 40, b"-1",
    b'"ts": -5', b'"dur": 1e300', b'"ph": "B"', b"]}", b'"traceEvents": [', b'"pid": [], ', b'"args": 7, ',
    b"\x80\x04", b".", b"(", b"t", b"R", b"cos\nsystem\n", b"\x93", b"\x8c\x02os", b"]\x94", b"}\x94", b"K\x01", b"N",
    b"SQLite format 3\x00", b"CUPTI_ACTIVITY_KIND_KERNEL", b"\x1f\x8b\x08", b"true", b"\n", b"123456789012345678901",
)  # fmt: skip


class TooSlow(BaseException):
    """A case ran out of time; not an ``Exception``, so that no reader swallows it."""


def mutated(content: bytes, random: random.Random) -> bytes:
    """A few cuts, fragments, flipped bytes, repeats and swaps; numbers become others."""
    data = bytearray(content)
    for _ in range(random.choice((0, 1, 1, 2, 3, 6))):
        place = random.randrange(len(data) + 1)
        kind = random.choice(("token", "cut", "byte", "bytes", "repeat", "move", "number"))
        if kind == "token":
            data[place:place] = random.choice(TOKENS)
        elif kind == "cut":
            del data[place : place + random.choice((1, 2, 40, 2000))]
        elif kind == "byte":
            data[place : place + 1] = random.randbytes(1)
        elif kind == "bytes":
            data[place : place + 16] = random.randbytes(16)
        elif kind == "repeat":
            data[place:place] = data[max(0, place - random.choice((3, 30, 300))) : place]
        elif kind == "move":
            piece = data[place : place + 200]
            del data[place : place + 200]
            other = random.randrange(len(data) + 1)
            data[other:other] = piece
        else:
            digits = [index for index in range(place, min(place + 200, len(data))) if 48 <= data[index] <= 57]
            for index in digits[:4]:
                data[index] = random.choice(b"0123456789-.e")
    if random.random() < 0.3:
        del data[random.randrange(len(data) + 1) :]
    return bytes(data)


def mutated_database(path: Path, random: random.Random) -> bytes:
    """A database with a table or column less, or with values of other types."""
    copy = path.with_suffix(".edited")
    shutil.copyfile(path, copy)
    with contextlib.closing(sqlite3.connect(copy)) as database, contextlib.suppress(sqlite3.Error):
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        for _ in range(random.choice((1, 2, 4))):
            table = random.choice(tables)
            columns = [row[1] for row in database.execute(f"pragma table_info('{table}')")]
            if not columns:
                continue
            column = random.choice(columns)
            with contextlib.suppress(sqlite3.Error):
                change = random.choice(("drop table", "drop column", "value", "value", "rows"))
                if change == "drop table":
                    database.execute(f"drop table '{table}'")
                elif change == "drop column":
                    database.execute(f"alter table '{table}' drop column '{column}'")
                elif change == "value":
                    value = random.choice((None, -1, 2**62, "text", 1e300, b"\x00\xff", "", -(2**63)))
                    database.execute(
                        f"update '{table}' set '{column}' = ? where rowid % ? = 0",
                        (value, random.choice((1, 7))),
                    )
                else:
                    database.execute(
                        f"delete from '{table}' where rowid % ? = 0", (random.choice((1, 2, 50)),)
                    )
        database.commit()
    return copy.read_bytes()


def mutated_folder(seed: Path, target: Path, random: random.Random) -> tuple[Path, int]:
    """A record with a file changed, or one that is gone."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(seed, target)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    for path in random.sample(files, random.choice((1, 1, 2))):
        if random.random() < 0.1:
            path.unlink()
        else:
            path.write_bytes(mutated(path.read_bytes(), random))
    return target, sum(path.stat().st_size for path in files if path.is_file())


def case_of(number: int, seeds: list[Path], folder: Path) -> tuple[Path, int]:
    """The file of a case, and its uncompressed bytes."""
    chance = random.Random(number)
    seed = chance.choice(seeds)
    if seed.is_dir():
        return mutated_folder(seed, folder / seed.name, chance)
    content = seed.read_bytes()
    packed = content[:2] == b"\x1f\x8b"
    if packed and chance.random() < 0.8:
        content, packed = gzip.decompress(content), False
    if content.startswith(b"SQLite format 3") and chance.random() < 0.7:
        content = mutated_database(_copied(seed, folder), chance)
    else:
        content = mutated(content, chance)
    size = _unpacked(content) if packed else len(content)
    if not packed and chance.random() < 0.2:
        content = gzip.compress(content, 1)[: chance.choice((None, None, -1, -9, 50))]
    target = folder / seed.name
    target.write_bytes(content)
    return target, size


def _copied(seed: Path, folder: Path) -> Path:
    copy = folder / "database"
    shutil.copyfile(seed, copy)
    return copy


def _unpacked(content: bytes) -> int:
    try:
        return len(zlib.decompressobj(wbits=31).decompress(content))
    except zlib.error:
        return len(content)


def read_everything(reader: Any, path: Path) -> str:
    """What came out: ``refused`` or ``read``. Tables are looked at, so that a bad one shows here."""
    try:
        known = reader.recognizes(path)
        job = reader.open_job(path) if known else trine.load(path)
        for source in job.sources:
            rank = source.read(source)
            for name in rank.__dataclass_fields__:
                table = getattr(rank, name)
                if isinstance(table, Table):
                    table.compact()
            assert all("\n" not in note.message for note in rank.quality), "a note of several lines"
        return "read"
    except TrineError as error:
        assert str(error).strip() and "\n" not in str(error), f"an error of several lines: {error!r}"
        return "refused"


def analyse(path: Path) -> str:
    """The whole way to a document, as ``trine analyze --format json`` goes it."""
    try:
        document = to_json(trine.analyze(trine.load(path), steps="all"))
    except TrineError:
        return "refused"
    failed = [note["message"] for note in document["data_quality"] if note["id"] == "study-failed"]
    assert not failed, failed[0]
    return "read"


def main() -> int:
    """Run the cases; print one JSON object."""
    format, first, cases, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    seeds = [Path(name) for name in sys.argv[5:]]
    warnings.simplefilter("error")
    reader = _reader(format)
    for seed in seeds:  # what is imported or cached once is no growth of a case
        copy = folder / seed.name
        (shutil.copytree if seed.is_dir() else shutil.copyfile)(seed, copy)
        read_everything(reader, copy)
        analyse(copy)
    signal.signal(signal.SIGALRM, _ring)
    report: dict[str, Any] = {"read": 0, "refused": 0, "failures": [], "memory": _reset_peak()}
    for number in range(first, first + cases):
        path, size = case_of(number, seeds, folder)
        way: Callable[[], str] = (
            (lambda path=path: analyse(path))
            if number % 10 == 0
            else (lambda path=path: read_everything(reader, path))
        )
        signal.alarm(CASE_S)
        _reset_peak()
        before = _memory("VmRSS")
        try:
            report[way()] += 1
            grown = _memory("VmHWM") - before
            if report["memory"] and grown > 4 * size + SPARE_BYTES:
                report["failures"].append(
                    [number, path.name, f"grew by {grown >> 20} MiB for {size:,} bytes"]
                )
        except TooSlow:
            report["failures"].append([number, path.name, f"took longer than {CASE_S} s"])
        except Exception as error:  # noqa: BLE001 what a fuzz test is for
            report["failures"].append([number, path.name, f"{type(error).__name__}: {error}"[:300]])
        finally:
            signal.alarm(0)
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def _reader(format: str) -> Any:
    from trine.record import readers

    for module in _modules(readers):
        if getattr(module, "FORMAT", None) == format:
            return module
    raise SystemExit(f"no reader of {format}")


def _modules(package: Any) -> Iterator[Any]:
    for path in sorted(Path(package.__path__[0]).glob("[!_]*.py")):
        yield importlib.import_module(f"{package.__name__}.{path.stem}")


def _ring(*_: Any) -> None:
    raise TooSlow


def _reset_peak() -> bool:
    """Set the peak back to what is resident now; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _memory(field: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(field)), 0)


if __name__ == "__main__":
    sys.exit(main())
