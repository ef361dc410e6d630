"""What is asked of a search: a model, a cluster, its software, the batch, the room to leave, and what is settled already.

problem = Problem.of(workload, cluster, stack_named("megatron-core"), global_batch=1024, pins=parse_pins(["tensor=8"]))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trine.optim.plan._tables import near
from trine.optim.plan.abilities import Abilities, abilities_of
from trine.optim.plan.cluster import Cluster, require_believable
from trine.optim.plan.constants import Stack
from trine.optim.plan.layouts import DEFAULTS, KINDS, RECOMPUTATIONS, Layouts
from trine.optim.plan.memory import USABLE
from trine.optim.plan.refusals import Rule
from trine.optim.plan.units import parse_sized
from trine.optim.plan.workload import Workload
from trine.record.errors import UsageError

__all__ = [
    "SEARCHABLE",
    "Pins",
    "Problem",
    "divisors",
    "parse_pins",
    "parse_searched",
    "pin_words",
    "usual_tokens",
]

#: Column → the values that it may have; kinds as codes.
Pins = Mapping[str, tuple[int, ...]]

#: Tokens of a step where nobody says the batch: GPT-3 had 3.2 million (Brown et al. 2020), Llama 3 began with 4 (2024).
USUAL_TOKENS = 4 * 2**20
#: The same of each rank on processors, where a step of millions takes hours: two sequences of GPT-2.
_PROCESSOR_TOKENS = 2 * 2**10
#: Every value that a pinned kind has.
_ANY = "any"
#: What is searched where it is asked for: it changes numbers (precision, compression), or no software runs it (another node's
#: memory).
SEARCHABLE = ("precision", "compression", "remote")
_EVERY = "all"
#: The largest count that is believed of a pin.
_MOST = 10**9
#: Columns of few values, and the largest.
_FEW = {"zero_stage": 3, "sequence": 1, "two_level": 1}
#: What "any" means of a column beside what its software offers; of a number without an end it leaves the search what it has.
_EVERY_VALUE = {name: range(len(words)) for name, words in KINDS.items()} | {
    name: range(most + 1) for name, most in _FEW.items()
}
#: Smaller buckets are numbers without their unit: messages of so little are all latency.
_LEAST_BUCKET = 16 * 2**10


@dataclass(frozen=True, slots=True)
class Problem:
    """``headroom``: the share of a device's memory that stays free. ``batch_is_usual``: nobody said the batch. ``searched``: of
    :data:`SEARCHABLE`, what is searched."""

    workload: Workload
    cluster: Cluster
    stack: Stack
    global_batch: int
    headroom: float = 0.1
    pins: Pins = field(default_factory=dict)
    batch_is_usual: bool = False
    searched: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster,
        stack: Stack,
        *,
        global_batch: int | None = None,
        headroom: float = 0.1,
        pins: Pins | None = None,
        searched: Iterable[str] = (),
    ) -> Problem:
        """With the usual batch where none is given. Raises ``UsageError``."""
        if global_batch is not None and not 1 <= global_batch <= _MOST:
            raise UsageError(f"global batch must be from 1 to {_MOST} sequences, not {global_batch}")
        if not 0 <= headroom < 1:
            raise UsageError(
                f"memory headroom must be from 0 to below 1, not {headroom}: 0.1 leaves a tenth free"
            )
        settled = sorted(set(pins or {}) & set(searched))
        if settled:
            raise UsageError(
                f"{settled[0]} is pinned and searched: keep --pin {settled[0]}=… or --search {settled[0]}"
            )
        require_believable(cluster.devices)
        batch = global_batch or _usual_batch(workload, cluster)
        usual = global_batch is None
        settled_pins = _with_recomputation(pins or {})
        return cls(workload, cluster, stack, batch, headroom, settled_pins, usual, tuple(searched))

    @property
    def devices(self) -> int:
        """Of the job."""
        return self.cluster.devices

    @property
    def capacity_bytes(self) -> float:
        """What a layout may take of a device's memory, no more than its driver gives."""
        return self.cluster.device.memory_bytes * min(1 - self.headroom, USABLE)

    @property
    def abilities(self) -> Abilities:
        """Of the stack."""
        return abilities_of(self.stack)

    def choices(self, column: str, usual: Iterable[Any]) -> tuple[int, ...]:
        """Values to try, as codes: the pinned ones, else of ``usual`` those that the stack offers."""
        if column in self.pins:
            return self.pins[column]
        offered = self.abilities.choices.get(column)
        chosen = [value for value in usual if offered is None or value in offered]
        return tuple(KINDS[column].index(value) if column in KINDS else int(value) for value in chosen)

    def refused_unless_pinned(
        self, about: Callable[[frozenset[str]], bool] = lambda columns: True
    ) -> list[Rule]:
        """What the stack refuses, of the columns that are asked ``about``, but for what the pins themselves ask for."""
        rules = self.abilities.refuses
        return [rule for rule in rules if about(rule.columns) and not rule.forced(self.pins)]

    def beyond_the_stack(self, layout: Mapping[str, int | str]) -> tuple[str, ...]:
        """What a layout has that the stack does not offer: ``"schedule=zb-v"``."""
        found = []
        for column, offered in self.abilities.choices.items():
            value = layout[column]
            if value not in offered and value != _plain(column):
                found.append(f"{column}={value}")
        stage = layout["zero_stage"]
        if layout["pipeline"] != 1 and stage not in self.abilities.zero_in_pipelines:
            found.append(f"zero_stage={stage} beside pipeline={layout['pipeline']}")
        rows = Layouts.of(**layout).columns
        codes = {name: int(column[0]) for name, column in rows.items()}
        broken = [rule for rule in self.abilities.refuses if rule.broken(rows, self.workload).all()]
        return (*found, *(rule.words(codes, self.workload) for rule in broken))

    def without_pins(self) -> Problem:
        """The same with nothing settled but what numbers are computed in."""
        kept = {name: values for name, values in self.pins.items() if name in ("precision", "compression")}
        return replace(self, pins=kept)


