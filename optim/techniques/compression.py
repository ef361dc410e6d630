"""Gradients that travel in fewer bytes: ``communication.compression`` and what goes with it.

    bf16, fp16   half the bytes, summed in half precision
    int8         a quarter; rounding errors fed back
    qsgd         a quarter or less, rounded at random so that the mean is right (Alistarh et al. 2017)
    powersgd     low-rank factors in place of matrices, errors fed back (Vogels et al. 2019)
    onebit       signs and a scale, errors fed back twice (Seide et al. 2014; Tang et al. 2021)
    terngrad     −s, 0 or s, at random so that the mean is right (Wen et al. 2017)

It pays where the time saved on the link is longer than the time to encode, and it changes the training: what is lost is
fed back later or right on average, never right at once. The effect's note says what both come to here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trine.optim.config import Communication, Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_plain_gradients, require_plain_layout, require_ranks
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.runtime.exchange.lossy import Compressed

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = (
    "communication.compression",
    "communication.compression_levels",
    "communication.compression_rank",
    "communication.compression_warmup_steps",
    "zero.quantized_weights",
)
ORDER = 38
QUANTITY = "communication/sent_bytes"
NUMERICS = (
    "changes the training: held-out loss within 0.1 % with bf16, fp16, int8 and qsgd at 127 levels, a few per cent with "
    "powersgd and terngrad, above 10 % with onebit in short runs; benchmarks/compression_quality.py prints them"
)

_COMPRESSION, _LEVELS, _RANK, _WARMUP, _WEIGHTS = KEYS


class Counted(Protocol):
    """What counts its traffic since the start."""

    def sent_bytes(self) -> int:
        """Given away by this rank."""

    def plain_bytes(self) -> int:
        """What the uncompressed exchange of the same would have sent."""


def refusal(config: Config) -> str | None:
    """More levels than eight bits hold."""
    levels = config.communication.compression_levels
    if levels is not None and levels > 127:
        return f"{_LEVELS} = {levels}: at most 127 levels and a sign fit eight bits; take fewer"
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Gradients are others by design; the losses of a few steps stay near."""
    near = {"none": 0.0, "bf16": 2e-3, "fp16": 1e-3, "int8": 5e-3, "qsgd": 2e-2}
    loss = near.get(config.communication.compression, 0.2)
    if config.zero.quantized_weights:
        loss += 2e-2
    return Tolerance(loss, None) if loss else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where there is nothing to compress, or where the code cannot work."""
    communication, stage = config.communication, config.zero.stage
    for key in (_COMPRESSION, _WEIGHTS):
        if key in config.changes():
            require_plain_layout(key, facts, "it exchanges whole gradients or their shards over all ranks")
    if config.zero.quantized_weights and stage < 3:
        raise UsageError(
            f"{_WEIGHTS} gathers parameters in int8, and zero.stage = {stage} gathers none that FSDP2 would let it: set "
            "zero.stage = 3, or drop it"
        )
    name = communication.compression
    if name == "none":
        _require_compression(config)
        return
    require_ranks(_COMPRESSION, facts)
    if stage >= 2 and name == "powersgd":
        raise UsageError(
            f'{_COMPRESSION} = "powersgd" needs whole matrices on every rank, and zero.stage = {stage} hands out flat '
            'shards: use "int8", or zero.stage = 1'
        )
    if name == "terngrad" and stage < 2:
        _check_ternary(facts.ranks)
    require_plain_gradients(_COMPRESSION, facts)


def apply(assembly: Assembly) -> None:
    """Set the reduction that DDP's hook will run, or FSDP2's reduce-scatter once the model is sharded."""
    config = assembly.config
    if config.communication.compression == "none" and not config.zero.quantized_weights:
        return
    if config.zero.stage >= 2:
        from trine.optim.runtime.exchange.sharded import install_sharded

        assembly.finish.append(install_sharded)
        return
    _apply_to_replicas(assembly)


# --- parts -------------------------------------------------------------------------------------


def _require_compression(config: Config) -> None:
    for key in (_LEVELS, _RANK, _WARMUP):
        if config[key] is not None:
            raise UsageError(
                f'{key} is about compressed gradients, and {_COMPRESSION} is "none": set it as well'
            )


def _check_ternary(ranks: int) -> None:
    from trine.optim.runtime.exchange.terngrad import MOST_RANKS

    if ranks > MOST_RANKS:
        raise UsageError(
            f'{_COMPRESSION} = "terngrad" sums codes in a byte, up to {MOST_RANKS} ranks, and there are {ranks}: use "qsgd" '
            f"with {_LEVELS} = 1"
        )


def _apply_to_replicas(assembly: Assembly) -> None:
    from trine.optim.runtime.exchange import choice
    from trine.optim.runtime.exchange.break_even import estimate_of
    from trine.optim.runtime.exchange.hooks import install
    from trine.optim.runtime.exchange.lossy import Compressed
    from trine.optim.runtime.exchange.sums import AllReduce, backend_sum
    from trine.optim.runtime.exchange.thread import thread_of
    from trine.optim.runtime.exchange.two_phase import Ranks

    communication, facts = assembly.config.communication, assembly.facts
    thread = thread_of(assembly)
    # Where communication.algorithm has chosen an all-reduce, linear codes go by it.
    sum_over = getattr(assembly.reduction, "sum_over", None) or backend_sum(thread.group)
    seed = choice.shared_seed(thread.group, facts.device)
    lossy = choice.reduction_of(communication, sum_over, Ranks(thread.group), facts.device, seed)
    plain = AllReduce(sum_over, facts.ranks)
    reduction = Compressed(lossy, plain, communication.compression_warmup_steps or 0)
    assembly.reduction = reduction
    assembly.state["compression"] = reduction
    assembly.after_update.append(reduction.after_update)
    assembly.finish.append(install)
    assembly.finish.append(lambda ready: _follow_scaler(ready, reduction))
    count(assembly, reduction)
    reduction.estimate = estimate_of(assembly)
    assembly.effects.append(Effect(_COMPRESSION, "none", words_of(communication), str(reduction.estimate)))


def _follow_scaler(assembly: Assembly, reduction: Compressed) -> None:
    """Residuals are in units of scaled losses, and a step that overflowed must leave them alone."""
    scaler = assembly.scaler
    if scaler is not None:
        reduction.follow(scaler)


def words_of(communication: Communication) -> str:
    """The code, its strength and its warm-up."""
    parts = [communication.compression]
    if communication.compression == "powersgd":
        from trine.optim.runtime.exchange.choice import DEFAULT_RANK

        parts.append(f"rank {communication.compression_rank or DEFAULT_RANK}")
    if communication.compression_levels is not None:
        parts.append(f"{communication.compression_levels} levels")
    if communication.compression_warmup_steps:
        parts.append(f"after {communication.compression_warmup_steps} steps")
    return ", ".join(parts)


def count(assembly: Assembly, reduction: Counted) -> None:
    """Bytes of the step that ends, and how often they fit into what would have been sent."""
    sent_before, plain_before = [0], [0]

    def sent() -> float:
        return float(reduction.sent_bytes() - sent_before[0])

    def ratio() -> float | None:
        return (reduction.plain_bytes() - plain_before[0]) / sent() if sent() else None

    def mark() -> None:
        sent_before[0], plain_before[0] = reduction.sent_bytes(), reduction.plain_bytes()

    assembly.metrics["communication/sent_bytes"] = sent
    assembly.metrics["communication/compression_ratio"] = ratio
    assembly.after_step.append(mark)
