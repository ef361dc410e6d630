"""Names without wrappers, and a live optimizer pointed at other parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trine
from trine.optim.techniques import Assembly

torch = pytest.importorskip("torch")

NAMES = st.lists(st.sampled_from(["blocks", "0", "weight", "my_module", "modules", "orig_mod"]), min_size=1)


@given(NAMES, st.lists(st.sampled_from(["module", "_orig_mod"]), max_size=3))
def test_a_name_is_the_innermost_models(parts: list[str], wrappers: list[str]) -> None:
    from trine.optim.runtime.adoption import plain_name

    name = ".".join(parts)
    assert plain_name(name) == name
    assert plain_name(".".join([*wrappers, *parts])) == name
    inside = [part for each in parts for part in ("_checkpoint_wrapped_module", each)]
    assert plain_name(".".join(inside)) == name


def _assembly(model: object, optimizer: object) -> Assembly:
    from trine.optim._facts import facts_of
    from trine.optim.runtime.adoption import named_parameters

    facts = facts_of(model, optimizer)  # type: ignore[arg-type]
    return Assembly(model, optimizer, trine.Config(), facts, named_parameters(model))  # type: ignore[arg-type]


def test_groups_state_and_schedulers_stay() -> None:
    from trine.optim.runtime.adoption import replace_parameters

    model = torch.nn.Linear(3, 2)
    groups = [{"params": [model.weight], "weight_decay": 0.5}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    held = optimizer.param_groups[0]
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    assembly = _assembly(model, optimizer)
    new = torch.nn.Parameter(model.weight.detach().double())
    replace_parameters(assembly, {model.weight: new}, lambda value, to: value.to(to.dtype))
    assert optimizer.param_groups[0] is held and held["params"] == [new] and held["weight_decay"] == 0.5
    assert optimizer.param_groups[1]["params"] == [model.bias]
    assert optimizer.state[new]["exp_avg"].dtype == torch.float64
    torch.testing.assert_close(optimizer.state[new]["exp_avg"].float(), moment)
    assert float(optimizer.state[new]["step"]) == 1.0  # of another shape: kept
    assert model.weight not in optimizer.state and len(optimizer.state) == 2
    assert assembly.parameters["weight"] is new and assembly.parameters["bias"] is model.bias
    before = new.detach().clone()
    new.grad = torch.ones_like(new)
    optimizer.step()
    scheduler.step()
    assert not torch.equal(before, new.detach()) and held["lr"] == 0.05


def test_state_of_no_parameter_is_left_alone() -> None:
    from trine.optim.runtime.adoption import replace_parameters

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["seen"] = {"batches": 3}  # type: ignore[index]
    assembly = _assembly(model, optimizer)
    replace_parameters(assembly, {}, lambda value, to: value)
    assert dict(optimizer.state) == {"seen": {"batches": 3}}
