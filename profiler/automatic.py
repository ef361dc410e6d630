"""Record a training loop that nobody edited: find its parts, and where its steps end.

First, a few patches watch for the start: the first batch that a ``DataLoader`` is asked for once there is an optimizer, the
first forward with gradients of a module that holds an optimizer's parameters, or the first backward. They are
then taken out and an :class:`AutomaticSession` takes over. It ends a step

* at the first fetch after an optimizer has stepped, so that accumulated batches are one step, and so are several
  optimizers (a GAN's two); or
* where no loader feeds the loop, after the last optimizer of the cycle that the first steps have shown.

A fetch from a loader whose batches were never followed by a backward is evaluation: it ends the step, and what follows
until training goes on is in none.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trine.record.errors import TrineError

from . import session as sessions
from .background import Part
from .batches import measure_batch
from .finding import holds, loader_of, outermost_modules
from .hooks import Hooks
from .phases import END, FORWARD
from .session import Session

__all__ = ["AutomaticSession", "Discovery"]

logger = logging.getLogger("trine")


class AutomaticSession(Session):
    """A session that decides by itself where steps end."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Forward is hooked where a module is seen to be called: the outermost one may only be a container.
        self._hooks = Hooks(self, ())
        self._loaders: dict[int, Any] = {}  # key -> what the key is the id of, so that it stays unique
        self._training: set[int] = set()  # loaders whose batches were trained on
        self._fetched: dict[int, int] = {}  # loader -> batches since the step began
        self._last_fetched: int | None = None
        self._joins_step = False  # the batch that is being fetched is for training
        self._stepped_optimizers: list[int] = []
        self._stepped_at = 0  # how many marks there were after the last optimizer step
        self._cycle_end: int | None = None
        self._backward_since_step = False
        self._backward_in_step = False
        self._totals = [0, 0]
        self._padding: int | None = 0
        #: Steps that have ended.
        self.completed = 0

    # What hooks tell. All of it runs in the script's own thread, so each is under the guard as a whole.

    def saw_loader(self, iterator: Any) -> None:
        """A batch is about to be fetched: perhaps a step ends here."""
        self.guard.run("steps", self._before_fetch, iterator)

    def saw_batch(self, iterator: Any, batch: Any) -> None:
        """Add up what the step's batches hold."""
        self.guard.run("batch sizes", self._add_batch, batch)

    def saw_exhausted(self, iterator: Any) -> None:
        """An epoch is over: a step that was begun for a batch that does not exist never was."""
        self.guard.run("steps", self._after_last_batch)

    def saw_forward(self) -> None:
        """A forward with gradients; outside of any step, training goes on."""
        super().saw_forward()
        self.guard.run("steps", self._in_forward)

    def saw_backward(self) -> None:
        """The loaders of this step are for training."""
        super().saw_backward()
        self.guard.run("steps", self._after_backward)

    def saw_optimizer(self, optimizer: Any) -> None:
        """An optimizer stepped; GradScaler and the optimizer's own hook both tell."""
        super().saw_optimizer(optimizer)
        self.guard.run("steps", self._after_optimizer, id(optimizer))

    # Inside.

    def _before_fetch(self, iterator: Any) -> None:
        if self.progress.engine:
            return
        source = getattr(iterator, "_index_sampler", iterator)
        key = id(source)
        self._loaders.setdefault(key, source)
        self._last_fetched = key
        self._joins_step = not self._training or key in self._training
        if not self._joins_step:  # evaluation
            if self._worked_in_step():
                self._end()
            elif self.part is not None and not self._backward_in_step:
                self._give_up()
            return
        if self.part is None:
            self._begin()
        elif self._worked_in_step():
            self._end()
            self._begin()
        elif not self._backward_in_step and any(o != key and n > 1 for o, n in self._fetched.items()):
            # Several batches of another loader and nothing was trained: evaluation before training.
            self._give_up()
            self._begin()
        self._fetched[key] = self._fetched.get(key, 0) + 1

    def _after_last_batch(self) -> None:
        if self.part is not None and not self._backward_in_step and not self.progress.engine:
            self._give_up()

    def _in_forward(self) -> None:
        if self.progress.engine:
            return
        if self.part is None or self._is_over_without_loader():
            if self.part is not None:
                self._cycle_end = self._stepped_optimizers[-1] if self._stepped_optimizers else None
                self._end()
            self._begin()
            self.marker.enter(FORWARD)  # which had been entered before the step began

    def _is_over_without_loader(self) -> bool:
        """No loader feeds this step, and all that could happen in it has: every optimizer has stepped."""
        if self._fetched or not self._backward_in_step:
            return False
        stepped = set(self._stepped_optimizers)
        return all(id(optimizer) in stepped for optimizer in self.optimizers)

    def _after_backward(self) -> None:
        first = not self._training
        self._backward_since_step = self._backward_in_step = True
        if self._fetched:
            self._training.update(self._fetched)
        elif self._last_fetched is not None:
            self._training.add(self._last_fetched)  # a loader made anew, for the next epoch
        if first and self._training:
            self.loader = loader_of(self._loaders[next(iter(self._training))])

    def _add_batch(self, batch: Any) -> None:
        part = self.part
        if part is None or not self._joins_step:
            return
        tokens, samples, sequence, on_host = measure_batch(batch, *self._sizes)
        part.host_batch = on_host and self.device[0] != "cpu"
        self.sequence = self.sequence or sequence
        self._totals[0] += tokens or 0
        self._totals[1] += samples or 0
        part.tokens, part.samples = self._totals[0] or None, self._totals[1] or None
        padding = self.guard.run("padding", self.padding.take, batch, tokens)
        self._padding = None if padding is None or self._padding is None else self._padding + padding
        part.padding = self._padding

    def _worked_in_step(self) -> bool:
        if self.part is None:
            return False
        return bool(self._stepped_optimizers) or (self._backward_in_step and not self.optimizers)

    def _after_optimizer(self, key: int) -> None:
        if self.part is None or self.progress.engine:
            return
        self._stepped_at = len(self.marker.marks)
        if not self._backward_since_step and key in self._stepped_optimizers:
            return  # told twice of one step
        self._backward_since_step = False
        if key in self._stepped_optimizers:
            # The same optimizer again and no fetch between: this loop's steps end with its last optimizer.
            self._cycle_end = self._stepped_optimizers[-1]
            self._end()
            self._begin()
            return
        self._stepped_optimizers.append(key)
        if key == self._cycle_end:
            self._end()
            self._begin()

    def _begin(self) -> None:
        self._stepped_optimizers = []
        self._fetched = {}
        self._backward_since_step = self._backward_in_step = False
        self._totals = [0, 0]
        self._padding = 0
        self.begin_part()

    def end_part(self, complete: bool | None) -> None:
        """Also for an engine in the script, which says itself where its steps end."""
        super().end_part(complete)
        self.completed += bool(complete)

    def turn_over(self, part: Part) -> None:
        """A step that ended with the part before the open one."""
        super().turn_over(part)
        self.completed += 1

    def _end(self) -> None:
        self.end_part(True)

    def _give_up(self) -> None:
        self._fetched = {}
        self.close_step()

    def _close(self, error: BaseException | None) -> None:
        self.guard.run("steps", self._close_last_step)
        super()._close(error)

    def _close_last_step(self) -> None:
        if self.part is None or self.progress.engine:
            return
        if self._worked_in_step():
            self._end_at_last_optimizer_step()
            self._end()
        else:
            self._give_up()

    def _end_at_last_optimizer_step(self) -> None:
        """Nothing told where the last step ended; what came after its optimizer may be anything (a checkpoint)."""
        marks = self.marker.marks[: self._stepped_at]
        if not self._stepped_at or len(marks) < 6:
            return
        marks[-3] = END
        self.marker.marks = []
        self.marker.end = lambda: marks  # type: ignore[method-assign]


