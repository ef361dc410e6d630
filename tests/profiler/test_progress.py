"""Where steps end, decided from what a loop does."""

from __future__ import annotations

from trine.profiler.progress import PATIENCE_KNOWN, PATIENCE_UNKNOWN, Progress


def _part(
    progress: Progress,
    *,
    backward: bool = True,
    steps: bool = False,
    updated: bool = False,
    known: bool = False,
) -> tuple[bool, str]:
    progress.begin()
    if steps:
        progress.optimizer_stepped()
    ends, guess = progress.ends_step(has_backward=backward, updated=updated, knows_optimizer=known)
    progress.end(ends)
    return ends, guess


def test_batches_accumulate_until_the_optimizer_steps() -> None:
    progress = Progress()
    ends = [_part(progress, steps=number % 4 == 3)[0] for number in range(8)]
    assert ends == [False, False, False, True] * 2
    assert progress.index == 2


def test_without_training_each_batch_is_a_step() -> None:
    progress = Progress()
    assert all(_part(progress, backward=False)[0] for _ in range(3))
    assert progress.index == 3


def test_a_skipped_batch_does_not_end_an_accumulation() -> None:
    progress = Progress()
    assert not _part(progress)[0]
    assert not _part(progress, backward=False)[0]
    assert _part(progress, steps=True)[0]
    assert progress.index == 1


def test_an_update_that_no_hook_saw_ends_the_step() -> None:
    progress = Progress()
    assert _part(progress, updated=True, known=True) == (True, "")


def test_patience_ends_and_returns() -> None:
    progress = Progress()
    ends = [_part(progress) for _ in range(PATIENCE_UNKNOWN)]
    assert [end for end, _ in ends].index(True) == PATIENCE_UNKNOWN - 1
    assert ends[-1] == (True, "guessed")
    assert _part(progress) == (True, "")  # from here on each batch
    assert _part(progress, steps=True) == (True, "")
    assert _part(progress) == (False, "")  # an optimizer was seen after all
    longer = Progress()
    assert not any(_part(longer, known=True)[0] for _ in range(PATIENCE_KNOWN - 1))
    assert _part(longer, known=True) == (True, "guessed")


def test_an_engine_has_the_say() -> None:
    progress = Progress()
    progress.engine = True
    assert not _part(progress, steps=True)[0]
    progress.begin()
    progress.engine_ended = True
    assert progress.ends_step(has_backward=True, updated=False, knows_optimizer=True) == (True, "")
