"""Batches of samples of like length: ``data.length_grouped``.

Padded to its longest, a batch of like lengths has little padding. The samples of an epoch are those of the loader's
sampler, in another order (:mod:`trine.optim.runtime.length_grouping`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("data.length_grouped",)
ORDER = 65
QUANTITY = "padding waste"
NUMERICS = "the same samples in another order: losses by step do not compare, those of whole epochs do"


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """There is none: steps hold other samples. Raises ``UsageError``, for who would compare them."""
    if not config.data.length_grouped:
        return None
    raise UsageError(
        "data.length_grouped gives each step other samples, so its losses cannot be compared with the plain run's: verify "
        "the configuration without this key"
    )


def check(config: Config, facts: Facts) -> None:
    """Nothing more: whether a loader can be regrouped shows when it comes."""


def apply(assembly: Assembly) -> None:
    """Have ``engine.steps`` replace the loader's sampler."""
    if not assembly.config.data.length_grouped:
        return
    from trine.optim.runtime.length_grouping import MEGA_BATCH, LengthGroupedBatches, length_grouped
    from trine.optim.runtime.padding import count_padding

    made: list[LengthGroupedBatches] = []

    def regroup(loader: Iterable[Any]) -> Iterable[Any]:
        remade, grouped = length_grouped(loader)
        made[:] = [grouped]
        return remade

    assembly.loaders.append(regroup)
    assembly.effects.append(
        Effect(
            KEYS[0],
            "the sampler's order",
            f"sorted within {MEGA_BATCH} batches at most",
            "the batches shuffled",
        )
    )
    count_padding(assembly, KEYS[0], lambda: made[0].slots_before if made else 0)
