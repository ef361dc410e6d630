"""Serve the dashboard of the runs under some folders, on this machine, without the internet.

    trine dashboard                    runs under ./runs, or here
    trine dashboard runs/a traces/     these

Each argument is a run, a trace, or a folder that holds any number of them.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import webbrowser
from pathlib import Path

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "show runs in the browser"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``trine dashboard``."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUNS", help="runs, traces, or folders of them")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to serve on (default: this machine only)"
    )
    parser.add_argument("--port", type=_port, default=8050, help="port (default 8050; 0 takes a free one)")
    parser.add_argument("--no-browser", action="store_true", help="do not open a browser")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from trine.dashboard import serve

    roots = arguments.runs or [Path("runs") if Path("runs").is_dir() else Path()]
    server = serve(roots, arguments.host, arguments.port)
    found = len(server.service.catalogue.runs())
    print(
        f"Trine shows {found} run{'s' if found != 1 else ''} at {server.address}   (Ctrl-C stops)", flush=True
    )
    if server.open_to_others:
        print("trine: anyone who can reach this address can read these runs", file=sys.stderr, flush=True)
    if not arguments.no_browser:
        threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
    # A supervisor's SIGTERM is an orderly end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.run()
    except KeyboardInterrupt:
        print()
    finally:
        server.stop_background()
    return 0


def _port(text: str) -> int:
    value = int(text) if text.isdigit() else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to 65535")
    return value
