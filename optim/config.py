"""The configuration of the optimisation runtime: one TOML file, one dataclass, no torch.

    config = Config.from_toml("tuned.toml")
    config = Config().with_changes({"precision.dtype": "bf16", "compute.fuse": ["optimizer"]})
    config.to_toml()

A key is named by its path, ``section.key``, in files, in errors and in what the analyses
recommend. Every default changes nothing: a key left alone, and ``None``, mean "as the program has
it". ``"auto"`` is allowed where a measurement can decide. What is said here is the whole schema;
which keys a version of the runtime can apply is the techniques' to say (:mod:`trine.optim.techniques`).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from trine.optim._schema import Key, foreign_name, spell
from trine.record.errors import UnreadableInput, UsageError

__all__ = [
    "APPLIED",
    "CODECS",
    "Accumulation",
    "Activations",
    "Checkpointing",
    "Communication",
    "Compute",
    "Config",
    "Data",
    "Offload",
    "Parallel",
    "Precision",
    "Zero",
]

#: What gradients may be compressed by → collectives of a bucket, where the plain exchange has one: two are an all-to-all
#: and an all-gather.
CODECS = {"bf16": 1, "fp16": 1, "int8": 2, "qsgd": 2, "powersgd": 2, "onebit": 2, "terngrad": 3}

#: The keys that this version's runtime applies. Reports say of the others that they are to be set elsewhere; a test
#: holds this equal to what the techniques answer for.
APPLIED = frozenset(
    {
        "accumulation.delayed",
        "accumulation.delayed_warmup_steps",
        "accumulation.global_batch",
        "accumulation.micro_batch",
        "accumulation.steps",
        "activations.dtype",
        "activations.pool",
        "checkpointing.budget_bytes",
        "checkpointing.every",
        "checkpointing.mode",
        "checkpointing.modules",
        "checkpointing.operators",
        "communication.algorithm",
        "communication.bucket_mib",
        "communication.compression",
        "communication.compression_levels",
        "communication.compression_rank",
        "communication.compression_warmup_steps",
        "communication.first_bucket_mib",
        "communication.gradient_as_view",
        "communication.nccl",
        "communication.overlap",
        "communication.static_graph",
        "compute.attention",
        "compute.compile",
        "compute.fuse",
        "data.length_grouped",
        "data.packed_length",
        "data.packing",
        "data.pin_memory",
        "data.prefetch",
        "data.shape_buckets",
        "data.workers",
        "engine",
        "offload.activations",
        "offload.cpu_bytes",
        "offload.device_bytes",
        "offload.optimizer",
        "offload.overlap",
        "offload.parameters",
        "offload.path",
        "offload.tile_mib",
        "parallel.chunks",
        "parallel.context",
        "parallel.data",
        "parallel.microbatches",
        "parallel.pipeline",
        "parallel.schedule",
        "parallel.split",
        "parallel.expert",
        "parallel.loss",
        "parallel.plan",
        "parallel.sequence",
        "parallel.shard",
        "parallel.tensor",
        "precision.dtype",
        "precision.float8",
        "precision.loss_scale",
        "precision.master_weights",
        "precision.tf32",
        "zero.prefetch",
        "zero.quantized_weights",
        "zero.reshard_after_forward",
        "zero.stage",
    }
)


def _key(default: Any, *kinds: type, **rules: Any) -> Any:
    """A field with its rule: the types it takes, its choices, its least value, whether ``"auto"``."""
    return field(default=default, metadata={"key": Key(kinds=kinds, default=default, **rules)})


class _Section:
    """Checks every field against its rule, with the key's path in the error."""

    def __post_init__(self) -> None:
        section = type(self).__name__.lower()
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if isinstance(value, list):  # TOML and JSON give lists; a configuration does not change
                value = tuple(value)
                object.__setattr__(self, each.name, value)
            each.metadata["key"].check(f"{section}.{each.name}", value)


