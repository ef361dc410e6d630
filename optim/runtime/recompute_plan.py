"""Which modules to recompute so that what is saved for backward fits a number of bytes.

The first forward runs with every candidate checkpointed, which needs the least memory and gives the same numbers. While
it runs, what each candidate would save is counted: the tensors that autograd hands to the checkpoint, by storage, without
parameters and without what is saved anyway. Then candidates are recomputed in the order of most bytes per FLOP until the
peak fits. No compiler takes part, so dropout repeats its numbers: PyTorch's own ``activation_memory_budget`` draws new
ones under ``torch.compile`` and corrupts gradients.

A larger batch than any before is measured anew, and decided on at once by the rank that met it. Where candidates hold
exchanges between ranks none may change its choice alone: at an update's end all learn of it and recompute every
candidate, until each rank has measured one as large as it met; then, at an update's end again, they decide together.

The peak is the larger of two: the end of the forward, when everything kept is alive, and the moment in backward when a
module has been recomputed, when what was kept before it is alive together with all that it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trine.optim.runtime.checkpointed import Region
from trine.optim.runtime.plain_tensors import is_plain
from trine.optim.runtime.saved_tensors import SavedTensors, local_part
from trine.optim.runtime.weak_storage import WeakStorage
from trine.record.errors import UsageError

__all__ = [
    "Candidate",
    "Measured",
    "Plan",
    "PlanAfterStep",
    "choose",
    "mib",
    "peak_of",
    "tensors_of",
]

logger = logging.getLogger("trine")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one module costs, in the order in which the forward meets them."""

    name: str
    saved_bytes: int  # that it keeps in addition when it is not recomputed
    recomputed_bytes: (
        int  # alive while it is recomputed; more than the above where what is saved is stored smaller
    )
    before_bytes: (
        int  # kept when it begins, with every candidate recomputed: its input, and all that came before
    )
    flops: int  # of its forward


def peak_of(candidates: Sequence[Candidate], recomputed: frozenset[str], end_bytes: int) -> int:
    """Largest number of bytes held for backward, with the candidates of these names recomputed.

    ``end_bytes``: held at the end of the forward when all are. Of inputs that are alive anyway nothing is counted twice.
    """
    kept = 0
    peak = 0
    for candidate in candidates:
        if candidate.name in recomputed:
            peak = max(peak, candidate.before_bytes + kept + candidate.recomputed_bytes)
        else:
            kept += candidate.saved_bytes
    return max(peak, end_bytes + kept)


def choose(candidates: Sequence[Candidate], budget_bytes: int, end_bytes: int) -> frozenset[str] | None:
    """Names to recompute: most bytes per FLOP first, the earlier of equals first; ``None`` where nothing fits.

    Early modules first, because what the last ones keep is given back before the others are recomputed.
    """
    order = sorted(
        range(len(candidates)),
        key=lambda position: (
            -candidates[position].saved_bytes / max(candidates[position].flops, 1),
            position,
        ),
    )
    chosen: set[str] = set()
    for position in order:
        if peak_of(candidates, frozenset(chosen), end_bytes) <= budget_bytes:
            break
        chosen.add(candidates[position].name)
    found = frozenset(chosen)
    return found if peak_of(candidates, found, end_bytes) <= budget_bytes else None


