"""What the ranks of the compression tests do; importable by spawned processes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any
from unittest import mock

from optim_cases import batches, small_gpt
from refusals import refusal_of

CODES = ("bf16", "fp16", "int8", "qsgd", "powersgd", "onebit", "terngrad")
MANY_BUCKETS = {"communication.bucket_mib": 0.03, "communication.first_bucket_mib": 0.01}


def engine_of(changes: dict[str, Any], model: Any = None, optimizer: str = "adamw", **options: Any) -> Any:
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt() if model is None else model
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    }
    config = trine.Config().with_changes(changes)
    return trine.optimize(model, make[optimizer](model.parameters()), config, loss_fn=loss_of, **options)


def losses_of(engine: Any, steps: int, rank: int, ranks: int) -> list[float]:
    return [float(engine.train_step(batch)) for batch in engine.steps(batches(steps, 4, rank, ranks))]


def prints_of(engine: Any) -> str:
    """A digest of the whole parameters' bits."""
    import hashlib

    digest = hashlib.sha256()
    for parameter in engine.model.parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def trained_by_each(rank: int, ranks: int, steps: int) -> dict[str, Any]:
    """Each code with one bucket and with many: losses, parameters' digest, sent and plain bytes of the last step."""
    found: dict[str, Any] = {}
    for code in CODES:
        for name, buckets in (("one", {}), ("many", MANY_BUCKETS)):
            engine = engine_of({"communication.compression": code, **buckets})
            losses = losses_of(engine, steps, rank, ranks)
            found[f"{code} {name}"] = (losses, prints_of(engine))
            engine.close()
    return found


def ratios(rank: int, ranks: int) -> dict[str, Any]:
    """What metric listeners hear in the last step of two, for a model of reasonable size."""
    from trine.record.events import listen

    found: dict[str, Any] = {}
    cases: list[tuple[str, dict[str, Any]]] = [(code, {}) for code in CODES]
    cases += [(f"qsgd {levels}", {"communication.compression_levels": levels}) for levels in (1, 7)]
    for name, more in cases:
        model = small_gpt(hidden=128, layers=2)
        engine = engine_of({"communication.compression": name.partition(" ")[0], **more}, model)
        heard: dict[str, float] = {}

        def hear(kind: str, values: dict[str, Any], heard: dict[str, float] = heard) -> None:
            if kind == "metric" and values["name"].startswith("communication/"):
                heard[values["name"]] = values["value"]

        stop = listen(hear)
        losses_of(engine, 2, rank, ranks)
        stop()
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        shapes = [tuple(p.shape) for p in model.parameters()]
        found[name] = (heard, size, shapes)
        engine.close()
    return found


def telescoping(rank: int, ranks: int) -> dict[str, float]:
    """Σ results + what is kept = Σ means of gradients, though buckets are made anew on the way. Relative, in float64."""
    import torch
    from torch import distributed

    from trine.optim.runtime.exchange import Bucket, Piece
    from trine.optim.runtime.exchange.codecs import Int8, OneBit
    from trine.optim.runtime.exchange.powersgd import PowerSGD
    from trine.optim.runtime.exchange.residuals import Residuals
    from trine.optim.runtime.exchange.sums import backend_sum
    from trine.optim.runtime.exchange.two_phase import Ranks, TwoPhase

    group = distributed.new_group()
    shapes = {"a": (33, 70), "b": (29,), "c": (50, 41), "d": (7,)}
    layouts = [[("a", "b", "c", "d")], [("d", "c"), ("b", "a")], [("c",), ("a", "d", "b")]]
    found = {}
    for name in ("int8", "onebit", "powersgd"):
        residuals = Residuals(ranks, rank)
        reduction: Any
        if name == "powersgd":
            reduction = PowerSGD(2, backend_sum(group), ranks, residuals)
        else:
            codec = Int8() if name == "int8" else OneBit()
            reduction = TwoPhase(codec, Ranks(group), residuals)
        source = torch.Generator().manual_seed(rank)
        wanted = {key: torch.zeros(shape, dtype=torch.float64).flatten() for key, shape in shapes.items()}
        arrived = {key: value.clone() for key, value in wanted.items()}
        for layout in layouts:
            for _ in range(3):
                for names in layout:
                    flat, pieces, start = [], [], 0
                    for key in names:
                        drawn = torch.randn(shapes[key], generator=source, dtype=torch.float64).flatten()
                        wanted[key] += drawn / ranks
                        flat.append(drawn)
                        pieces.append(Piece(key, start, shapes[key]))
                        start += drawn.numel()
                    bucket = Bucket(torch.cat(flat), tuple(pieces))
                    reduction.mean(bucket)
                    for piece in pieces:
                        end = piece.start + wanted[piece.name].numel()
                        arrived[piece.name] += bucket.flat[piece.start : end]
        kept = residuals.state_dict()
        worst = 0.0
        for key in shapes:
            left = wanted[key] + 0.0
            late = kept[key].double() / ranks
            distributed.all_reduce(left, group=group)
            distributed.all_reduce(late, group=group)
            worst = max(worst, float((arrived[key] + late - left).norm() / left.norm()))
        found[name] = worst
    distributed.destroy_process_group(group)
    return found


