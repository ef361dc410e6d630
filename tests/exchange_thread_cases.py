"""What the ranks of the communication thread's tests do; importable by spawned processes."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

from compression_cases import MANY_BUCKETS, engine_of, losses_of


def order_and_close(rank: int) -> dict[str, Any]:
    """Work runs in the order submitted, off the training thread; a closed thread says so."""
    import torch

    from trine.optim.runtime.exchange.thread import CommunicationThread, ExchangeFailed

    thread = CommunicationThread(torch.device("cpu"))
    seen: list[Any] = []
    futures = []
    for position in range(20):
        flat = torch.full((3,), float(position))

        def work(position: int = position, flat: Any = flat) -> None:
            time.sleep(0.002 if position % 3 == rank else 0.0)  # ranks are quick at other times
            torch.distributed.all_reduce(flat, group=thread.group)
            seen.append((position, threading.current_thread() is threading.main_thread()))

        futures.append(thread.submit(work, flat))
    sums = [float(future.wait()[0]) for future in futures]
    thread.close()
    thread.close()
    try:
        thread.submit(lambda: None, torch.zeros(1))
        refused = ""
    except ExchangeFailed as error:
        refused = str(error)
    alive = any(each.name == "trine-exchange" for each in threading.enumerate())
    return {"seen": seen, "sums": sums, "refused": refused, "alive": alive}


def hook_against_plain(rank: int, ranks: int) -> dict[str, Any]:
    """Losses by DDP's own all-reduce and by our hook around the same all-reduce."""
    from trine.optim.runtime.exchange.hooks import install
    from trine.optim.runtime.exchange.sums import AllReduce, backend_sum
    from trine.optim.runtime.exchange.thread import thread_of
    from trine.optim.techniques import data_parallel

    def hooked(assembly: Any) -> None:
        thread = thread_of(assembly)
        assembly.reduction = AllReduce(backend_sum(thread.group), ranks)
        assembly.finish += [install, install]  # the second finds it installed

    losses: dict[str, Any] = {}
    cases = {
        "one bucket": {},
        "many buckets": MANY_BUCKETS,
        "views": {"communication.gradient_as_view": True},
        "accumulation": {"accumulation.steps": 2},
    }
    for name, changes in cases.items():
        plain = engine_of(changes)
        expected = losses_of(plain, 4, rank, ranks)
        plain.close()
        with mock.patch.object(data_parallel, "apply", _after(data_parallel.apply, hooked)):
            engine = engine_of(changes)
        losses[name] = (expected, losses_of(engine, 4, rank, ranks))
        engine.close()
    return losses


def _after(first: Any, second: Any) -> Any:
    def both(assembly: Any) -> None:
        first(assembly)
        second(assembly)

    return both


def failing_on_all(rank: int, ranks: int) -> dict[str, Any]:
    """A reduction that fails in the third step's second bucket, on every rank."""
    engine = engine_of({"communication.compression": "int8", **MANY_BUCKETS})
    losses = losses_of(engine, 2, rank, ranks)
    lossy = engine._assembly.reduction.lossy
    with mock.patch.object(
        type(lossy._codec), "encode", side_effect=ValueError("the codec broke\nin two lines")
    ):
        try:
            losses_of(engine, 1, rank, ranks)
            said = ""
        except Exception as error:  # noqa: BLE001 - its kind is what the test asks about
            said = f"{type(error).__name__}: {error}"
    try:  # the engine does not go on as if nothing had been
        losses_of(engine, 1, rank, ranks)
        again = ""
    except Exception as error:  # noqa: BLE001
        again = type(error).__name__
    began = time.monotonic()
    engine.close()
    return {"losses": losses, "said": said, "again": again, "closing_s": time.monotonic() - began}


def failing_on_one(rank: int, ranks: int) -> dict[str, Any]:
    """Rank 0's reduction fails while the others wait for it, for no longer than the exchange's group says."""
    import torch

    from trine.optim.runtime.exchange import thread

    stated = thread.default_timeout(torch.device("cpu"))
    with mock.patch.object(thread, "default_timeout", return_value=timedelta(seconds=6)):
        engine = engine_of({"communication.compression": "int8"})
    healthy = losses_of(engine, 2, rank, ranks)
    if rank == 0:
        codec = engine._assembly.reduction.lossy._codec
        mock.patch.object(type(codec), "encode", side_effect=ValueError("the codec broke")).start()
    began = time.monotonic()
    try:
        losses_of(engine, 1, rank, ranks)
        said = ""
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {error}"
    waited = time.monotonic() - began
    finite = all(bool(torch.isfinite(p).all()) for p in engine.model.parameters())
    engine.close()
    return {"healthy": healthy, "said": said, "waited_s": waited, "finite": finite, "stated": stated}