class Discovery:
    """Watches for the start of training, then opens the session that ``make(models, optimizers)`` gives.

    ``prepare(models, optimizers)`` is called just before, for what a configuration changes in them. Where ``make`` gives
    ``None``, that is all that was wanted, and nothing is recorded.
    """

    def __init__(
        self,
        make: Callable[[list[Any], list[Any]], AutomaticSession | None],
        prepare: Callable[[list[Any], list[Any]], None] | None = None,
    ) -> None:
        self._make = make
        self._prepare = prepare
        self._optimizers: list[Any] = []
        self._process = os.getpid()
        self._thread = threading.get_ident()
        self._patches: list[tuple[Any, str, Any, Any]] = []
        self._watched: set[int] = set()
        self._inside = False
        self.session: AutomaticSession | None = None
        self._over = False
        #: A configuration could not be applied: the script was ended.
        self.refused = False
        #: The script opened a session of its own, which records.
        self.recorded_by_script = False

    def install(self) -> None:
        """Put the patches in place."""
        self._patch(torch.optim.Optimizer, "__init__", self._wrap_optimizer)
        self._patch(_BaseDataLoaderIter, "__next__", self._wrap_fetch)
        self._patch(torch.autograd, "backward", self._wrap_backward)
        self._patch(torch.nn.Module, "__call__", self._wrap_call)

    def close(self, kind: Any, error: Any, traceback: Any) -> None:
        """Take what is left out and close the session; safe to call whatever happened."""
        self._remove_all()
        self._over = True
        if self.session is not None:
            self.session.__exit__(kind, error, traceback)

    # Patches. Each does nothing in another thread or process, and under compilation.

    def _here(self) -> bool:
        return (
            not self._over
            and not torch.compiler.is_compiling()
            and threading.get_ident() == self._thread
            and os.getpid() == self._process
        )

    def _patch(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        ours = wrap(original)
        self._patches.append((owner, name, original, ours))
        setattr(owner, name, ours)

    def _remove(self, kept: tuple[str, ...] = ()) -> None:
        left = []
        for owner, name, original, ours in reversed(self._patches):
            if name in kept:
                left.append((owner, name, original, ours))
            elif getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._patches = left[::-1]

    def _remove_all(self) -> None:
        self._remove()

    def _wrap_optimizer(self, original: Any) -> Any:
        discovery = self

        def __init__(optimizer: Any, *arguments: Any, **named: Any) -> None:  # noqa: N807
            original(optimizer, *arguments, **named)
            if discovery._here() and not any(optimizer is known for known in discovery._optimizers):
                discovery._optimizers.append(optimizer)

        return __init__

    def _wrap_fetch(self, original: Any) -> Any:
        discovery = self

        def __next__(iterator: Any) -> Any:  # noqa: N807
            if discovery._here() and discovery._optimizers and discovery._begin(None):
                # By now the session's own hook stands here: it must see this batch.
                return type(iterator).__next__(iterator)
            return original(iterator)

        return __next__

    def _wrap_backward(self, original: Any) -> Any:
        discovery = self

        def backward(*arguments: Any, **named: Any) -> Any:
            if discovery._here() and discovery._begin(None):
                return torch.autograd.backward(*arguments, **named)
            return original(*arguments, **named)

        return backward

    def _wrap_call(self, original: Any) -> Any:
        discovery = self

        def __call__(module: Any, *arguments: Any, **named: Any) -> Any:  # noqa: N807
            if torch.compiler.is_compiling() or discovery._inside or not discovery._here():
                return original(module, *arguments, **named)
            discovery._inside = True
            try:
                if torch.is_grad_enabled():
                    discovery._saw_call(module)
                return original(module, *arguments, **named)
            finally:
                discovery._inside = False

        return __call__

    def _saw_call(self, module: Any) -> None:
        """An outermost module is called with gradients: a model, if it holds what is optimised."""
        session = self.session
        if session is not None and session.completed > 0:
            self._remove_all()  # one whole step has shown all models
            return
        if id(module) in self._watched or not self._optimizers:
            return
        wanted = {
            id(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        if holds(module, wanted):
            self._begin(module)
            self._watch(module)

    def _watch(self, module: Any) -> None:
        session = self.session
        if session is not None and id(module) not in self._watched:
            self._watched.add(id(module))
            session.guard.run("models", session._hooks.watch, module)

    def _apply(self, models: list[Any]) -> None:
        """What a configuration changes. A key that cannot be applied ends the script here, before its first step."""
        if self._prepare is None:
            return
        try:
            self._prepare(models, self._optimizers)
        except TrineError as error:
            self._over = self.refused = True
            self._remove_all()
            print(f"trine: {' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201
            raise SystemExit(error.exit_code) from None

    def _begin(self, module: Any) -> bool:
        """Open the session, once. Faults cost the record, never the run."""
        if self.session is not None or self._over:
            return False
        self._remove(kept=("__call__",))
        current = sessions._current
        if current is not None and current.is_alive():
            self._over = self.recorded_by_script = True
            self._remove_all()
            return False
        try:
            models = outermost_modules(self._optimizers)
            self._apply(models)
            session = self._make(models, list(self._optimizers))
            if session is None:
                self._over = True
                self._remove_all()
                return False
            session.__enter__()
            self.session = session
            session.guard.run("steps", session._begin)
        except Exception:
            logger.warning("this run cannot be recorded", exc_info=True)
            self._over = True
            self._remove_all()
            return False
        return True
