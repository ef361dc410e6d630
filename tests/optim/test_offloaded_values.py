"""Programs that put other tensors in the place of offloaded parameters: what they put there is trained on, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import offload_cases
import optim_cases
import pytest
import torch
from offload_cases import whole

from trine.record.errors import TrainingError, UsageError
from trine.samples.gpt import loss_of

CPU = {"offload.optimizer": "cpu", "offload.parameters": "cpu"}


def put(engine: Any, step: int) -> list[float]:
    """Other values for an evaluation and back, as averaged weights are; then one parameter for good."""
    found = []
    named = dict(engine.model.named_parameters())
    kept = {name: parameter.data for name, parameter in named.items()}
    for parameter in named.values():
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        found.append(float(loss_of(engine.model, optim_cases.batches(5, 4)[4])))
    for name, parameter in named.items():
        parameter.data = kept[name]
    if step == 1:
        last = list(named.values())[-1]
        last.data = torch.zeros_like(last)
        within = next(parameter for name, parameter in named.items() if "blocks.1" in name)
        within.data = torch.zeros_like(within)
    return found


def test_what_a_program_puts_in_a_parameters_place_is_trained_on(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    def look(engine: Any, step: int) -> None:
        seen[-1].extend(put(engine, step))

    def run(changes: dict[str, Any]) -> offload_cases.Trained:
        seen.append([])
        return offload_cases.train(changes, act=look)

    plain = run({})
    assert plain.is_bitwise(run(CPU)) and seen[0] == seen[1]
    untouched = offload_cases.train(CPU)
    assert not plain.is_bitwise(untouched)  # the values matter


def test_a_parameter_on_disk_cannot_be_replaced_and_says_so(tmp_path: Path) -> None:
    def within(engine: Any) -> list[torch.nn.Parameter]:
        return [parameter for name, parameter in engine.model.named_parameters() if "blocks.1" in name]

    def replace(engine: Any, step: int) -> None:
        for parameter in within(engine):
            parameter.data = torch.zeros_like(parameter)

    def write_unseen(engine: Any, step: int) -> None:
        for parameter in within(engine):
            parameter.data.zero_()

    def write(engine: Any, step: int) -> None:
        with torch.no_grad():
            for parameter in within(engine):
                parameter.zero_()

    with pytest.raises(UsageError, match=r"blocks\.1\..*: its \.data was replaced .* parameter\.copy_"):
        offload_cases.train(whole(tmp_path), act=replace)
    with pytest.raises(
        TrainingError, match=r"or the program wrote to its \.data, unseen \(write to the parameter"
    ):
        offload_cases.train(whole(tmp_path), act=write_unseen)
    assert offload_cases.train({}, act=write).is_bitwise(offload_cases.train(whole(tmp_path), act=write))
