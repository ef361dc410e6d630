"""Run a training script as it is, and record it.

    trine run train.py --lr 3e-4
    trine run -o runs/wide train.py --width 2048
    trine run -m my_package.train
    trine run torchrun --nproc-per-node 8 train.py        (the same as:)
    torchrun --nproc-per-node 8 -m trine run train.py

The script needs no change: its model, optimizer and loader are found when training begins. Its exit code,
its traceback and its signals are what they would be under python. The record goes to runs/SCRIPT; a second
run of the same script is kept beside the first. --config applies the keys of a configuration that need no code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim import Config

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "run a script unchanged and record it"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Options come before SCRIPT; all that follows it is the script's own."""
    parser.usage = "trine run [-o RUN] [--config CONFIG] [--no-windows] [-m] [--] SCRIPT ..."
    parser.add_argument(
        "-o", "--output", type=Path, metavar="RUN", help="folder of the record (default: runs/SCRIPT)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="CONFIG", help="apply the keys of this TOML file that need no code"
    )
    parser.add_argument("--no-windows", action="store_true", help="record no deep windows of torch.profiler")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments"
    )


def run(arguments: argparse.Namespace) -> NoReturn:
    """Ends the process as the script ends it. Raises ``UsageError`` before the script has started."""
    command = list(arguments.command_line)
    if command and command[0] == "--":
        command = command[1:]
    if not command:
        raise UsageError("trine run needs a script: trine run train.py (or trine run -m PACKAGE)")
    if not arguments.module and Path(command[0]).name == "torchrun" and not Path(command[0]).is_file():
        _launch(command[1:], arguments)
    from trine.profiler.launch import find_program, run_program
    from trine.profiler.unedited import recording

    program = find_program(command[0], arguments.module)
    configuration = install = None
    if arguments.config is not None:
        from trine.optim import Config

        config = Config.from_toml(arguments.config)
        _require_no_code(config)
        configuration, install = config.to_dict(), lambda: _install(config)
    path = (arguments.output or Path("runs") / program.name).absolute()
    windows = None if arguments.no_windows else "default"
    run_program(program, command[1:], lambda: recording(path, configuration, install, windows))


def _require_no_code(config: Config) -> None:
    """Raise ``UsageError`` with the first key that a script must apply itself."""
    from trine.optim.techniques._unedited import refusals_without_code

    for reason in refusals_without_code(config).values():
        raise UsageError(reason)


def _install(config: Config) -> Any:
    from trine.optim.techniques._unedited import install

    return install(config)


def _launch(options_and_script: Sequence[str], arguments: argparse.Namespace) -> NoReturn:
    """``trine run torchrun OPTIONS SCRIPT ...``: torchrun with us in front of the script, in this very process."""
    from trine.profiler.launch import split_launcher_arguments

    options, script, is_module = split_launcher_arguments(options_and_script)
    ours = ["-m", "trine", "run"]
    if arguments.output is not None:
        ours += ["-o", str(arguments.output)]
    if arguments.config is not None:
        ours += ["--config", str(arguments.config)]
    if arguments.no_windows:
        ours.append("--no-windows")
    if is_module:
        ours.append("-m")
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "torch.distributed.run", *options, *ours, "--", *script]
    os.execv(sys.executable, command)
