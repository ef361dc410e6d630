"""Build and cache the C++ observer of collectives (``observer.cpp``).

One process of a node compiles it, at low priority, in a process of its own that outlives a short run,
under a lock that the kernel frees when its holder dies. What is published was loaded and tried first,
so a broken build is never picked up. Nothing here raises into a run: where it cannot be built the
answer is ``None`` and :func:`why_not_built` says why.

The cache is :func:`trine.record.hardware.cache_folder`; a file's name carries torch's version, its C++ ABI,
Python's version, the machine and the source's hash, so an upgrade never meets an old binary.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trine.record.hardware import cache_folder

__all__ = ["ensure_built", "why_not_built"]

SOURCE = Path(__file__).with_name("observer.cpp")
#: A builder that waits for another one gives up after this.
LOCK_SECONDS = 30.0
#: A compiler that takes longer is stopped. It takes 5 s on an idle machine; it runs at low priority.
COMPILE_SECONDS = 180.0
#: A failed build is tried again after this, or at once when the compiler changed or someone waits for it.
RETRY_SECONDS = 24 * 3600.0
#: torch 2.12 and newer need C++20; "2a" is how older compilers spell it.
STANDARDS = ("c++20", "c++2a", "c++17")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What the compiler needs to know, without importing torch a second time."""

    torch_folder: str
    torch_version: str
    cxx11_abi: bool
    output: str  # where the built library goes


def _toolchain() -> Toolchain:
    import torch

    folder = Path(torch.__file__).parent
    abi = bool(torch._C._GLIBCXX_USE_CXX11_ABI)
    recipe = SOURCE.read_bytes() + repr((STANDARDS, _flags())).encode()
    parts = (
        f"torch{torch.__version__}",
        f"abi{int(abi)}",
        f"python{sys.version_info[0]}.{sys.version_info[1]}",
        platform.machine(),
        hashlib.sha256(recipe).hexdigest()[:12],
    )
    library = cache_folder() / f"observer-{'-'.join(parts)}.so"
    return Toolchain(str(folder), torch.__version__, abi, str(library))


def ensure_built(wait: bool) -> Path | None:
    """The observer's library, or ``None`` when there is none (yet).

    With ``wait`` the build runs now and this returns when it is over, at most some minutes later: for commands.
    Without, a missing library is built in the background by the node's first process, for the next run.
    Never raises.
    """
    try:
        if sys.platform != "linux":
            return None
        tools = _toolchain()
        library = Path(tools.output)
        if _usable(library):
            return library
        if not wait and (os.environ.get("LOCAL_RANK", "0") != "0" or _failure(tools) is not None):
            return None
        builder = _start_builder(tools, wait)
        if wait:
            with contextlib.suppress(subprocess.TimeoutExpired):
                builder.wait(LOCK_SECONDS + len(STANDARDS) * COMPILE_SECONDS)
        else:  # so that it is no zombie when it is done
            threading.Thread(target=builder.wait, name="trine-observer-build", daemon=True).start()
        return library if wait and _usable(library) else None
    except (OSError, ImportError, AttributeError):
        return None


def why_not_built() -> str:
    """One clause on why there is no library to load: for the record and for ``trine hardware``."""
    if sys.platform != "linux":
        return f"the C++ observer is for Linux, this is {sys.platform}"
    try:
        tools = _toolchain()
        failure = _failure(tools)
    except (OSError, ImportError, AttributeError) as error:
        return f"the C++ observer cannot be built here ({error})"
    if failure is not None:
        return failure
    if _compiler() is None:
        return "there is no C++ compiler; install g++ or set CXX, then run trine hardware"
    return (
        "the C++ observer is not built yet; it is being built for the next run (trine hardware builds it now)"
    )


def _usable(library: Path) -> bool:
    """Whether it exists and is ours: code from a file that others can write is not loaded."""
    try:
        found = library.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o002 and found.st_size > 0


def _compiler() -> str | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def _identity(compiler: str | None) -> str:
    if compiler is None:
        return "none"
    return f"{compiler}:{Path(compiler).stat().st_mtime_ns}"


