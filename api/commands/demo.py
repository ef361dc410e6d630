"""Train a small GPT on two local ranks, plain and tuned, and report what changed.

    trine demo
    trine demo --steps 60 --output runs/mine

The text is the Python standard library's own sources. The run is measured, analysed, changed by what
the analysis recommends, and measured again; every figure is this machine's. About two minutes on two
CPU cores, three at most.

Exit codes: 0 the tuned run trains the same; 1 its losses differ by more than the tolerance; 2 it could
not be run.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from trine.record.errors import UsageError

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "train the sample on two local ranks, plain and tuned; report what changed"

#: Fewer steps have no steady state: warm-up, FLOP counting and the deep window take the first dozen.
LEAST_STEPS = 16


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine demo``."""
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps of each run (default: 30)")
    parser.add_argument("--ranks", type=int, metavar="N", help="local ranks (default: 2, or the only GPU)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: runs/demo-DATE-TIME")
    parser.add_argument(
        "--compile", action="store_true", help="try torch.compile although it takes half a minute"
    )
    parser.add_argument(
        "--try-seconds",
        type=float,
        default=32.0,
        metavar="S",
        help="time for trying the changes (default: 32); more narrows the intervals",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its table."""
    if find_spec("torch") is None:
        raise UsageError("the demo trains with PyTorch, which is not installed: pip install 'trine[train]'")
    if arguments.steps < LEAST_STEPS:
        raise UsageError(
            f"--steps must be at least {LEAST_STEPS}, not {arguments.steps}: the first dozen warm up"
        )
    if arguments.ranks is not None and not 1 <= arguments.ranks <= 16:
        raise UsageError(f"--ranks must be from 1 to 16, not {arguments.ranks}")
    if not 1 <= arguments.try_seconds <= 3600:
        raise UsageError(f"--try-seconds must be from 1 to 3600, not {arguments.try_seconds:g}")
    from trine._demo_table import render
    from trine.demo import Options, run_demo

    output = arguments.output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    options = Options(output, arguments.steps, arguments.ranks, arguments.compile, arguments.try_seconds)
    result = run_demo(options, lambda line: print(line, file=sys.stderr, flush=True))
    print(render(result))
    return 0 if result.same else 1
