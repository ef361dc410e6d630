"""What a pipeline will be: its stages, their blocks, its schedule and its micro-batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trine.optim.batches import Divisible, Gathered, joined, pieces_of, size_of, tensors_of
from trine.optim.runtime.pipelining.chain import Chain, chain_of
from trine.optim.runtime.pipelining.costs import Costs, estimated
from trine.optim.runtime.pipelining.schedules import Schedule, ideal_bubble, schedule_of
from trine.optim.runtime.pipelining.split import equal_numbers, partition, stage_costs, stages_of_rank
from trine.optim.runtime.sequences import IGNORED
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.config import Config
    from trine.optim.runtime.pipelining.example import Shown
    from trine.optim.techniques._assembly import Facts

logger = logging.getLogger("trine")

__all__ = ["LARGEST_BUBBLE", "Plan", "chosen_microbatches", "plan_of"]

#: Of the ideal, when micro-batches are chosen.
LARGEST_BUBBLE = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """Decided alike on every rank."""

    chain: Chain
    schedule: Schedule
    ranks: int  # of the pipeline
    chunks: int  # stages a rank
    begins: tuple[int, ...]  # first block of each stage
    costs: Costs
    why: str
    microbatches: int | None  # None: chosen by the batch
    behind: frozenset[int]  # modules outside the blocks that run behind them, by id
    needed: Mapping[int, tuple[int, ...]]  # id of a module → stages, beside its own, that need it

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.ranks * self.chunks

    def blocks(self, stage: int) -> tuple[int, int]:
        """First block of a stage, and the one behind its last."""
        ends = (*self.begins[1:], len(self.chain))
        return self.begins[stage], ends[stage]

    def local(self, place: int) -> tuple[int, ...]:
        """The stages of the rank at this place of the pipeline."""
        return stages_of_rank(place, self.ranks, self.chunks, self.schedule.turned)

    def ideal(self, microbatches: int) -> float:
        """The schedule's bubble with so many, and even stages."""
        return ideal_bubble(self.schedule, self.ranks, self.chunks, microbatches)

    def spelled(self) -> str:
        """Blocks and share of the cost of each stage, for people."""
        sums = stage_costs(self.costs.blocks, self.begins, self.costs.before, self.costs.behind)
        whole = sum(sums) or 1.0
        said = []
        for stage, cost in enumerate(sums):
            first, end = self.blocks(stage)
            names = self.chain.names[first]
            if end - first > 1:
                names += f"…{self.chain.names[end - 1].rpartition('.')[2]}"
            said.append(f"{names} {cost / whole:.0%}")
        return ", ".join(said)


def plan_of(config: Config, facts: Facts, measured: bool = False) -> Plan:
    """By the configuration and the model. Raises ``UsageError`` that names the key which cannot be met.

    ``measured``: by the example as well, where the program gave one; collective then.
    """
    parallel = config.parallel
    schedule = schedule_of(parallel.schedule, parallel.chunks)
    chunks = parallel.chunks if parallel.chunks > 1 else schedule.default_chunks()
    if chunks > 1 and not schedule.several:
        raise UsageError(
            f'parallel.chunks = {chunks}: the schedule {schedule.name} runs one stage a rank: use "interleaved", '
            '"looped_bfs" or "interleaved_zero_bubble", or take parallel.chunks out'
        )
    if schedule.turned and chunks != 2:
        raise UsageError(
            f"parallel.chunks = {chunks}: {schedule.name} goes along the ranks and back, with 2 stages a rank: take the key out"
        )
    begins = parallel.split if isinstance(parallel.split, tuple) else ()
    chain = chain_of(facts.model, begins)
    ranks = parallel.pipeline
    stages = ranks * chunks
    if len(chain) < stages:
        raise UsageError(
            f"parallel.pipeline = {ranks}{f' with {chunks} stages a rank' if chunks > 1 else ''} makes {stages} stages, and "
            f"{chain.container or type(facts.model).__name__} has {len(chain)} blocks: use at most {len(chain)} stages"
        )
    wanted = parallel.microbatches or _of_accumulation(config)
    if wanted is not None:
        key = "parallel.microbatches" if parallel.microbatches else "accumulation.steps"
        _require_runnable(schedule, ranks, chunks, wanted, key)

    def cut(costs: Costs) -> tuple[int, ...]:
        return _cuts(parallel.split, chain, ranks, chunks, schedule, costs)

    costs = estimated(facts.model, chain)
    cuts, behind, needed = cut(costs), _registered_behind(facts, chain), {}
    if measured and facts.example is not None:
        shown = _shown(facts, chain, cut)
        ids = {name: id(module) for name, module in facts.model.named_modules()}
        costs, cuts = shown.costs, shown.begins
        behind = frozenset(ids[name] for name in shown.behind)
        needed = {ids[name]: stages for name, stages in shown.needed.items()}
    why = _why(parallel.split, costs)
    return Plan(chain, schedule, ranks, chunks, cuts, costs, why, wanted, behind, needed)