class Plan:
    """Measures the candidates in the first forward, and whenever a larger batch comes; then decides."""

    def __init__(
        self,
        regions: Sequence[Region],
        saved: SavedTensors,
        budget: Callable[[int, int], int],
        key: str,
        told: Callable[[str], None],
        ranks: int = 1,
    ) -> None:
        self._ranks = ranks
        self._regions = list(regions)
        self._saved = saved
        self._budget = budget
        self._key = key
        self._told = told
        self._is_measuring = True
        self._is_decided = False
        self._largest = 0  # elements of a candidate's arguments
        self._larger = 0  # of those that are still to be measured
        self._together: torch.device | None = None  # where ranks tell each other, if they change together
        self._is_renewing = False  # everything is recomputed on all ranks, until larger batches were measured
        self._measured: dict[str, Measured] = {}
        self._end_bytes = 0
        for region in regions:
            region.plan = self
        saved.always_counting = True
        saved.counts_back = True
        saved.after_forward.append(self._forward_ended)

    @property
    def is_measured(self) -> bool:
        """Whether a forward has been measured, so that :meth:`decide` can be called."""
        return bool(self._measured) and not self._is_measuring

    @property
    def candidates(self) -> list[Candidate]:
        """What was measured, in the forward's order; tensors that several candidates save belong to the first."""
        seen: set[int] = set()
        found = []
        for measured in self._measured.values():
            own = {key: sizes for key, sizes in measured.storages.items() if key not in seen}
            seen |= own.keys()
            raw = sum(size for size, _ in measured.storages.values())
            cost = sum(cost for _, cost in own.values())
            found.append(Candidate(measured.name, cost, raw, measured.before_bytes, measured.flops))
        return found

    def meet(self, region: Region, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Before each forward of a candidate: a larger batch than any before is measured anew."""
        if self._is_measuring or not self._is_decided:
            return
        size = _elements(arguments, named)
        if size <= max(self._largest, self._larger):
            return
        if self._together is None:
            self._begin_measuring()
            return
        self._larger = size
        if self._is_renewing:  # nothing changes by it: all is recomputed
            self._begin_measuring()
        else:
            logger.warning(
                "a larger batch came (%d numbers into %s; %d before): this step is run as was chosen before it, and may "
                "save more than is allowed; ranks change their choice together, at its end",
                size,
                region.name,
                self._largest,
            )

    def decide_together(self, device: torch.device) -> None:
        """From now on no rank changes its choice alone: candidates hold exchanges between ranks."""
        self._together = device

    def renew(self, stepped: bool) -> None:
        """At each update's end, on all ranks: where a larger batch came to any of them they begin, or end, to measure."""
        if self._together is None or not self._is_decided:
            return
        held = torch.tensor(int(self._larger > 0), device=self._together)
        torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
        is_needed = bool(held)
        if is_needed and not self._is_renewing:
            self._is_renewing = True
            if self._larger:
                self._begin_measuring()
            else:
                self._save_least()
            self._told(
                f"a larger batch came to a rank: all ranks run {len(self._regions)} modules with the least memory until "
                "batches as large were measured"
            )
        elif self._is_renewing and not is_needed:
            self._is_renewing = False
            self.decide()

    def _begin_measuring(self) -> None:
        self._is_measuring = True
        self._forget_measured()
        self._save_least()

    def _forget_measured(self) -> None:
        self._measured = {}

    def _save_least(self) -> None:
        """As the first forward ran."""
        for each in self._regions:
            each.active = True

    def watching(
        self, region: Region, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """The context of a checkpointed region's forward, or of its recomputation."""
        if torch._C._current_graph_task_id() != -1:
            return self._recomputing(region)
        return self._measured_within(region, arguments, named) if self._is_measuring else nullcontext()

    def _measured_within(
        self, region: Region, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> AbstractContextManager[None]:
        return self._measuring(region, arguments, named)

    @contextmanager
    def _recomputing(self, region: Region) -> Iterator[None]:
        """Count what comes back to life, until backward has used it."""
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def count(tensor: torch.Tensor) -> Any:
            if not self._saved.is_parameter(tensor):
                self._saved.note_back(tensor)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(count, unpack):
            yield

    @contextmanager
    def _measuring(self, region: Region, arguments: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
        """Count what the region saves while it runs, and its operations."""
        measured = self._measured.setdefault(region.name, Measured(region.name, {}, 0, 0))
        measured.before_bytes = max(measured.before_bytes, self._saved.held_bytes)
        self._largest = max(self._largest, _elements(arguments, named))
        known = {t.untyped_storage()._cdata for t in tensors_of(arguments, named)}
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

        def count(tensor: torch.Tensor) -> Any:
            local = local_part(tensor)
            if _is_activation(local) and not self._saved.is_parameter(tensor):
                self._count(measured, tensor, local.untyped_storage()._cdata in known)
            return pack(tensor)

        with _FlopCount() as counter, torch.autograd.graph.saved_tensors_hooks(count, unpack):
            yield
        measured.flops += counter.flops

    def _count(self, measured: Measured, tensor: torch.Tensor, is_argument: bool) -> bool:
        """Count a tensor that a region saves; false for one that was counted, or lies outside."""
        weak = WeakStorage(local_part(tensor))
        if is_argument or weak.address in measured.storages:
            return False
        size = local_part(tensor).untyped_storage().nbytes()
        measured.storages[weak.address] = (size, self._saved.cost_bytes(tensor))
        measured.references.append(weak)  # its address is not reused while it is counted
        return True

    def decide(self) -> None:
        """Choose, set the regions, say so. Raises ``UsageError`` where nothing fits and nothing ran before."""
        candidates = self.candidates
        everything = frozenset(candidate.name for candidate in candidates)
        least = peak_of(candidates, everything, self._end_bytes)
        most = peak_of(candidates, frozenset(), self._end_bytes)
        budget = self._budget(least, most)
        chosen, least = self._agreed(choose(candidates, budget, self._end_bytes), least)
        if chosen is None:
            message = (
                f"{self._key} = {budget}: full checkpointing of {len(candidates)} modules needs {least} bytes for "
                "what it saves: give at least that, or use smaller micro-batches (accumulation.steps)"
            )
            if not self._is_decided:
                raise UsageError(message)
            logger.warning("a larger batch came. %s", message)
            chosen = everything
        for region in self._regions:
            region.active = region.name in chosen
        peak = peak_of(candidates, chosen, self._end_bytes)
        names = ", ".join(region.name for region in self._regions if region.active) or "nothing"
        self._is_decided = True
        self._told(
            f"{len(chosen)} of {len(candidates)} modules recomputed: {names}; {mib(peak)} saved for backward at the "
            f"peak, {mib(most)} without, {mib(least)} with all, {mib(budget)} allowed"
        )

    def _agreed(self, chosen: frozenset[str] | None, least: int) -> tuple[frozenset[str] | None, int]:
        """What all ranks recompute, and the most that any needs; ``None`` where it does not fit on one of them.

        Their first batches may differ in size, and a rank that refused alone would leave the others waiting. Every rank
        takes its first decision at the same place; later ones, for a larger batch, are a rank's own unless
        :meth:`decide_together` was called.
        """
        if self._ranks == 1 or (self._is_decided and self._together is None):
            return chosen, least
        found: list[Any] = [None] * self._ranks
        torch.distributed.all_gather_object(found, (chosen, least))
        plans = [plan for plan, _ in found]
        most = max(needed for _, needed in found)
        return (None if None in plans else frozenset().union(*plans)), most

    def _forward_ended(self) -> None:
        if not self._is_measuring or not self._measured:
            return
        if self._largest < self._larger:  # ranks wait for one as large as was met
            self._forget_measured()
            return
        self._is_measuring = False
        self._larger = 0
        self._end_bytes = self._saved.held_bytes
        for measured in self._measured.values():
            measured.references.clear()
        decides_later = self._is_decided and self._together is not None
        if (self._decides_at_once or self._is_decided) and not decides_later:
            self.decide()

    #: False: somebody calls :meth:`decide` later, when more is known.
    _decides_at_once = True


class PlanAfterStep(Plan):
    """Decides when the first step has ended, and the optimizer's state is there."""

    _decides_at_once = False


@dataclass(slots=True)
class Measured:
    """What one module saves in a forward."""

    name: str
    storages: dict[int, tuple[int, int]]  # address → (bytes, bytes that stay on the device)
    before_bytes: int
    flops: int
    references: list[WeakStorage] = field(default_factory=list)


class _FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplications and additions of matrix products, convolutions and attention, by PyTorch's own formulas."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        packet = getattr(function, "overloadpacket", None)
        if (
            packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ):  # PyTorch counts nothing for it
            query, key, value = args[:3]
            pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
            self.flops += 2 * pairs * (query.shape[3] + value.shape[3])
        elif packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        return out


def tensors_of(arguments: tuple[Any, ...], named: dict[str, Any]) -> list[torch.Tensor]:
    """A call's tensors; of DTensors, this rank's parts."""
    leaves = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
    return [part for part in map(local_part, leaves) if _is_activation(part)]


def _is_activation(tensor: Any) -> bool:
    return is_plain(tensor) and not isinstance(tensor, torch.nn.Parameter)


def _elements(arguments: tuple[Any, ...], named: dict[str, Any]) -> int:
    return sum(tensor.numel() for tensor in tensors_of(arguments, named))


def mib(size: int) -> str:
    """In words."""
    return f"{size / 2**20:.1f} MiB"