@dataclass(frozen=True)
class Precision(_Section):
    """What numbers are computed in. ``dtype`` is autocast's; parameters keep theirs."""

    dtype: Literal["bf16", "fp16", "fp32"] | None = _key(None, choices=("bf16", "fp16", "fp32"))
    master_weights: bool = _key(False, bool)
    loss_scale: float | Literal["auto"] | None = _key(None, float, least=1, auto=True)
    tf32: bool | None = _key(None, bool)
    float8: bool = _key(False, bool)


@dataclass(frozen=True)
class Compute(_Section):
    """How operators run: compiled regions, the attention's implementation, fused kernels."""

    compile: Literal["blocks", "model"] | bool = _key(False, choices=(False, "blocks", "model"))
    attention: str | None = _key(None, choices=("sdpa", "flash", "varlen", "flex"), auto=True)
    fuse: tuple[str, ...] = _key(
        (),
        tuple,
        members=("bias_dropout_residual", "mlp", "norm", "rotary", "cross_entropy", "optimizer"),
    )


@dataclass(frozen=True)
class Data(_Section):
    """How batches come: loader workers, pinned memory; packed into rows of ``packed_length``, of like length, or padded
    to one of ``shape_buckets``.
    """

    packing: bool = _key(False, bool)
    packed_length: int | None = _key(None, int, least=1)
    length_grouped: bool = _key(False, bool)
    shape_buckets: tuple[int, ...] | Literal["auto"] = _key((), tuple, ascending=True, auto=True)
    workers: int | Literal["auto"] | None = _key(None, int, least=0, auto=True)
    pin_memory: bool | None = _key(None, bool)
    prefetch: int | None = _key(None, int, least=1)


@dataclass(frozen=True)
class Accumulation(_Section):
    """A step's samples in micro-batches: so many (``steps``) or so large (``micro_batch``), synchronised at the last.

    ``global_batch`` counts the samples of an optimizer step over all ranks.
    """

    steps: int | Literal["auto"] = _key(1, int, least=1, auto=True)
    micro_batch: int | Literal["auto"] | None = _key(None, int, least=1, auto=True)
    global_batch: int | None = _key(None, int, least=1)
    delayed: bool = _key(False, bool)
    delayed_warmup_steps: int | None = _key(None, int, least=0)

    @property
    def splits(self) -> bool:
        """Whether a step may be more than one forward and backward."""
        return self.steps != 1 or self.micro_batch is not None or self.global_batch is not None


@dataclass(frozen=True)
class Parallel(_Section):
    """The degrees of each kind of parallelism. ``data = "auto"``: every rank that is left over.

    ``shard`` is the size of the group that ZeRO shards over; left alone, all data-parallel ranks. ``sequence`` and ``loss``
    say what else is divided by ``tensor``: norms and residuals by the sequence, the loss by the vocabulary. ``plan`` maps
    patterns of module names to how they are cut, where that is not found.
    """

    data: int | Literal["auto"] = _key("auto", int, least=1, auto=True)
    shard: int | Literal["auto"] | None = _key(None, int, least=1, auto=True)
    tensor: int = _key(1, int, least=1)
    sequence: bool = _key(False, bool)
    loss: bool = _key(False, bool)
    plan: Mapping[str, Any] | None = _key(None, dict)
    context: int = _key(1, int, least=1)
    expert: int = _key(1, int, least=1)
    pipeline: int = _key(1, int, least=1)
    schedule: str | None = _key(None, str)
    chunks: int = _key(1, int, least=1)
    microbatches: int | None = _key(None, int, least=1)
    split: tuple[str, ...] | str = _key("auto", tuple, str, auto=True)


@dataclass(frozen=True)
class Zero(_Section):
    """Sharding of optimizer state (1), gradients (2) and parameters (3).

    ``quantized_weights`` gathers parameters in int8; the shards that the optimizer updates stay as they are.
    """

    stage: int = _key(0, choices=(0, 1, 2, 3))
    quantized_weights: bool = _key(False, bool)
    reshard_after_forward: bool | int | None = _key(None, bool, int, least=1)
    prefetch: int | None = _key(None, int, least=0)