def _failure(tools: Toolchain) -> str | None:
    """Why the last build failed, while that is recent and the compiler is still the same."""
    try:
        told = json.loads(Path(tools.output).with_suffix(".failed").read_text())
        recent = 0 <= time.time() - float(told["time"]) < RETRY_SECONDS
        if recent and told["compiler"] == _identity(_compiler()):
            return str(told["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _flags() -> tuple[str, ...]:
    return ("-O2", "-DNDEBUG", "-fPIC", "-shared", "-w")


def _start_builder(tools: Toolchain, wait: bool) -> subprocess.Popen[bytes]:
    """A process that compiles, quietly, at low priority and apart from the run's process group."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_THE_RUN}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, json.dumps({**asdict(tools), "wait": wait})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


#: Variables that would make the builder take part in the run, or profile itself.
_OF_THE_RUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONSTARTUP",
    "LD_PRELOAD",
)


# --- in the builder's own process ----------------------------------------------------------------


@contextlib.contextmanager
def _lock(path: Path, seconds: float) -> Iterator[bool]:
    """Hold ``path`` exclusively; yields False after ``seconds`` of somebody else holding it."""
    import fcntl

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    yield False
                    return
                time.sleep(0.05)
        yield True
    finally:
        os.close(handle)  # and so unlocks


def _command(compiler: str, standard: str, tools: Toolchain, output: Path) -> list[str]:
    include = Path(tools.torch_folder) / "include"
    libraries = Path(tools.torch_folder) / "lib"
    return [
        compiler,
        f"-std={standard}",
        *_flags(),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(tools.cxx11_abi)}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        str(SOURCE),
        "-o",
        str(output),
        f"-L{libraries}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{libraries}",
    ]


def _compile(tools: Toolchain, output: Path) -> str | None:
    """Compile to ``output``; the reason when that failed."""
    compiler = _compiler()
    if compiler is None:
        return "there is no C++ compiler; install g++ or set CXX, then run trine hardware"
    reason = ""
    for standard in STANDARDS:
        try:
            done = subprocess.run(
                _command(compiler, standard, tools, output),
                check=False,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=COMPILE_SECONDS,
                text=True,
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            return f"{compiler} took more than {COMPILE_SECONDS:.0f} s to build the C++ observer"
        except OSError as error:
            return f"{compiler} cannot be run ({error.strerror})"
        if done.returncode == 0 and output.exists():
            return None
        lines = [
            line for line in done.stderr.splitlines() if "error" in line.lower()
        ] or done.stderr.splitlines()
        reason = reason or (lines[0].strip() if lines else f"exit code {done.returncode}")
    return f"{compiler} could not build the C++ observer ({reason[:200]})"


def _try_out(library: Path) -> str | None:
    """Load the library and observe one event with it; the reason when that failed."""
    import torch

    loaded = ctypes.CDLL(str(library))
    loaded.trine_observer_enable(ctypes.c_int64(8))
    with (
        torch.autograd.profiler.record_function("gloo:trial"),
        torch.autograd.profiler.record_function("other"),
    ):
        torch.zeros(1)
    loaded.trine_observer_disable()
    buffer = ctypes.create_string_buffer(8 * int(loaded.trine_observer_row_bytes()))
    count = int(loaded.trine_observer_drain(buffer, ctypes.c_int64(8)))
    return (
        None if count == 1 and b"gloo:trial" in buffer.raw else "the C++ observer was built but sees nothing"
    )


def _build(tools: Toolchain) -> str | None:
    """Compile, try and publish; the reason when that failed."""
    library = Path(tools.output)
    handle, name = tempfile.mkstemp(prefix=library.stem, suffix=".part", dir=library.parent)
    os.close(handle)
    part = Path(name)
    part.unlink()
    try:
        reason = _compile(tools, part) or _try_out(part)
        if reason is None:
            part.chmod(0o700)
            part.replace(library)
        return reason
    finally:
        part.unlink(missing_ok=True)


def _main(argument: str) -> int:
    told = json.loads(argument)
    wait = bool(told.pop("wait"))
    tools = Toolchain(**told)
    library = Path(tools.output)
    if not wait:
        os.nice(19)
    library.parent.mkdir(parents=True, exist_ok=True)
    _sweep(library.parent)
    with _lock(library.with_suffix(".lock"), LOCK_SECONDS + COMPILE_SECONDS if wait else 0.0) as mine:
        if not mine or _usable(library):
            return 0
        if not wait and _failure(tools) is not None:
            return 1
        reason = _build(tools)
        told_failure = library.with_suffix(".failed")
        if reason is None:
            told_failure.unlink(missing_ok=True)
            return 0
        content = {"reason": reason, "compiler": _identity(_compiler()), "time": time.time()}
        told_failure.write_text(json.dumps(content))
        return 1


def _sweep(folder: Path) -> None:
    """Remove what killed builders left behind, once it is too old to be in use."""
    for part in folder.glob("observer-*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > 3600:
                part.unlink()


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
