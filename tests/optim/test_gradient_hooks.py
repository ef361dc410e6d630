"""Hooks on gradients, and odd parameters of a block's own: what cannot go over to parts of parameters is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_cases import small_gpt

from trine.optim.config import Config
from trine.optim.layout import layout_of
from trine.optim.runtime.shard_units import odd_dtypes
from trine.optim.techniques import data_parallel, zero
from trine.optim.techniques._assembly import Facts
from trine.optim.topology import Topology
from trine.record.errors import UsageError

_HOOKED = "norm.bias"

HOOKS: tuple[Callable[[Any], Any], ...] = (
    lambda parameter: parameter.register_hook(lambda gradient: 2 * gradient),
    lambda parameter: parameter.register_post_accumulate_grad_hook(lambda parameter: None),
)


def _check(technique: Any, changes: dict[str, Any], hook: Callable[[Any], Any] | None = None) -> None:
    model = small_gpt(heads=4)
    if hook is not None:
        hook(model.get_parameter(_HOOKED))
    config = Config().with_changes(changes)
    facts = Facts(
        device=torch.device("cpu"),
        topology=Topology(0, 2, 2),
        layout=layout_of(config, 0, 2),
        backend="gloo",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    technique.check(config, facts)


@pytest.mark.parametrize("hook", HOOKS, ids=["gradient", "accumulated"])
@pytest.mark.parametrize(
    ("technique", "changes"),
    [
        (data_parallel, {"parallel.tensor": 2}),
        (data_parallel, {"parallel.pipeline": 2}),
        (zero, {"zero.stage": 2}),
        (zero, {"zero.stage": 3}),
    ],
)
def test_hooks_that_nobody_would_call_are_refused(technique: Any, changes: dict[str, Any], hook: Any) -> None:
    with pytest.raises(UsageError, match=f"{_HOOKED} has a hook on its gradient"):
        _check(technique, changes, hook)
    _check(technique, changes)  # and without the hook it is taken


@pytest.mark.parametrize(("technique", "changes"), [(data_parallel, {}), (zero, {"zero.stage": 1})])
def test_hooks_on_whole_parameters_stay(technique: Any, changes: dict[str, Any]) -> None:
    _check(technique, changes, HOOKS[0])


def test_a_unit_goes_with_what_it_holds_itself() -> None:
    """A small parameter of the block's own in another dtype: its layers are apart from it, not it from them."""
    block = torch.nn.Sequential(torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4).double())
    block.register_parameter("gate", torch.nn.Parameter(torch.ones(4)))
    assert odd_dtypes(block) == [block[0], block[1]]
    block.gate = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    assert odd_dtypes(block) == []
