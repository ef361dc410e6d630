"""Does a configuration train the same as the plain run? The comparison behind `trine verify`, without torch.

    verification = compare(plain_folder, optimised_folder, Tolerance(loss=1e-5, gradient=1e-4))

Both folders were written by :class:`trine.optim.runtime.witness.Witness`, a file a rank. What is compared:

    losses         of every step, mean over ranks, relative to the plain one
    gradients      of the first step, by parameter: later ones are taken at other parameters
    replicas       checksums of each parameter's bits, between ranks that hold the same part of it, every step
    recomputation  checksums of what checkpointed regions saved and recomputed, on sampled steps
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trine.record.errors import UnreadableInput

if TYPE_CHECKING:
    import numpy

__all__ = ["Check", "Tolerance", "Verification", "compare"]

#: A parameter's gradient is compared relative to its own norm, but to no less than this part of the whole gradient's:
#: some gradients are nought in theory (a key's bias under softmax), and what stands there is rounding alone.
LEAST_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Relative differences that are still *the same*. ``None`` for a gradient: it is another one by design."""

    loss: float
    gradient: float | None

    def plus(self, other: Tolerance) -> Tolerance:
        """Of two techniques together: their errors add up."""
        both = None if self.gradient is None or other.gradient is None else self.gradient + other.gradient
        return Tolerance(self.loss + other.loss, both)


@dataclass(frozen=True, slots=True)
class Check:
    """One of the four questions."""

    name: str  # losses, gradients, replicas, recomputation
    holds: bool
    is_same_bits: bool
    measured: float | None  # the largest relative difference; None where bits are compared
    tolerance: float | None
    where: str  # the step, the parameter, the ranks
    said: str  # one line for people


@dataclass(frozen=True, slots=True)
class Verification:
    """What two sides came to."""

    steps: int
    ranks: int
    backend: str | None
    checks: tuple[Check, ...]
    tolerance: Tolerance
    configuration: dict[str, Any]
    effects: tuple[str, ...]
    key_at_fault: str | None = None
    #: Whether a search for it has been made.
    is_searched: bool = False

    @property
    def holds(self) -> bool:
        """Every check does."""
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        """``same``, ``same within the stated tolerance`` or ``not the same``."""
        if not self.holds:
            return "not the same"
        exact = all(check.is_same_bits for check in self.checks)
        return "same" if exact else "same within the stated tolerance"

    def blaming(self, key: str | None) -> Verification:
        """With the key that a search found; ``None``: no key by itself."""
        return replace(self, key_at_fault=key, is_searched=True)


def compare(plain: Path, optimised: Path, tolerance: Tolerance) -> Verification:
    """Compare what two sides wrote. Raises ``UnreadableInput`` where a side wrote nothing or ranks are missing."""
    first, second = _side(plain, "plain"), _side(optimised, "optimised")
    checks = [_losses(first, second, tolerance)]
    gradients = _gradients(first, second, plain, optimised, tolerance)
    checks += [gradients] if gradients else []
    checks.append(_replicas(second))
    recomputed = _recomputation(second)
    checks += [recomputed] if recomputed else []
    one = second[0]
    return Verification(
        steps=len(one["bits"]),
        ranks=one["ranks"],
        backend=one["backend"],
        checks=tuple(checks),
        tolerance=tolerance,
        configuration=one.get("configuration", {}),
        effects=tuple(one.get("effects", ())),
    )


