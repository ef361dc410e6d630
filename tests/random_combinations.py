"""Configurations drawn at random, and what becomes of one on a rank: refused with nothing touched, or trained."""

from __future__ import annotations

import math
import multiprocessing
import random
import re
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from parity_ranks import parity

__all__ = ["Drawn", "apart", "attempt", "draw", "faults_of", "faults_of_answers"]

STEPS = 6
#: Stated tolerances from here on are of techniques that change the training itself: late updates, coarse compression.
OTHER_TRAINING = 0.05

#: Key → values to draw from. What only a CUDA device or a compiler can do is left out.
VALUES: Mapping[str, tuple[Any, ...]] = {
    "accumulation.delayed": (True,),
    "accumulation.delayed_warmup_steps": (1, 3),
    "accumulation.global_batch": (8,),
    "accumulation.micro_batch": (1, 2, 3, "auto"),
    "accumulation.steps": (2, 4),
    "activations.dtype": ("bf16", "fp16", "fp8"),
    "activations.pool": (True,),
    "checkpointing.budget_bytes": (100_000, 10_000_000),
    "checkpointing.every": (2,),
    "checkpointing.mode": ("full", "selective", "auto"),
    "checkpointing.modules": (["blocks.0"], ["blocks.*.mlp"]),
    "checkpointing.operators": (["matmul"], ["batched_matmul", "activation"]),
    "communication.algorithm": ("ring", "tree", "two_level", "auto"),
    "communication.bucket_mib": (0.05, 2.0, "auto"),
    "communication.compression": ("bf16", "fp16", "int8", "qsgd", "powersgd", "onebit", "terngrad"),
    "communication.compression_levels": (15,),
    "communication.compression_rank": (2,),
    "communication.compression_warmup_steps": (0, 2),
    "communication.first_bucket_mib": (0.02, 1.0),
    "communication.gradient_as_view": (True, False),
    "communication.nccl": ({"algorithm": "ring"},),
    "communication.overlap": (True, False),
    "communication.static_graph": (True,),
    "compute.attention": ("sdpa", "flash", "auto", "varlen", "flex"),
    "compute.fuse": (["optimizer"],),
    "data.length_grouped": (True,),
    "data.packed_length": (32, 64),
    "data.packing": (True,),
    "data.pin_memory": (True,),
    "data.prefetch": (2,),
    "data.shape_buckets": ([16, 32], "auto"),
    "data.workers": (0, 1, "auto"),
    "offload.activations": ("cpu", "nvme"),
    "offload.device_bytes": (0, 100_000),
    "parallel.data": (1, 2, "auto"),
    "parallel.shard": (1, 2, "auto"),
    "precision.dtype": ("bf16", "fp16", "fp32"),
    "precision.float8": (True,),
    "precision.loss_scale": ("auto", 1024.0),
    "precision.master_weights": (True,),
    "precision.tf32": (True, False),
    "zero.prefetch": (0, 2),
    "zero.quantized_weights": (True,),
    "zero.reshard_after_forward": (True, False, 2),
    "zero.stage": (1, 2, 3),
}
#: Key → what it is meaningless without; set along most of the time, so that fewer draws end in the same refusals.
NEEDS: Mapping[str, Mapping[str, Any]] = {
    "accumulation.delayed_warmup_steps": {"accumulation.delayed": True},
    "checkpointing.budget_bytes": {"checkpointing.mode": "budget"},
    "checkpointing.every": {"checkpointing.mode": "full"},
    "checkpointing.operators": {"checkpointing.mode": "selective"},
    "checkpointing.modules": {"checkpointing.mode": "full"},
    "communication.compression_levels": {"communication.compression": "qsgd"},
    "communication.compression_rank": {"communication.compression": "powersgd"},
    "communication.compression_warmup_steps": {"communication.compression": "onebit"},
    "data.packed_length": {"data.packing": True},
    "data.prefetch": {"data.workers": 1},
    "offload.device_bytes": {"offload.activations": "cpu"},
    "parallel.shard": {"zero.stage": 2},
    "precision.loss_scale": {"precision.dtype": "fp16"},
    "precision.master_weights": {"precision.dtype": "bf16"},
    "zero.prefetch": {"zero.stage": 3},
    "zero.quantized_weights": {"zero.stage": 3},
    "zero.reshard_after_forward": {"zero.stage": 3},
}
#: Seldom: most draws with these end in the one refusal that they have on a CPU.
SELDOM = frozenset(
    {"communication.nccl", "data.pin_memory", "precision.float8", "precision.tf32", "data.length_grouped"}
)


class Drawn(dict[str, Any]):
    """A case's parts, picklable: ``changes``, ``data``, ``optimizer``, ``dropout``; of a layout ``dtype``, ``model``, ``example`` too."""


