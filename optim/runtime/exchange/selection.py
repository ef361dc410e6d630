"""Which all-reduce for which size: predicted from measured latency and bandwidth, alike on every rank.

With α, β of a step in which every rank sends and receives (:data:`trine.optim.runtime.links.Operation` ``shift``), γ the
rate at which one rank adds, n ranks, k nodes of m ranks, H the height of the trees over n and C the chunks that follow
each other down them (Hockney 1994; Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005):

    ring       2(n-1) · (α + S/(nβ)) + S/γ · (n-1)/n
    tree       (2H + C - 1) · (α + L/C · S/(2β)) + S/γ          L: messages of the busiest rank a chunk, 4 from n = 4 on
    two_level  2(m-1) · (α' + S/(mβ')) + ring or tree over k of S/m + S/γ · (m-1)/m      α', β': inside a node
    backend    α'' + S/β''                                       its own all-reduce, measured as a whole

The tree's C that costs least is √((2H-1) · L·S/(2αβ)). A short trial corrects each prediction for what single messages
do not meet. Every number is agreed by all ranks, so all choose alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import distributed

from trine.optim.runtime.exchange.ring import ring_plan
from trine.optim.runtime.exchange.schedule import Plan
from trine.optim.runtime.exchange.scheduled import ScheduledSum
from trine.optim.runtime.exchange.tree import double_tree, tree_load, tree_plan
from trine.optim.runtime.exchange.two_level import two_level_plan
from trine.optim.runtime.links import Link, Links, link_of, node_links
from trine.optim.topology import Topology

__all__ = [
    "Costs",
    "Range",
    "Selected",
    "best_pieces",
    "candidates",
    "connect",
    "described",
    "inputs",
    "measure_costs",
    "ranges",
    "ring_seconds",
    "tree_seconds",
]

MOST_PIECES = 64
#: What a change from the backend's own all-reduce must promise: less is within the prediction's error.
MARGIN = 0.1
#: Sizes between which choices are told apart: a factor of two is finer than the prediction.
SMALLEST_BYTES = 2**10


@dataclass(frozen=True, slots=True)
class Costs:
    """What a prediction needs, the same on every rank."""

    topology: Topology
    shift: Links
    backend: Link
    add_bytes_per_s: float
    #: Name → (size, measured / predicted) at two sizes, the smaller first (:mod:`trine.optim.runtime.exchange.trial`).
    factors: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def seconds(self, name: str, size_bytes: float) -> float:
        """Predicted time of the all-reduce called ``name`` (one of :func:`candidates`) on ``size_bytes``."""
        return self._modelled(name, size_bytes) * _factor(self.factors.get(name, ()), size_bytes)

    def _modelled(self, name: str, size_bytes: float) -> float:
        ranks, size, nodes = self.topology.ranks, self.topology.ranks_per_node, self.topology.nodes
        adding = 1 / self.add_bytes_per_s
        if name == "backend":
            return self.backend.seconds(size_bytes)
        if name == "ring":
            return ring_seconds(size_bytes, ranks, self.shift.whole, adding)
        if name == "tree":
            return tree_seconds(size_bytes, ranks, self.shift.whole, adding)
        inside, across = self.shift.inside, self.shift.across
        assert inside is not None and across is not None  # candidates() names no two-level without both
        slice_bytes = size_bytes / size
        within = 2 * (size - 1) * inside.seconds(slice_bytes) + (size - 1) * slice_bytes * adding
        over = ring_seconds if name == "two_level/ring" else tree_seconds
        return within + over(slice_bytes, nodes, across, adding)


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes up to ``largest_bytes`` (the last: all that are larger as well) go by ``name``."""

    largest_bytes: int
    name: str
    seconds: float  # predicted at largest_bytes


def ring_seconds(size_bytes: float, ranks: int, shift: Link, add_s_per_byte: float = 0.0) -> float:
    """Predicted time of a ring all-reduce."""
    part = size_bytes / ranks
    return (ranks - 1) * (2 * shift.seconds(part) + part * add_s_per_byte)


