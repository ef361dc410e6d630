"""What a configuration needs of each rank's memory, for any number of ranks, without any of them.

    prediction = trine.predict_memory(model, {"zero.stage": 3}, ranks=64, batch=example, loss_fn=loss_of)
    print(prediction)                 # peak, and what it is made of
    prediction.fits(80 * 2**30)

The engine's own code applies the configuration and runs two steps, with tensors that have shapes and no memory in a
process group that sends nothing (:mod:`trine.optim.runtime.pretended_ranks`), so what is predicted is what runs.
Imports torch when it predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.optim._inputs import as_config
from trine.optim.config import Config
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["MARGIN", "MemoryPrediction", "predict_memory"]

#: Of a device's memory, the share to plan with: allocators round up and fragment, and drivers keep some for themselves.
MARGIN = 0.9

#: Above any machine that there is; lists of a thousand times as many fill a host's memory.
MOST_RANKS = 2**20
#: Seconds after which a prediction is given up.
TIMEOUT_S = 300.0
#: Blocks of CUDA's caching allocator are multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
CUDA_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """Bytes that one rank's tensors take on its device. Kinds are those of :data:`trine.optim.runtime.memory_ledger.KINDS`."""

    ranks: int
    rank: int
    #: kind → bytes at the moment of the steps' peak; they sum to it.
    at_peak_bytes: Mapping[str, int]
    #: kind → the most bytes it has at any time of a step.
    most_bytes: Mapping[str, int]
    #: kind → bytes between two steps.
    resident_bytes: Mapping[str, int]
    #: kind → bytes at the peak of applying the configuration, when the model is still whole.
    start_bytes: Mapping[str, int]
    #: What was taken to be otherwise than the configuration says, in words.
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once in a step."""
        return sum(self.at_peak_bytes.values())

    @property
    def start_peak_bytes(self) -> int:
        """The most bytes alive at once before the first step."""
        return sum(self.start_bytes.values())

    @property
    def needed_bytes(self) -> int:
        """What the device must hold: the larger of the two."""
        return max(self.peak_bytes, self.start_peak_bytes)

    @property
    def dominant(self) -> str:
        """The kind that most of the peak is."""
        return max(self.at_peak_bytes, key=lambda kind: self.at_peak_bytes[kind])

    def fits(self, capacity_bytes: float, margin: float = MARGIN) -> bool:
        """Whether a device of this size can hold it with the margin left free."""
        return self.needed_bytes <= capacity_bytes * margin

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.ranks}: peak {spelled_bytes(self.peak_bytes)} in a step"]
        for kind, size in sorted(self.at_peak_bytes.items(), key=lambda item: -item[1]):
            most = self.most_bytes[kind]
            if most:
                lines.append(
                    f"  {kind.replace('_', ' '):20} {spelled_bytes(size):>11}   most {spelled_bytes(most):>11}"
                )
        lines.append(f"between steps {spelled_bytes(sum(self.resident_bytes.values()))}, ")
        lines[-1] += f"while the configuration is applied {spelled_bytes(self.start_peak_bytes)}"
        return "\n".join([*lines, *self.notes])


def spelled_bytes(size: float) -> str:
    """``12.3 GiB``."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B"


def predict_memory(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    ranks: int,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    clip_norm: float | None = None,
    rank: int = 0,
    ranks_per_node: int | None = None,
    device_type: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> MemoryPrediction:
    """What ``rank`` of ``ranks`` would hold, in bytes by kind, while it trains by ``config``.

    ``model`` is a live module, on any device (``meta`` included), or a function that makes one; such a function may make
    models that no machine could hold. ``batch`` is one batch as ``engine.train_step`` takes it, on any device, or a
    function that gives one. ``optimizer`` is the live one, or a function of the parameters; by default AdamW. Nothing of
    what is given is changed: it happens in a forked copy of this process, within ``timeout_s`` seconds.

    ``device_type = "cuda"`` rounds to CUDA's blocks, and attention and dropout keep what they keep there; by default that
    of the model. Workspaces inside of kernels and the backend's own buffers are not counted.

    Raises ``UsageError`` for what it cannot say: values decided by measurements (``"auto"``), ``compute.compile``, and
    models that decide by the values of tensors; and for what :func:`trine.optimize` itself refuses.
    """
    config, notes = _decided(as_config(config))
    if not isinstance(ranks, int) or ranks < 1 or not 0 <= rank < ranks:
        raise UsageError(
            f"ranks = {ranks!r} and rank = {rank!r}: a memory prediction is of one rank of 1 or more"
        )
    if ranks > MOST_RANKS:
        raise UsageError(f"ranks = {ranks}: layouts list every rank: use {MOST_RANKS} or fewer")
    if ranks_per_node is not None and (ranks_per_node < 1 or ranks % ranks_per_node):
        raise UsageError(
            f"ranks per node = {ranks_per_node}: it takes a number that divides the {ranks} ranks"
        )
    from trine.optim.runtime.memory_runs import Request, run
    from trine.optim.runtime.pretended_ranks import in_a_fork

    request = Request(
        model, optimizer, config, loss_fn, batch, clip_norm, ranks, rank, ranks_per_node, device_type
    )
    found = in_a_fork(lambda: run(request), timeout_s)
    return MemoryPrediction(
        ranks, rank, found["peak"], found["most"], found["resident"], found["start"], tuple(notes)
    )


def _decided(config: Config) -> tuple[Config, list[str]]:
    """The configuration with what measurements decide taken out, and what was said of it. Raises where it matters."""
    notes = []
    if config.compute.compile is not False:
        raise UsageError(
            f'compute.compile = "{config.compute.compile}": what compiled code keeps is known after it was compiled, so its '
            "memory cannot be predicted: take the key out of the prediction (eager mode keeps as much or more)"
        )
    for key, way in (
        ("accumulation.micro_batch", "a number of samples"),
        ("accumulation.steps", "a number of micro-batches"),
        ("checkpointing.mode", '"full", "selective" or "none"'),
        ("parallel.shard", "the size of the shard group"),
    ):
        if config[key] == "auto":
            raise UsageError(
                f'{key} = "auto" is decided by a measurement, which a prediction does not have: give {way}'
            )
    for key in ("offload.optimizer", "offload.parameters", "offload.activations"):
        if config[key] != "none":
            raise UsageError(
                f'{key} = "{config[key]}" moves bytes off the device, which a prediction on the CPU cannot tell from those on '
                "it: its own plan, among the engine's effects, says what stays; take the key out of the prediction"
            )
    for key, why in (
        ("parallel.pipeline", "stages learn shapes from each other's messages"),
        ("parallel.context", "ranks compare what they cut out of a batch"),
        ("accumulation.delayed", "the update reads a weight that comes from the other ranks"),
    ):
        if key in config.changes():
            raise UsageError(
                f"{key} = {str(config[key]).lower()} cannot be predicted in this version, since {why}: take the key out"
            )
    if config.engine != "torch":
        raise UsageError(
            f'engine = "{config.engine}" allocates by its own rules, which are not predicted: predict with engine = "torch"'
        )
    changes: dict[str, Any] = {}
    for key, instead in (("communication.bucket_mib", None), ("communication.algorithm", None)):
        if config[key] == "auto":
            changes[key] = instead
            notes.append(f'{key} = "auto" is decided by a measurement: predicted with PyTorch\'s default')
    return config.with_changes(changes) if changes else config, notes
