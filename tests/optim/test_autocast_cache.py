"""A forward without gradients inside of autocast leaves no cast behind that the trained forward would take."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from trine.optim.runtime.autocast_cache import without_cached_casts


def casts_of_a_trained_forward(between: bool) -> int:
    """How often the weight is cast where a forward without gradients came before: as kept ones are, not again."""
    from torch.utils._python_dispatch import TorchDispatchMode

    weight, data = torch.nn.Parameter(torch.ones(4, 4)), torch.ones(2, 4)
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
            if "_to_copy" in str(function) and arguments[0] is weight:
                seen.append(str(function))
            return function(*arguments, **(named or {}))

    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            if between:
                with without_cached_casts():
                    torch.nn.functional.linear(data, weight)
            else:
                torch.nn.functional.linear(data, weight)
        assert torch.is_autocast_cache_enabled()
        with Seen():
            torch.nn.functional.linear(data, weight).sum().backward()
    return len(seen)


def test_a_cast_that_was_made_without_gradients_is_not_kept() -> None:
    assert casts_of_a_trained_forward(between=True) == 1
    assert casts_of_a_trained_forward(between=False) == 0  # what autocast does by itself
