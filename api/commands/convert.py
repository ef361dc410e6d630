"""Read a configuration of DeepSpeed or Accelerate, or one of Trine, and write it in the other's words.

    trine convert ds_config.json                      DeepSpeed's JSON as Trine's TOML
    trine convert accelerate.yaml -o tuned.toml       Accelerate's YAML as TOML, in a file
    trine convert tuned.toml --to deepspeed           Trine's TOML as DeepSpeed's JSON

What the program has to do itself, and what was left out and why, stands above the TOML as comments. By the file's name:
.json is DeepSpeed's, .yaml and .yml are Accelerate's, .toml is Trine's; --from says it otherwise.

Exit codes: 0; 2 for a key that is unknown, was removed, or has no counterpart, with what to write instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from trine.optim.config import Config
from trine.optim.dialects import Imported, read_accelerate, read_deepspeed, to_deepspeed
from trine.record.errors import UsageError

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "a configuration of DeepSpeed or Accelerate as one of Trine, or back"

_BY_SUFFIX = {".json": "deepspeed", ".yaml": "accelerate", ".yml": "accelerate", ".toml": "trine"}

#: What the JSON says of clipping is not the program's, and nobody would notice.
_CLIPPING = (
    "to do: gradient_clipping is written as 0.0, which clips nothing, for a Trine configuration leaves clipping to the "
    "loop: set it to your norm, and drop clip_grad_norm_, or clip_norm of trine.optimize, from the loop"
)


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine convert``."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the configuration")
    parser.add_argument(
        "--from",
        dest="source",
        choices=("deepspeed", "accelerate", "trine"),
        help="whose it is (default: by its name)",
    )
    parser.add_argument("--to", choices=("trine", "deepspeed"), help="whose to write (default: trine)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="ranks of the job, for batches that depend on them"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write there, not to standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, write, and say what is to be done."""
    if arguments.ranks is not None and arguments.ranks < 1:
        raise UsageError(f"--ranks must be 1 or more, not {arguments.ranks}")
    source = arguments.source or _BY_SUFFIX.get(arguments.file.suffix.lower())
    if source is None:
        raise UsageError(
            f"whose configuration is {arguments.file}? Say --from deepspeed, accelerate or trine"
        )
    logging.getLogger("trine").addHandler(logging.NullHandler())  # it is all in the text
    imported = _read(arguments.file, source, arguments.ranks)
    if arguments.to == "deepspeed":
        text = json.dumps(to_deepspeed(imported.config), indent=2) + "\n"
        _tell(imported)
        print(_CLIPPING, file=sys.stderr)
    else:
        text = imported.to_toml()
    if arguments.output is None:
        print(text, end="")
        return 0
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {arguments.output}: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        raise UsageError(f"{arguments.file} holds a name that no text file can: {error.reason}") from error
    if arguments.to != "deepspeed":
        _tell(imported)
    print(f"Wrote {arguments.output}", file=sys.stderr)
    return 0


def _read(path: Path, source: str, ranks: int | None) -> Imported:
    if source == "trine":
        return Imported(Config.from_toml(path), {}, (), ())
    read = read_deepspeed if source == "deepspeed" else read_accelerate
    return read(path, ranks=ranks)


def _tell(imported: Imported) -> None:
    for line in imported.to_do:
        print(f"to do: {line}", file=sys.stderr)