def _side(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each rank wrote, by rank."""
    paths = sorted(folder.glob("rank-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
    if not paths:
        raise UnreadableInput(f"the {name} run took no optimizer step: is SCRIPT a training script?")
    ranks = [json.loads(path.read_text()) for path in paths]
    if len(ranks) != ranks[0]["ranks"]:
        raise UnreadableInput(
            f"the {name} run has {ranks[0]['ranks']} ranks, and only {len(ranks)} of them took a step"
        )
    if any(not rank["bits"] for rank in ranks):
        raise UnreadableInput(f"the {name} run took no optimizer step: is SCRIPT a training script?")
    return ranks


def _mean_losses(ranks: Sequence[dict[str, Any]]) -> list[float]:
    lists = [rank["losses"] for rank in ranks]
    return [
        math.nan if any(loss is None for loss in step) else math.fsum(step) / len(step)
        for step in zip(*lists, strict=False)
    ]


def _losses(plain: list[dict[str, Any]], optimised: list[dict[str, Any]], tolerance: Tolerance) -> Check:
    ours, theirs = _mean_losses(optimised), _mean_losses(plain)
    counts = len(optimised[0]["bits"]), len(plain[0]["bits"])
    if counts[0] != counts[1]:
        said = f"the optimised run took {counts[0]} steps where the plain one took {counts[1]}"
        return Check("losses", False, False, math.inf, tolerance.loss, f"step {min(counts)}", said)
    if not ours or not theirs:
        said = "no loss was seen: neither a scalar's backward nor engine.train_step"
        return Check("losses", False, False, None, tolerance.loss, "", said)
    apart = [
        0.0 if a == b else math.inf if math.isnan(a) or math.isnan(b) else abs(a - b) / max(abs(b), 1e-300)
        for a, b in zip(ours, theirs, strict=False)
    ]
    broken = [step for step, difference in enumerate(apart) if difference > tolerance.loss]
    step = broken[0] if broken else max(range(len(apart)), key=apart.__getitem__)
    said = f"{ours[step]:.6g} against {theirs[step]:.6g} at step {step}: {apart[step]:.1e} apart"
    same = not any(apart)
    return Check(
        "losses",
        not broken,
        same,
        apart[step],
        tolerance.loss,
        f"step {step}",
        "the same numbers at every step" if same else said,
    )


def _gradients(
    plain: list[dict[str, Any]],
    optimised: list[dict[str, Any]],
    plain_folder: Path,
    optimised_folder: Path,
    tolerance: Tolerance,
) -> Check | None:
    """Of the first step, at the same parameters on both sides."""
    if tolerance.gradient is None:
        return None
    import numpy  # a part of a second, which the command line need not wait for

    expected, found = _of_first_step(plain_folder, plain), _of_first_step(optimised_folder, optimised)
    if not expected:
        return None
    if missing := sorted(expected.keys() ^ found.keys()):
        side = "plain" if missing[0] in expected else "optimised"
        said = f"{missing[0]} has a gradient in the {side} run alone"
        return Check("gradients", False, False, math.inf, tolerance.gradient, missing[0], said)
    whole = plain[0]["gradient_norms"].get("0", 0.0)
    apart: dict[str, float] = {}
    for name, sketch in expected.items():
        if found[name].shape != sketch.shape:
            apart[name] = math.inf
            continue
        norm = max(float(numpy.linalg.norm(sketch)), LEAST_SHARE * whole, 1e-300)
        difference = float(numpy.linalg.norm(found[name] - sketch))
        is_finite = math.isfinite(difference) and math.isfinite(norm)  # else the quotient says nothing
        apart[name] = difference / norm if is_finite else math.inf
    broken = [name for name, difference in apart.items() if difference > tolerance.gradient]
    name = broken[0] if broken else max(apart, key=apart.__getitem__)
    same = not any(apart.values())
    said = f"{name} at step 0: {apart[name]:.1e} apart"
    if len(broken) > 1:
        said += f", the first of {len(broken)} parameters of {len(apart)}"
    return Check(
        "gradients",
        not broken,
        same,
        apart[name],
        tolerance.gradient,
        f"step 0, {name}",
        f"the same numbers in all {len(apart)} parameters" if same else said,
    )


def _of_first_step(folder: Path, ranks: list[dict[str, Any]]) -> dict[str, numpy.ndarray]:
    """Of every parameter, from the first rank that holds it: a rank of a pipeline has its stages' alone."""
    import numpy

    found: dict[str, numpy.ndarray] = {}
    for rank in ranks:
        with numpy.load(folder / f"rank-{rank['rank']}.npz") as sketches:
            for key in sketches.files:
                step, _, name = key.partition("/")
                if step == "0" and name not in found:
                    found[name] = sketches[key]
        if set(rank["bits"][0]) == {name for each in ranks for name in each["bits"][0]}:
            break  # it holds them all
    return found


def _replicas(ranks: list[dict[str, Any]]) -> Check:
    """Ranks that hold the same part of a parameter hold the same bits of it."""
    for step in range(min(len(rank["bits"]) for rank in ranks)):
        for name in dict.fromkeys(name for rank in ranks for name in rank["bits"][step]):
            seen: dict[str, tuple[int, int]] = {}  # part → rank, bits
            for rank in ranks:
                if name not in rank["bits"][step]:  # of another stage of a pipeline
                    continue
                part, bits = rank["bits"][step][name]
                first = seen.setdefault(part, (rank["rank"], bits))
                if first[1] != bits:
                    said = f"{name} differs between rank {first[0]} and rank {rank['rank']} after step {step}"
                    return Check("replicas", False, False, None, None, f"step {step}, {name}", said)
    count = len(ranks)
    said = "one rank" if count == 1 else f"the same bits on {count} ranks, after every step"
    return Check("replicas", True, True, None, None, "", said)


def _recomputation(ranks: list[dict[str, Any]]) -> Check | None:
    regions = sum(rank["recomputed_regions"] for rank in ranks)
    if not regions:
        return None
    for rank in ranks:
        for module, what in rank["recomputation_differences"]:
            said = f"{module} on rank {rank['rank']}: {what}"
            return Check("recomputation", False, False, None, None, module, said)
    return Check(
        "recomputation", True, True, None, None, "", f"the same bits in {regions} recomputed regions"
    )
