"""What a drawn step's collectives carry: bytes of a layer's, a stage's and a message, by the literature's volumes.

As :mod:`trine.optim.plan.waits` has them, whose seconds are of one collective alone; here they add up over a micro-batch, as
nccl-tests count them (what a gather gives, what a reduction takes, else the buffer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trine.optim.plan.columns import Conditions, Sizes
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.operators import repeated_share
from trine.optim.plan.ranks import place_elements, places_of, stays_gathered, sums_whole
from trine.optim.plan.traffic import reductions
from trine.optim.plan.waits import wire_bytes

__all__ = ["Carried", "carried_by"]


@dataclass(frozen=True, slots=True)
class Carried:
    """Of one layout. ``layer``: kind of group → bytes of an average layer's forward and backward on a micro-batch.

    ``gathered`` and ``reduced``: of a chunk's weights under ZeRO 3, forward and backward, by the rank's place in the pipeline
    (first, between, last); ``gradients``: of a chunk and step otherwise; ``message``: between stages.
    """

    layer: dict[str, tuple[float, float]]
    gathered: tuple[float, float, float]
    reduced: tuple[float, float, float]
    gradients: tuple[float, float, float]
    message: float


def carried_by(sizes: Sizes, conditions: Conditions, one: Layouts) -> Carried:
    """Bytes of the collectives of a single layout."""
    element = 4.0 if one.is_kind("precision", "fp32", "tf32")[0] else 2.0
    output = one["micro_batch"] * sizes.sequence / one["context"] * sizes.hidden * element
    weights = _chunk_elements(sizes, conditions, one)
    wire = float(wire_bytes(conditions, one)[0])
    sharded = bool(one["zero_stage"][0] == 3)
    once = bool(stays_gathered(one)[0])
    share = 1 / float(one["microbatches"][0]) if once else 1.0
    # Sharded state is reduced to its owners, who gather what they have made of it.
    both = wire + (element if one["zero_stage"][0] > 0 else 0.0)
    gathered = tuple(sharded * share * element * each for each in weights)
    again = 0.0 if once else element
    # Where whole gradients are summed, a micro-batch has its part of the step's one reduction.
    summed = bool(sums_whole(one, bool(conditions.whole_sums[0]))[0]) and not once
    often = 1 / float(one["microbatches"][0]) if summed else 1.0
    reduced = tuple(sharded * share * (again + often * wire) * each for each in weights)
    shares_data = int(one["data"][0] * one["context"][0]) > 1
    gradients = tuple(shares_data * (not sharded) * both * each for each in weights)
    return Carried(
        layer=_of_layers(sizes, conditions, one, output, element),
        gathered=(gathered[0], gathered[1], gathered[2]),
        reduced=(reduced[0], reduced[1], reduced[2]),
        gradients=(gradients[0], gradients[1], gradients[2]),
        message=float((output / one["tensor"])[0]),
    )


def _of_layers(
    sizes: Sizes, conditions: Conditions, one: Layouts, output: np.ndarray, element: float
) -> dict[str, tuple[float, float]]:
    """Forward and backward, which under recomputation repeats the forward's; a ring's backward carries twice as much."""
    mixed = sizes.mixture_layers / sizes.layers
    again = repeated_share(sizes, one)
    # Where the sequence is split, a reduction is a scatter and a gather.
    halves = np.where(one["sequence"] > 0, 2.0, 1.0)
    copies = conditions.expert_tensor * sizes.experts_per_token * mixed
    tensor = (reductions(sizes) + copies) * halves * output
    keys = np.maximum(sizes.kv_heads / one["tensor"], 1) * sizes.score_size
    context = (one["context"] - 1) * output / sizes.hidden * keys
    routed = 2 * mixed * output / one["tensor"] * sizes.experts_per_token * sizes.load_imbalance
    found = {
        "tensor": (tensor, tensor * (1 + again)),
        "context": (context, context * (2 + again)),
        "expert": (routed, routed * (1 + again)),
    }
    return {name: (float(ahead[0]), float(behind[0])) for name, (ahead, behind) in found.items()}


def _chunk_elements(sizes: Sizes, conditions: Conditions, one: Layouts) -> tuple[float, ...]:
    """A chunk's weights on the first, a middle and the last rank."""
    shared, experts = place_elements(sizes, conditions.expert_tensor, one, places_of(sizes, one))
    return tuple(float(each) / int(one["chunks"][0]) for each in (shared + experts)[:, 0])