@dataclass(frozen=True)
class Communication(_Section):
    """How gradients travel between replicas."""

    bucket_mib: float | Literal["auto"] | None = _key(None, float, above=0, auto=True)
    first_bucket_mib: float | None = _key(None, float, above=0)
    gradient_as_view: bool | None = _key(None, bool)
    static_graph: bool | None = _key(None, bool)
    overlap: bool | None = _key(None, bool)
    compression: str = _key(
        "none",
        choices=("none", *CODECS),
    )
    compression_levels: int | None = _key(None, int, least=1)
    compression_rank: int | None = _key(None, int, least=1)
    compression_warmup_steps: int | None = _key(None, int, least=0)
    algorithm: str | None = _key(None, choices=("ring", "tree", "two_level"), auto=True)
    nccl: Mapping[str, Any] | None = _key(None, dict)


@dataclass(frozen=True)
class Checkpointing(_Section):
    """Activations recomputed in backward instead of kept."""

    mode: str = _key("none", choices=("none", "full", "selective", "budget"), auto=True)
    every: int = _key(1, int, least=1)
    modules: tuple[str, ...] = _key((), tuple)
    operators: tuple[str, ...] = _key((), tuple)
    budget_bytes: int | None = _key(None, int, least=0)


@dataclass(frozen=True)
class Offload(_Section):
    """State that lives off the device. ``auto``: by heat on the device, the host and, with ``path``, a disk, under
    ``device_bytes`` and ``cpu_bytes`` of each rank. ``tile_mib`` counts parameters whose update is one tile.
    """

    optimizer: str = _key("none", choices=("none", "cpu", "nvme", "auto"))
    parameters: str = _key("none", choices=("none", "cpu", "nvme", "auto"))
    activations: str = _key("none", choices=("none", "cpu", "nvme"))
    path: str | None = _key(None, str)
    tile_mib: float | None = _key(None, float, least=0.001)
    overlap: bool | None = _key(None, bool)
    device_bytes: int | None = _key(None, int, least=0)
    cpu_bytes: int | None = _key(None, int, least=0)


@dataclass(frozen=True)
class Activations(_Section):
    """What is saved for backward, and where it lies."""

    dtype: str | None = _key(None, choices=("bf16", "fp16", "fp8"))
    pool: bool = _key(False, bool)


