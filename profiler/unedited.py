"""The recording around a script that was not edited: what ``trine run`` puts in place and takes out again."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .after_import import call_after_import

__all__ = ["recording"]

logger = logging.getLogger("trine")


@contextlib.contextmanager
def recording(
    path: Path,
    configuration: dict[str, Any] | None = None,
    install: Callable[[], Callable[[list[Any], list[Any]], None]] | None = None,
    windows: Any = "default",
) -> Iterator[None]:
    """Record the training loop that runs inside to the folder ``path``; everything passes through.

    ``install`` is called when torch was imported; what it returns is called with the models and optimizers when
    training is about to begin. ``configuration`` is kept in the record. Nothing is imported here.
    """
    found: list[Any] = []
    process = os.getpid()

    def begin() -> None:
        try:
            prepare = None if install is None else install()
            found.append(_discovery(path, configuration, prepare, windows))
        except Exception:
            logger.warning("this run cannot be recorded", exc_info=True)

    call_after_import("torch", begin)
    information: tuple[Any, Any, Any] = (None, None, None)
    try:
        yield
    except BaseException:
        information = sys.exc_info()
        raise
    finally:
        if os.getpid() == process:
            _finish(found[0] if found else None, path, information)


def _discovery(path: Path, configuration: dict[str, Any] | None, prepare: Any, windows: Any) -> Any:
    from .automatic import AutomaticSession, Discovery

    facts = {"configuration": configuration} if configuration else {}

    def make(models: list[Any], optimizers: list[Any]) -> AutomaticSession:
        return AutomaticSession(path, models=models, optimizers=optimizers, windows=windows, metadata=facts)

    discovery = Discovery(make, prepare)
    discovery.install()
    return discovery


def _finish(discovery: Any, path: Path, information: tuple[Any, Any, Any]) -> None:
    try:
        if discovery is not None:
            discovery.close(*information)
    except Exception:
        logger.warning("the record of this run could not be closed", exc_info=True)
    if os.environ.get("RANK", "0") != "0":
        return
    session = None if discovery is None else discovery.session
    try:
        where = path.relative_to(Path.cwd())
    except (ValueError, OSError):
        where = path
    if session is not None and session.completed:
        line = f"trine: recorded {session.completed} steps in {where}; read them with: trine analyze {where}"
    elif discovery is not None and (discovery.recorded_by_script or discovery.refused):
        return
    else:
        line = (
            "trine: no training step was seen in this process, so nothing was recorded (a step is known by backward() or "
            "an optimizer of torch.optim in the main thread: else use trine.profile; processes that it started are not "
            "recorded: start them with torchrun)"
        )
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - the command's one line
