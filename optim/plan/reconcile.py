"""Dimensions that do not add up to a model's stated parameters: which one was left out, or is wrong.

Papers and tables often leave the heads' size out where it is not hidden over heads (Qwen3, PaLM), and whether the output head is
tied; now and then a number of layers is wrong. The parameters are mostly right, and tell.

    reconciled(workload, 30.5e9)      (the workload with heads of 128, "head_size 128, since …")
"""

from __future__ import annotations

from collections.abc import Iterator

from trine.optim.plan.workload import Workload

__all__ = ["reconciled"]

#: A count this close to the stated one is meant, however many digits are stated.
_CLOSE = 0.003
#: Layers are doubted only where the dimensions come this near, since a model cut down to a few layers keeps its name and its
#: size, and not nearer than that, where biases, positions or a padded vocabulary may be the difference.
_NEAR, _NEARER = 0.35, 0.03
#: Digits from which a stated count tells layers: 1.2 or 7 billion are a name, and a layer of few is less than they are rounded by.
_LAYER_DIGITS = 3
#: What sizes of heads are multiples of.
_EVEN = 8
#: Commonest first.
_HEAD_SIZES = (128, 64, 256, 96, 80, 192, 160)


def reconciled(workload: Workload, parameters: float) -> tuple[Workload, str]:
    """The workload whose count is nearest to the stated parameters, and why it was changed; "" where it was not.

    Tried: a head size that models have, tied or untied embeddings; where none of these agrees, embeddings that come near; where
    they do not either and three digits are stated, another number of layers. Nothing is changed where the count agrees with the
    digits that are stated (1000 billion has one), nor where no change makes it agree. No gated model keeps heads whose size is
    no multiple of 8.
    """
    best, reason = workload, ""
    close = max(_CLOSE, _half_a_digit(parameters))
    if _distance(workload, parameters) <= close and _has_usual_heads(workload):
        return best, reason
    for candidates in (_left_out(workload), _other_layers(workload, parameters)):
        for changed, why in candidates:
            distance = _distance(changed, parameters)
            if not _has_usual_heads(changed):
                continue
            if distance <= close and (not reason or distance < _distance(best, parameters) / 2):
                best, reason = changed, why
        if not reason:
            best, reason = _nearer_embeddings(workload, parameters)
        if reason:
            break
    if reason:
        said = f"{parameters / 1e9:.4g} billion parameters are stated and the dimensions given make "
        reason = f"{reason}, since {said}{workload.parameters / 1e9:.4g} billion"
    return best, reason


def _has_usual_heads(workload: Workload) -> bool:
    """Whether heads are of a size that kernels like, as those of all gated models are."""
    return not workload.gated or workload.head_size % _EVEN == 0


def _half_a_digit(parameters: float) -> float:
    """A little more than half a unit of the last digit that a number of billions is stated with, as a share of it."""
    text = _billions(parameters)
    places = len(text.partition(".")[2])
    if not places:
        places = -(len(text) - len(text.rstrip("0")))
    return 0.6 * 10.0**-places / (parameters / 1e9)


def _digits(parameters: float) -> int:
    """With how many digits a number of billions is stated: two of 0.35, one of 1000."""
    text = _billions(parameters)
    return len(text.replace(".", "").lstrip("0") if "." in text else text.rstrip("0"))


def _billions(parameters: float) -> str:
    return f"{parameters / 1e9:.6g}".split("e")[0]


def _distance(workload: Workload, parameters: float) -> float:
    return abs(workload.parameters / parameters - 1)


def _either(workload: Workload) -> tuple[tuple[Workload, str], tuple[Workload, str]]:
    """As it is, and with its output head tied the other way."""
    other = workload.with_changes(tied_embeddings=not workload.tied_embeddings)
    return (workload, ""), (other, "tied embeddings" if other.tied_embeddings else "untied embeddings")


def _nearer_embeddings(workload: Workload, parameters: float) -> tuple[Workload, str]:
    """The output head tied the other way where that alone comes near: likelier than a wrong number of layers."""
    (_, _), (other, word) = _either(workload)
    near = _distance(other, parameters) <= _NEARER < _distance(workload, parameters)
    return (other, word) if near and _has_usual_heads(other) else (workload, "")


def _left_out(workload: Workload) -> Iterator[tuple[Workload, str]]:
    """What papers leave out, likeliest first: one that is likelier is kept unless another is twice as close."""
    either = _either(workload)
    yield either[1]
    for size in _HEAD_SIZES:
        for base, word in either:
            if size != workload.head_size:
                yield base.with_changes(head_size=size), _joined(f"head_size {size}", word)


def _other_layers(workload: Workload, parameters: float) -> Iterator[tuple[Workload, str]]:
    """Another number of layers, where the stated one can be wrong and the parameters are stated well enough to tell."""
    near = _NEARER < _distance(workload, parameters) < _NEAR
    if not near or workload.dense_layers or workload.window or _digits(parameters) < _LAYER_DIGITS:
        return
    each = workload.layer_parameters(mixture=workload.is_mixture)
    for base, word in _either(workload):
        layers = workload.layers + round((parameters - base.parameters) / each)
        if layers >= 1:
            yield base.with_changes(layers=layers), _joined(f"{layers} layers", word)


def _joined(*words: str) -> str:
    return " and ".join(word for word in words if word)