@dataclass(frozen=True)
class Config:
    """The whole configuration. Raises ``UsageError`` naming the key and the way out."""

    engine: Literal["torch", "deepspeed"] = _key("torch", choices=("torch", "deepspeed"))
    precision: Precision = field(default_factory=Precision)
    compute: Compute = field(default_factory=Compute)
    data: Data = field(default_factory=Data)
    accumulation: Accumulation = field(default_factory=Accumulation)
    parallel: Parallel = field(default_factory=Parallel)
    zero: Zero = field(default_factory=Zero)
    communication: Communication = field(default_factory=Communication)
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    offload: Offload = field(default_factory=Offload)
    activations: Activations = field(default_factory=Activations)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "engine":
                each.metadata["key"].check("engine", value)
            elif not isinstance(value, _SECTIONS[each.name]):
                raise UsageError(
                    f"{each.name} must be a {_SECTIONS[each.name].__name__} or a [{each.name}] table, "
                    f"not {value!r}; Config.from_dict takes plain tables"
                )
        _check_together(self)

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """Every key, by path."""
        return tuple(path for path, _ in _paths())

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], source: str = "the configuration") -> Config:
        """From nested tables. ``source`` names the file in errors. Unknown keys are errors."""
        sections: dict[str, Any] = {}
        for name, value in tables.items():
            if name == "engine":
                sections[name] = value
            elif name not in _SECTIONS:
                raise UsageError(_unknown(source, str(name)))
            elif not isinstance(value, Mapping):
                raise UsageError(f"{source}: {name} is a table: write [{name}] and its keys below it")
            else:
                known = {each.name for each in fields(_SECTIONS[name])}
                for key in value:
                    if key not in known:
                        raise UsageError(_unknown(source, f"{name}.{key}"))
                sections[name] = _SECTIONS[name](**value)
        return cls(**sections)

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """From a TOML file. Raises ``UnreadableInput`` when it cannot be read or is not TOML."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            tables = tomllib.loads(text)
        except OSError as error:
            raise UnreadableInput(
                f"cannot read the configuration {path}: {error.strerror or error}"
            ) from error
        except (ValueError, RecursionError) as error:  # also of a number, or of tables, without end
            raise UnreadableInput(f"{path} is not TOML: {error}") from error
        return cls.from_dict(tables, source=str(path))

    @classmethod
    def from_deepspeed(cls, source: str | Path | Mapping[str, Any], *, ranks: int | None = None) -> Config:
        """From DeepSpeed's JSON, a path or a dictionary; see :func:`trine.optim.dialects.read_deepspeed`."""
        from trine.optim.dialects import read_deepspeed

        return read_deepspeed(source, ranks=ranks).config

    @classmethod
    def from_accelerate(
        cls, source: str | Path | Mapping[str, Any], *, ranks: int | None = None, ddp: Any = None
    ) -> Config:
        """From Accelerate's YAML, a path or a dictionary; see :func:`trine.optim.dialects.read_accelerate`."""
        from trine.optim.dialects import read_accelerate

        return read_accelerate(source, ranks=ranks, ddp=ddp).config

    def to_dict(self) -> dict[str, Any]:
        """Nested tables of the keys that differ from their default: what this configuration changes."""
        tables: dict[str, Any] = {}
        for path, value in self.changes().items():
            section, _, key = path.rpartition(".")
            (tables.setdefault(section, {}) if section else tables)[key] = value
        return tables

    def to_toml(self) -> str:
        """TOML of :meth:`to_dict`; reading it back gives an equal configuration."""
        tables = self.to_dict()
        lines = [f"{key} = {spell(value)}" for key, value in tables.items() if not isinstance(value, dict)]
        for section, keys in tables.items():
            if isinstance(keys, dict):
                lines += ["", f"[{section}]", *(f"{key} = {spell(value)}" for key, value in keys.items())]
        return "\n".join(lines).strip() + "\n" if lines else ""

    def changes(self) -> dict[str, Any]:
        """Key path → value of every key that differs from its default."""
        found: dict[str, Any] = {}
        for path, default in _paths():
            value = self[path]
            if value != default:
                found[path] = list(value) if isinstance(value, tuple) else value
        return found

    def with_changes(self, changes: Mapping[str, Any]) -> Config:
        """A copy with these key paths set, as analyses recommend them. Unknown paths are errors."""
        sections: dict[str, dict[str, Any]] = {}
        top: dict[str, Any] = {}
        known = set(self.keys())
        for path, value in changes.items():
            if path not in known:
                raise UsageError(_unknown("the change", str(path)))
            section, _, key = path.rpartition(".")
            (sections.setdefault(section, {}) if section else top)[key] = value
        replaced = {name: replace(getattr(self, name), **keys) for name, keys in sections.items()}
        return replace(self, **replaced, **top)

    def __getitem__(self, path: str) -> Any:
        """The value of a key path, ``config["precision.dtype"]``."""
        value: Any = self
        for name in path.split("."):
            if not hasattr(value, name):
                raise UsageError(_unknown("the configuration", path))
            value = getattr(value, name)
        return value


_SECTIONS: Mapping[str, Any] = {
    "precision": Precision,
    "compute": Compute,
    "data": Data,
    "accumulation": Accumulation,
    "parallel": Parallel,
    "zero": Zero,
    "communication": Communication,
    "checkpointing": Checkpointing,
    "offload": Offload,
    "activations": Activations,
}