def averages(rank: int, ranks: int, draws: int) -> dict[str, Any]:
    """Mean of many exchanges of one bucket, in standard errors of what a draw may be off by; replicas' bits."""
    import torch
    from torch import distributed

    from trine.optim.runtime.exchange import Bucket, Piece
    from trine.optim.runtime.exchange.choice import generator_of
    from trine.optim.runtime.exchange.codecs import Qsgd
    from trine.optim.runtime.exchange.terngrad import TernGrad
    from trine.optim.runtime.exchange.two_phase import Ranks, TwoPhase

    torch.manual_seed(3)
    group = distributed.new_group()
    generator = generator_of(rank, torch.device("cpu"))
    flat = torch.rand(64, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 2 - 1
    true = flat.clone()
    distributed.all_reduce(true, group=group)
    true /= ranks
    found: dict[str, Any] = {}
    for name, reduction, step in (
        ("qsgd", TwoPhase(Qsgd(generator, 7), Ranks(group)), 2 / 7),
        ("terngrad", TernGrad(generator, Ranks(group)), 1.0),
    ):
        summed, digest = torch.zeros_like(flat), 0.0
        for _ in range(draws):
            bucket = Bucket(flat.clone(), (Piece("w", 0, (64,)),))
            reduction.mean(bucket)
            summed += bucket.flat
            digest += float(bucket.flat.sum())
        off = float(((summed / draws - true).abs() / (step / draws**0.5)).max())
        found[name] = (off, digest)
    distributed.destroy_process_group(group)
    return found


def poisoned(rank: int, ranks: int) -> dict[str, Any]:
    """One rank's gradient is not finite in one step: what every rank gets, and what becomes of residuals."""
    import torch

    found: dict[str, Any] = {}
    for code in CODES:
        engine = engine_of({"communication.compression": code}, nonfinite="skip")
        losses_of(engine, 2, rank, ranks)
        reduction = engine._assembly.reduction
        before, prints = _residuals(reduction), prints_of(engine)
        first = next(p for p in engine.model.parameters() if p.dim() == 2)
        handle = first.register_hook(lambda g: g * float("nan")) if rank == ranks - 1 else None
        seen: list[bool] = []
        watch = mock.patch.object(
            reduction, "mean", side_effect=_watching(reduction.mean, seen), autospec=False
        )
        with watch:
            losses_of(engine, 1, rank, ranks)
        if handle is not None:
            handle.remove()
        after = _residuals(reduction)
        same = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
        unchanged = prints == prints_of(engine)
        healthy = losses_of(engine, 2, rank, ranks)
        found[code] = {
            "finite": all(seen),
            "residuals_same": same,
            "residuals": len(before),
            "unchanged": unchanged,
            "healthy": healthy,
            "moved": prints != prints_of(engine),
        }
        engine.close()
    return found


def _watching(mean: Any, seen: list[bool]) -> Any:
    import torch

    def watched(bucket: Any) -> None:
        mean(bucket)
        seen.append(bool(torch.isfinite(bucket.flat).all()))

    return watched


def _residuals(reduction: Any) -> dict[str, Any]:
    found: dict[str, Any] = reduction.state_dict()["lossy"].get("residuals", {})
    return found


def overflowing(rank: int, ranks: int) -> dict[str, Any]:
    """fp16 with a loss scale that is far too high at first: residuals follow it down and only taken steps change them."""
    import torch

    engine = engine_of({"communication.compression": "onebit", "precision.dtype": "fp16"})
    scaler, reduction = engine._assembly.scaler, engine._assembly.reduction
    losses_of(engine, 2, rank, ranks)
    skipped_before = scaler.skipped
    before = _residuals(reduction)
    scale = scaler.current
    first = next(p for p in engine.model.parameters() if p.dim() == 2)
    handle = first.register_hook(lambda g: g * float("inf"))
    losses_of(engine, 1, rank, ranks)
    handle.remove()
    after = _residuals(reduction)
    factor = scaler.current / scale
    followed = all(torch.equal(before[name] * factor, after[name]) for name in before)
    losses = losses_of(engine, 2, rank, ranks)
    result = {
        "skipped": scaler.skipped - skipped_before,
        "factor": factor,
        "followed": followed and bool(before),
        "losses": losses,
        "prints": prints_of(engine),
    }
    engine.close()
    return result


def warm_up(rank: int, ranks: int) -> dict[str, Any]:
    """Losses without compression, with it at once, and with it after three steps."""
    found = {}
    for name, changes in {
        "plain": {},
        "at once": {"communication.compression": "onebit"},
        "warm": {"communication.compression": "onebit", "communication.compression_warmup_steps": 3},
    }.items():
        engine = engine_of(changes)
        found[name] = losses_of(engine, 7, rank, ranks)
        engine.close()
    return found


def resumed(rank: int, ranks: int) -> dict[str, Any]:
    """A second engine takes the first one's state over, residuals and all, and goes on as it does."""
    found: dict[str, Any] = {}
    for code in ("int8", "qsgd", "powersgd", "onebit", "terngrad"):
        first = engine_of({"communication.compression": code})
        losses_of(first, 3, rank, ranks)
        state = deepcopy(first._assembly.state["compression"].state_dict())
        second = engine_of({"communication.compression": code})
        second._assembly.state["compression"].load_state_dict(state)
        taken = second._assembly.state["compression"].state_dict()
        found[code] = _same_state(state, taken)
        first.close()
        second.close()
    return found


def _same_state(first: Any, second: Any) -> bool:
    import torch

    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same_state(first[k], second[k]) for k in first)
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def synchronised_once(rank: int, ranks: int) -> dict[str, int]:
    """Bytes of two steps with one micro-batch and with four."""
    found = {}
    for steps in (1, 4):
        engine = engine_of({"communication.compression": "int8", "accumulation.steps": steps})
        losses_of(engine, 2, rank, ranks)
        found[str(steps)] = engine._assembly.reduction.sent_bytes()
        engine.close()
    return found


