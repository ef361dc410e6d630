"""Configurations of several kinds of parallelism and of offloading, drawn at random beside other keys.

What becomes of one is :mod:`random_combinations`' to say: it is refused in one line, or trains as one process does on the
whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from parity_ranks import parity
from random_combinations import OTHER_TRAINING, STEPS, Drawn, apart, faults_of_answers

__all__ = ["VALUES", "draw_layout", "faults_of_layout"]

#: What sums in another order is off by, beside what techniques state: with each dtype.
ROUNDING = {"float64": 1e-10, "float32": 1e-5}

#: Kind → what makes it, on two ranks of a group, and the model that it needs.
KINDS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "tensor": ({"parallel.tensor": 2}, {"heads": 4}),
    "pipeline": ({"parallel.pipeline": 2}, {"layers": 4}),
    "expert": ({"parallel.expert": 2}, {"experts": 4}),
    "context": ({"parallel.context": 2}, {"attention": "sdpa"}),
    "shard": ({"zero.stage": 3}, {}),
    "offload": ({"offload.optimizer": "cpu"}, {}),
}

#: Key → values to draw from: those of layouts and of offloading.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "offload.cpu_bytes": (20_000, 10_000_000),
    "offload.device_bytes": (30_000, 10_000_000),
    "offload.optimizer": ("cpu", "nvme", "auto"),
    "offload.overlap": (True, False),
    "offload.parameters": ("cpu", "nvme", "auto"),
    "offload.tile_mib": (0.001, 0.01, 1.0),
    "parallel.chunks": (1, 2, 3),
    "parallel.context": (2, 4),
    "parallel.expert": (2, 4),
    "parallel.loss": (True,),
    "parallel.microbatches": (1, 2, 3, 4, 8),
    "parallel.pipeline": (2, 4),
    "parallel.plan": ({"blocks.*.up": "column", "blocks.*.down": "row"}, {"head": "replicate"}),
    "parallel.schedule": (
        "gpipe",
        "1f1b",
        "interleaved",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv",
        "dualpipev",
    ),
    "parallel.sequence": (True,),
    "parallel.split": ("auto", "layers", ["blocks.1"], ["blocks.3"]),
    "parallel.tensor": (2, 4),
}

#: Keys of other techniques that mean something beside layouts, and their values; what is refused is drawn seldom.
BESIDE: Mapping[str, tuple[Any, ...]] = {
    "accumulation.micro_batch": (1, 2, 3, "auto"),
    "accumulation.steps": (2, 4),
    "activations.dtype": ("bf16", "fp16", "fp8"),
    "activations.pool": (True,),
    "checkpointing.budget_bytes": (100_000, 10_000_000),
    "checkpointing.every": (2,),
    "checkpointing.mode": ("full", "selective", "auto"),
    "checkpointing.modules": (["blocks.0"], ["blocks.*.attention"]),
    "checkpointing.operators": (["matmul"], ["batched_matmul", "activation"]),
    "compute.attention": ("sdpa", "flash", "varlen"),
    "compute.fuse": (["optimizer"],),
    "data.packing": (True,),
    "data.shape_buckets": ([16, 32],),
    "data.workers": (0,),
    "offload.activations": ("cpu", "nvme"),
    "parallel.data": (1, 2),
    "parallel.shard": (1, 2),
    "precision.dtype": ("bf16", "fp16"),
    "precision.master_weights": (True,),
    "zero.prefetch": (0, 2),
    "zero.quantized_weights": (True,),
    "zero.reshard_after_forward": (True, False),
    "zero.stage": (2, 3),
}
SELDOM: Mapping[str, tuple[Any, ...]] = {
    "accumulation.delayed": (True,),
    "communication.algorithm": ("ring",),
    "communication.bucket_mib": (0.05,),
    "communication.compression": ("bf16", "powersgd"),
    "communication.overlap": (False,),
    "engine": ("deepspeed",),
    "precision.loss_scale": (1024.0,),
    "zero.stage": (1,),
}

#: Key → what it is meaningless without, set along most of the time.
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "activations.pool": {"offload.activations": "cpu"},
    "checkpointing.budget_bytes": {"checkpointing.mode": "budget"},
    "checkpointing.every": {"checkpointing.mode": "full"},
    "checkpointing.modules": {"checkpointing.mode": "full"},
    "checkpointing.operators": {"checkpointing.mode": "selective"},
    "offload.cpu_bytes": {"offload.optimizer": "auto"},
    "offload.device_bytes": {"offload.optimizer": "auto"},
    "offload.overlap": {"offload.optimizer": "cpu"},
    "offload.parameters": {"offload.optimizer": "cpu", "zero.stage": 3},
    "offload.tile_mib": {"offload.optimizer": "nvme"},
    "precision.loss_scale": {"precision.dtype": "fp16"},
    "precision.master_weights": {"precision.dtype": "bf16", "zero.stage": 3},
    "zero.prefetch": {"zero.stage": 3},
    "zero.quantized_weights": {"zero.stage": 3},
    "zero.reshard_after_forward": {"zero.stage": 3},
    "parallel.shard": {"zero.stage": 3},
}
#: Kind → the keys about it, which mean nothing without it.
OF_KIND = {
    "tensor": ("parallel.loss", "parallel.sequence", "parallel.plan"),
    "pipeline": ("parallel.schedule", "parallel.chunks", "parallel.microbatches", "parallel.split"),
    "expert": (),
    "context": (),
    "shard": ("zero.reshard_after_forward", "zero.prefetch", "zero.quantized_weights", "parallel.shard"),
    "offload": ("offload.parameters", "offload.tile_mib", "offload.overlap", "offload.device_bytes"),
}
_SEVERAL_CHUNKS = ("interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def draw_layout(generator: random.Random, ranks: int) -> Drawn:
    """One to three kinds on so many ranks, one to four keys beside them, and a run to use them in."""
    kinds = _kinds(generator, ranks)
    changes: dict[str, Any] = {}
    model: dict[str, Any] = {"heads": 4}
    for kind in kinds:
        changes |= KINDS[kind][0]
        model |= KINDS[kind][1]
    own = [key for kind in kinds for key in OF_KIND[kind]]
    if ranks == 4 and len(kinds) == 1 and generator.random() < 0.4 and kinds[0] not in ("shard", "offload"):
        changes[f"parallel.{kinds[0]}"] = 4
    count = len(changes) + generator.randint(1, 4)
    while len(changes) < count:
        key, value = _key(generator, own)
        changes[key] = value
        if key in NEEDS and generator.random() < 0.95:
            changes |= {name: needed for name, needed in NEEDS[key].items() if name not in changes}
    _complete(generator, changes, model)
    documents = _documents(generator, changes)
    rounded = any(key in changes for key in ("precision.dtype", "activations.dtype"))
    return Drawn(
        changes=changes,
        data="documents" if documents else "windows",
        optimizer=generator.choice(("adamw", "sgd")),
        clip_norm=generator.choice((None, None, 0.5)),
        dropout=0.0,
        dtype="float32" if rounded or generator.random() < 0.2 else "float64",
        model=model,
        example=generator.random() < 0.5,
    )


def _kinds(generator: random.Random, ranks: int) -> list[str]:
    """Those whose degrees have room on so many ranks; now and then they have none."""
    kinds = generator.sample(sorted(KINDS), len(KINDS))
    room = ranks if generator.random() < 0.95 else 2 * ranks
    chosen: list[str] = []
    for kind in kinds[: generator.choice((1, 2, 3))]:
        taken = 1 if kind == "offload" or (kind == "shard" and {"expert", "context"} & set(chosen)) else 2
        if taken <= room:
            chosen.append(kind)
            room //= taken
    return chosen


def _key(generator: random.Random, own: Sequence[str]) -> tuple[str, Any]:
    if own and generator.random() < 0.45:
        key = generator.choice(own)
        return key, generator.choice({**VALUES, **BESIDE}[key])
    source = generator.choices((BESIDE, VALUES, SELDOM), (0.7, 0.24, 0.06))[0]
    key = generator.choice(
        [name for name in sorted(source) if not name.startswith("parallel.")] or sorted(source)
    )
    return key, generator.choice(source[key])


def _complete(generator: random.Random, changes: dict[str, Any], model: dict[str, Any]) -> None:
    """Most of the time what a schedule cannot do without; the model has as many layers as there are stages."""
    if changes.get("parallel.schedule") in _SEVERAL_CHUNKS and generator.random() < 0.9:
        changes.setdefault("parallel.chunks", 2)
    if changes.keys() & {"offload.device_bytes", "offload.cpu_bytes"} and generator.random() < 0.9:
        changes["offload.optimizer"] = "auto"
    if (
        "zero.stage" in changes
        and changes.get("offload.parameters", "cpu") != "cpu"
        and generator.random() < 0.9
    ):
        changes["offload.parameters"] = "cpu"
    stages = changes.get("parallel.pipeline", 1) * changes.get("parallel.chunks", 1)
    if stages > 1:
        model["layers"] = max(4, stages)


def _documents(generator: random.Random, changes: dict[str, Any]) -> bool:
    """Of unequal lengths; contexts take rows as wide as their parts need."""
    if "parallel.context" in changes and generator.random() < 0.2:
        changes["data.shape_buckets"] = [16, 32]
    if changes.keys() & {"data.packing", "data.shape_buckets"}:
        return generator.random() < 0.9
    return "parallel.context" not in changes and generator.random() < 0.2


def faults_of_layout(drawn: Mapping[str, Any], by_rank: list[dict[str, Any]]) -> str:
    """What is wrong with these ranks' answers, beside one process on the whole batch."""
    said = faults_of_answers(drawn, by_rank)
    if said or any("refused" in answer for answer in by_rank):
        return said
    tolerance = by_rank[0]["tolerance"]
    inexact = drawn["data"] == "documents" and drawn["changes"].get("parallel.context", 1) > 1
    if tolerance is None or inexact:  # ranks of a context count other tokens each
        return ""
    if tolerance >= OTHER_TRAINING and drawn["optimizer"] == "sgd":
        return ""
    by_rank[0]["allowed"] = allowed = tolerance + ROUNDING[drawn["dtype"]]
    found = [sum(values) / len(by_rank) for values in zip(*(a["losses"] for a in by_rank), strict=True)]
    expected = _expected(drawn, by_rank[0]["data_ranks"])
    if len(found) != len(expected):
        return f"{len(found)} steps instead of {len(expected)}"
    # A tolerance is of single precision: what nothing rounds must be as near as double precision is.
    worst = max(apart(a, b) for a, b in zip(found, expected, strict=True))
    by_rank[0]["worst"] = worst
    return "" if worst <= allowed else f"{worst:.2e} apart, {allowed:.0e} allowed: {found} {expected}"


def _expected(drawn: Mapping[str, Any], data_ranks: int) -> tuple[float, ...]:
    shares = data_ranks if drawn["data"] == "documents" else 1
    model = tuple(sorted({**drawn["model"], "dropout": 0.0}.items()))
    found: tuple[float, ...] = parity._plain_losses(
        drawn["dtype"], drawn["optimizer"], model, drawn["data"], drawn["clip_norm"], shares, STEPS
    )
    return found