def draw(generator: random.Random) -> Drawn:
    """Two to five keys with values, and a run to use them in."""
    changes: dict[str, Any] = {}
    count = generator.randint(2, 5)
    while len(changes) < count:
        key = generator.choice(sorted(VALUES))
        if key in SELDOM and generator.random() < 0.9:
            continue
        changes[key] = generator.choice(VALUES[key])
        if key in NEEDS and generator.random() < 0.95:
            changes |= {name: value for name, value in NEEDS[key].items() if name not in changes}
    needs_documents = changes.keys() & {"data.packing", "data.shape_buckets", "data.length_grouped"}
    documents = generator.random() < (0.9 if needs_documents else 0.15)
    return Drawn(
        changes=changes,
        data="documents" if documents else "windows",
        optimizer=generator.choice(("adamw", "sgd")),
        clip_norm=generator.choice((None, None, 0.5)),
        dropout=0.0,
    )


def _case(drawn: Mapping[str, Any], ranks: int) -> Any:
    return parity.Case(
        "drawn",
        drawn["changes"],
        ranks=ranks,
        dtype=drawn.get("dtype", "float32"),
        optimizer=drawn["optimizer"],
        model={**drawn.get("model", {}), "dropout": drawn["dropout"]},
        data=drawn["data"],
    )


def attempt(rank: int, drawn: Mapping[str, Any], ranks: int, folder: str) -> dict[str, Any]:
    """On this rank: ``refused`` with what was left behind, or ``losses`` and ``sums``; ``failure`` where it broke."""
    import torch

    import trine

    torch.set_num_threads(1)
    # A pool's ranks are daemons, which may have no children; a loader's workers end with their iterator.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    case = _case(drawn, ranks)
    torch.manual_seed(0)
    changes = dict(drawn["changes"])
    if {"nvme", "auto"} & {
        changes.get(f"offload.{kind}") for kind in ("optimizer", "parameters", "activations")
    }:
        changes["offload.path"] = folder
    model = parity.model_of(case)
    optimizer = parity.optimizer_of(case, model)
    before = _surroundings(model)
    try:
        config = trine.Config().with_changes(changes)
        from trine.samples.gpt import loss_of

        example = parity.batch_of(case, 0, 0, ranks) if drawn.get("example") else None
        engine = trine.optimize(
            model, optimizer, config, loss_fn=loss_of, clip_norm=drawn.get("clip_norm"), example=example
        )
    except trine.TrineError as error:
        said = {"refused": str(error), "kind": type(error).__name__}
        is_cut = "which has been changed" in str(error)  # then it says so, and there is nothing to go on with
        return said if is_cut else said | _aftermath(case, model, optimizer, before)
    except BaseException:  # noqa: BLE001 - told to the test
        return {"failure": traceback.format_exc()}
    try:
        return _trained(case, engine, model, config, rank, before)
    except trine.TrineError as error:
        return {"refused": str(error), "kind": type(error).__name__, "late": engine.step_index}
    except BaseException:  # noqa: BLE001 - told to the test
        return {"failure": traceback.format_exc()}
    finally:
        engine.close()


def plain(rank: int, drawn: Mapping[str, Any], ranks: int) -> list[float]:
    """Losses of the same run under a configuration that changes nothing."""
    found: list[float] = attempt(rank, {**drawn, "changes": {}}, ranks, "")["losses"]
    return found


def _trained(case: Any, engine: Any, model: Any, config: Any, rank: int, before: Any) -> dict[str, Any]:
    from trine.optim.techniques import tolerance_of
    from trine.record.errors import UsageError

    losses = [
        float(engine.train_step(batch))
        for batch in engine.steps(_loader(case, engine.data_rank, engine.data_ranks))
    ]
    sums = _sums(engine.model)
    engine.close()
    try:
        tolerance = tolerance_of(config).loss
        if engine._update.skipped:  # fp16's scale came down: the plain run took a step more
            tolerance = None
        elif tolerance >= OTHER_TRAINING and case.optimizer == "sgd":
            tolerance = None  # a rate at the edge: what trains otherwise by design leaves it to either side
    except UsageError:
        tolerance = None  # steps of other samples
    return {
        "losses": losses,
        "sums": sums,
        "tolerance": tolerance,
        "threads": _threads_left(before),
        "data_ranks": engine.data_ranks,
    }


def _threads_left(before: Mapping[str, Any]) -> list[str]:
    """After a while: the queues of a loader's workers end a little later than the workers."""
    for _ in range(40):
        left = sorted(t.name for t in threading.enumerate() if t.name not in before["threads"])
        if not left:
            break
        time.sleep(0.05)
    return left


def _sums(model: Any) -> dict[str, float]:
    """By name; of a pipeline's parameters those that this rank has, and of spread experts none, which differ by rank."""
    import torch

    sums = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if ".experts." not in name:
            sums[name] = float(value.double().mul(torch.arange(value.numel()).view_as(value) + 1.0).sum())
    return sums


class _Samples:
    """The rank's samples of every step, one by one, for a loader that can be made anew."""

    def __init__(self, case: Any, rank: int, ranks: int) -> None:
        self._case, self._rank, self._ranks = case, rank, ranks
        self._share = parity.BATCH // ranks

    def __len__(self) -> int:
        return STEPS * self._share

    def __getitem__(self, index: int) -> Any:
        step, place = divmod(index, self._share)
        if self._case.data == "documents":
            return parity._document(step * parity.BATCH + self._rank * self._share + place)
        ids, targets = parity.batch_of(self._case, step, self._rank, self._ranks)
        return ids[place], targets[place]


