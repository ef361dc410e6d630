"""Compression under FSDP2: gradients on their way to their shards, parameters on their way from them.

FSDP2 lets a module's reduce-scatter and all-gather be replaced. The reduce-scatter here sends each rank its part of the
encoded gradients (all-to-all) and sums what arrives in full precision (ZeRO++'s qgZ, Wang et al. 2023); the all-gather
sends int8 with a scale for each chunk (its qwZ), while the shards that the optimizer updates stay as they are. Both run
where FSDP2 runs its own, in the order that it has on every rank, on its group. The all-reduce between the replicas of
hybrid sharding stays plain: FSDP2 keeps it to itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.nn import functional

from trine.optim.runtime.exchange import Bucket, Piece
from trine.optim.runtime.exchange.choice import sharded_codec_of
from trine.optim.runtime.exchange.codecs import Codec, Int8, OneBit
from trine.optim.runtime.exchange.lossy import Lossy
from trine.optim.runtime.exchange.residuals import Residuals
from trine.optim.runtime.exchange.traffic import one_phase_bytes
from trine.optim.runtime.exchange.two_phase import Ranks
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly, Scaler

__all__ = ["ShardedExchange", "install_sharded"]

#: PyTorch 2.13 renames them and deprecates the old names.
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


class ShardedExchange(Lossy):
    """What all modules of a model share: codes, residuals by module, warm-up, traffic."""

    def __init__(
        self, gradients: Codec | None, weights: Codec | None, warmup_steps: int = 0, residuals: bool = False
    ) -> None:
        """``None`` leaves that exchange to FSDP2. ``residuals``: for codes that are biased; as large as the model."""
        self.gradients = gradients
        self.weights = weights
        self._warmup_steps = warmup_steps
        self._step = 0
        self._scaler: Scaler | None = None
        self._scale = 1.0
        super().__init__(Residuals(1, 0) if residuals else None, getattr(gradients, "generator", None))
        self.name = gradients.name if gradients is not None else "none"

    def mean(self, bucket: Bucket) -> None:
        """Shards are not buckets: FSDP2 calls :meth:`reduce_scatter`."""
        raise NotImplementedError

    def follow(self, scaler: Scaler) -> None:
        """Losses are scaled, and steps that overflow are skipped."""
        self._scaler = scaler
        self._scale = float(scaler.scale(torch.ones((), dtype=torch.float32)))
        if self.residuals is not None:
            self.residuals.staged = True

    def after_update(self, stepped: bool) -> None:
        """Once a step."""
        self.settle(stepped)
        self._step += 1
        if self._scaler is not None and self.residuals is not None:
            scale = float(self._scaler.scale(torch.ones((), dtype=torch.float32)))
            if scale != self._scale:
                self.residuals.rescale(scale / self._scale)
            self._scale = scale

    def plain_bytes(self) -> int:
        """What FSDP2's own exchange of the same would have sent."""
        return round(self.traffic.plain)

    def reduce_scatter(
        self, name: str, output: torch.Tensor, given: torch.Tensor, group: distributed.ProcessGroup, op: Any
    ) -> None:
        """``output`` (part,) becomes this rank's part of the sum, or mean, over ranks of ``given`` (ranks · part,)."""
        ranks = group.size()
        size = one_phase_bytes(given.numel() * given.element_size(), ranks)
        if self.gradients is None or self._step < self._warmup_steps:
            _reduce_scatter(output, given, group=group, op=op)
            self.traffic.add(size, size)
            return
        codec, factor = self.gradients, _factor_of(op, ranks)
        rows = _padded_rows(given.view(ranks, -1), codec)
        length = rows.shape[1]
        bucket = Bucket(rows.view(-1), (Piece(name, 0, (rows.numel(),)),))
        old = None if self.residuals is None else self.residuals.own(bucket, rows.dtype)
        if old is not None:
            rows.view(-1).add_(old)
        payload = codec.encode(rows)
        if old is not None and self.residuals is not None:
            left = rows - codec.decode(payload, length, rows.dtype)
            left[:, output.numel() :] = 0.0  # padding has no gradient that could be late
            self.residuals.keep_own(bucket, torch.where(torch.isfinite(rows).all(), left.view(-1), old))
        received = Ranks(group).exchanged(payload)
        summed = codec.decode(received, length, rows.dtype).sum(0)
        output.copy_(summed[: output.numel()] * factor)
        self.traffic.add(one_phase_bytes(payload.numel(), ranks), size)

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, group: distributed.ProcessGroup) -> None:
        """``output`` (ranks · part,) becomes every rank's ``given`` (part,), the same bits on every rank."""
        ranks = group.size()
        size = one_phase_bytes(output.numel() * output.element_size(), ranks)
        if self.weights is None or not given.is_floating_point():
            _all_gather(output, given, group=group)
            self.traffic.add(size, size)
            return
        rows = _padded_rows(given.view(1, -1), self.weights)
        payload = self.weights.encode(rows)
        everyone = self.weights.decode(Ranks(group).gathered(payload), rows.shape[1], rows.dtype)
        output.view(ranks, -1).copy_(everyone[:, : given.numel()])
        self.traffic.add(one_phase_bytes(payload.numel() * ranks, ranks), size)

    def state_dict(self) -> dict[str, Any]:
        """Residuals by module, the generator, steps taken and the loss scale that residuals are in."""
        return {**super().state_dict(), "step": self._step, "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back, on the same rank of as many."""
        super().load_state_dict(state)
        self._step, self._scale = int(state["step"]), float(state["scale"])


class _Allocating:
    """FSDP2's own way: a new tensor, which its caching allocator makes cheap."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ReduceScatter(_Allocating, ReduceScatter):
    def __init__(self, exchange: ShardedExchange, name: str) -> None:
        self._exchange = exchange
        self._name = name

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._exchange.reduce_scatter(self._name, output_tensor, input_tensor, group, op)


class _AllGather(_Allocating, AllGather):
    def __init__(self, exchange: ShardedExchange) -> None:
        self._exchange = exchange

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        self._exchange.all_gather(output_tensor, input_tensor, group)


def install_sharded(assembly: Assembly) -> None:
    """Set the exchanges of ``communication.compression`` and ``zero.quantized_weights`` on every FSDP2 module.

    To be called when every technique has been applied (``assembly.finish``).
    """
    from trine.optim.runtime.exchange.break_even import estimate_of
    from trine.optim.techniques import compression as technique
    from trine.optim.techniques._assembly import Effect

    config, facts = assembly.config, assembly.facts
    communication = config.communication
    compresses = communication.compression != "none"
    codec = sharded_codec_of(communication, facts.rank, facts.device) if compresses else None
    weights = Int8() if config.zero.quantized_weights else None
    exchange = ShardedExchange(
        codec, weights, communication.compression_warmup_steps or 0, isinstance(codec, OneBit)
    )
    set_on(assembly.model, exchange)
    if assembly.scaler is not None:
        exchange.follow(assembly.scaler)
    assembly.state["compression"] = exchange
    assembly.after_update.append(exchange.after_update)
    technique.count(assembly, exchange)
    if compresses:
        note = f"gradients on their way to their shards; {estimate_of(assembly, 0.5)}"
        if exchange.residuals is not None:
            held = sum(p.numel() for p in assembly.model.parameters()) * 4 / 2**20
            note += f"; its residuals are not sharded, {held:.3g} MiB a rank"
        shown = technique.words_of(communication)
        assembly.effects.append(Effect("communication.compression", "none", shown, note))
    if weights is not None:
        assembly.effects.append(
            Effect("zero.quantized_weights", "gathered as they are", "gathered in int8", "shards stay whole")
        )


def set_on(model: torch.nn.Module, exchange: ShardedExchange) -> None:
    """On every FSDP2 module of ``model``; residuals are kept by the module's name. Raises ``UsageError`` without any."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not found:
        raise UsageError("communication.compression found no FSDP2 module to set its reduce-scatter on")
    for name, module in found.items():
        if exchange.gradients is not None:
            module.set_custom_reduce_scatter(_ReduceScatter(exchange, name or "root"))
        if exchange.weights is not None:
            module.set_custom_all_gather(_AllGather(exchange))


def _factor_of(op: Any, ranks: int) -> float:
    """What the sum is multiplied by: FSDP2 asks for means in fp32 and bf16, for sums where it divides by itself."""
    if op == distributed.ReduceOp.AVG:
        return 1.0 / ranks
    if op == distributed.ReduceOp.SUM:
        return 1.0
    raise UsageError(
        f"communication.compression: FSDP2 asks for {op}, after set_gradient_divide_factor, which compressed gradients "
        "have not: leave the factor alone, or drop the key"
    )


def _padded_rows(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """A copy of (rows, part), at least fp32, with zeros up to a length that the codec takes."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    return functional.pad(wide, (0, codec.padded(rows.shape[1]) - rows.shape[1]))