def _with_recomputation(pins: Pins) -> dict[str, tuple[int, ...]]:
    """Layers that are recomputed are those of a budget, which such a pin asks for. Raises ``UsageError`` for another beside it."""
    found, budget = dict(pins), RECOMPUTATIONS.index("budget")
    layers = found.get("recomputed_layers", (0,))
    if min(layers) == 0:
        return found
    if budget not in found.get("recompute", (budget,)):
        raise UsageError(
            f"--pin: recomputed_layers={pin_words('recomputed_layers', layers)} is of recompute=budget, and recompute is pinned "
            f"to {pin_words('recompute', found['recompute'])}: drop one of them"
        )
    return found | {"recompute": (budget,)}


def _plain(column: str) -> int | str:
    return KINDS[column][DEFAULTS[column]] if column in KINDS else DEFAULTS[column]


def usual_tokens(cluster: Cluster) -> int:
    """Of a step where nobody says the batch."""
    return _PROCESSOR_TOKENS * cluster.devices if cluster.device.is_processor else USUAL_TOKENS


def _usual_batch(workload: Workload, cluster: Cluster) -> int:
    """About the sequences of :func:`usual_tokens`: a power of two times what of the devices is none, so that much divides it."""
    odd = cluster.devices
    while odd % 2 == 0:
        odd //= 2
    sequences = max(usual_tokens(cluster) / workload.sequence / odd, 1.0)
    return odd << round(math.log2(sequences))


def divisors(number: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))


def parse_pins(words: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """From ``"tensor=8"``, ``"schedule=1f1b,zb-v"`` or ``"compression=any"``; ``"tensor=any"`` settles nothing. Raises ``UsageError`` for what is no pin.

    A column may be given once. Kinds are those of ``layouts.KINDS``; ``bucket_bytes`` takes sizes (``25MiB``).
    """
    found: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not text.strip():
            raise UsageError(f"--pin: {word!r} is no KEY=VALUE, as tensor=8 or schedule=1f1b,interleaved")
        if name not in DEFAULTS:
            raise UsageError(
                f"--pin: a layout has no {name!r}{near(name, DEFAULTS)}: one of {', '.join(DEFAULTS)}"
            )
        if text.strip() == _ANY and name not in _EVERY_VALUE:
            continue
        values = tuple(dict.fromkeys(_values(name, text)))
        if name in found and found[name] != values:
            raise UsageError(
                f"--pin: {name} is pinned twice, to {pin_words(name, found[name])} and to {pin_words(name, values)}: "
                f"keep one, or write {name}={pin_words(name, found[name] + values)} to try all"
            )
        found[name] = values
    return found


def parse_searched(names: Iterable[str]) -> tuple[str, ...]:
    """Of :data:`SEARCHABLE` those that are named, or ``all``; what is always searched may be named. Raises ``UsageError``."""
    found: dict[str, None] = {}
    for name in (
        part.strip() for each in ([names] if isinstance(names, str) else names) for part in each.split(",")
    ):
        plain = name.replace("-", "_")
        if plain == _EVERY:
            found |= dict.fromkeys(SEARCHABLE)
        elif plain in SEARCHABLE:
            found[plain] = None
        elif plain not in DEFAULTS:
            raise UsageError(
                f"--search: nothing is called {name!r}{near(plain, (*SEARCHABLE, *DEFAULTS))}: one of {', '.join(SEARCHABLE)}, or "
                f"{_EVERY}; the rest of a layout is always searched"
            )
    return tuple(found)


def pin_words(name: str, values: tuple[int, ...]) -> str:
    """What a column is pinned to, as people write it."""
    return ",".join(KINDS[name][value] if name in KINDS else str(value) for value in values)


def _values(name: str, text: str) -> Iterable[int]:
    if text.strip() == _ANY:
        yield from _EVERY_VALUE[name]
        return
    for part in text.split(","):
        yield _value(name, part.strip())


def _value(name: str, text: str) -> int:
    if name in KINDS:
        if text not in KINDS[name]:
            raise UsageError(
                f"--pin: no {name} is called {text!r}{near(text, KINDS[name])}: one of {', '.join(KINDS[name])}, "
                f"or {_ANY}"
            )
        return KINDS[name].index(text)
    if name == "bucket_bytes":
        return _bucket(text)
    try:
        value = int(text)
    except ValueError:
        raise UsageError(f"--pin: {name} must be a whole number, not {text!r}") from None
    least, most = (0 if DEFAULTS[name] == 0 else 1), _most(name)
    if not least <= value <= most:
        raise UsageError(f"--pin: {name} must be from {least} to {most}, not {value}")
    return value


def _bucket(text: str) -> int:
    """A bucket's bytes; 0 is the software's own. Raises ``UsageError``."""
    try:
        return parse_sized(text, _LEAST_BUCKET, "bucket", "25MiB", or_none=True)
    except UsageError as error:
        raise UsageError(f"--pin: bucket_bytes: {error}") from error


def _most(name: str) -> int:
    return _FEW.get(name, _MOST)
