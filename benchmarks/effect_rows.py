"""The rows of ``benchmarks/effects.py``: techniques, the quantities they exist to change, and what theory says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ROWS", "Expected", "Facts", "Line", "Row"]


@dataclass(frozen=True)
class Facts:
    """What formulas need to know of a run."""

    ranks: int
    shapes: tuple[tuple[int, ...], ...]  # of the model's parameters, tied ones once
    plain: float  # the plain run's measured value of the quantity
    optimised: Mapping[str, Any]  # the configuration's changes

    @property
    def parameters(self) -> int:
        """Elements of all of them."""
        return sum(_size(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Expected:
    """What the optimised value should be. ``near``: within 5 % of it; ``most``: not above; ``above``: beyond it."""

    value: Callable[[Facts], float]
    words: str
    kind: str = "near"

    def holds(self, measured: float, facts: Facts) -> bool:
        """Whether the measured value is what theory says. What is missing (NaN) does not hold."""
        expected = self.value(facts)
        if self.kind == "most":
            return measured <= expected
        return measured > expected if self.kind == "above" else abs(measured - expected) <= 0.05 * expected


@dataclass(frozen=True)
class Line:
    """A quantity of a row, by its name in ``effects.QUANTITIES``, and what is expected of it."""

    quantity: str
    expected: Expected | None = None


@dataclass(frozen=True)
class Row:
    """A technique beside the plain run."""

    name: str
    changes: Mapping[str, Any]
    lines: tuple[Line, ...]
    ranks: int = 1
    #: Configuration of the run that it is compared with.
    plain: Mapping[str, Any] = field(default_factory=dict)
    #: One of ``effects.SHAPES``: "small" for bytes, "large" for times; or "images".
    model: str = "small"
    #: "windows" of text, all of one length; "documents", padded; "images" that are slow to fetch.
    data: str = "windows"
    #: A rank's in a step, and the plain run's where it has others.
    samples: int = 4
    plain_samples: int | None = None
    steps: int = 4
    environment: Mapping[str, str] = field(default_factory=dict)
    #: The part of the plain run's saved activations that ``checkpointing.budget_bytes`` is set to.
    budget: float | None = None


# --- what theory says --------------------------------------------------------------------------


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for dimension in shape:
        total *= dimension
    return total


def share(part: float, words: str) -> Expected:
    """The plain value times ``part``."""
    return Expected(lambda facts: facts.plain * part, words)


def zero_lines(stage: int, shards: int) -> tuple[Line, ...]:
    """Rajbhandari et al. 2020, figure 1, for Adam in fp32: 4 + 4 + 8 bytes a parameter.

    Parameters are read when the optimizer has stepped, and FSDP2 has sharded them again by then, in stage 2 as well; the
    paper's stage 2 holds all of them all the time.
    """
    return tuple(
        Line(
            f"{what} bytes",
            Expected(lambda facts, each=each: each * facts.parameters, f"{stated}"),
        )
        for what, each, stated in (
            ("optimizer", 8 / shards, f"8Ψ/{shards}"),
            ("gradient", 4 / shards if stage >= 2 else 4.0, f"4Ψ/{shards}" if stage >= 2 else "4Ψ"),
            ("parameter", 4 / shards if stage >= 2 else 4.0, f"4Ψ/{shards}" if stage >= 2 else "4Ψ"),
        )
    )


def _zero(stage: int, ranks: int, shards: int | None = None) -> Row:
    changes: dict[str, Any] = {"zero.stage": stage}
    if shards is not None:
        changes["parallel.shard"] = shards
    name = f"zero {stage} on {ranks}" + ("" if shards is None else f", shards of {shards}")
    return Row(name, changes, zero_lines(stage, shards or ranks), ranks=ranks)


def code_bits(name: str, levels: int, ranks: int) -> float:
    """Bits that a rank sends for an element and phase, scales included; fp32 has 32."""
    chunk_bits, scale_bits = 512, 16  # a scale in bf16 for so many bits of codes
    if name in ("bf16", "fp16"):
        return 16
    if (
        name == "terngrad"
    ):  # ternary codes one way; their sums, 2n+1 different ones, the other; a scale a layer
        sums = 4 if 2 * ranks + 1 <= 16 else 8
        return (2 + sums) / 2
    codes = {"int8": 8, "onebit": 1}.get(name) or next(b for b in (2, 4, 8) if 2 * levels + 1 <= 2**b)
    return codes * (1 + scale_bits / chunk_bits)


def powersgd_elements(shapes: tuple[tuple[int, ...], ...], rank: int) -> int:
    """Numbers that PowerSGD sends: two factors of each matrix where they are half of it or less, else all."""
    total = 0
    for shape in shapes:
        whole = _size(shape)
        factors = rank * (shape[0] + whole // shape[0]) if len(shape) > 1 else whole
        total += factors if 2 * factors <= whole else whole
    return total


def _compressed_bytes(facts: Facts) -> float:
    changes = facts.optimised
    name = changes["communication.compression"]
    if name == "powersgd":
        rank = changes.get("communication.compression_rank", 4)
        return facts.plain * powersgd_elements(facts.shapes, rank) / facts.parameters
    levels = changes.get("communication.compression_levels", 127)
    return facts.plain * code_bits(name, levels, facts.ranks) / 32


def _compression(name: str, ranks: int = 2, **more: Any) -> Row:
    changes = {"communication.compression": name}
    changes |= {f"communication.compression_{key}": value for key, value in more.items()}
    said = "".join(f", {key} {value}" for key, value in more.items())
    expected = Expected(_compressed_bytes, "by the code")
    return Row(f"{name}{said} on {ranks}", changes, (Line("bytes sent", expected),), ranks=ranks)


_GRADIENTS = Line("scattered bytes", Expected(_compressed_bytes, "by the code"))
_INT8_WEIGHTS = Expected(lambda facts: facts.plain * code_bits("int8", 0, facts.ranks) / 32, "by the code")


# --- the rows ----------------------------------------------------------------------------------

_ACTIVATIONS = Line("activation bytes")
_TIME = Line("step time")

_COMPUTE = (
    Row("bf16", {"precision.dtype": "bf16"}, (_ACTIVATIONS, _TIME), model="large"),
    Row("fp16", {"precision.dtype": "fp16"}, (_ACTIVATIONS, _TIME)),
    Row(
        "bf16 master weights",
        {"precision.dtype": "bf16", "precision.master_weights": True},
        (
            Line("parameter bytes", share(1 / 2, "half")),
            Line("optimizer bytes", share(12 / 8, "8Ψ and 4Ψ of masters")),
            Line("gradient bytes"),
            _ACTIVATIONS,
        ),
    ),
    Row("sdpa", {"compute.attention": "sdpa"}, (_ACTIVATIONS, _TIME), model="long"),
    Row("fused optimizer", {"compute.fuse": ["optimizer"]}, (Line("optimizer time"), _TIME), model="large"),
    Row(
        "fused cross_entropy",
        {"compute.fuse": ["cross_entropy"]},
        (_ACTIVATIONS, _TIME),
        model="vocabulary",
    ),
    Row(
        "fused bias_dropout_residual",
        {"compute.fuse": ["bias_dropout_residual"]},
        (_ACTIVATIONS, _TIME),
        model="dropout",
    ),
    Row(
        "fused mlp and norm",
        {"compute.fuse": ["mlp", "norm"]},
        (_ACTIVATIONS, _TIME, Line("compile time")),
        model="gated",
    ),
    Row(
        "compile blocks",
        {"compute.compile": "blocks"},
        (_TIME, _ACTIVATIONS, Line("compile time")),
        model="large",
    ),
)

_SEQUENCES = (
    Row(
        "packing",
        {"data.packing": True, "data.packed_length": 384},
        (Line("padding waste"), Line("time a thousand tokens")),
        model="documents",
        data="documents",
        samples=8,
        steps=8,
    ),
    Row(
        "length_grouped",
        {"data.length_grouped": True},
        (Line("padding waste"), Line("time a thousand tokens")),
        model="documents",
        data="documents",
        samples=8,
        steps=8,
    ),
    Row(
        "shape_buckets",
        {"data.shape_buckets": [128, 256, 384]},
        (Line("widths", Expected(lambda facts: 3, "≤ buckets", "most")), Line("padding waste")),
        model="documents",
        data="documents",
        samples=2,
        steps=8,
    ),
    Row(
        "loader workers",
        {"data.workers": 1},
        (Line("data time"), _TIME),
        model="images",
        data="images",
        samples=8,
        steps=8,
    ),
)

_ACCUMULATION = (
    Row(
        "accumulation 4, the same step",
        {"accumulation.steps": 4},
        (Line("activation bytes", share(1 / 4, "a quarter")),),
        samples=8,
    ),
    Row(
        "accumulation 4, the same micro-batch",
        {"accumulation.steps": 4},
        (
            Line("all-reduces a sample", share(1 / 4, "a quarter")),
            Line("bytes sent a sample", share(1 / 4, "a quarter")),
        ),
        ranks=2,
        samples=8,
        plain_samples=2,
    ),
    Row(
        "delayed",
        {"accumulation.delayed": True, "accumulation.delayed_warmup_steps": 0},
        (Line("exposed communication"), _TIME),
        ranks=2,
        model="large",
    ),
)

_COMMUNICATION = (
    Row(
        "small buckets",
        {"communication.bucket_mib": 1.0, "communication.first_bucket_mib": 0.25},
        (
            Line("overlap efficiency", Expected(lambda facts: facts.plain, "above", "above")),
            Line("exposed communication"),
            _TIME,
        ),
        ranks=2,
        plain={"communication.overlap": False},
        model="large",
    ),
    Row(
        "bucket auto",
        {"communication.bucket_mib": "auto"},
        (Line("overlap efficiency"), Line("exposed communication"), _TIME),
        ranks=2,
        plain={"communication.overlap": False},
        model="large",
    ),
    *(_compression(name) for name in ("bf16", "fp16", "int8", "qsgd")),
    _compression("qsgd", levels=7),
    _compression("qsgd", levels=1),
    _compression("powersgd", rank=4),
    _compression("powersgd", rank=2),
    _compression("onebit"),
    _compression("terngrad"),
    _compression("int8", ranks=4),
    _compression("terngrad", ranks=4),
    Row(
        "int8 under zero 2 on 2",
        {"communication.compression": "int8", "zero.stage": 2},
        (_GRADIENTS,),
        ranks=2,
        plain={"zero.stage": 2},
    ),
    Row(
        "quantized weights under zero 3 on 2",
        {"zero.quantized_weights": True, "zero.stage": 3},
        (Line("gathered bytes", _INT8_WEIGHTS),),
        ranks=2,
        plain={"zero.stage": 3},
    ),
    Row(
        "two_level on 2 nodes of 2",
        {"communication.algorithm": "two_level"},
        (
            # Of S bytes: a ring of n ranks hands 2(n-1)/n S on at a node's edge; two levels 2(k-1)/k S with k nodes.
            Line("bytes across nodes", share((2 * 1 / 2) / (2 * 3 / 4), "2(k-1)/k of 2(n-1)/n")),
            _TIME,
        ),
        ranks=4,
        environment={"TRINE_RANKS_PER_NODE": "2"},
    ),
)

_ZERO = (
    *(_zero(stage, ranks) for ranks in (2, 4) for stage in (1, 2, 3)),
    _zero(3, 4, shards=2),
)


def _checkpointing(name: str, changes: Mapping[str, Any], budget: float | None = None) -> Row:
    expected = None
    if budget is not None:
        expected = Expected(lambda facts: facts.plain * budget, "≤ budget", "most")
    return Row(f"checkpointing {name}", changes, (Line("activation bytes", expected), _TIME), budget=budget)


_ACTIVATION_ROWS = (
    _checkpointing("full", {"checkpointing.mode": "full"}),
    _checkpointing("every 2", {"checkpointing.mode": "full", "checkpointing.every": 2}),
    _checkpointing("selective", {"checkpointing.mode": "selective"}),
    _checkpointing("budget", {"checkpointing.mode": "budget"}, budget=0.6),
    *(
        Row(f"activations {dtype}", {"activations.dtype": dtype}, (_ACTIVATIONS, _TIME))
        for dtype in ("bf16", "fp16", "fp8")
    ),
    Row("offload cpu", {"offload.activations": "cpu"}, (_ACTIVATIONS, _TIME)),
    Row("offload nvme", {"offload.activations": "nvme", "offload.path": "."}, (_ACTIVATIONS, _TIME)),
)

ROWS: tuple[Row, ...] = (
    *_COMPUTE,
    *_SEQUENCES,
    *_ACCUMULATION,
    *_COMMUNICATION,
    *_ZERO,
    *_ACTIVATION_ROWS,
)
