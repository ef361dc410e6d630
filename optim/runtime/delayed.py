"""A one-step-late update: gradients are averaged while the next step computes, and applied at its end.

With θ_t the parameters of step t and g_t its gradients, the plain run has θ_{t+1} = θ_t - η·U(g_t). Here the averaging
of g_t begins at the end of step t and is awaited at the end of step t+1, so a whole forward and backward hides it:

    θ_{t+1} = θ_t - η·U(ḡ_{t-1}),    ḡ_{t-1} taken at θ_{t-1}

The gradient is one step old when it is applied: pipelined SGD with a delay of one (Li et al., "Pipe-SGD", NeurIPS 2018;
stale gradients of bounded age converge, Ho et al., NeurIPS 2013). Early on parameters move fast and an old gradient
harms most, so the first steps are not delayed (Ren et al., "ZeRO-Offload", ATC 2021, begin after 40). The first late step
applies nothing, and what is left at the end is applied by a flush.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from trine.optim.runtime.exchange.thread import default_timeout
from trine.optim.runtime.groups import end_group
from trine.optim.techniques._assembly import Effect
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from trine.optim.techniques._assembly import Assembly

__all__ = ["WARMUP_STEPS", "DelayedGradients", "install"]

#: Steps before updates are late, unless ``accumulation.delayed_warmup_steps`` says otherwise.
WARMUP_STEPS = 40


@dataclass(slots=True)
class _Flight:
    """One step's gradients on their way."""

    flats: list[torch.Tensor]  # one a dtype
    counts: torch.Tensor  # (1 + parameters,): the weight, then whether each has a gradient; float64
    missing: list[int]  # parameters without a gradient on this rank
    works: list[Any]


