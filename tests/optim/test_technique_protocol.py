"""What every technique offers, so that whoever goes through them need not ask."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, cast

import pytest

from trine.optim.config import Config
from trine.optim.techniques import techniques, tolerance_of
from trine.optim.verify import Tolerance

MODULES = [cast(ModuleType, technique) for technique in techniques()]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_technique_offers_the_whole_protocol(module: Any) -> None:
    assert module.KEYS
    assert set(module.KEYS) <= set(Config.keys())
    assert isinstance(module.ORDER, int)
    assert module.QUANTITY
    assert module.NUMERICS
    arguments = {
        "tolerance": ["config"],
        "refusal": ["config"],
        "check": ["config", "facts"],
        "apply": ["assembly"],
    }
    for name, wanted in arguments.items():
        function = getattr(module, name)
        assert list(inspect.signature(function).parameters) == wanted, name
        assert function.__module__ == module.__name__, name  # its own, not one that it imports
        assert inspect.getdoc(function), name
    assert {"KEYS", "NUMERICS", "ORDER", "QUANTITY", *arguments} <= set(module.__all__)


def test_a_key_belongs_to_one_technique() -> None:
    answered = [key for module in MODULES for key in module.KEYS]
    assert len(answered) == len(set(answered))


def test_the_order_is_the_techniques_own() -> None:
    orders = [module.ORDER for module in MODULES]
    assert orders == sorted(orders)
    assert len(orders) == len(set(orders)), (
        "two techniques of one order are applied by the names of their files"
    )


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_the_default_is_refused_nowhere_and_changes_nothing(module: Any) -> None:
    assert module.refusal(Config()) is None
    assert module.tolerance(Config()) is None


def test_the_default_allows_no_difference() -> None:
    assert tolerance_of(Config()) == Tolerance(0.0, 0.0)
