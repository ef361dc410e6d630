"""Prove that a configuration trains the same as the plain run.

    trine verify --config tuned.toml train.py --lr 3e-4
    trine verify --ranks 2 --config tuned.toml -m my_package.train
    trine verify train.py --config tuned.toml            (a script that hands its --config to trine.optimize)

The script runs twice from one seed, for N optimizer steps: plain, and with the configuration. Where it calls
trine.optimize, the engine applies nothing at all the first time and the configuration the second; without --config that is the
script's own. Where it does not, keys that need no code are applied as trine run does. Compared are losses (every step),
gradients (the first step, each parameter), replicas across ranks (every bit, every step), and recomputed activations against
the original ones (checksums). Exit code 0: the same, or within the tolerance that the techniques state; 1: not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from trine._verification_words import as_json, as_text
from trine.optim.verify import Verification
from trine.record.errors import UsageError

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "prove that a configuration trains the same as the plain run"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Options come before SCRIPT; all that follows it is the script's own."""
    parser.usage = "trine verify [--config CONFIG] [--ranks N] [-n STEPS] [-m] [--] SCRIPT ..."
    parser.add_argument("--config", type=Path, metavar="CONFIG", help="the configuration to prove (TOML)")
    parser.add_argument(
        "-n", "--steps", type=int, default=10, metavar="N", help="optimizer steps (default: 10)"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="local ranks, by torchrun (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of both runs (default: 0)")
    parser.add_argument(
        "--loss-tolerance", type=float, metavar="X", help="relative; default: what the techniques state"
    )
    parser.add_argument("--gradient-tolerance", type=float, metavar="X", help="relative, of the first step")
    parser.add_argument(
        "--no-search", action="store_true", help="do not look for the key at fault by further runs"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, metavar="SECONDS", help="for each run (default: 1800)"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: the same; 1: not."""
    command = list(arguments.command_line)
    if command and command[0] == "--":
        command = command[1:]
    if not command:
        raise UsageError("trine verify needs a script: trine verify --config tuned.toml train.py")
    for name in ("steps", "ranks"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name} takes 1 or more")
    if not arguments.timeout > 0:
        raise UsageError("--timeout takes seconds, more than 0")
    if "RANK" in os.environ:
        raise UsageError(
            "RANK is set, so a launcher has started this process: trine verify starts the ranks itself, so call it once, "
            f"without torchrun: trine verify --ranks {os.environ.get('WORLD_SIZE', 'N')} ..."
        )
    previous = signal.signal(signal.SIGTERM, _ended)  # so that it leaves as little as Ctrl-C does
    try:
        verification = _verified(arguments, command)
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(_formatted(verification, arguments.format))
    return 0 if verification.holds else 1


def _verified(arguments: argparse.Namespace, command: list[str]) -> Verification:
    from trine._verification import Sides

    with tempfile.TemporaryDirectory(prefix="trine-verify-") as folder:
        sides = Sides(Path(folder), command, arguments, _say)
        verification = sides.verify(_given(arguments))
        if not verification.holds and not arguments.no_search:
            verification = verification.blaming(sides.key_at_fault(verification))
    return verification


def _ended(number: int, _: Any) -> NoReturn:
    raise SystemExit(128 + number)


def _given(arguments: argparse.Namespace) -> tuple[float | None, float | None]:
    for name in ("loss_tolerance", "gradient_tolerance"):
        value = getattr(arguments, name)
        if value is not None and not value >= 0:
            raise UsageError(f"--{name.replace('_', '-')} takes 0 or more")
    return arguments.loss_tolerance, arguments.gradient_tolerance


def _say(line: str) -> None:
    """Progress, where a person waits for it."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def _formatted(verification: Verification, form: str) -> str:
    return json.dumps(as_json(verification), indent=2) if form == "json" else as_text(verification)
