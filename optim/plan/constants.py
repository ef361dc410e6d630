"""What devices, networks and software reach in practice: fitted constants, each with where it comes from.

A datasheet says what could be; :file:`constants.toml` says what published runs reached. A constant belongs to a device
family, to a kind of network, or (at most four) to a declared software stack. ``benchmarks/planner_fit.py`` writes the file
and prints how far predictions are from runs that the fit did not see; nothing here knows a run.

    stack_named("Megatron-LM 2022")       what a framework's own description of itself maps to
    device_constants("hopper")            of a family that nobody fitted: its neighbour's, and said so in ``provenance``
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from trine.record.errors import UsageError

__all__ = [
    "DEVICE_CONSTANTS",
    "NETWORK_CONSTANTS",
    "OPERATORS",
    "STACK_CONSTANTS",
    "DeviceConstants",
    "NetworkConstants",
    "Spread",
    "Stack",
    "device_constants",
    "network_constants",
    "spread",
    "stack_named",
    "stacks",
]

#: What the fit may move.
DEVICE_CONSTANTS = ("matmul", "depth", "attention", "memory", "launch_s", "call_s", "skew_s", "fp8")
NETWORK_CONSTANTS = ("bandwidth", "overlap")
#: :attr:`Stack.operators`.
OPERATORS = ("none", "alternate", "all")
STACK_CONSTANTS = ("compute", "microbatch_s", "step_s", "exposed")


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """Of a device family.

    ``matmul``: share of the best rate any matmul was seen to reach that large matmuls of a training step reach. ``depth``:
    length of the summed dimension at which half of a tile's time is spent filling and draining it. ``attention``: share of the
    matmul rate that fused attention with heads of 128 reaches. ``memory``: share of the memory's bandwidth that element-wise
    kernels reach. ``launch_s``: host seconds a kernel, where the host launches each. ``call_s``: host seconds a collective,
    beside its kernel checks, events on two streams and a node of the graph that autograd keeps. ``skew_s``: what each
    tensor-parallel collective waits for the slowest of its ranks. ``fp8``: share of the gain that the peaks
    of fp8 and bf16 promise. ``achievable``: best matmul over peak, for devices nobody measured. ``units``: streaming
    multiprocessors or compute units.
    """

    family: str
    matmul: float
    depth: float
    attention: float
    memory: float
    launch_s: float
    call_s: float
    skew_s: float
    fp8: float
    achievable: float
    units: float
    provenance: str = ""


@dataclass(frozen=True, slots=True)
class NetworkConstants:
    """Of a kind of network.

    ``bandwidth``: share of what a collective alone reaches (:mod:`trine.optim.plan.collectives`) that training reaches.
    ``overlap``: how much longer computing takes while a collective runs beside it, as a share of the collective's time.
    """

    kind: str
    bandwidth: float
    overlap: float
    provenance: str = ""


@dataclass(frozen=True, slots=True)
class Stack:
    """A declared software stack: four fitted constants, and traits, which are facts about the software.

    ``compute``: its compute time over the family's. ``microbatch_s``: host seconds a micro-batch and rank beside kernels.
    ``step_s``: seconds a step. ``exposed``: share of the gradients' synchronisation that backward does not hide;
    under ZeRO 3, seconds of its gathers over those that the network would take.

    ``fused_attention``: scores never reach memory. ``attention_gain``: of its attention kernels over FlashAttention-2's
    on devices where those leave most of the tensor units idle (Shah 2024: 1.5 to 2 on Hopper). ``fp8_gain``: share of
    the family's gain from fp8 that its recipe keeps (scales by rows cost most of it). ``fused``: element-wise kernels
    are joined (compiled, or by hand). ``padded``: a vocabulary is padded to an even size even where it is not split.
    ``captured``: kernels are launched by a graph, not one by one. ``tensor_overlap``: tensor-parallel collectives are
    cut up and hidden behind matmuls. ``expert_overlap``: all-to-alls of experts run behind another micro-batch.
    ``expert_once``: a token goes to a node once, however many of its experts lie there (DeepSeek-AI 2024, section
    3.2.2). ``expert_tensor``: experts are split over the tensor group, too, which then exchanges their tokens.
    ``softmax_heads``: its fused softmax takes the heads of a micro-batch and rank by so many, and is left out where they are no
    multiple (Megatron-LM, ``fused_softmax.py``). ``hidden_input_gradients``: all-reduces of backward run behind weight gradients. ``message_overlap``: pipeline
    messages are hidden. ``gradient_bytes``: of an element when it is reduced. ``fused_loss``: cross entropy reads
    16-bit logits and writes their gradient, without a 32-bit copy of either. ``split_optimizer``: its runs shard
    optimizer state over data ranks where they do not say. ``operators``: of which matmuls selective recomputation keeps
    the outputs, with attention's (``alternate``: every second, ``all``); ``none``: it repeats attention's scores alone.
    ``recompute``, ``sequence``, ``precision``: what its runs do where they do not say.
    """

    name: str
    aliases: tuple[str, ...] = ()
    parent: str = ""
    compute: float = 1.0
    microbatch_s: float = 0.0
    step_s: float = 0.0
    exposed: float = 1.0
    fused_attention: bool = True
    fused: bool = True
    padded: bool = True
    softmax_heads: int = 1
    captured: bool = False
    attention_gain: float = 1.0
    fp8_gain: float = 1.0
    tensor_overlap: bool = False
    expert_overlap: bool = False
    expert_once: bool = False
    expert_tensor: bool = False
    hidden_input_gradients: bool = False
    message_overlap: bool = False
    gradient_bytes: int = 4
    fused_loss: bool = False
    split_optimizer: bool = False
    operators: Literal["none", "alternate", "all"] = "none"
    recompute: str = "none"
    precision: str = "bf16"
    sequence: bool = False
    provenance: str = ""

    def with_traits(self, **traits: Any) -> Stack:
        """The same software with other facts about it: compiled, say, which makes ``fused`` true."""
        return replace(self, **traits)


@dataclass(frozen=True, slots=True)
class Spread:
    """How far predictions lay from runs that their constants had not seen: factors on the prediction.

    Nine of ten such runs took between ``low`` and ``high`` times the prediction.
    """

    low: float
    high: float


@cache
def _content() -> Mapping[str, Any]:
    return tomllib.loads(files(__package__).joinpath("constants.toml").read_text(encoding="utf-8"))


@cache
def device_constants(family: str) -> DeviceConstants:
    """Of a family; one that was never fitted takes ``generic``'s, and its provenance says so."""
    table = _content()["device"]
    if family in table:
        return DeviceConstants(family=family, **table[family])
    found = DeviceConstants(family=family, **table["generic"])
    return replace(found, provenance=f"no run of the family {family} was fitted: {found.provenance}")