def tree_seconds(
    size_bytes: float, ranks: int, shift: Link, add_s_per_byte: float = 0.0, pieces: int | None = None
) -> float:
    """Predicted time over two trees, with ``pieces`` chunks in each half, by default the best number."""
    pieces = best_pieces(size_bytes, ranks, shift) if pieces is None else pieces
    sent = tree_load(ranks) * size_bytes / (2 * pieces)
    return (_fixed_steps(ranks) + pieces) * shift.seconds(sent) + size_bytes * add_s_per_byte


def best_pieces(size_bytes: float, ranks: int, shift: Link) -> int:
    """Chunks in each tree's half that cost least, as a power of two up to :data:`MOST_PIECES`."""
    whole = tree_load(ranks) * size_bytes / (2 * shift.bytes_per_s)
    exact = math.sqrt(_fixed_steps(ranks) * whole / shift.alpha_s)
    return min(MOST_PIECES, 1 << round(math.log2(max(exact, 1.0))))


def candidates(algorithm: str, topology: Topology) -> tuple[str, ...]:
    """Names of what ``communication.algorithm`` may come to: ``auto`` compares all, the backend's own among them."""
    two_level = ("two_level/ring", "two_level/tree")
    if algorithm == "two_level":
        return two_level
    if algorithm != "auto":
        return (algorithm,)
    has_levels = topology.nodes > 1 and topology.ranks_per_node > 1
    return ("backend", "ring", "tree", *(two_level if has_levels else ()))


def measure_costs(topology: Topology, device: torch.device) -> Costs:
    """Measure what is not measured yet. Collective over all ranks; up to about 1.5 s the first time."""
    return Costs(
        topology, node_links("shift", device, topology), link_of("all_reduce", device), _add_rate(device)
    )


def ranges(costs: Costs, names: Sequence[str], largest_bytes: int) -> tuple[Range, ...]:
    """The fastest of ``names`` by size, in powers of two from 1 KiB to what holds ``largest_bytes``.

    Another than the backend's own must promise to be faster by :data:`MARGIN`.
    """
    needed = 1 + MARGIN if "backend" in names else 1.0
    last = max(SMALLEST_BYTES, 2 ** math.ceil(math.log2(max(largest_bytes, 1))))
    found: list[Range] = []
    size = SMALLEST_BYTES
    while size <= last:
        _, seconds, name = min(
            (seconds if name == "backend" else seconds * needed, seconds, name)
            for name, seconds in ((name, costs.seconds(name, size)) for name in names)
        )
        if found and found[-1].name == name:
            found.pop()
        found.append(Range(size, name, seconds))
        size *= 2
    return tuple(found)


class Selected:
    """A ``SumOver`` that goes by the size of what it is given. To be made and called alike on every rank."""

    def __init__(
        self,
        choices: Sequence[Range],
        costs: Costs | None,
        topology: Topology,
        group: distributed.ProcessGroup,
    ) -> None:
        """``costs`` may be ``None`` where only a ring is chosen, which has nothing to decide."""
        self._choices = choices
        self._costs = costs
        self._group = group
        self._ranks = topology.ranks
        self._scheduled = {
            choice.name: ScheduledSum(_plans(choice.name, costs, topology), group)
            for choice in choices
            if choice.name != "backend"
        }
        self._backend_bytes = 0.0

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent since the start; the backend's counted as 2(n-1)/n of the tensor's."""
        counted = sum(each.sent_bytes for each in self._scheduled.values())
        return counted + round(self._backend_bytes)

    def seconds(self, size_bytes: float) -> float | None:
        """Predicted time for a tensor of this size; ``None`` where nothing was measured."""
        return None if self._costs is None else self._costs.seconds(self.name_for(size_bytes), size_bytes)

    def name_for(self, size_bytes: float) -> str:
        """Which all-reduce a tensor of this size goes by."""
        for choice in self._choices:
            if size_bytes <= choice.largest_bytes:
                return choice.name
        return self._choices[-1].name

    def __call__(self, flat: torch.Tensor) -> None:
        """Replace ``flat`` by its sum over all ranks."""
        size = flat.numel() * flat.element_size()
        name = self.name_for(size)
        if name == "backend":
            distributed.all_reduce(flat, group=self._group)
            self._backend_bytes += 2 * (self._ranks - 1) / self._ranks * size
        else:
            self._scheduled[name](flat)


# --- parts -------------------------------------------------------------------------------------


def _factor(points: tuple[tuple[float, float], ...], size_bytes: float) -> float:
    """Between two points a straight line in the logarithms of both; outside of them the nearer one's."""
    if not points:
        return 1.0
    (small, at_small), (large, at_large) = points
    if small == large:
        return at_small
    share = min(1.0, max(0.0, math.log(max(size_bytes, 1.0) / small) / math.log(large / small)))
    return math.exp((1 - share) * math.log(at_small) + share * math.log(at_large))


