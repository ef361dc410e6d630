"""What ``test_data_parallel.py`` runs on live ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import optim_cases
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import trine
from trine.optim.runtime import bucket_tuning
from trine.optim.runtime.buckets import predict
from trine.record import events
from trine.samples.gpt import loss_of


def buckets_of(wrapped: Any) -> list[int]:
    """Bytes of the buckets that DDP has now."""
    data = wrapped._get_ddp_logging_data()
    return [int(size) for size in (data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]).split(",")]


def optimized(changes: dict[str, Any], model: Any = None) -> Any:
    model = optim_cases.small_gpt() if model is None else model
    return trine.optimize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        trine.Config().with_changes(changes),
        loss_fn=loss_of,
    )


def checksum(model: Any) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters())


def buckets_after_steps(rank: int, ranks: int, changes: dict[str, Any]) -> Any:
    """DDP's buckets after four steps, the metrics told, effects, and gradients' bytes in the order of readiness."""
    told: dict[str, list[float]] = {}

    def listen(kind: str, values: Any) -> None:
        if kind == "metric":
            told.setdefault(values["name"], []).append(values["value"])

    stop = events.listen(listen)
    try:
        engine = optimized(changes)
        for batch in engine.steps(optim_cases.batches(4, 2, rank, ranks)):
            engine.train_step(batch)
        indices = engine.model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        parameters = list(engine.model.parameters())
        ordered = [parameters[int(n)].numel() * 4 for n in indices.replace(",", " ").split()]
        return buckets_of(engine.model), told, [str(effect) for effect in engine.effects], ordered
    finally:
        stop()


def tuned(rank: int, ranks: int, alpha_s: float, bytes_per_s: float, extra: dict[str, Any]) -> Any:
    """``auto`` on a link of these numbers: DDP's buckets before and after the decision, effects, replicas, the metric.

    A reference to the first wrapper is kept and called after the decision, as a loop of the user's own may do.
    """
    link = bucket_tuning_link(alpha_s, bytes_per_s)
    with mock.patch("trine.optim.runtime.links.link_of", lambda *arguments: link):
        engine = optimized({"communication.bucket_mib": "auto", **extra})
    first = engine.model
    data = optim_cases.batches(8, 2, rank, ranks)
    before: list[int] = []
    caps = []
    for position, batch in enumerate(engine.steps(data)):
        engine.train_step(batch)
        if position == 2:
            before = buckets_of(engine.model)
        caps.append(engine._assembly.metrics["communication/bucket_bytes"]())
    with torch.no_grad():
        same = bool((first(data[0][0]) == engine.model(data[0][0])).all())
    hooks = [p for p in engine.model.parameters() if p._post_accumulate_grad_hooks]
    return {
        "before": before,
        "after": buckets_of(engine.model),
        "effects": [str(effect) for effect in engine.effects],
        "caps": caps,
        "old wrapper works": same,
        "hooks left": len(hooks),
        "checksum": checksum(engine.model),
        "rewrapped": engine.model is not first,
    }


def bucket_tuning_link(alpha_s: float, bytes_per_s: float) -> Any:
    from trine.optim.runtime.links import Link

    return Link(alpha_s, bytes_per_s, "gloo", 2, "a test")


def own_loop_through_the_decision(rank: int, ranks: int, micro_batches: int, extra: dict[str, Any]) -> Any:
    """A loop of the user's own that keeps ``engine.model``: losses and parameters against the run that never rewraps."""

    def run(steps_to_measure: int) -> Any:
        link = bucket_tuning_link(1e-5, 1e8)
        with (
            mock.patch.object(bucket_tuning, "MEASURED_STEPS", steps_to_measure),
            mock.patch.object(
                bucket_tuning,
                "best_cap",
                lambda gradients, *rest: predict(gradients, 2**14, lambda size: 0.0),
            ),
            mock.patch("trine.optim.runtime.links.link_of", lambda *arguments: link),
        ):
            model = optim_cases.small_gpt().double()
            engine = trine.optimize(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                trine.Config().with_changes(
                    {"communication.bucket_mib": "auto", "accumulation.steps": micro_batches, **extra}
                ),
            )
            kept = engine.model
            losses = []
            for ids, targets in engine.steps(optim_cases.batches(12, 2, rank, ranks)):
                logits = kept(ids) if micro_batches == 1 else engine(ids)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
        return losses, checksum(model), engine.model is not kept

    return run(3), run(1000)


