"""Batches padded to one of few widths: ``data.shape_buckets``.

``torch.compile`` compiles for the shapes that it meets: a loader that pads each batch to its longest has it compile anew,
or fall back to slower code for any shape. With buckets it compiles once for each (:mod:`trine.optim.techniques.compilation`
is told to take shapes as they are).
"""

from __future__ import annotations

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("data.shape_buckets",)
ORDER = 67
QUANTITY = "compilations"
NUMERICS = (
    "unchanged where padding has no influence: in causal models, and in others by their attention_mask; the loss must leave "
    "targets of -100 out, as PyTorch's does"
)


def refusal(config: Config) -> str | None:
    """Everything of this key can be applied; packing names the combination with it."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Of fp32 runs: wider products sum in another order."""
    return Tolerance(loss=1e-5, gradient=1e-4) if config.data.shape_buckets else None


def check(config: Config, facts: Facts) -> None:
    """Nothing more: whether a batch can be padded shows when it comes."""


def apply(assembly: Assembly) -> None:
    """Have ``engine.steps`` pad each batch."""
    wanted = assembly.config.data.shape_buckets
    if not wanted:
        return
    from trine.optim.runtime.adoption import unwrapped
    from trine.optim.runtime.loaders import changed
    from trine.optim.runtime.padding import count_padding
    from trine.optim.runtime.shape_buckets import ShapeBuckets

    config = getattr(unwrapped(assembly.facts.model), "config", None)
    most = getattr(config, "max_position_embeddings", getattr(config, "sequence", None))
    buckets = ShapeBuckets(
        None if wanted == "auto" else tuple(wanted), most if isinstance(most, int) else None
    )
    assembly.loaders.append(lambda loader: changed(loader, buckets))
    shown = "2ⁿ and 3·2ⁿ⁻¹" if wanted == "auto" else ", ".join(map(str, wanted))
    assembly.effects.append(Effect(KEYS[0], "any width", shown, "padded on the right"))
    count_padding(assembly, KEYS[0])
