"""Whether a model fits into a device's memory, by any configuration and on any number of ranks, without them.

    trine fit trine.samples.sizing:gpt layers=32 hidden=4096 heads=32 sequence=4096 batch=1 \\
        --config zero3.toml --ranks 64 --capacity 80GiB
    trine fit mypackage.train:for_memory --ranks 8 --set zero.stage=3 --set checkpointing.mode=full

MODULE:FUNCTION gives (model, loss_fn, batch) or (model, loss_fn, batch, optimizer); KEY=VALUE are its arguments. It runs
where tensors have shapes and no memory, so the model may be of any size; then the runtime's own code applies the
configuration and runs two steps as one of so many ranks. Printed is what one rank holds at the peak, by kind. Blocks are
rounded, and attention and dropout counted, as on CUDA; --device cpu counts as the CPU does.

Exit codes: 0 it fits, or no --capacity was given; 1 it does not; 2 bad usage, or nothing can be predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim import Config

__all__ = ["SUMMARY", "prepare_parser", "run"]

SUMMARY = "whether a model fits into memory, on any number of ranks"


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trine fit``."""
    parser.add_argument("factory", metavar="MODULE:FUNCTION", help="gives model, loss function and batch")
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help="arguments of the function")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="how many there are (1)")
    parser.add_argument("--config", type=Path, metavar="TOML", help="the configuration that they train by")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one key of it, as zero.stage=3"
    )
    parser.add_argument("--capacity", type=_bytes, metavar="SIZE", help="of a device: 80GiB, 24e9")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="whose allocator counts (cuda)"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="for shard groups that lie inside nodes"
    )
    parser.add_argument("--clip-norm", type=float, metavar="X", help="gradients are clipped to this norm")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(arguments: argparse.Namespace) -> int:
    """Predict, print, and say whether it fits."""
    from trine.optim import predict_memory
    from trine.optim.memory_prediction import MARGIN, spelled_bytes

    config = _configuration(arguments)
    maker = _Maker(arguments.factory, dict(_pair(word, "KEY=VALUE") for word in arguments.arguments))
    predicted = predict_memory(
        maker.model,
        config,
        ranks=arguments.ranks,
        batch=maker.batch,
        loss_fn=maker.loss,
        optimizer=maker.optimizer,
        clip_norm=arguments.clip_norm,
        ranks_per_node=arguments.ranks_per_node,
        device_type=arguments.device,
    )
    capacity = arguments.capacity
    fits = None if capacity is None else predicted.fits(capacity)
    if arguments.format == "json":
        print(json.dumps({**asdict(predicted), "peak_bytes": predicted.peak_bytes, "fits": fits}, indent=2))
        return 1 if fits is False else 0
    print(predicted)
    if capacity is not None:
        word = "fits into" if fits else "does not fit into"
        print(f"{word} {spelled_bytes(capacity)}, of which {MARGIN:.0%} are planned with")
    return 1 if fits is False else 0


class _Maker:
    """The program's function, called once, in the process that predicts."""

    def __init__(self, path: str, arguments: dict[str, Any]) -> None:
        module, _, name = path.partition(":")
        if not module or not name:
            raise UsageError(f"{path!r} is no function: write MODULE:FUNCTION, as trine.samples.sizing:gpt")
        sys.path.insert(0, "")
        try:
            self._function = getattr(import_module(module), name)
        except (Exception, SystemExit) as error:  # it runs the program's own code
            kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
            raise UsageError(f"{path} cannot be imported: {kind}{error}") from error
        self._path = path
        self._arguments = arguments
        self._made: Any = None

    def model(self) -> Any:
        """Called first."""
        try:
            self._made = self._function(**self._arguments)
        except TypeError as error:
            raise UsageError(f"{self._path}: {error}") from error
        if not isinstance(self._made, tuple) or len(self._made) not in (3, 4):
            raise UsageError(
                f"{self._path} must return (model, loss_fn, batch) or (model, loss_fn, batch, optimizer)"
            )
        return self._made[0]

    def optimizer(self, parameters: Any) -> Any:
        """The fourth of what it returned: an optimizer, a function that makes one, or none."""
        given = self._made[3] if len(self._made) == 4 else None
        return given(parameters) if callable(given) else given

    def loss(self, model: Any, batch: Any) -> Any:
        """The second."""
        return self._made[1](model, batch)

    def batch(self) -> Any:
        """The third."""
        return self._made[2]


def _configuration(arguments: argparse.Namespace) -> Config:
    from trine.optim import Config

    config = Config() if arguments.config is None else Config.from_toml(arguments.config)
    return config.with_changes(dict(_pair(word, "--set") for word in arguments.set))


def _pair(word: str, where: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not key or not equals:
        raise UsageError(f"{where}: {word!r} is no KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return key, text


def _bytes(text: str) -> int:
    from trine.optim.plan.units import parse_bytes  # with numpy, which the command line starts without

    try:
        return parse_bytes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
