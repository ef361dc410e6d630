"""What compiling costs while training: seconds in the record, recompilations counted and warned about by name.

PyTorch compiles when a function is first called and again when a guard fails: another shape, another Python value. The
seconds come from its callbacks around every compilation, forward and backward (``torch._dynamo.callback``); which
function it was and which guard failed from its compilation metrics.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from trine.optim.techniques._assembly import Assembly, Effect

__all__ = ["CompileWatch", "watch_compilation"]

logger = logging.getLogger("trine")

#: A function compiled anew in so many steps after its first has no end in sight: one more shape is made dynamic.
_TOO_MANY = 3


def watch_compilation(assembly: Assembly, key: str) -> None:
    """Tell ``compile_seconds`` and ``recompilations`` of each step, and in words once compiling has settled.

    Once an assembly: whichever of compute.compile and compute.fuse comes first.
    """
    if "compile_seconds" in assembly.metrics:
        return
    buckets = assembly.config.data.shape_buckets
    # Each bucket is compiled once; of automatic ones, a few.
    watch = CompileWatch(key, assembly.effects, max(_TOO_MANY, 8 if buckets == "auto" else len(buckets)))
    assembly.metrics["compile_seconds"] = lambda: watch.step_seconds or None
    assembly.metrics["recompilations"] = lambda: watch.step_recompilations() or None
    assembly.after_step.append(watch.end_step)
    assembly.closers.append(watch.close)


class CompileWatch:
    """Watches the whole process, as PyTorch compiles for all of it."""

    def __init__(self, key: str, effects: list[Effect], most: int = _TOO_MANY) -> None:
        """``most``: a function that is compiled anew in so many steps is warned about."""
        self.seconds = 0.0  # of all steps
        self.step_seconds = 0.0  # of the running one
        self.recompiled: Counter[str] = Counter()  # function → steps in which it was compiled anew
        self.warned: set[str] = set()
        self._key = key
        self._effects = effects
        self._most = most
        self._began = 0.0
        self._step = 0
        self._last_step = 0  # in which something was compiled
        self._reported = False
        self._functions: set[str] = set()
        self._names: dict[str, str] = {}  # PyTorch's number of a function → its name
        self._seen = self._newest()
        self._fresh: list[Any] | None = None  # metrics of this step, once read
        self.close = _listen(self)

    def began(self) -> None:
        """A compilation starts."""
        self._began = time.perf_counter()

    def ended(self) -> None:
        """It ended."""
        self.step_seconds += time.perf_counter() - self._began

    def step_recompilations(self) -> int:
        """Functions that were compiled anew in this step."""
        return sum(bool(each.recompile_reason) for each in self._of_step())

    def end_step(self) -> None:
        """After each step: nothing in one that compiled nothing but the report of those before."""
        self._step += 1
        if self._of_step():  # PyTorch's giving up takes no time, and is told here alone
            self._account()
        if self.step_seconds:
            self.seconds += self.step_seconds
            self.step_seconds = 0.0
            self._last_step = self._step
        elif self.seconds and not self._reported:
            self._report()
        self._fresh = None

    def _account(self) -> None:
        anew: dict[str, Any] = {}
        for each in self._of_step():
            name = self._names.get(_number_of(each), "a function")
            self._functions.add(name)
            if each.recompile_reason:
                anew[name] = each
        complaints: dict[bool, list[str]] = {False: [], True: []}  # by whether PyTorch gave up
        for name, each in anew.items():
            self.recompiled[name] += 1
            gave_up = "recompile limit" in (each.fail_reason or "").lower()
            endless = self.recompiled[name] >= self._most and name not in self.warned
            if gave_up or endless:
                self.warned.add(name)
                complaints[gave_up].append(self._complaint(name, each, gave_up))
        for alike in filter(None, complaints.values()):
            # One of them: a block is cut into many functions, which are compiled anew for one reason.
            others = len(alike) - 1
            also = f" (and {others} other function{'s' * (others > 1)} in this step)" if others else ""
            logger.warning("%s%s", alike[0], also)

    def _complaint(self, name: str, metrics: Any, gave_up: bool) -> str:
        reason = _reason_of(metrics)
        shapes = any(words in reason for words in ("size mismatch", "dynamic", ".size()", "dtensor_spec"))
        way_out = (
            "give batches few shapes (data.shape_buckets, data.packing)"
            if shapes
            else "keep what that names the same from step to step"
        )
        cost = (
            "PyTorch gave up and runs it uncompiled from now on"
            if gave_up
            else f"{self.seconds + self.step_seconds:.1f} s of compiling so far"
        )
        return (
            f"{self._key}: {name} was compiled anew in {self.recompiled[name]} of {self._step} steps, the last time "
            f"because this no longer held: {reason}; {cost}. To end it {way_out}, or take the key out"
        )

    def _report(self) -> None:
        self._reported = True
        steps = "step" if self._last_step == 1 else f"{self._last_step} steps"
        again = sum(self.recompiled.values())
        note = f"{again} of them anew" if again else ""
        effect = Effect(
            self._key,
            f"{len(self._functions)} function{'s' * (len(self._functions) > 1)}",
            f"compiled in {self.seconds:.1f} s within the first {steps}",
            note,
        )
        self._effects.append(effect)
        logger.info("%s", effect)

    def _of_step(self) -> list[Any]:
        """Metrics of forward compilations since the last step."""
        if self._fresh is None:
            every = torch._dynamo.utils.get_compilation_metrics()  # the newest 64
            since = [each for each in every if (each.start_time_us or 0) > self._seen]
            self._seen = max([self._seen, *(each.start_time_us or 0 for each in since)])
            self._names |= {_number_of(each): _name_of(each) for each in every if each.co_name}
            self._fresh = [each for each in since if each.is_forward is not False and each.compile_id]
        return self._fresh

    @staticmethod
    def _newest() -> int:
        return max([0, *(each.start_time_us or 0 for each in torch._dynamo.utils.get_compilation_metrics())])


def _name_of(metrics: Any) -> str:
    path = Path(metrics.co_filename or "?")
    return f"{metrics.co_name} ({path.parent.name}/{path.name}:{metrics.co_firstlineno})"


def _number_of(metrics: Any) -> str:
    """``3`` of ``3/1``, the second compilation of the function that PyTorch numbers 3; its limit records no name."""
    return str(metrics.compile_id).partition("/")[0]


def _reason_of(metrics: Any) -> str:
    """``flavour == 'a'`` of ``0/1: flavour == 'a'   # the line of source`` and a stack."""
    line = str(metrics.recompile_reason).splitlines()[0].partition("  #")[0]
    number, _, rest = line.partition(": ")
    return (rest if "/" in number else line).strip()


def _listen(watch: CompileWatch) -> weakref.finalize[Any, Any]:
    """Register with PyTorch for as long as the watch lives; what is returned stops earlier."""
    from torch._dynamo.callback import callback_handler

    alive = weakref.ref(watch)

    def began(arguments: Any) -> None:
        one = alive()
        if one is not None:
            one.began()

    def ended(arguments: Any) -> None:
        one = alive()
        if one is not None:
            one.ended()

    callback_handler.register_start_callback(began)
    callback_handler.register_end_callback(ended)

    def stop() -> None:
        if began in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(began)
        if ended in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(ended)

    return weakref.finalize(watch, stop)
