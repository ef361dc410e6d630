"""Two real processes with a gloo process group that stay alive across tests; cases are functions of a module."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["RankPool"]

SECONDS = 120.0
#: For the other ranks, once one has failed.
PATIENCE = 20.0


class RankPool:
    """``run("module:function", *arguments)`` calls ``function(rank, *arguments)`` on every rank at once.

    Ranks that do not answer are replaced by new ones, so that a case that hangs costs no other its time.
    """

    def __init__(self, folder: Path, world_size: int = 2) -> None:
        self._folder, self._world_size = folder, world_size
        self._starts = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = str(self._folder / f"store-{self._starts}")
        self._starts += 1
        self._pipes, self._processes = [], []
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world_size, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def run(self, case: str, *arguments: Any) -> list[Any]:
        """Results by rank. Raises ``AssertionError`` with the traceback of the first rank that failed."""
        for pipe in self._pipes:
            pipe.send((case, arguments))
        return self._answers()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        end = time.monotonic() + SECONDS
        while len(answers) < len(self._pipes) and time.monotonic() < end:
            for rank, pipe in enumerate(self._pipes):
                if rank not in answers and pipe.poll(0.005):
                    answers[rank] = _received(pipe)
            if any(failure is not None for failure, _ in answers.values()):
                end = min(end, time.monotonic() + PATIENCE)  # the others may wait for it for ever
        silent = [rank for rank in range(len(self._pipes)) if rank not in answers]
        if silent:
            for process in self._processes:
                process.kill()
                process.join(20)
            self._start()
        for rank, (failure, _) in sorted(answers.items()):
            assert failure is None, f"rank {rank}: {failure}"
        assert not silent, f"rank {silent[0]} did not answer in {SECONDS:.0f} s"
        return [answers[rank][1] for rank in range(len(self._pipes))]


def _received(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return "the process ended", None


def _serve(rank: int, world_size: int, store: str, pipe: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    pipe.send((None, None))
    while True:
        request = pipe.recv()
        if request is None:
            break
        case, arguments = request
        module, _, function = case.partition(":")
        try:
            pipe.send((None, getattr(importlib.import_module(module), function)(rank, *arguments)))
        except BaseException:  # noqa: BLE001 - told to the test
            pipe.send((traceback.format_exc(), None))
    torch.distributed.destroy_process_group()
