"""The two sides of ``trine verify``: processes that run the script, and the search for the key at fault."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trine.optim.config import Config
from trine.optim.techniques import tolerance_of
from trine.optim.verify import Tolerance, Verification, compare
from trine.profiler.launch import find_program
from trine.record.errors import TrineError, UsageError

__all__ = ["Sides"]

#: A launcher that is told to end gives its workers up to 30 s; then it is killed.
ENDING_S = 40.0


class Sides:
    """Runs the script plain once, and with as many configurations as are asked for."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        arguments: argparse.Namespace,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._command = list(command)
        self._arguments = arguments
        self._say = say
        self._plain: Path | None = None
        self._proved: Config | None = None
        self._has_engine = False
        self._runs = 0
        self._given: tuple[float | None, float | None] = (None, None)

    def verify(self, given: tuple[float | None, float | None]) -> Verification:
        """Both sides, compared. ``given``: tolerances of losses and gradients that override what techniques state.

        Raises ``UsageError`` where a side cannot run.
        """
        self._given = given
        find_program(
            self._command[0], self._arguments.module
        )  # a wrong name is found before anything is started
        path = self._arguments.config
        config = self._proved = None if path is None else Config.from_toml(path)
        self._say("plain …")
        self._plain = self._run(Config(), "plain")
        seen = _facts(self._plain)
        if not seen.get("bits"):
            raise UsageError("the plain run took no optimizer step: is SCRIPT a training script?")
        self._has_engine = bool(seen.get("engine"))
        if config is None and not self._has_engine:
            raise UsageError(
                "nothing to prove: the script does not call trine.optimize, and there is no --config before it"
            )
        return self._against(config)

    def key_at_fault(self, verification: Verification) -> str | None:
        """The first key that fails alone; else the one without which all is well; ``None`` where neither tells."""
        changes = verification.configuration
        config = Config.from_dict(changes)
        keys = list(config.changes())
        if len(keys) == 1:
            return keys[0]
        for key in keys:
            alone = _valid(lambda key=key: Config().with_changes({key: config.changes()[key]}))  # type: ignore[misc]
            if alone is not None and self._fails(alone, f"{key} alone"):
                return key
        for key in keys:
            rest = {other: value for other, value in config.changes().items() if other != key}
            without = _valid(lambda rest=rest: Config().with_changes(rest))  # type: ignore[misc]
            if without is not None and self._fails(without, f"without {key}") is False:
                return key
        return None

    def _fails(self, config: Config, said: str) -> bool | None:
        """Whether it is not the same; ``None`` where it cannot run."""
        self._say(f"{said} …")
        try:
            return not self._against(config).holds
        except TrineError:
            return None

    def _against(self, config: Config | None) -> Verification:
        self._say("optimised …" if config is None or self._runs == 1 else "  running")
        optimised = self._run(config, "optimised")
        applied = Config.from_dict(_facts(optimised).get("configuration", {}))
        if not applied.changes():
            raise UsageError(
                "nothing to prove: the configuration changes nothing; give one with --config in front of the script"
            )
        stated = tolerance_of(applied)
        loss, gradient = self._given
        tolerance = Tolerance(
            stated.loss if loss is None else loss, stated.gradient if gradient is None else gradient
        )
        assert self._plain is not None
        return compare(self._plain, optimised, tolerance)

    def _run(self, config: Config | None, name: str) -> Path:
        arguments = self._arguments
        self._runs += 1
        folder = self._folder / f"{self._runs}-{name}"
        plan = {
            "folder": str(folder),
            "config": None if config is None else config.to_dict(),
            "proved": None if self._proved is None else self._proved.to_dict(),
            "steps": arguments.steps,
            "seed": arguments.seed,
            "is_module": arguments.module,
            "has_engine": self._has_engine,
        }
        ours = ["-m", "trine.commands._verify_side", json.dumps(plan), *self._command]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        command = [sys.executable, *(launcher if arguments.ranks > 1 else []), *ours]
        log = self._folder / f"{self._runs}-{name}.log"
        environment = {**os.environ, "PYTHONHASHSEED": str(arguments.seed)}
        with log.open("wb") as output, _process(command, output, environment) as process:
            try:
                code = process.wait(arguments.timeout)
            except subprocess.TimeoutExpired:
                raise UsageError(
                    f"the {name} run took longer than {arguments.timeout:g} s: raise --timeout, or lower --steps"
                ) from None
        if code:
            raise UsageError(_reason(name, code, log.read_text(errors="replace")))
        return folder


@contextlib.contextmanager
def _process(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; nothing of it is left afterwards, however this ends."""
    process = subprocess.Popen(
        command,
        stdout=output,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its workers, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what the script started and left
        process.wait()


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / "rank-0.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _reason(name: str, code: int, log: str) -> str:
    """Our own line where there is one, else the last that the script said."""
    # torchrun puts the rank in front of a rank's lines, and a report of its own, which says nothing of the cause, behind.
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and "torch.distributed.elastic" not in line]
    ours = [line.partition("trine: ")[2] for line in lines if "trine: " in line]
    if ours:
        return ours[0]
    said = [
        line
        for line in lines
        if re.match(r"[\w.]*(Error|Exception|Interrupt|Exit)\b", line) or ": error: " in line
    ]
    last = said[0] if said else (lines or ["it said nothing"])[-1]
    return f"the {name} run ended with exit code {code}: {last}"


def _valid(make: Callable[[], Config]) -> Config | None:
    try:
        return make()
    except UsageError:
        return None
