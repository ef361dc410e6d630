"""Packing: documents of varying length in rows of one length, ``data.packing`` and ``data.packed_length``.

Padding is computed like any token and teaches nothing. Packed rows hold several documents, with positions that begin anew
at each, and attention that ends at their borders, so that every token sees what it saw before (Krell et al. 2021,
"Efficient Sequence Packing without Cross-contamination"). Each batch is packed by itself: a step has the documents that
it had, hence the same loss and gradients, on fewer slots. What batches and models must offer is said in
:mod:`trine.optim.runtime.packing`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "inputs_of", "refusal", "tolerance"]

KEYS = ("data.packing", "data.packed_length")
ORDER = 66
QUANTITY = "padding waste"
NUMERICS = (
    "the same documents in each step, so unchanged but for the order of summation: losses within 1e-10 relative in fp64, "
    "1e-5 in fp32; dropout draws other random numbers"
)


def refusal(config: Config) -> str | None:
    """Combinations whose keys contradict each other."""
    if config.data.packing and config.data.shape_buckets:
        return (
            "data.packing and data.shape_buckets cannot be combined: packed rows have one length. Set "
            "data.packed_length, and take data.shape_buckets out"
        )
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Of fp32 runs."""
    return Tolerance(loss=1e-5, gradient=1e-4) if config.data.packing else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` for a model that cannot keep documents in one row apart."""
    if config.data.packing:
        inputs_of(facts.model)


def apply(assembly: Assembly) -> None:
    """Have ``engine.steps`` pack each batch, and the model refuse to train on rows without their borders."""
    data = assembly.config.data
    if not data.packing:
        return
    from trine.optim.runtime.adoption import unwrapped
    from trine.optim.runtime.loaders import changed
    from trine.optim.runtime.packing import Packer
    from trine.optim.runtime.padding import count_padding

    model = unwrapped(assembly.facts.model)
    packer = Packer(data.packed_length, inputs_of(model))
    assembly.loaders.append(lambda loader: changed(loader, packer, uncollated=True))
    hook = model.register_forward_pre_hook(_Guard(packer.made[0]), with_kwargs=True)
    assembly.closers.append(hook.remove)
    length = "the batch's width at most" if data.packed_length is None else f"{data.packed_length} tokens"
    note = "the same documents a step"
    if data.length_grouped:
        note += "; of like length, they fill rows worse than mixed ones would"
    assembly.effects.append(Effect("data.packing", "a document a row, padded", f"in rows of {length}", note))
    count_padding(assembly, "data.packing")


def inputs_of(model: torch.nn.Module) -> str:
    """How the model is told of documents, as :data:`trine.optim.runtime.packing.INPUTS` names it.

    Raises ``UsageError``, with the way out, for a model that cannot be told.
    """
    from trine.optim.runtime.adoption import unwrapped

    model = unwrapped(model)
    takes = inspect.signature(model.forward).parameters
    if {"positions", "documents"} <= takes.keys():
        return "documents"
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation is None or not {"position_ids", "attention_mask"} <= takes.keys():
        raise UsageError(
            f"data.packing: {type(model).__name__}.forward takes no positions and documents, so documents in one row "
            "would see each other: give it these arguments (docs/sequences.md shows how), or take the key out"
        )
    if not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        raise UsageError(
            f"data.packing: {type(model).__name__} is no causal language model of Transformers, the only kind there whose "
            "mask Trine makes: give a forward of your own positions and documents, or take the key out"
        )
    if implementation == "eager":
        return "bias"
    # Flash and flex attention read the borders off the positions, where no mask is given.
    return "mask" if implementation == "sdpa" else "positions"


class _Guard:
    """Training on packed rows without their borders would mix documents, silently. A class: models are pickled."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.training and named.get(self._name) is None:
            raise UsageError(
                f"data.packing: {type(module).__name__} was called without {self._name}=: loss_fn must pass on what the "
                "packed batch holds besides ids and targets, batches must come from engine.steps(loader), and "
                "validation wants model.eval()"
            )