@cache
def network_constants(kind: str) -> NetworkConstants:
    """Of a kind of link; one that was never fitted takes ``generic``'s, and its provenance says so."""
    table = _content()["network"]
    if kind in table:
        return NetworkConstants(kind=kind, **table[kind])
    found = NetworkConstants(kind=kind, **table["generic"])
    return replace(found, provenance=f"no run over {kind} was fitted: {found.provenance}")


@cache
def stacks() -> Mapping[str, Stack]:
    """All that are declared, by name; a stack takes what it does not state from its ``parent``."""
    table: Mapping[str, Mapping[str, Any]] = _content()["stack"]
    found: dict[str, Stack] = {}
    for name, given in table.items():
        inherited = {
            key: value
            for key, value in table.get(given.get("parent", ""), {}).items()
            if key not in ("aliases", "parent", "provenance")
        }
        stated = {key: tuple(value) if key == "aliases" else value for key, value in given.items()}
        found[name] = Stack(name=name, **{**inherited, **stated})
    return found


def stack_named(text: str) -> Stack:
    """The stack whose name or alias (a regular expression, found anywhere, case ignored) fits; the longest match wins.

    Raises ``UsageError`` where none does.
    """
    plain = text.strip().lower()
    best: tuple[int, Stack] | None = None
    for stack in stacks().values():
        if plain == stack.name:
            return stack
        for alias in stack.aliases:
            match = re.search(alias, plain)
            if match and (best is None or len(match[0]) > best[0]):
                best = (len(match[0]), stack)
    if best is None:
        raise UsageError(f"no software stack is called {text!r}: one of {', '.join(sorted(stacks()))}")
    return best[1]


@cache
def spread() -> Spread:
    """Of all predictions."""
    return Spread(**_content()["spread"])
