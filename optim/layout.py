"""How ranks are laid out: which of them hold a part of the same model, and which see other batches. Imports no torch.

    layout = layout_of(config, rank, ranks)
    layout.tensor, layout.data_ranks, layout.data_rank

Ranks are numbered with tensor parallelism innermost, so that its groups lie inside a node, and pipelines outermost, whose
messages are the smallest (Narayanan et al. 2021, section 3). Ranks along ``replicate``, ``shard`` and ``expert`` see
different batches; those along ``pipeline``, ``context`` and ``tensor`` share theirs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from trine.optim.config import Config
from trine.record.errors import UsageError

__all__ = [
    "DATA_DIMENSIONS",
    "DIMENSIONS",
    "IN_MODULES",
    "Layout",
    "arranged",
    "degrees",
    "fitting",
    "layout_of",
]

#: From the outermost to the innermost.
DIMENSIONS = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
#: Those whose ranks see different batches.
DATA_DIMENSIONS = ("replicate", "shard", "expert")
#: Those whose ranks exchange within the model's modules, in every forward and backward. Ranks of a pipeline do so between
#: them; replicas and shards after backward, unless parameters are gathered (``Layout.gathers``).
IN_MODULES = ("expert", "context", "tensor")


@dataclass(frozen=True, slots=True)
class Layout:
    """The degree of each kind of parallelism, and where this rank stands."""

    rank: int
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    #: Whether each module's parameters are gathered from other data-parallel ranks when it is called: ZeRO 2 and 3.
    gathers: bool = False

    def size(self, *dimensions: str) -> int:
        """Ranks along these dimensions together."""
        product = 1
        for dimension in dimensions:
            product *= int(getattr(self, dimension))
        return product

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.size(*DIMENSIONS)

    def place(self, *dimensions: str) -> int:
        """Where this rank stands along these dimensions, the last of them counted fastest."""
        places: dict[str, int] = {}
        left = self.rank
        for dimension in reversed(DIMENSIONS):
            left, places[dimension] = divmod(left, self.size(dimension))
        found = 0
        for dimension in dimensions:
            found = found * self.size(dimension) + places[dimension]
        return found

    @property
    def data_ranks(self) -> int:
        """How many different batches a step has: what samplers divide the data by."""
        return self.size(*DATA_DIMENSIONS)

    @property
    def data_rank(self) -> int:
        """Which of them is this rank's."""
        return self.place(*DATA_DIMENSIONS)

    @property
    def is_hybrid(self) -> bool:
        """Whether there is more than data parallelism and sharding."""
        return self.size("pipeline", "expert", "context", "tensor") > 1

    @property
    def exchanges_in_modules(self) -> bool:
        """Whether ranks exchange what modules compute, so that none can recompute one alone."""
        return self.size(*IN_MODULES) > 1

    @property
    def meets_in_modules(self) -> bool:
        """Whether ranks wait for each other inside of modules: all must call the same ones equally often."""
        return self.gathers or self.exchanges_in_modules

    @property
    def meets_in_forward(self) -> bool:
        """Whether ranks wait for each other before the gradients' exchange: none can leave a forward, or repeat it, alone."""
        return self.meets_in_modules or self.pipeline > 1

    @property
    def meets_over_batches(self) -> bool:
        """Whether ranks with different batches do, which may be cut into different numbers of micro-batches."""
        return self.gathers or self.expert > 1

    def hybrid_key(self) -> str:
        """The key that makes it hybrid, for refusals."""
        return next(
            f"parallel.{name}" for name in ("pipeline", "tensor", "expert", "context") if self.size(name) > 1
        )

    def __str__(self) -> str:
        spelled = [f"{name} {self.size(name)}" for name in DIMENSIONS if self.size(name) > 1]
        return " × ".join(spelled) or "one rank"


