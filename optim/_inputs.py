"""What a program hands to the engine, looked at before it is used: settings, loaders, losses, token counts.

Nothing here waits for a device: numbers that lie on one are not read.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.optim.batches import has_no_sample
from trine.optim.config import Config
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = [
    "as_config",
    "length_of",
    "plain",
    "require_count",
    "require_gradient",
    "require_iterable",
    "require_loss",
    "require_own_steps",
    "require_settings",
    "weighed",
]


def as_config(given: Any) -> Config:
    """A :class:`Config` from one, from nested tables, or from the path of a TOML file; ``None`` changes nothing."""
    if given is None:
        return Config()
    if isinstance(given, Config):
        return given
    if isinstance(given, Mapping):
        if given and all(isinstance(key, str) and ("." in key or key == "engine") for key in given):
            return Config().with_changes(given)  # key paths, as recommendations have them
        return Config.from_dict(given)
    if isinstance(given, (str, Path)):
        return Config.from_toml(given)
    raise UsageError(
        f"config is a {type(given).__name__}: trine.optimize takes a trine.Config, nested tables, or the path of a TOML "
        "file"
    )


def require_settings(
    optimizer: torch.optim.Optimizer, loss_fn: Any, clip_norm: Any, scheduler: Any, nonfinite: Any
) -> None:
    """Raise ``UsageError`` for arguments of ``trine.optimize`` that would fail, or do nothing, in the first step."""
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"loss_fn is a {type(loss_fn).__name__}: it is called as loss_fn(model, batch)")
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise UsageError(
            f"clip_norm = {clip_norm!r}: it takes a number above 0, or None to leave gradients as they are"
        )
    if nonfinite not in ("raise", "skip", "allow"):
        raise UsageError(f'nonfinite = {nonfinite!r}: it takes "raise", "skip" or "allow"')
    _require_scheduler(optimizer, scheduler)


def _require_scheduler(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    if scheduler is None:
        return
    name = type(scheduler).__name__
    step = getattr(scheduler, "step", None)
    if not callable(step) or inspect.isclass(scheduler):
        raise UsageError(
            f"scheduler is a {name}: give one scheduler, whose step() is called after each update"
        )
    wanted = _without_default(step)
    if wanted:
        raise UsageError(
            f"scheduler: {name}.step() wants {wanted[0]}, which the engine does not have: leave scheduler out and call "
            f"scheduler.step({wanted[0]}) yourself, between the steps of engine.steps"
        )
    of = getattr(scheduler, "optimizer", optimizer)
    if of is not optimizer:
        raise UsageError(
            f"scheduler: this {name} is of another optimizer, so that the rates of this one would never change: make it "
            "from the optimizer that trine.optimize is given"
        )


def require_own_steps(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UsageError`` for an optimizer that evaluates the loss itself."""
    # The class's: a scheduler puts a wrapper over the instance's.
    if "closure" in _without_default(type(optimizer).step):
        raise UsageError(
            f"{type(optimizer).__name__}.step() evaluates the loss itself, by a closure, and the engine runs forward and "
            "backward once a step: use another optimizer, or keep your own loop"
        )


def _without_default(function: Any) -> list[str]:
    """Parameters that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # not written in Python: it says nothing of itself
        return []
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = (*named, inspect.Parameter.KEYWORD_ONLY)
    wanted = [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return [name for name in wanted if name != "self"]


def require_iterable(loader: Any) -> None:
    """Raise ``UsageError`` for what gives no batches."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise UsageError(
            f"engine.steps takes a loader, something that gives batches one by one, not a {type(loader).__name__}"
        )


def length_of(loader: Any) -> int | None:
    """How many batches there are; ``None`` where it is not known, as of a DataLoader over an iterable dataset."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def plain(loss: Any) -> Any:
    """A loss that comes as a DTensor, as over logits that are cut by the vocabulary, as the number that it is on all ranks."""
    whole = getattr(loss, "full_tensor", None)
    return whole() if callable(whole) else loss


def weighed(result: Any, share: float, piece: Any) -> tuple[torch.Tensor, Any, bool]:
    """What ``loss_fn`` returned for a micro-batch: the mean loss, what it weighs, and whether that is a token count.

    Without one it weighs its share of the step's samples. Raises ``UsageError`` for anything else, and for the mean
    over no samples.
    """
    result = (plain(result[0]), *result[1:]) if isinstance(result, tuple) and result else plain(result)
    if isinstance(result, tuple):
        if len(result) != 2:
            raise UsageError(
                f"loss_fn returned {len(result)} values: it takes the mean loss, or (mean loss, token count)"
            )
        return result[0], result[1], True
    if has_no_sample(piece):
        raise UsageError(
            "the batch holds no sample, so its loss has no mean: leave such batches out, or have loss_fn return "
            "(mean loss, token count), which lets a rank without samples take part"
        )
    return result, share, False


def require_loss(loss: Any) -> None:
    """Raise ``UsageError`` for what is not one real number in a tensor."""
    import torch

    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"the loss is a {type(loss).__name__}: it takes a tensor of one element, the mean loss, or from loss_fn "
            "(mean loss, token count)"
        )
    if loss.numel() != 1:
        raise UsageError(f"the loss has the shape {tuple(loss.shape)}: take its mean, loss.mean()")
    if not loss.is_floating_point():
        raise UsageError(
            f"the loss is of {loss.dtype}, which has no gradient: return a real, floating-point loss"
        )


def require_gradient(loss: torch.Tensor) -> None:
    """Raise ``UsageError`` for a loss that no parameter has part in."""
    if not loss.requires_grad:
        raise UsageError(
            "the loss has no gradient, so nothing would be learnt from it: it was detached, computed under "
            "torch.no_grad() or made from numbers"
        )


def require_count(count: Any) -> None:
    """Raise ``UsageError`` for a token count that is not one number of 0 or more. What lies on a device is not read."""
    import torch

    if isinstance(count, torch.Tensor):
        if count.numel() != 1 or count.is_complex():
            raise UsageError(
                f"the token count has the shape {tuple(count.shape)} and is of {count.dtype}: it takes one number, the "
                "number of tokens that the loss is the mean of"
            )
        if count.requires_grad:
            raise UsageError("the token count has a gradient: it takes a number, not a second loss")
        if count.device.type != "cpu":
            return
    elif not _is_number(count):
        raise UsageError(
            f"the token count is a {type(count).__name__}: it takes the number of tokens that the loss is the mean of"
        )
    value = float(count)
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"the token count is {value:g}: it takes a number of 0 or more")


def _is_number(value: Any) -> bool:
    """A real number of Python or numpy."""
    if isinstance(value, (bool, str, bytes, complex)):
        return False
    return hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
