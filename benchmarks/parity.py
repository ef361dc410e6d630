"""Does a technique train the same? Every technique and many combinations against the plain run, 30 steps each.

    python benchmarks/parity.py                     every case
    python benchmarks/parity.py zero compression    the cases whose names contain one of these

Each case trains the sample GPT on real text twice: plain, in one process on the whole batch, and by the engine with the
case's configuration on its ranks, each on its share of that batch. What is compared is the mean loss of every step,
relative to the plain one's, and whether the replicas are the same bits at the end. In float64 a scaling bug (a mean of
means, a forgotten division) stands out from rounding by eight orders of magnitude.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parity_cases import CASES, Case
from spawned_ranks import SpawnedRanks, cause, in_one_line

__all__ = ["Outcome", "outcome_of", "run_rank"]

#: Samples of a step over all ranks; divisible by 8 ranks and by two micro-batches on 4.
BATCH = 8
STEPS = 30


@dataclass(frozen=True)
class Outcome:
    """What a case came to."""

    case: Case
    worst: float  # largest relative difference of a step's loss
    last: float  # relative difference of the mean of the last five losses
    same_replicas: bool
    refused: str = ""

    @property
    def holds(self) -> bool:
        """Within the case's tolerance, on replicas of the same bits."""
        measured = self.last if self.case.by_last else self.worst
        return not self.refused and self.same_replicas and measured <= self.case.tolerance


@functools.lru_cache(maxsize=1)
def text() -> bytes:
    """Source code, the same on every machine: this package's own would change with each commit."""
    lines = (f"def function_{n}(x):\n    return x * {n} + {n * n % 17}\n" for n in range(2000))
    return "".join(lines).encode()


def model_of(case: Case) -> Any:
    """The case's GPT, with a mixture of experts where it names some, seeded."""
    import torch

    from trine.samples.gpt import GPT, GPTConfig
    from trine.samples.moe import MixtureConfig, MixtureGPT

    shape: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, **case.model}
    torch.manual_seed(0)
    model = MixtureGPT(MixtureConfig(**shape)) if "experts" in case.model else GPT(GPTConfig(**shape))
    return model.double() if case.dtype == "float64" else model


def batch_of(case: Case, step: int, rank: int = 0, ranks: int = 1) -> Any:
    """The rank's share of the step's batch: ids and targets, (BATCH / ranks, 32) each; or documents, padded."""
    import torch

    from trine.samples.text import SourceText, pad_documents

    size = BATCH // ranks
    start = step * BATCH + rank * size
    if case.data == "documents":
        return pad_documents([_document(position) for position in range(start, start + size)])
    data = SourceText(text(), 32)
    pairs = [data[position % len(data)] for position in range(start, start + size)]
    return torch.stack([ids for ids, _ in pairs]), torch.stack([targets for _, targets in pairs])


def _document(position: int) -> Mapping[str, Any]:
    """Of 1 to 32 tokens, which the position decides."""
    import torch

    length = 1 + (7 * position * position + 3 * position) % 32
    start = position * 37 % (len(text()) - length)
    ids = torch.tensor(list(text()[start : start + length]))
    return {"input_ids": ids, "labels": ids}


def optimizer_of(case: Case, model: Any) -> Any:
    """AdamW as people set it, or SGD, whose steps are proportional to gradients: a wrong scale shows at once."""
    import torch

    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@functools.cache
def _plain_losses(
    dtype: str,
    optimizer: str,
    model: tuple[tuple[str, Any], ...],
    data: str,
    clip_norm: float | None,
    ranks: int,
    steps: int,
) -> tuple[float, ...]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have it: more threads sum in another order
    case = Case("plain", {}, dtype=dtype, optimizer=optimizer, model=dict(model), data=data)
    plain = model_of(case)
    stepper = optimizer_of(case, plain)
    losses = []
    for step in range(steps):
        loss, shown = _plain_loss(case, plain, step, ranks)
        loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        stepper.step()
        stepper.zero_grad()
        losses.append(float(shown))
    torch.set_num_threads(threads)
    return tuple(losses)


def _plain_loss(case: Case, model: Any, step: int, ranks: int) -> tuple[Any, Any]:
    """The loss of the whole batch, and what is compared: that, or the mean of the shares' where they weigh unequally."""
    from trine.samples.gpt import loss_of

    if case.data != "documents":
        loss = loss_of(model, batch_of(case, step))
        return loss, loss.detach()
    shares = [loss_of(model, batch_of(case, step, rank, ranks)) for rank in range(ranks)]
    tokens = sum(count for _, count in shares)
    return sum(mean * count for mean, count in shares) / tokens, sum(
        mean.detach() for mean, _ in shares
    ) / ranks