def layout_of(config: Any = None, rank: int | None = None, ranks: int | None = None) -> Layout:
    """What ``config`` makes of so many ranks; given as ``trine.optimize`` takes it. Raises ``UsageError`` where the
    degrees do not fit them.

    Rank and ranks are the launcher's (``RANK``, ``WORLD_SIZE``) where they are not given. A program asks before it makes
    its sampler, which divides the data by ``layout.data_ranks`` and takes the part ``layout.data_rank``.

    ``parallel.pipeline`` × ``expert`` × ``context`` × ``tensor`` divide the ranks; replicas and shards
    (``parallel.data``, ``parallel.shard``, ``zero.stage``) share what is left.
    """
    from trine.optim._inputs import as_config
    from trine.optim._override import current_override

    config = as_config(config)
    override = current_override()
    if override is not None:  # both sides of a comparison see the same samples
        config = override.divides_by(config)
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if ranks is None else ranks
    if not 0 <= rank < ranks:  # it would sample another's data
        raise UsageError(f"there is no rank {rank} of {ranks}: the first is 0 and the last {ranks - 1}")
    return arranged(config, rank, ranks)


def arranged(config: Config, rank: int, ranks: int) -> Layout:
    """:func:`layout_of` of this very configuration."""
    parallel = config.parallel
    kinds = {name: int(getattr(parallel, name)) for name in ("pipeline", "expert", "context", "tensor")}
    product = 1
    for degree in kinds.values():
        product *= degree
    if product == 1:
        return _plain(config, rank, ranks)
    spelled = " × ".join(f"parallel.{name} = {degree}" for name, degree in kinds.items() if degree > 1)
    if ranks % product:
        near = [n for n in (ranks // product * product, (ranks // product + 1) * product) if n]
        raise UsageError(
            f"{spelled} must divide the {ranks} rank{'s' if ranks > 1 else ''}: start {' or '.join(map(str, near))} ranks, "
            "or change the degrees"
        )
    rest = ranks // product
    if config.zero.stage:
        replicas, shards = degrees(config, rest, f" that {spelled} leave")
    else:
        replicas, shards = rest, 1
        if parallel.data not in ("auto", rest):
            raise UsageError(
                f"parallel.data = {parallel.data} × {spelled} must make the {ranks} ranks: write "
                f'parallel.data = {rest} or "auto"'
            )
    gathers = config.zero.stage >= 2 and rest > 1
    return Layout(rank=rank, replicate=replicas, shard=shards, gathers=gathers, **kinds)


def _plain(config: Config, rank: int, ranks: int) -> Layout:
    """Of data parallelism and ZeRO alone; what does not fit is the techniques' own to refuse."""
    if config.zero.stage:
        try:
            replicas, shards = degrees(config, ranks)
        except UsageError:
            replicas, shards = ranks, 1
        return Layout(
            rank=rank, replicate=replicas, shard=shards, gathers=config.zero.stage >= 2 and ranks > 1
        )
    return Layout(rank=rank, replicate=ranks)


def degrees(config: Config, ranks: int, which: str = "") -> tuple[int, int]:
    """(replicas, shards) with replicas × shards = ``ranks``, from ``parallel.data`` and ``parallel.shard``.

    ``parallel.shard = "auto"`` counts as all ranks here. ``which`` says of the ranks, in errors, which they are. Raises
    ``UsageError`` with both names where they do not fit.
    """
    data, shard = config.parallel.data, config.parallel.shard
    if isinstance(shard, int):
        replicas = max(ranks // shard, 1) if data == "auto" else data
        if replicas * shard != ranks:
            raise UsageError(
                f"parallel.data = {_spelled(data)} × parallel.shard = {shard} must make the {ranks} ranks{which}: "
                f"{fitting(ranks)}"
            )
        return replicas, shard
    if data == "auto":
        return 1, ranks
    if ranks % data:
        raise UsageError(
            f"parallel.data = {data} does not divide the {ranks} ranks{which}, which parallel.shard is a part of"
        )
    return data, ranks // data


def fitting(ranks: int) -> str:
    """What replicas × shards could be, for errors."""
    found = [f"{ranks // n} × {n}" for n in range(2, ranks + 1) if ranks % n == 0]
    return f"use one of {', '.join(found)}" if found else "there is one rank alone to shard over"


def _spelled(data: int | str) -> str:
    return '"auto"' if data == "auto" else str(data)