def _shown(facts: Facts, chain: Chain, cut: Callable[[Costs], tuple[int, ...]]) -> Shown:
    from trine.optim.runtime.pipelining.example import show

    if facts.loss_fn is None:
        raise UsageError("parallel.pipeline: example=… is run with the loss function: give loss_fn=… as well")
    return show(facts, chain, facts.loss_fn, facts.example, cut)


def _registered_behind(facts: Facts, chain: Chain) -> frozenset[int]:
    """Without an example, what is registered behind the blocks is taken to run behind them."""
    first = id(chain.blocks[0])
    found: set[int] = set()
    inside = {id(module) for block in chain.blocks for module in block.modules()}
    passed = False
    for module in facts.model.modules():
        passed = passed or id(module) == first
        if passed and id(module) not in inside:
            found.add(id(module))
    return frozenset(found)


def _of_accumulation(config: Config) -> int | None:
    steps = config.accumulation.steps
    return steps if isinstance(steps, int) and steps > 1 else None


def _require_runnable(schedule: Schedule, ranks: int, chunks: int, microbatches: int, key: str) -> None:
    problem = schedule.problem(ranks, chunks, microbatches)
    if problem:
        raise UsageError(f"{key} = {microbatches}: {problem}")


def _cuts(
    split: Any, chain: Chain, ranks: int, chunks: int, schedule: Schedule, costs: Costs
) -> tuple[int, ...]:
    stages = ranks * chunks
    if split == "layers":
        return equal_numbers(len(chain), stages)
    if isinstance(split, tuple):
        return _named(split, chain, stages)
    return partition(
        costs.blocks, ranks, chunks, turned=schedule.turned, before=costs.before, behind=costs.behind
    )


def _why(split: Any, costs: Costs) -> str:
    if split == "layers":
        return f"equal numbers of blocks; {costs.kind} cost"
    if isinstance(split, tuple):
        return f"as the configuration names them; {costs.kind} cost"
    return f"equal {costs.kind} cost"


def _named(split: Sequence[str], chain: Chain, stages: int) -> tuple[int, ...]:
    if len(split) != stages - 1:
        raise UsageError(
            f"parallel.split names {len(split)} blocks, and {stages} stages begin at {stages - 1} beside the first"
        )
    places = [chain.names.index(name) for name in split]
    if places != sorted(set(places)) or places[0] == 0:
        raise UsageError(
            f"parallel.split = {', '.join(split)}: the blocks stand in the model's order, and the first stage begins without "
            "being named"
        )
    return (0, *places)


