"""What an engine does when a step fails: what can be undone is, and what cannot is said before the next step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from trine.optim.config import Config
from trine.optim.techniques import Assembly, Facts
from trine.record.errors import TrainingError, TrineError, UsageError

__all__ = ["EXCHANGING", "IDLE", "RUNNING", "UPDATING", "Failing", "naming_lost_ranks"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: How far a step has come: what can still be undone when it fails.
IDLE, RUNNING, EXCHANGING, UPDATING = range(4)
_WHILE = {
    IDLE: "before a step",
    RUNNING: "in forward or backward",
    EXCHANGING: "while gradients were exchanged",
    UPDATING: "in the optimizer step",
}

#: PyTorch names the shape alone, and the code that wrote it is right without a plan.
_WHOLE_HEADS = (
    "trine: under parallel.plan a rank has a part of the features: where the model writes the whole number of heads "
    "(view(batch, sequence, heads, size)), write -1 for heads, or take that module out of the plan"
)


def naming_lost_ranks(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A method of the engine that names the ranks that are gone, in place of the backend's own error."""

    @functools.wraps(function)
    def called(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        engine: Any = arguments[0]
        paths = engine._assembly.paths
        try:
            return function(*arguments, **named)
        except (KeyboardInterrupt, SystemExit) as ending:  # this rank alone, perhaps: the others wait for it
            if paths is not None:
                paths.failed(ending)
            raise
        except Exception as error:
            from trine.optim.runtime.lost_ranks import explained

            told = None if paths is None else paths.told_of(error)
            if told is None:
                told = explained(error, engine._facts.rank, engine._facts.ranks, engine.step_index)
            if told is None:
                raise
            raise told from error

    return called


class Failing:
    """The part of an engine that knows how far a step has come."""

    config: Config
    discard: Callable[[], None]
    _assembly: Assembly
    _broken: str | None
    _close: weakref.finalize[..., Any]
    _facts: Facts
    _stage: int

    def _require_usable(self) -> None:
        if self._broken is not None:
            raise UsageError(self._broken)
        if not self._close.alive:
            raise UsageError("this engine was closed: make another with trine.optimize")

    def _take_back(self) -> None:
        """Forget the gradients of a step that ran out of memory. Raises ``TrainingError`` where it is too late for that."""
        if self._stage == UPDATING or (self._stage == EXCHANGING and self._facts.ranks > 1):
            raise TrainingError(
                f"out of memory {_WHILE[self._stage]}, when the step can no longer be run in smaller pieces: start again "
                "from a checkpoint with a smaller accumulation.micro_batch"
            )
        self.discard()

    def _fail(self, error: BaseException) -> None:
        """A step raised: what it added is dropped, and the engine stays usable unless ranks or parameters may differ."""
        stage, self._stage = self._stage, IDLE
        if stage == RUNNING and self.config.parallel.plan and "is invalid for input of size" in str(error):
            error.add_note(_WHOLE_HEADS)
        # By this package, with parameters as they were, unless it says otherwise: a disk that fails in mid-update.
        refused = isinstance(error, TrineError) and not getattr(error, "half_done", False)
        alone = self._facts.ranks == 1
        if stage == UPDATING:
            lost = not refused
        else:
            lost = not alone and (
                stage == EXCHANGING or (stage == RUNNING and self._facts.layout.meets_in_forward)
            )
        if lost:
            said = str(error).partition("\n")[0]
            self._broken = (
                f"this engine failed {_WHILE[stage]} ({type(error).__name__}: {said}), so that parameters or ranks may "
                "disagree: start again from a checkpoint with a new one"
            )
        self.discard()