def _loader(case: Any, rank: int, ranks: int) -> Any:
    from torch.utils.data import DataLoader

    from trine.samples.text import pad_documents

    collate = pad_documents if case.data == "documents" else None
    return DataLoader(_Samples(case, rank, ranks), batch_size=parity.BATCH // ranks, collate_fn=collate)  # type: ignore[arg-type]


def _surroundings(model: Any) -> dict[str, Any]:
    from torch import distributed

    groups = distributed.is_initialized() and len(distributed.distributed_c10d._world.pg_map)
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "groups": groups,
        "hooks": _hooks(model),
    }


def _hooks(model: Any) -> int:
    """What hangs on modules and parameters."""
    on_modules = sum(
        len(found)
        for module in model.modules()
        for name, found in vars(module).items()
        if name.endswith("_hooks") and hasattr(found, "__len__")
    )
    replaced = sum("forward" in vars(module) for module in model.modules())
    on_parameters = sum(
        len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) + len(p._backward_hooks or ())
        for p in model.parameters()
    )
    return on_modules + replaced + on_parameters


def _aftermath(case: Any, model: Any, optimizer: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """What a refusal left behind: nothing, and a model that trains as one that nobody touched."""
    import torch

    after = _surroundings(model)
    left = [f"{name}: {before[name]} then {after[name]}" for name in before if before[name] != after[name]]
    fresh = parity.model_of(case)
    torch.manual_seed(1)
    expected = _two_steps(case, fresh, parity.optimizer_of(case, fresh))
    torch.manual_seed(1)
    found = _two_steps(case, model, optimizer)
    if found != expected:
        left.append(f"losses afterwards {found}, not {expected}")
    return {"left": left}


def _two_steps(case: Any, model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(2):
        loss, shown = parity._plain_loss(case, model, step, 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(shown))
    return losses


def faults_of_answers(drawn: Mapping[str, Any], by_rank: list[dict[str, Any]]) -> str:
    """What is wrong with these ranks' answers whatever the losses: a failure, a bad refusal, replicas that differ."""
    for rank, answer in enumerate(by_rank):
        if "failure" in answer:
            return f"rank {rank}: {answer['failure']}"
    refused = [answer.get("refused") for answer in by_rank]
    if any(refused):
        return _faults_of_refusal(drawn, by_rank, refused)
    first: dict[str, float] = {}
    for answer in by_rank:
        for name, total in answer["sums"].items():
            if first.setdefault(name, total) != total:
                return f"replicas differ: {name} by {abs(first[name] - total):.1e} of {total:.1e}"
        if answer["threads"]:
            return f"threads left: {answer['threads']}"
    return ""


def faults_of(
    drawn: Mapping[str, Any], by_rank: list[dict[str, Any]], plain_by_rank: list[list[float]]
) -> str:
    """What is wrong with these ranks' answers; empty where the configuration was refused well or trained the same."""
    said = faults_of_answers(drawn, by_rank)
    if said or any("refused" in answer for answer in by_rank):
        return said
    tolerance = by_rank[0]["tolerance"]
    if tolerance is None:
        return ""
    steps = [_mean(answer["losses"] for answer in by_rank), _mean(plain_by_rank)]
    if len(steps[0]) != len(steps[1]):
        return f"{len(steps[0])} steps instead of {len(steps[1])}"
    worst = max(apart(found, expected) for found, expected in zip(*steps, strict=True))
    by_rank[0]["worst"] = worst
    return "" if worst <= tolerance else f"{worst:.2e} apart, {tolerance:.0e} stated: {steps[0]} {steps[1]}"


def _faults_of_refusal(drawn: Mapping[str, Any], by_rank: list[dict[str, Any]], refused: list[Any]) -> str:
    # Of ranks' own batches each says its own numbers; of one rank's trouble the others say whose it is.
    if None in refused or len({re.sub(r"^on rank \d+: |\d+", "", said) for said in refused}) > 1:
        return f"ranks disagree: {refused}"
    if "\n" in refused[0]:
        return f"more than one line: {refused[0]}"
    if by_rank[0].get("late", 0) > 0:
        return f"refused at step {by_rank[0]['late']}: {refused[0]}"
    if not any(key in refused[0] or key.partition(".")[2] in refused[0] for key in drawn["changes"]):
        return f"names no key: {refused[0]}"
    left = [said for answer in by_rank for said in answer.get("left", ())]
    return f"left behind after {refused[0]!r}: {left}" if left else ""


def _mean(lists: Any) -> list[float]:
    lists = list(lists)
    return [sum(values) / len(lists) for values in zip(*lists, strict=True)]


def apart(found: float, expected: float) -> float:
    """Relative to what is expected; infinite where it is no number."""
    return abs(found - expected) / abs(expected) if math.isfinite(found) else float("inf")