def _fixed_steps(ranks: int) -> int:
    """2H - 1: the steps of one chunk through a tree, less one."""
    one, other = double_tree(ranks)
    return max(1, 2 * max(one.height[one.root], other.height[other.root]) - 1)


def _plans(name: str, costs: Costs | None, topology: Topology) -> Callable[[int], Plan]:
    rank, ranks, size = topology.rank, topology.ranks, topology.ranks_per_node
    if name == "ring":
        ring = ring_plan(rank, ranks)
        return lambda size_bytes: ring
    if name == "two_level/ring":
        two_level = two_level_plan(topology)
        return lambda size_bytes: two_level
    assert costs is not None
    whole, across = costs.shift.whole, costs.shift.across
    tree = lru_cache(maxsize=16)(lambda pieces: tree_plan(rank, ranks, pieces))
    levels = lru_cache(maxsize=16)(lambda pieces: two_level_plan(topology, pieces))
    if name == "tree":
        return lambda size_bytes: tree(best_pieces(size_bytes, ranks, whole))
    assert across is not None
    return lambda size_bytes: levels(best_pieces(size_bytes / size, topology.nodes, across))


def _add_rate(device: torch.device) -> float:
    """Bytes of one operand that the slowest rank adds in a second; what of it is measured is 1 MiB, thrice."""
    values = torch.zeros(2**18, dtype=torch.float32, device=device)
    best = math.inf
    for _ in range(3):
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        began = time.perf_counter()
        values.add_(values)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - began)
    agreed = torch.tensor([best], dtype=torch.float64, device=device)
    distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX)
    return 2**20 / float(agreed)


def described(choices: Sequence[Range]) -> str:
    """The table in words: ``up to 64 KiB tree, up to 8 MiB two_level/ring, above it backend``."""
    words = []
    for position, choice in enumerate(choices):
        if len(choices) == 1:
            return choice.name
        if position == len(choices) - 1:
            words.append(f"above it {choice.name}")
        else:
            words.append(f"up to {_size(choice.largest_bytes)} {choice.name}")
    return ", ".join(words)


def _size(size_bytes: int) -> str:
    return f"{size_bytes // 2**20} MiB" if size_bytes >= 2**20 else f"{size_bytes // 2**10} KiB"


def inputs(costs: Costs) -> str:
    """What a choice was made from, in words."""
    parts = [("ring step", costs.shift.whole), ("inside", costs.shift.inside), ("across", costs.shift.across)]
    found = [
        f"{name} {_link(link)}" for name, link in (*parts, ("backend", costs.backend)) if link is not None
    ]
    tried = next(iter(costs.factors.values()), ())
    trial = (
        f", corrected by a trial at {' and '.join(_size(int(size)) for size, _ in tried)}" if tried else ""
    )
    return f"{', '.join(found)}; {costs.backend.backend}, {costs.shift.whole.source}{trial}"


def _link(link: Link) -> str:
    return f"{link.alpha_s * 1e6:.0f} µs + S/({link.bytes_per_s / 1e9:.2f} GB/s)"


def connect(group: distributed.ProcessGroup, device: torch.device) -> None:
    """A first collective on ``group``: NCCL's point-to-point messages of some ranks need its communicator on all."""
    distributed.all_reduce(torch.zeros(1, device=device), group=group)
