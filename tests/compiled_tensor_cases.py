"""Compiled blocks that lie on a tensor group; importable by spawned processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optim_cases import small_gpt
from tensor_cases import EVERYTHING

LENGTHS = (16, 12)


def differences(rank: int, compiled_before_on: int | None = None) -> list[float]:
    """Losses of compiled blocks on rows of several lengths, less those of the same blocks uncompiled.

    ``compiled_before_on``: a rank that has compiled the same blocks before, whole, until PyTorch gave up on them.
    """
    import torch

    torch._dynamo.reset()  # what ranks have compiled for cases before decides nothing
    plain = _losses(EVERYTHING)
    if rank == compiled_before_on:
        _compile_until_given_up()
    compiled = _losses({**EVERYTHING, "compute.compile": "blocks"})
    return [a - b for a, b in zip(plain, compiled, strict=True)]


def _losses(changes: Mapping[str, Any], lengths: Sequence[int] = LENGTHS) -> list[float]:
    import torch

    import trine
    from trine.samples.gpt import loss_of

    model = small_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of)
    found = []
    for length in lengths * 2:  # the second time shows gradients that were wrong
        ids = torch.randint(64, (2, length + 1), generator=torch.Generator().manual_seed(length))
        found.append(float(engine.train_step((ids[:, :-1], ids[:, 1:]))))
    engine.close()
    return found


def _compile_until_given_up() -> None:
    import torch

    model = small_gpt()
    for block in model.blocks:
        block.compile(dynamic=False)
    for length in range(2, 4 + torch._dynamo.config.recompile_limit):
        model(torch.zeros(1, length, dtype=torch.long))
