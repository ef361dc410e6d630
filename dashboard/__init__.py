"""Shows runs in a browser: ``trine dashboard``, or :func:`serve` from a program.

Importing this module does not import Dash; the functions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.dashboard.server import Server

__all__ = ["serve"]


def serve(roots: Sequence[str | Path], host: str = "127.0.0.1", port: int = 8050) -> Server:
    """A server of the runs under ``roots``, bound and ready; call its ``run()``, and ``close()`` after.

    ``port`` 0 takes any free one (``server.port``). Only runs under the roots are served; there is no
    log-in, so a host other than this machine's own lets all who reach it read them.

    Raises ``UsageError`` when Dash is not installed or the port is taken, ``UnreadableInput`` when a
    root does not exist.
    """
    try:
        from trine.dashboard.server import Server
        from trine.dashboard.service import Service
    except ModuleNotFoundError as error:
        if (error.name or "trine").split(".")[0] == "trine":  # a fault of ours, not an absent package
            raise
        raise UsageError(
            "the dashboard needs Dash; install it with: pip install 'trine[dashboard]'"
        ) from error
    return Server(Service([Path(root) for root in roots]), host, port)
