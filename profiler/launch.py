"""Run somebody's script as Python would, and record it: the inside of ``trine run``.

The script is ``__main__``, has its own ``sys.argv`` and ``sys.path[0]``, and leaves through its own door:
exit codes, ``SystemExit``, tracebacks (without our frames) and Ctrl-C are those of ``python SCRIPT``. torch is not
imported before the script does it, because scripts set variables first that torch reads when it is imported.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import os
import signal
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from trine.record.errors import UsageError

__all__ = ["Program", "find_program", "run_program", "visible_traceback"]

_OURS = str(Path(__file__).parent)


class Program:
    """Code to run as ``__main__``, and what belongs to it."""

    def __init__(self, name: str, load: Callable[[], types.CodeType], **attributes: Any) -> None:
        self.name = name
        self.load = load
        self.attributes = attributes
        self.argv0 = str(attributes.get("__file__") or name)
        self.path0: str | None = None


def find_program(target: str, as_module: bool) -> Program:
    """The program that ``python TARGET`` or ``python -m TARGET`` would run. Raises ``UsageError`` when there is none."""
    return _module(target) if as_module else _script(target)


def _script(target: str) -> Program:
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{target} is a folder: name the script in it, or give a package with -m")
    if not path.is_file():
        raise UsageError(f"there is no script {target} in {Path.cwd()}; a module is given with -m")
    file = os.path.abspath(target)  # noqa: PTH100 - as Python: made absolute, links kept
    loader = SourceFileLoader("__main__", file)

    def load() -> types.CodeType:
        return compile(loader.get_data(file), file, "exec", dont_inherit=True)

    program = Program(path.stem, load, __file__=file, __loader__=loader, __package__=None, __spec__=None)
    program.argv0 = target
    program.path0 = str(path.resolve().parent)
    return program


def _module(target: str) -> Program:
    program_path = str(Path.cwd())
    if not sys.flags.safe_path and program_path not in sys.path:
        sys.path.insert(0, program_path)
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except (ImportError, ValueError) as error:
        raise UsageError(f"cannot find the module {target}: {error}") from None
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        raise UsageError(
            f"there is no module {target} that can be run; a script is run with trine run FILE.py"
        )
    name = spec.name

    def load() -> types.CodeType:
        code = loader.get_code(name)
        if code is None:
            raise ImportError(f"no code object available for {name}")
        return code  # type: ignore[no-any-return]

    package = spec.parent
    program = Program(
        target.rpartition(".")[2],
        load,
        __file__=spec.origin,
        __loader__=loader,
        __package__=package,
        __spec__=spec,
    )
    program.path0 = program_path
    return program


def run_program(program: Program, arguments: Sequence[str], around: Callable[[], Any]) -> NoReturn:
    """Run it and end the process as it ends. ``around()`` is a context manager that must let everything pass."""
    sys.argv = [program.argv0, *arguments]
    if program.path0 is not None and not sys.flags.safe_path:
        # What stands there is the folder of our own command, or of python -m.
        sys.path[0] = program.path0
    module = types.ModuleType("__main__")
    vars(module).update(program.attributes, __builtins__=builtins, __cached__=None)
    ours = sys.modules["__main__"]
    sys.modules["__main__"] = module
    # Registered before the script's own, so it runs after them.
    leave = _LeaveLast(ours)
    atexit.register(leave)
    try:
        with around():
            code = program.load()
            exec(code, vars(module))  # noqa: S102 - that is what running a script is
    except SystemExit as error:
        raise SystemExit(error.code) from None
    except BaseException as error:  # noqa: BLE001 - whatever the script raised ends it, as under Python
        _show(error)
        if isinstance(error, KeyboardInterrupt):
            leave.by_signal = signal.SIGINT
        raise SystemExit(1) from None
    raise SystemExit(0)


class _LeaveLast:
    """The last thing the process does before the interpreter is torn down."""

    def __init__(self, keep: types.ModuleType) -> None:
        self._keep = keep  # else the names of our own __main__ would be cleared under us
        self.by_signal: signal.Signals | None = None

    def __call__(self) -> None:
        if self.by_signal is not None:
            # As Python does after an uncaught KeyboardInterrupt, so that shells and launchers see a signal.
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(self.by_signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.by_signal)


def _show(error: BaseException) -> None:
    """Print the traceback as Python would have, through the script's own ``sys.excepthook`` if it set one."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = visible_traceback(link.__traceback__)
        link = link.__cause__ or link.__context__
    traceback = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    try:
        sys.excepthook(type(error), error, traceback)
    except BaseException:  # noqa: BLE001 - a broken hook of the script's: Python falls back too
        sys.__excepthook__(type(error), error, traceback)
    sys.stderr.flush()


def visible_traceback(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The same traceback without frames of ours: those that started the script, and our wrappers inside it."""
    frames = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            frames.append(traceback)
        traceback = traceback.tb_next
    visible: types.TracebackType | None = None
    for frame in reversed(frames):
        visible = types.TracebackType(visible, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return visible


def split_launcher_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str], bool]:
    """(torchrun's options, the script and its arguments, whether it is a module). Raises ``UsageError``.

    torchrun's own parser tells where its options end.
    """
    try:
        from torch.distributed.run import get_args_parser
    except ImportError as error:
        raise UsageError(f"torchrun is not installed here ({error}): pip install 'trine[train]'") from None
    given = list(arguments)
    parser = get_args_parser()
    try:
        known = parser.parse_args(given)
    except SystemExit as error:
        if error.code in (0, None):
            raise
        raise UsageError("torchrun does not understand its options, as it says above") from None
    if known.no_python:
        raise UsageError("torchrun --no-python starts a command that is not Python: leave the option out")
    count = 1 + len(known.training_script_args)
    options, script = given[:-count], given[-count:]
    if known.module:
        options = [option for option in options if option not in ("-m", "--module")]
    return options, script, bool(known.module)
