"""Start a module on local ranks under torchrun, wait for it with a limit, leave no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trine.record.errors import TrineError

__all__ = ["launch"]

#: After a polite end, torchrun and its ranks get this long before they are killed.
GRACE_SECONDS = 8.0

#: What a rank's last lines say → what to do about it.
_REMEDIES = (
    (r"EADDRINUSE|address already in use", "a port is in use: end the other run, or try again"),
    (r"No module named 'torch'", "PyTorch is not installed: pip install 'trine[train]'"),
    (r"out of memory|OutOfMemory|bad_alloc", "out of memory: end other programs, or use fewer --ranks"),
    (r"No space left on device", "the disk is full: give --output a folder on another one"),
)


def launch(
    what: str,
    module: str,
    arguments: Sequence[str],
    *,
    ranks: int,
    log_folder: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``python -m module`` on ``ranks`` local ranks under torchrun and wait at most ``seconds``.

    What the ranks print goes to ``log_folder``. Raises ``TrineError`` in one line, with the failed rank's last line,
    when a rank fails or time is up. On that, on Ctrl-C and on any other exception every process that was started
    is ended first.
    """
    log_folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=0", f"--log-dir={log_folder}", "--redirects=3", "-m", module, *arguments]
    with (log_folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TrineError(
                f"{what} took longer than {seconds:.0f} s and was ended; {_last_words(log_folder)}"
            ) from None
        finally:
            _end(process)
    if code != 0:
        raise TrineError(f"{what} failed: {_last_words(log_folder)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks. Ranks live in sessions of their own, so killing its group would miss them."""
    family = [process.pid, *_descendants(process.pid)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on and waits for its ranks
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            family += _descendants(process.pid)
    for pid in dict.fromkeys(family[1:]):
        _kill(pid)
    if process.poll() is None:
        process.kill()
        process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # gone already, as it should
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        time.sleep(0.02)


def _descendants(pid: int) -> list[int]:
    """Children of a process and theirs, from ``/proc``; empty where there is none."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
        except OSError:
            continue  # ended meanwhile
        # pid (name) state parent ...: the name may hold spaces and brackets.
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _last_words(log_folder: Path) -> str:
    """The line that says why, from the rank that failed first, and where the whole log is."""
    logs = sorted(log_folder.glob("*/attempt_0/*/stderr.log"), key=lambda path: path.stat().st_mtime)
    for path in [*logs, log_folder / "torchrun.log"]:
        lines = [line.strip() for line in _tail(path) if line.strip()]
        # An exception's own line, not the warnings that a rank prints while it goes down.
        errors = [
            line
            for line in lines
            if re.match(r"^(\[rank\d+\]:\s*)?[\w.]*(Error|Exception|Interrupt)\b", line)
        ]
        if not errors:
            continue
        words = re.sub(r"^\[rank\d+\]:\s*", "", errors[-1])[:300]
        rank = f"rank {path.parent.name}: " if path.name == "stderr.log" else ""
        remedy = next(
            (text for pattern, text in _REMEDIES if re.search(pattern, "\n".join(lines), re.IGNORECASE)), ""
        )
        return f"{rank}{words}{f' ({remedy})' if remedy else ''}; the log is in {log_folder}"
    return f"the log is in {log_folder}"


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