def chosen_microbatches(plan: Plan, batch: int) -> int:
    """As few as keep the ideal bubble below :data:`LARGEST_BUBBLE`, of those that divide a batch of so many samples.

    Where none does, the most that the schedule can run. Raises ``UsageError`` where it can run none.
    """
    able = [
        count
        for count in range(1, batch + 1)
        if batch % count == 0 and plan.schedule.problem(plan.ranks, plan.chunks, count) is None
    ]
    if not able:
        problem = plan.schedule.problem(plan.ranks, plan.chunks, batch)
        raise UsageError(
            f"parallel.pipeline: a batch of {batch} cannot be cut for its schedule: {problem or 'it is empty'}; use larger "
            'batches, or parallel.schedule = "gpipe"'
        )
    return next((count for count in able if plan.ideal(count) <= LARGEST_BUBBLE), able[-1])


class Cutter:
    """Cuts each batch into the plan's micro-batches, or chosen ones; tells what it chose."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._chosen: dict[int, int] = {}  # samples of a batch → micro-batches
        self._uneven: torch.Tensor | None = None  # whether this batch's targets are spread unevenly
        self._is_done = False  # looking at targets

    @property
    def chosen(self) -> dict[int, int]:
        """What was chosen, by the samples of a batch."""
        return self._chosen

    def __call__(self, batch: Any) -> list[Any]:
        """A batch's micro-batches, along its first dimension."""
        if isinstance(batch, Gathered):
            batch = joined(batch.parts, "parallel.microbatches")
        pieces = _pieces(batch, self._number(size_of(batch) or 0))
        if not self._is_done and torch.is_grad_enabled():
            self._uneven = uneven = _uneven_targets(pieces)
            self._is_done = uneven is not None and uneven.device.type != "cpu"
        return pieces

    def uncounted(self) -> None:
        """The loss came without a token count. Warns once where micro-batches hold different numbers of targets.

        Of batches on a device the first alone is looked at, since to read the answer waits for it.
        """
        uneven, self._uneven = self._uneven, None
        if uneven is not None and bool(uneven):
            self._is_done = True
            logger.warning(
                "parallel.pipeline: micro-batches hold different numbers of targets that are not %d, and the mean of their "
                "means is another loss than the batch's: have loss_fn return (mean loss, token count)",
                IGNORED,
            )

    def _number(self, size: int) -> int:
        """An evaluation runs stage after stage: what is too small for the schedule goes in one piece there."""
        evaluates = not torch.is_grad_enabled()
        stated = self._plan.microbatches
        if stated is not None:
            return 1 if evaluates and size < stated else stated
        if size not in self._chosen:
            if evaluates and self._plan.schedule.problem(self._plan.ranks, self._plan.chunks, size):
                return 1
            self._chosen[size] = chosen_microbatches(self._plan, size)
        return self._chosen[size]


def _uneven_targets(pieces: list[Any]) -> torch.Tensor | None:
    """Whether what is not ignored of some integers, per sample, differs between pieces; ``None`` where there are none."""
    shares: list[list[torch.Tensor]] = []
    for piece in pieces:
        integers = [each for each in tensors_of(piece) if each.dtype == torch.int64 and each.numel()]
        shares.append([(each != IGNORED).double().mean() for each in integers])
    by_tensor = [torch.stack(each) for each in zip(*shares, strict=False)]
    if len(pieces) < 2 or not by_tensor:
        return None
    return torch.stack([(each - each[0]).abs().max() > 1e-9 for each in by_tensor]).any()


def _pieces(batch: Any, count: int) -> list[Any]:
    """As accumulation has them. Raises ``UsageError`` with what can be done where the whole model never runs at once."""
    lengths = {len(each) for each in tensors_of(batch) if each.dim()}
    if len(lengths) > 1 and not isinstance(batch, Divisible):
        raise UsageError(
            f"parallel.microbatches = {count}: the batch has first dimensions {sorted(lengths)}, and is cut along the first "
            "dimension that all its tensors share: have what is no sample's (a table, weights of classes) in the model or in "
            "loss_fn, or repeat it for each sample"
        )
    return pieces_of(batch, count, "parallel.microbatches")
