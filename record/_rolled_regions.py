"""Regions of a roll-up: a run that evaluates or saves in every step would else never fit its budget."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_REGIONS", "rolled_regions"]

Array = npt.NDArray[np.int64]

#: Of a roll-up. The longest half stay as they are; the others are joined, by kind and name, over stretches of time.
MOST_REGIONS = 512


def rolled_regions(regions: dict[str, Array]) -> dict[str, Array]:
    """At most about :data:`MOST_REGIONS` rows that hold the same time of each kind and name.

    ``regions`` are columns of the table, text as codes, times in ns. What is joined begins with the first of its
    stretch and is as long as all of them together, one kind after another; so sums stay, and places blur.
    """
    count = len(regions["start_ns"])
    if count <= MOST_REGIONS:
        return regions
    length = regions["end_ns"] - regions["start_ns"]
    order = np.argsort(-length, kind="stable")
    kept, short = order[: MOST_REGIONS // 2], order[MOST_REGIONS // 2 :]
    pairs, kind = np.unique(
        np.stack([regions["kind"][short], regions["name"][short]]), axis=1, return_inverse=True
    )
    start = regions["start_ns"][short]
    stretches = max(MOST_REGIONS // 2 // pairs.shape[1], 1)
    stretch = (start - start.min()) * stretches // (int(start.max() - start.min()) + 1)
    keys, row = np.unique(stretch * pairs.shape[1] + kind.reshape(-1), return_inverse=True)
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, row.reshape(-1), length[short])
    where, which = keys // pairs.shape[1], keys % pairs.shape[1]
    first = np.full(stretches, np.iinfo(np.int64).max)
    np.minimum.at(first, stretch, start)
    before = np.cumsum(total) - total
    begin = first[where] + before - before[np.searchsorted(where, where)]
    joined = {"kind": pairs[0][which], "name": pairs[1][which], "start_ns": begin, "end_ns": begin + total}
    return {name: np.concatenate([regions[name][kept], column]) for name, column in joined.items()}
