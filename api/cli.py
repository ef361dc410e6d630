"""The command line: one module per verb in :mod:`trine.commands`, found by name.

Exit codes: 0 all is well; 1 a check failed; 2 bad usage or unreadable input; 3 two runs cannot be
compared. One clear line on standard error, never a traceback (``TRINE_DEBUG=1`` shows it).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn, Protocol, TextIO, cast

import trine
from trine.record.errors import TrineError, UsageError

__all__ = ["main"]


class Command(Protocol):
    """What a module of :mod:`trine.commands` offers."""

    SUMMARY: str

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int: ...


class _Parser(argparse.ArgumentParser):
    """Complains in one line, without the usage that pushes it off the screen."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            # argparse takes -1T for an option.
            message += " (one that begins with a - is written after =, as --option=-1)"
        raise UsageError(f"{message}; see '{self.prog} --help'")


def _command_names() -> list[str]:
    import trine.commands

    names = (module.name for module in pkgutil.iter_modules(trine.commands.__path__))
    return sorted(name for name in names if not name.startswith("_"))


def _parser() -> _Parser:
    parser = _Parser(
        prog="trine",
        description="Find what holds a distributed training run back, fix it, and prove it.",
    )
    parser.add_argument("--version", action="version", version=f"trine {trine.__version__}")
    verbs = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _command_names():
        command = cast(Command, import_module(f"trine.commands.{name}"))
        verb = verbs.add_parser(
            name,
            help=command.SUMMARY,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.prepare_parser(verb)
        verb.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code."""
    _ready_streams()
    try:
        arguments = _parser().parse_args(argv)
        code = int(arguments.run(arguments))
        # Here, where a full disk still has a message; at the interpreter's end it would have a traceback.
        sys.stdout.flush()
        return code
    except TrineError as error:
        return _complain(error, error.exit_code)
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        # The reader of our output (head, less) went away; that is its right.
        _silence(sys.stdout)
        return 0
    except OSError as error:
        _silence(sys.stdout)  # what it could not write it would try again at the interpreter's end
        return _complain(f"{error.strerror or error}{_where(error)}", 2)
    except Exception as error:  # noqa: BLE001 - a user sees one line, never a traceback
        reason = f"unexpected {type(error).__name__}: {error}; set TRINE_DEBUG=1 to see where, and please report it"
        return _complain(reason, 2)


def _ready_streams() -> None:
    """Standard streams that take what comes: closed ones (``>&-``) swallow it, others replace what they cannot print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - for as long as we run
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _silence(stream: TextIO) -> None:
    """Let the rest of a stream go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor has nothing to lose
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _where(error: OSError) -> str:
    if error.filename is not None:
        return f": {error.filename}"
    return " (while writing to standard output)" if error.errno in (errno.ENOSPC, errno.EIO) else ""


def _complain(reason: object, code: int) -> int:
    if os.environ.get("TRINE_DEBUG") and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    line = " ".join(str(reason).split())
    try:
        # A name in it may hold escapes that a terminal would obey.
        print(f"trine: {''.join(_shown(each) for each in line)}", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)  # the exit code has to say it alone
    return code


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