def adopted(rank: int, ranks: int, changes: dict[str, Any]) -> Any:
    """What of a program's own wrapper survives other options: its bucket size, its hook, its buffers, its group."""
    group = distributed.new_group(list(range(ranks)))
    calls = [0]

    def hook(state: Any, bucket: Any) -> Any:
        calls[0] += 1
        future = torch.futures.Future()
        flat = bucket.buffer().div_(ranks)
        distributed.all_reduce(flat, group=state)
        future.set_result(flat)
        return future

    hook.__annotations__ = {}
    inner = optim_cases.small_gpt()
    inner.register_buffer("mine", torch.tensor(float(rank)))  # of this rank alone
    given = DistributedDataParallel(inner, bucket_cap_mb=7, process_group=group, forward_sync_buffers=False)
    inner.mine.fill_(float(rank))
    given.register_comm_hook(group, hook)
    engine = optimized(changes, given)
    engine.train_step(optim_cases.batches(1, 2, rank, ranks)[0])
    wrapped = engine.model
    return {
        "anew": wrapped is not given,
        "cap": wrapped.bucket_bytes_cap,
        "group": wrapped.process_group is group,
        "buffers": wrapped.broadcast_buffers,
        "mine": float(inner.mine),
        "hook calls": calls[0],
        "view": wrapped.gradient_as_bucket_view,
    }


def refused_wrappers(rank: int, ranks: int) -> list[str]:
    """What is said to wrappers whose properties a new one would lose."""
    said = []
    builtin = DistributedDataParallel(optim_cases.small_gpt())
    builtin._register_builtin_comm_hook(distributed.BuiltinCommHookType.FP16_COMPRESS)
    for changes in (
        {"communication.gradient_as_view": True},
        {"communication.bucket_mib": "auto"},
        {"communication.algorithm": "ring"},
    ):
        try:
            optimized(changes, builtin)
            said.append("not refused")
        except trine.TrineError as error:
            said.append(str(error))
    engine = optimized({}, builtin)  # nothing about DDP: adopted as it is
    said.append("adopted" if engine.model is builtin else "wrapped anew")
    return said


def hinted(rank: int, ranks: int, hints: dict[str, Any]) -> Any:
    """The environment and options under which the group for gradients is made, with gloo in NCCL's place."""
    import os

    from trine.optim.runtime import nccl_hints

    class Options:
        class config:  # noqa: N801 - as PyTorch names it
            min_ctas = max_ctas = cga_cluster_size = -1

    seen: dict[str, Any] = {}
    make = distributed.new_group

    def new_group(**named: Any) -> Any:
        options = named["pg_options"].config
        seen.update(backend=named["backend"], channels=(options.min_ctas, options.max_ctas))
        return make()

    reduce = distributed.all_reduce

    def all_reduce(tensor: torch.Tensor, group: Any) -> None:
        seen["environment"] = {name: os.environ.get(name) for name in ("NCCL_ALGO", "NCCL_PROTO")}
        reduce(tensor, group=group)

    with (
        mock.patch.object(distributed, "new_group", new_group),
        mock.patch.object(distributed, "all_reduce", all_reduce),
        mock.patch.object(distributed, "ProcessGroupNCCL", mock.Mock(Options=Options), create=True),
        mock.patch.dict(os.environ, {"NCCL_PROTO": "Simple"}),
    ):
        os.environ.pop("NCCL_ALGO", None)
        nccl_hints.hinted_group(hints, torch.device("cpu"))
        after = {name: os.environ.get(name) for name in ("NCCL_ALGO", "NCCL_PROTO")}
    return seen, after