def _paths() -> Iterator[tuple[str, Any]]:
    yield "engine", "torch"
    for section, kind in _SECTIONS.items():
        for each in fields(kind):
            yield f"{section}.{each.name}", each.metadata["key"].default


def _unknown(source: str, path: str) -> str:
    """The error for a key that does not exist, with the likeliest one that does."""
    paths = Config.keys()
    if path in paths and "." in path and source != "the change":
        section, _, key = path.partition(".")
        return f"{source}: {path} is a path: write it as the table {section} with the key {key}, or Config().with_changes"
    translated = foreign_name(path)
    if translated:
        return f"{source}: there is no key {path}; here it is {translated}"
    if "." not in path:
        if path in _SECTIONS:
            first = next(known for known in paths if known.startswith(f"{path}."))
            return f"{source}: {path} is a table and takes no value itself: set one of its keys, as {first}"
        tables = difflib.get_close_matches(path, _SECTIONS, n=1)
        if tables:
            return f"{source}: there is no table [{path}]; did you mean [{tables[0]}]?"
    near = difflib.get_close_matches(path, paths, n=1, cutoff=0.6)
    if not near:  # the right name under the wrong table
        last = path.rpartition(".")[2]
        near = [known for known in paths if known.rpartition(".")[2] == last]
    if not near:
        lasts = {known.rpartition(".")[2]: known for known in paths}
        near = [lasts[name] for name in difflib.get_close_matches(path.rpartition(".")[2], lasts, n=1)]
    if near:
        return f"{source}: there is no key {path}; did you mean {near[0]}?"
    section = path.partition(".")[0]
    if section in _SECTIONS:
        listed = ", ".join(each.name for each in fields(_SECTIONS[section]))
        return f"{source}: there is no key {path}; [{section}] has {listed}"
    return f"{source}: there is no key {path}; the tables are {', '.join(_SECTIONS)}"


def _check_together(config: Config) -> None:
    """Combinations that no engine can mean, whatever the machine. Each error names both keys."""
    data, communication = config.data, config.communication
    if data.prefetch is not None and data.workers in (None, 0):
        raise UsageError("data.prefetch needs workers to fetch ahead: set data.workers to 1 or more as well")
    if data.packed_length is not None and not data.packing:
        raise UsageError("data.packed_length is the length of packed rows: set data.packing to true as well")
    if config.precision.loss_scale is not None and config.precision.dtype != "fp16":
        raise UsageError(
            'precision.loss_scale belongs to precision.dtype = "fp16"; bf16 and fp32 need no scaling: drop it'
        )
    if communication.compression_levels is not None and communication.compression != "qsgd":
        raise UsageError('communication.compression_levels needs communication.compression = "qsgd"')
    if communication.compression_rank is not None and communication.compression != "powersgd":
        raise UsageError('communication.compression_rank needs communication.compression = "powersgd"')
    if config.checkpointing.budget_bytes is not None and config.checkpointing.mode != "budget":
        raise UsageError('checkpointing.budget_bytes needs checkpointing.mode = "budget"')
    offload = config.offload
    if "nvme" in (offload.optimizer, offload.parameters, offload.activations) and offload.path is None:
        raise UsageError('offload to "nvme" needs offload.path, a folder on that disk')
    accumulation = config.accumulation
    if accumulation.delayed_warmup_steps is not None and not accumulation.delayed:
        raise UsageError(
            "accumulation.delayed_warmup_steps belongs to accumulation.delayed: set that as well"
        )
    both = accumulation.micro_batch is not None and accumulation.steps not in (1, "auto")
    if both and (accumulation.global_batch is None or accumulation.micro_batch == "auto"):
        raise UsageError(
            "accumulation.steps and accumulation.micro_batch both say how to split a batch: keep one of them"
        )
