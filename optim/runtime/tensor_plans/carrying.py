"""Carries a plan out on a live model: parameters first, then what modules do with inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from trine.optim.runtime.tensor_plans import styles
from trine.optim.runtime.tensor_plans.roles import HEADS, KEY_HEADS, Attention, Block, FeedForward, Plan
from trine.optim.runtime.tensor_plans.streams import Streams
from trine.record.errors import TrainingError

__all__ = ["Settings", "carry_out"]

#: What attention modules count in beside heads: the features of those together.
_FEATURES = ("split_size", "all_head_size")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a plan is carried out."""

    mesh: DeviceMesh
    sequence: bool
    loss: bool
    #: Where the model drops; ``None`` where it does not.
    streams: Streams | None

    @property
    def plain(self) -> Any:
        """What a plain tensor between the layers of a block means."""
        return Shard(1) if self.sequence else Replicate()


def carry_out(plan: Plan, settings: Settings) -> None:
    """Hooks on every module of ``plan``, whose parameters are cut already."""
    for block in plan.blocks:
        _block(block, settings)
    for column in plan.columns:
        _apply(column.module, settings, styles.Columns())
    for _, module in plan.rows:
        _apply(module, settings, styles.Rows())
    if plan.embedding is not None:
        _apply(plan.embedding[1], settings, styles.Rows(input_layouts=Replicate()))
    if plan.head is not None:
        of_head = (
            styles.Columns(use_local_output=False)
            if settings.loss
            else styles.Columns(output_layouts=Replicate())
        )
        _apply(plan.head[1], settings, of_head)
        plan.head[1].register_forward_hook(lambda _, inputs, output: styles.fresh(output))
    if settings.sequence:
        for members in _runs(plan.blocks):
            _sequence(members[0].module, members[-1].module, settings)


def _apply(module: nn.Module, settings: Settings, style: ParallelStyle) -> None:
    parallelize_module(module, settings.mesh, style)


def _block(block: Block, settings: Settings) -> None:
    if settings.sequence:
        for _, norm in block.norms:
            _apply(norm, settings, styles.SequenceNorm())
    for attention in block.attentions:
        _apply(attention.module, settings, styles.Entry(settings.plain))
        _region(attention, settings)
        for _, norm in attention.norms:
            _apply(norm, settings, styles.HeadNorm())
        _fewer_heads(attention, settings.mesh.size())
        if attention.rows:
            _own_numbers(attention.module, attention.rows[0][1], settings)
    for forward in block.feed_forwards:
        if forward.entry is not None:
            entry = styles.NormBefore if forward.is_behind else styles.Entry
            _apply(forward.entry[1], settings, entry(settings.plain))
        _region(forward, settings)
        if forward.entry is not None and forward.rows:
            _own_numbers(forward.entry[1], forward.rows[0][1], settings, after=forward.is_behind)
    for mixture in block.mixtures:
        if settings.sequence:
            _apply(mixture.module, settings, styles.Mixture())
        if mixture.cuts:
            _apply(mixture.experts, settings, styles.ExpertsInside(tuple(mixture.cuts)))


def _region(region: Attention | FeedForward, settings: Settings) -> None:
    for column in region.columns:
        _apply(column.module, settings, styles.Columns(input_layouts=settings.plain))
    for _, row in region.rows:
        _apply(row, settings, styles.Rows(output_layouts=settings.plain))


def _fewer_heads(attention: Attention, ranks: int) -> None:
    """Numbers that a module reads as it computes become this rank's; those that are inferred from widths need nothing."""
    module = attention.module
    for names, count in ((HEADS, attention.heads), (KEY_HEADS, attention.key_heads)):
        for name in names:
            if vars(module).get(name) == count:
                setattr(module, name, count // ranks)
    for name in _FEATURES:
        size = vars(module).get(name)
        if isinstance(size, int) and size % attention.heads == 0:
            setattr(module, name, size // ranks)


def _own_numbers(first: nn.Module, last: nn.Module, settings: Settings, after: bool = False) -> None:
    """Between a region's entry and its row-wise layer dropout is of what this rank alone has.

    With ``parallel.sequence`` everything between the first block and the last is, and has its own numbers already.
    """
    streams = settings.streams
    if streams is None or settings.sequence:
        return

    def begin(module: nn.Module, *_: Any) -> None:
        if module.training:
            streams.begin()

    def end(*_: Any) -> None:
        streams.end()

    if after:
        first.register_forward_hook(begin)
    else:
        first.register_forward_pre_hook(begin)
    last.register_forward_pre_hook(end)


# --- parallel.sequence -------------------------------------------------------------------------


def _runs(blocks: Iterable[Block]) -> list[list[Block]]:
    """Blocks by the list that they stand in."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.name.rpartition(".")[0], []).append(block)
    return list(found.values())


def _sequence(first: nn.Module, last: nn.Module, settings: Settings) -> None:
    """Cut the sequence where the blocks begin, and gather it where they end."""
    mesh, streams = settings.mesh, settings.streams

    def cut(x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or x.shape[1] % mesh.size():
            raise TrainingError(
                f"parallel.sequence cuts rows in {mesh.size()}, and these are of {x.shape[1] if x.dim() > 1 else 0} tokens: "
                "pad them to a multiple (data.shape_buckets does), or drop parallel.sequence"
            )
        return styles.moved(x, mesh, Replicate(), Shard(1))

    def gather(_: nn.Module, inputs: Any, output: Any) -> Any:
        if streams is not None:
            streams.end()
        return styles.first_of(output, lambda x: styles.fresh(styles.moved(x, mesh, Shard(1), Replicate())))

    enter: Callable[..., Any] = styles.with_first(first, cut)

    def begin(module: nn.Module, arguments: Any, named: Any) -> Any:
        entered = enter(module, arguments, named)
        if streams is not None and module.training:
            streams.begin()
        return entered

    first.register_forward_pre_hook(begin, with_kwargs=True)
    last.register_forward_hook(gather)