class DelayedGradients:
    """Sums gradients over ranks in flat tensors, on a process group of its own, in the background.

    Two sets of flat tensors alternate: one travels while the other is filled.
    """

    def __init__(
        self, parameters: list[torch.nn.Parameter], ranks: int, device: torch.device, warmup_steps: int = 0
    ) -> None:
        """Every rank must make it at the same point, since it makes a process group."""
        self._warmup_left = warmup_steps
        self._parameters = parameters
        self._ranks = ranks
        self._device = device
        self._group = distributed.new_group(
            timeout=default_timeout(device), group_desc="trine delayed gradients"
        )
        self._by_dtype: dict[torch.dtype, list[int]] = {}
        for place, parameter in enumerate(parameters):
            self._by_dtype.setdefault(parameter.dtype, []).append(place)
        self._spare: list[torch.Tensor] | None = None
        self._flight: _Flight | None = None

    @property
    def waits(self) -> bool:
        """Whether gradients are on their way, or were loaded from a checkpoint."""
        return self._flight is not None

    def exchange(self, weight: Any) -> Any | None:
        """Send this step's summed gradients off, wait for the step before's and put them in place.

        Returns the mean over ranks of their weights, the gradients being means over ranks too; ``None`` at first. In
        warm-up it is this step's own that are put in place.
        """
        if self._warmup_left:
            self._warmup_left -= 1
            return self._put(self._sent(weight))
        arrived, self._flight = self._flight, self._sent(weight)
        return None if arrived is None else self._put(arrived)

    def flush(self) -> Any | None:
        """Put the last step's in place; ``None`` where nothing is on its way."""
        arrived, self._flight = self._flight, None
        return None if arrived is None else self._put(arrived)

    def forget(self) -> None:
        """Drop what is on its way, once it has arrived."""
        if self._flight is not None:
            self._arrive(self._flight)
            self._flight = None

    def close(self) -> None:
        """End the group, unless gradients are still on their way: other ranks may be gone, and waiting would not end."""
        if self._flight is None:
            end_group(self._group)

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The sums that are still to be applied, so that a resumed run goes on bitwise."""
        if self._flight is None:
            return {"warmup_left": self._warmup_left}
        self._arrive(self._flight)
        return {
            "warmup_left": self._warmup_left,
            "flats": [flat.clone() for flat in self._flight.flats],
            "counts": self._flight.counts.clone(),
            "missing": list(self._flight.missing),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back. Raises ``UsageError`` where they belong to other parameters."""
        self.forget()
        self._warmup_left = int(state["warmup_left"])
        if "flats" not in state:
            return
        sizes = [flat.numel() for flat in self._flats()]
        if [flat.numel() for flat in state["flats"]] != sizes:
            raise UsageError(
                "the checkpoint holds a delayed update of another model: load it into the model that was saved"
            )
        flats = [flat.to(self._device).clone() for flat in state["flats"]]
        self._flight = _Flight(flats, state["counts"].to(self._device), list(state["missing"]), [])

    def load_resharded(self, states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Take over what other ranks summed: the means are the same on all, weights are sums over those that there were."""
        state = dict(states[0])
        if "counts" in state:
            state["counts"] = state["counts"] * (ranks / len(states))
            missing = [set(each["missing"]) for each in states]
            state["missing"] = sorted(set.intersection(*missing))
        self.load_state_dict(state)

    # --- one flight ----------------------------------------------------------------------------

    def _sent(self, weight: Any) -> _Flight:
        flats = self._spare if self._spare is not None else self._flats()
        self._spare = None
        missing = [place for place, p in enumerate(self._parameters) if p.grad is None]
        for flat, places in zip(flats, self._by_dtype.values(), strict=True):
            parts = torch.split(flat, [self._parameters[place].numel() for place in places])
            held = [(part, self._parameters[place].grad) for part, place in zip(parts, places, strict=True)]
            filled = [(part.view_as(gradient), gradient) for part, gradient in held if gradient is not None]
            if filled:
                torch._foreach_copy_([part for part, _ in filled], [gradient for _, gradient in filled])
            for part, gradient in held:
                if gradient is None:
                    part.zero_()
        counts = torch.ones(1 + len(self._parameters), dtype=torch.float64, device=self._device)
        counts[0] = weight
        if missing:
            counts[[1 + place for place in missing]] = 0.0
        # Divided before it is summed, as DDP does: the sum of many ranks could overflow.
        for flat in flats:
            flat.div_(self._ranks)
        works = [
            distributed.all_reduce(tensor, group=self._group, async_op=True) for tensor in (*flats, counts)
        ]
        return _Flight(flats, counts, missing, works)

    def _put(self, flight: _Flight) -> Any:
        self._arrive(flight)
        absent: set[int] = set()
        if flight.missing:  # a parameter that no rank used has no gradient, and the optimizer leaves it alone
            used = flight.counts[1:].tolist()
            absent = {place for place in flight.missing if not used[place]}
        for flat, places in zip(flight.flats, self._by_dtype.values(), strict=True):
            parts = torch.split(flat, [self._parameters[place].numel() for place in places])
            for part, place in zip(parts, places, strict=True):
                parameter = self._parameters[place]
                parameter.grad = None if place in absent else part.view_as(parameter)
        self._spare = flight.flats  # filled again at the next step, when these gradients are gone
        weight = flight.counts[0] / self._ranks
        return float(weight) if self._device.type == "cpu" else weight

    def _arrive(self, flight: _Flight) -> None:
        for work in flight.works:
            work.wait()
        flight.works.clear()

    def _flats(self) -> list[torch.Tensor]:
        return [
            torch.zeros(
                sum(self._parameters[place].numel() for place in places), dtype=dtype, device=self._device
            )
            for dtype, places in self._by_dtype.items()
        ]


def install(assembly: Assembly) -> None:
    """Take averaging away from DDP once every technique has been applied, and give it to a :class:`DelayedGradients`."""
    assembly.finish.append(_install)
    warmup = _warmup_of(assembly)
    assembly.effects.append(
        Effect(
            "accumulation.delayed",
            "at once",
            "one step late",
            f"averaged behind the next step, after {warmup} steps that are not",
        )
    )


def _warmup_of(assembly: Assembly) -> int:
    stated = assembly.config.accumulation.delayed_warmup_steps
    return WARMUP_STEPS if stated is None else stated


def _install(assembly: Assembly) -> None:
    held = [p for group in assembly.optimizer.param_groups for p in group["params"] if p.requires_grad]
    facts = assembly.facts
    delayed = DelayedGradients(held, facts.ranks, facts.device, _warmup_of(assembly))
    wrapped: DistributedDataParallel = assembly.model  # type: ignore[assignment]
    begins = True

    def synchronise(last: bool) -> None:
        """DDP never averages. Its broadcast of buffers (batch norm's) stays: in the first forward of each step."""
        nonlocal begins
        wrapped.require_backward_grad_sync = False
        wrapped.require_forward_param_sync = begins
        begins = last

    def undo() -> None:
        wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True
        delayed.close()

    assembly.closers.append(undo)
    assembly.synchronise = synchronise
    assembly.deferred = delayed
    assembly.state["accumulation.delayed"] = delayed
