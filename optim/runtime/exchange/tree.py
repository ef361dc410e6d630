"""All-reduce over two binary trees at once (Sanders, Speck and Träff, Parallel Computing 35, 2009; NCCL since 2.4).

In one tree half of the ranks do nothing but send up and receive: the second tree makes leaves of the first one's inner
ranks. Each tree reduces and broadcasts half of the tensor, in chunks that follow each other down the levels. A rank
sends 2S bytes at most, against the ring's 2(n-1)/n · S, in about 2·log2(n) + chunks steps instead of 2(n-1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from trine.optim.runtime.exchange.schedule import Message, Plan, Step, merged

__all__ = ["Tree", "double_tree", "tree_load", "tree_plan", "tree_steps"]


@dataclass(frozen=True, slots=True)
class Tree:
    """One tree over places 0 … n-1: each place's parent, children, height above its deepest leaf, depth below the root."""

    root: int
    parent: tuple[int | None, ...]
    children: tuple[tuple[int, ...], ...]
    height: tuple[int, ...]
    depth: tuple[int, ...]


@lru_cache(maxsize=64)
def double_tree(places: int) -> tuple[Tree, Tree]:
    """The two trees. With an even number no place has children in both; with an odd one, at most one has."""
    parents = [_parent(place, places) for place in range(places)]
    if places % 2 == 0:  # mirrored: odd places, the leaves, change with even ones
        seconds = [
            None if (up := parents[places - 1 - p]) is None else places - 1 - up for p in range(places)
        ]
    else:  # shifted by one
        seconds = [None if (up := parents[p - 1]) is None else (up + 1) % places for p in range(places)]
    return _tree(parents), _tree(seconds)


def tree_load(places: int) -> int:
    """Messages that the busiest place sends for one chunk of either tree; it receives as many."""
    return max(
        sum((tree.parent[place] is not None) + len(tree.children[place]) for tree in double_tree(places))
        for place in range(places)
    )


def tree_plan(rank: int, ranks: int, pieces: int) -> Plan:
    """This rank's plan; each tree's half of the tensor goes in ``pieces`` chunks."""
    return Plan(2 * pieces, merged(tree_steps(rank, ranks, pieces, lambda place: place)))


def tree_steps(
    place: int, places: int, pieces: int, peer: Callable[[int], int], first: int = 0, number: int = 0
) -> Iterator[Step]:
    """Over 2·``pieces`` chunks from ``first``; 2·height + pieces - 1 steps from ``number`` on.

    Chunk c is sent up by a place of height h in step h + c, so that it has met both children by then; the root has it
    whole after step H - 1 + c, and a place of depth d hands it down in step H + c + d.
    """
    for half, tree in enumerate(double_tree(places)):
        parent, children, top = tree.parent[place], tree.children[place], tree.height[tree.root]
        for chunk in range(pieces):
            at = first + half * pieces + chunk
            for child in children:
                yield Step(number + tree.height[child] + chunk, adds=(Message(peer(child), at, at + 1),))
            down = number + top + chunk + tree.depth[place]
            if parent is not None:
                up = (Message(peer(parent), at, at + 1),)
                yield Step(number + tree.height[place] + chunk, sends=up)
                yield Step(down - 1, copies=up)
            for child in children:
                yield Step(down, sends=(Message(peer(child), at, at + 1),))


# --- parts -------------------------------------------------------------------------------------


def _parent(place: int, places: int) -> int | None:
    """An in-order binary tree on 1 … n-1 under the root 0: a place with k trailing zero bits has height k.

    Its parent has the next higher bit set and the lower ones clear; where that is out of range, the nearest ancestor
    that is not.
    """
    if place == 0:
        return None
    lowest = place & -place
    above = (place - lowest) | (lowest << 1)
    return above if above < places else place - lowest


def _tree(parents: list[int | None]) -> Tree:
    places = len(parents)
    children: list[list[int]] = [[] for _ in range(places)]
    for place, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(place)
    root = parents.index(None)
    depth = [0] * places
    order = [root]
    for place in order:  # grows while it is walked: every place after its parent
        for child in children[place]:
            depth[child] = depth[place] + 1
            order.append(child)
    height = [0] * places
    for place in reversed(order):
        height[place] = max((height[child] + 1 for child in children[place]), default=0)
    return Tree(root, tuple(parents), tuple(map(tuple, children)), tuple(height), tuple(depth))