def plain_losses(case: Case, steps: int = STEPS) -> tuple[float, ...]:
    """Losses of the loop that people write, in this process, on the whole batch."""
    import trine

    config = trine.Config().with_changes(case.changes)
    shares = trine.layout_of(config, 0, case.ranks).data_ranks
    ranks = shares if case.data == "documents" else 1
    model = tuple(sorted(case.model.items()))
    return _plain_losses(case.dtype, case.optimizer, model, case.data, case.clip_norm, ranks, steps)


#: Losses of a rank, and parameter → a sum over its values.
RankResult = tuple[list[float], dict[str, float]]


def run_rank(rank: int, ranks: int, case: Case, steps: int = STEPS) -> RankResult:
    """This rank's losses by the engine, and sums of its parameters: replicas must agree in every bit.

    Parameters that are sharded are gathered first. A rank of a pipeline has its own stages' alone. To be called on every rank of a process group, or alone.
    """
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = model_of(case)
    config = trine.Config().with_changes(case.changes)
    engine = trine.optimize(
        model, optimizer_of(case, model), config, loss_fn=loss_of, clip_norm=case.clip_norm
    )
    try:
        share = (engine.data_rank, engine.data_ranks)
        batches = (batch_of(case, step, *share) for step in range(steps))
        losses = [float(engine.train_step(batch)) for batch in engine.steps(batches)]
        sums = {}
        for name, parameter in engine.model.named_parameters():
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            sums[name] = float(value.double().mul(torch.arange(value.numel()).view_as(value) + 1.0).sum())
        return losses, sums
    finally:
        engine.close()


def outcome_of(case: Case, by_rank: Sequence[RankResult], steps: int = STEPS) -> Outcome:
    """Compare what the ranks returned with the plain run."""
    plain = plain_losses(case, steps)
    means = [sum(losses) / len(by_rank) for losses in zip(*(losses for losses, _ in by_rank), strict=True)]
    apart = [abs(a - b) / abs(b) for a, b in zip(means, plain, strict=True)]
    last = abs(sum(means[-5:]) / sum(plain[-5:]) - 1.0)
    worst = max(float("inf") if math.isnan(difference) else difference for difference in apart)
    first: dict[str, float] = {}
    same = all(first.setdefault(name, value) == value for _, sums in by_rank for name, value in sums.items())
    return Outcome(case, worst, last, same)


# --- standing alone ----------------------------------------------------------------------------


def _run_together(ranks: int, environment: Mapping[str, str], cases: Sequence[Case]) -> list[Outcome]:
    """All cases of one size and environment, on processes that are started once."""
    outcomes = []
    backend = "gloo" if ranks > 1 else None
    with SpawnedRanks(ranks, backend=backend, environment=environment) as spawned:
        for case in cases:
            answers = spawned.outcomes(run_rank, ranks, case, timeout_s=300)
            failure = cause(answers)
            if failure is not None:
                print(failure.trace, end="", file=sys.stderr)
            inf = float("inf")
            outcomes.append(
                Outcome(case, inf, inf, False, str(failure)) if failure else outcome_of(case, answers)
            )
            print(_line(outcomes[-1]), flush=True)
            if spawned.has_ended:
                break  # a rank hangs or died: the group is of no use any more
    return outcomes


def _line(outcome: Outcome) -> str:
    case = outcome.case
    measured = outcome.last if case.by_last else outcome.worst
    said = (
        "ok"
        if outcome.holds
        else outcome.refused or ("replicas differ" if not outcome.same_replicas else "TOO FAR")
    )
    return (
        f"{case.name:<44} {case.ranks:>5} {case.dtype:>8} {measured:>10.1e} {case.tolerance:>10.0e}  {said}"
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 where a case does not hold."""
    parser = argparse.ArgumentParser(prog="parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only cases whose names contain one of these"
    )
    words = parser.parse_args(argv).words
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    print(f"{'case':<44} {'ranks':>5} {'dtype':>8} {'apart':>10} {'tolerance':>10}")
    outcomes: list[Outcome] = []
    places = sorted({(case.ranks, tuple(sorted(case.environment.items()))) for case in chosen})
    for ranks, environment in places:
        same = [c for c in chosen if (c.ranks, tuple(sorted(c.environment.items()))) == (ranks, environment)]
        outcomes += _run_together(ranks, dict(environment), same)
    failed = [outcome for outcome in outcomes if not outcome.holds]
    print(f"{len(outcomes) - len(failed)} of {len(chosen)} cases hold")
    return 1 if failed or len(outcomes) < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(in_one_line(main))
