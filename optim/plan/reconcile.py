"""Dimensions that do not add up to a model's stated parameters: which one was left out, or is wrong.

Papers and tables often leave the heads' size out where it is not hidden over heads (Qwen3, PaLM), and whether the output head is
tied; now and then a number of layers is wrong. The parameters are mostly right, and tell.

    reconciled(workload, 30.5e9)      (the workload with heads of 128, "head_size 128, since …")
"""

from __future__ import annotations

from collections.abc import Iterator

from trine.optim.plan.workload import Workload

__all__ = ["reconciled"]

#: A count this close to the stated one is meant: papers give three digits.
_CLOSE = 0.006
#: Layers are doubted only where the dimensions come this near: a model cut down to a few layers keeps its name and its size.
_NEAR = 0.35
#: Commonest first.
_HEAD_SIZES = (128, 64, 256, 96, 80, 192, 160)


def reconciled(workload: Workload, parameters: float) -> tuple[Workload, str]:
    """The workload whose count is nearest to the stated parameters, and why it was changed; "" where it was not.

    Tried, one at a time and then tied embeddings with each: a head size that models have, tied or untied embeddings, another
    number of layers. Nothing is changed where no change comes within 0.6 % of what is stated.
    """
    best, reason = workload, ""
    if _distance(workload, parameters) <= _CLOSE:
        return best, reason
    for changed, why in _candidates(workload, parameters):
        distance = _distance(changed, parameters)
        if distance <= _CLOSE and (not reason or distance < _distance(best, parameters) / 2):
            best, reason = changed, why
    if reason:
        said = f"{parameters / 1e9:.4g} billion parameters are stated and the dimensions given make "
        reason = f"{reason}, since {said}{workload.parameters / 1e9:.4g} billion"
    return best, reason


def _distance(workload: Workload, parameters: float) -> float:
    return abs(workload.parameters / parameters - 1)


def _candidates(workload: Workload, parameters: float) -> Iterator[tuple[Workload, str]]:
    """Likeliest first: one that is likelier is kept unless another is twice as close."""
    tied, untied = workload, workload.with_changes(tied_embeddings=not workload.tied_embeddings)
    either = ((tied, ""), (untied, "tied embeddings" if untied.tied_embeddings else "untied embeddings"))
    yield either[1]
    for size in _HEAD_SIZES:
        for base, word in either:
            if size != workload.head_size:
                yield base.with_changes(head_size=size), _joined(f"head_size {size}", word)
    if _distance(workload, parameters) < _NEAR and not workload.dense_layers and not workload.window:
        each = workload.layer_parameters(mixture=workload.is_mixture)
        for base, word in either:
            layers = workload.layers + round((parameters - base.parameters) / each)
            if layers >= 1:
                yield base.with_changes(layers=layers), _joined(f"{layers} layers", word)


def _joined(*words: str) -> str:
    return " and ".join(word for word in words if word)