def sharded_exactly(rank: int, ranks: int, changes: dict[str, Any]) -> tuple[list[float], list[float]]:
    """FSDP2's losses in float64, by its own collectives and by ours with a code that loses nothing."""
    import torch

    from trine.optim.runtime.exchange.codecs import Exact
    from trine.optim.runtime.exchange.sharded import ShardedExchange, set_on

    found = []
    for ours in (False, True):
        engine = engine_of(changes, small_gpt().double(), "sgd")
        if ours:
            exchange = ShardedExchange(Exact(torch.float64), Exact(torch.float64))
            set_on(engine.model, exchange)
        found.append(losses_of(engine, 5, rank, ranks))
        if ours:
            assert exchange.traffic.sent == exchange.traffic.plain > 0
        engine.close()
    return found[0], found[1]


def refusals(rank: int, ranks: int) -> dict[str, str]:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    def said(changes: dict[str, Any], model: Any = None) -> str:
        model = small_gpt() if model is None else model
        before = [p.clone() for p in model.parameters()]
        found = refusal_of(lambda: engine_of(changes, model).close())
        if found != "not refused":
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return found

    hooked = DistributedDataParallel(small_gpt())

    def own(state: Any, bucket):  # type: ignore[no-untyped-def]
        raise AssertionError

    hooked.register_comm_hook(None, own)
    key = "communication.compression"
    return {
        "powersgd sharded": said({key: "powersgd", "zero.stage": 3}),
        "levels": said({key: "qsgd", "communication.compression_levels": 128}),
        "warm-up alone": said({"communication.compression_warmup_steps": 5}),
        "weights": said({"zero.quantized_weights": True, "zero.stage": 2}),
        "algorithm": said({key: "int8", "communication.algorithm": "ring"}),
        "own hook": said({key: "int8"}, hooked),
        "sparse": said({key: "int8"}, nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))),
    }


def batched_power_sgd_of_torch(rank: int, ranks: int) -> str:
    """What PyTorch's own batched PowerSGD comes to: it hands this function a matrix, whatever the backend."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    try:
        powerSGD_hook._orthogonalize(torch.randn(8, 2))
    except AssertionError as error:
        return f"AssertionError: {error}"
    return "worked"


def many_buckets_of_power_sgd(rank: int, ranks: int) -> dict[str, Any]:
    """Thirteen buckets and more of PowerSGD, thrice."""
    found: dict[str, Any] = {"buckets": 0, "prints": []}
    for _ in range(3):
        model = small_gpt(hidden=64, layers=4)
        engine = engine_of({"communication.compression": "powersgd", **MANY_BUCKETS}, model)
        found["losses"] = losses_of(engine, 6, rank, ranks)
        found["prints"].append(prints_of(engine))
        sizes = engine.model._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
        found["buckets"] = len(str(sizes).split(","))
        engine.close()
    return found


def algorithms(rank: int, ranks: int) -> dict[str, Any]:
    """bf16 over a ring against bf16 over the backend's all-reduce."""
    found = {}
    for name, more in {"backend": {}, "ring": {"communication.algorithm": "ring"}}.items():
        engine = engine_of({"communication.compression": "bf16", **more})
        losses = losses_of(engine, 4, rank, ranks)
        found[name] = (losses, prints_of(engine), engine._assembly.reduction.sent_bytes())
        engine.close()
    return found


def effect_notes(rank: int, ranks: int) -> list[str]:
    engine = engine_of({"communication.compression": "int8"})
    engine.close()
    return [str(effect) for effect in engine.effects]
