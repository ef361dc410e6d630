"""Write a configuration, or a plan's layout, in the words of another tool.

    trine export plan.json --to megatron                  the best layout of `trine plan --format json`
    trine export plan.json --row 3 --to torchtitan -o trine_torchtitan.py
    trine export tuned.toml --to accelerate --devices 16 --nodes 2

What the other tool cannot say is named on standard error, one line each; nothing is dropped without a word. A plan is for one
software (trine plan --stack): for another its layout is predicted again, and a first line says what it takes there. Where an
export is several files, -o names a folder.

Exit codes: 0; 2 for what is no configuration and no plan, and for degrees that do not fit the devices.
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from trine.commands._runs import refuse_overwriting, write_output
from trine.record.errors import UsageError

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "a configuration or a plan for DeepSpeed, Megatron-LM, torchtitan, Accelerate, …"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine export``."""
    parser.add_argument(
        "config", metavar="CONFIG", type=Path, help="a configuration (.toml), or a plan (.json)"
    )
    parser.add_argument(
        "--to",
        required=True,
        metavar="DIALECT",
        help=f"one of {', '.join(_names())}",
    )
    parser.add_argument("--row", type=int, metavar="K", help="which layout of a plan (default: 1, its best)")
    parser.add_argument("--devices", type=int, metavar="N", help="of the job that a configuration is for")
    parser.add_argument("--nodes", type=int, metavar="N", help="that these devices are on")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there: a file, or a folder for several"
    )


def _names() -> list[str]:
    """Of the dialects, by their files: help imports none of them, nor the planner that they need."""
    spec = find_spec("trine.optim.exports")
    folders = [] if spec is None else spec.submodule_search_locations
    found = (module.name for module in pkgutil.iter_modules(folders))
    return sorted(name.replace("_", "-") for name in found if not name.startswith("_"))


def run(arguments: argparse.Namespace) -> int:
    """Read, write, and name what the dialect cannot say."""
    from trine.optim.exports import exported_from, write

    exported = exported_from(
        arguments.config, row=arguments.row, devices=arguments.devices, nodes=arguments.nodes
    )
    written = write(arguments.to, exported)
    if len(written.files) == 1 or arguments.output is None:
        refuse_overwriting(arguments.output, (str(arguments.config),))
        write_output(written.text, arguments.output)
    else:
        _write_folder(arguments.output, written.files, arguments.config)
    if written.elsewhere:
        print(written.elsewhere, file=sys.stderr)
    for line in written.cannot:
        print(f"not said: {line}", file=sys.stderr)
    return 0


def _write_folder(folder: Path, files: Mapping[str, str], source: Path) -> None:
    for name in files:  # all of them before the first is written
        refuse_overwriting(folder / name, (source,))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {folder} for {', '.join(files)}: {error.strerror or error}"
        ) from error
    for name, text in files.items():
        write_output(text, folder / name)
