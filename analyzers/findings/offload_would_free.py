"""``offload-would-free``: memory limits, and the optimizer's state could lie in the host's."""

from __future__ import annotations

from typing import Literal

from trine.analyzers.results import Finding, Prediction, Recommendation
from trine.analyzers.units import percent, size

from ._facts import Facts
from ._frees import evidence_of, freed_at_peak, freed_bytes, state_bytes
from ._gain import predict
from ._memory import Fill, limited

__all__ = ["ID", "KIND", "find"]

ID = "offload-would-free"
KIND: Literal["opportunity"] = "opportunity"

#: Freed bytes below this share of capacity are not worth the way over the bus.
SHARE = 0.05
#: Bytes a second between host and device: PCIe 4.0 x16 as measured (low, mid, high). NVLink-C2C is ten times that.
BUS_BYTES_PER_S = (12e9, 22e9, 50e9)


def find(facts: Facts) -> Finding | None:
    """Known optimizer state on a device that is nearly full."""
    fill = limited(facts)
    if fill is None or fill.kind != "device" or facts.trains is False:
        return None
    if facts.about("configuration", "offload", "optimizer") not in (None, "none"):
        return None
    prediction = _prediction(facts, fill)
    if prediction is None or freed_bytes(prediction) < SHARE * fill.capacity_bytes:
        return None
    freed = freed_bytes(prediction)
    return Finding(
        id=ID,
        kind=KIND,
        title=f"Keeping the optimizer's state on the host would free {size(freed)} a rank ({percent(freed / fill.capacity_bytes)} of its memory)",
        evidence=evidence_of(fill, prediction),
        recommendation=Recommendation(
            change={"offload.optimizer": "cpu"},
            why="The state is read once a step: gradients go over the bus, parameters come back. Where ranks hold the same "
            "state, ZeRO costs less.",
            numerics="unchanged",
            predicted=prediction,
        ),
        severity=min(freed / fill.capacity_bytes, 1.0) * 0.4,
    )


def _prediction(facts: Facts, fill: Fill) -> Prediction | None:
    """The state's bytes off the peak, for gradients and parameters over the bus each step."""
    state = state_bytes(facts, fill.rank, "optimizer_state")
    if not state:
        return None
    drawn = freed_at_peak(facts, fill.rank, "offload optimizer state")
    freed = drawn if drawn is not None else state
    inputs: dict[str, float | int | str] = {"optimizer_bytes": state}
    gradients, parameters = (state_bytes(facts, fill.rank, name) for name in ("gradients", "parameters"))
    formula = "optimizer state off the peak"
    if not gradients or not parameters or not facts.step_ns:
        return Prediction(None, None, -freed, formula, inputs)
    moved = gradients + parameters
    low, mid, high = BUS_BYTES_PER_S
    inputs |= {"moved_bytes": moved, "bus_bytes_per_s": mid}
    return predict(
        facts,
        moved / mid * 1e9,
        (-mid / low, -1.0, -mid / high),
        f"{formula}; cost: (gradients + parameters) ÷ bus a step",
        inputs,
        -freed,
    )
