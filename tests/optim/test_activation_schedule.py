"""Keep, move or recompute: the choice is the fastest that fits, the bytes are as predicted, the bits are the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import memory_cases
import optim_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lazy_copies import LazyCopier
from rank_pool import RankPool

import trine
from trine.optim.runtime import activation_schedule, memory_fit
from trine.optim.runtime.activation_plan import names_in_short
from trine.optim.runtime.activation_schedule import (
    Block,
    Choice,
    Link,
    added_ns,
    peak_bytes,
    schedule,
)
from trine.optim.runtime.host_memory import HostMemory
from trine.record.errors import UsageError

CPU = {"offload.activations": "cpu"}


# --- the choice --------------------------------------------------------------------------------


@st.composite
def blocks_of(draw: st.DrawFn, most: int = 4) -> list[Block]:
    found = []
    for number in range(draw(st.integers(1, most))):
        saved, given_in = draw(st.integers(1, 60)), draw(st.integers(0, 20))
        left = draw(st.integers(0, min(5, saved)))
        forward = draw(st.integers(0, 50))
        found.append(
            Block(
                name=str(number),
                input_bytes=given_in,
                saved_bytes=saved,
                moved_bytes=given_in + saved - left,
                left_bytes=left,
                recomputed_bytes=saved + draw(st.integers(0, 5)),
                at_once_bytes=draw(st.integers(0, saved)),
                outside_bytes=draw(st.integers(0, 10)),
                forward_ns=forward,
                backward_ns=2 * forward,
            )
        )
    return found


rates = st.sampled_from([0.0, 0.2, 0.5, 1.0, 3.0])
links = st.builds(Link, rates, rates, rates, st.integers(0, 30), st.integers(0, 10))


@given(blocks_of(), links, st.integers(0, 20), st.integers(0, 20), st.floats(0.0, 1.1))
@settings(max_examples=60)
def test_the_choice_is_the_fastest_of_all_that_fit(
    blocks: list[Block], link: Link, end_bytes: int, tail: int, part: float
) -> None:
    tail_ns = (tail, 2 * tail)
    budget = int(part * peak_bytes(blocks, [Choice.KEPT] * len(blocks), link, end_bytes))
    times = [
        sum(added_ns(blocks, choices, link, tail_ns))
        for choices in itertools.product(Choice, repeat=len(blocks))
        if peak_bytes(blocks, choices, link, end_bytes) <= budget
    ]
    found = schedule(blocks, budget, link, end_bytes, tail_ns)
    assert (found is None) == (not times)
    if found is not None:
        assert found.is_best and found.peak_bytes <= budget
        assert found.added_ns == pytest.approx(min(times), abs=1)  # nanoseconds are rounded once


def equal_blocks(count: int) -> list[Block]:
    return [Block(f"b.{n}", 8, 200, 200, 8, 200, 40, 10, 10_000, 20_000) for n in range(count)]


def test_what_hides_behind_the_computation_is_moved_and_what_does_not_is_recomputed() -> None:
    blocks = equal_blocks(12)
    budget = peak_bytes(blocks, [Choice.KEPT] * 12, Link(0, 0, 0, 0, 0), 100) // 2
    fast = schedule(blocks, budget, Link(0.0, 10.0, 10.0, 400, 400), 100)
    slow = schedule(blocks, budget, Link(0.0, 1000.0, 1000.0, 400, 400), 100)
    between = schedule(blocks, budget, Link(0.0, 100.0, 100.0, 400, 400), 100)
    assert fast is not None and slow is not None and between is not None
    assert fast.added_ns == 0 and Choice.MOVED in fast.choices
    assert not any(choice.recomputes for choice in fast.choices)
    assert Choice.MOVED not in slow.choices and slow.recomputing_ns > 0
    assert {Choice.MOVED, Choice.KEPT} < set(between.choices)
    assert any(choice.recomputes for choice in between.choices)
    assert fast.added_ns < between.added_ns < slow.added_ns
    assert between.choices[-1] is Choice.KEPT  # what is wanted back first stays


def test_a_thinned_search_fits_and_loses_little(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [
        replace(block, forward_ns=10_000 + 97 * n % 13 * 100) for n, block in enumerate(equal_blocks(20))
    ]
    link = Link(0.0, 100.0, 100.0, 400, 400)
    budget = peak_bytes(blocks, [Choice.KEPT] * 20, link, 100) // 3
    full = schedule(blocks, budget, link, 100)
    monkeypatch.setattr(activation_schedule, "MOST_PARTIAL", 30)
    thinned = schedule(blocks, budget, link, 100)
    assert full is not None and thinned is not None and not thinned.is_best
    assert thinned.peak_bytes <= budget
    assert full.added_ns <= thinned.added_ns <= 1.1 * full.added_ns


def test_names_are_ranges() -> None:
    assert names_in_short(["h.0", "h.1", "h.2", "h.4", "norm", "x.7.y", "x.8.y"]) == (
        "h.0-2, h.4, norm, x.7-8.y"
    )


# --- on a model --------------------------------------------------------------------------------


def budget_of(size: int, **changes: Any) -> dict[str, Any]:
    return {"checkpointing.mode": "budget", "checkpointing.budget_bytes": size, **changes}


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    return optim_cases.batches(6, 4)


@pytest.fixture(scope="module")
def plain(batches: list[Any]) -> memory_cases.Trained:
    return memory_cases.train({}, batches=batches)


def link_of(blocking_ns: float) -> Any:
    """The machine's own rate varies: a stated one."""
    return mock.patch.object(HostMemory, "measured_link", lambda *_: Link(blocking_ns, 0.0, 0.0, 0, 0))


@pytest.mark.parametrize("where", ["cpu", "nvme"])
@pytest.mark.parametrize("budget", [1_500_000, 700_000, 425_000])
def test_bits_and_bytes(
    where: str, budget: int, plain: memory_cases.Trained, batches: list[Any], tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"offload.activations": where}
    if where == "nvme":
        changes["offload.path"] = str(tmp_path)
    trained = memory_cases.train(budget_of(budget, **changes), batches=batches)
    assert trained.is_bitwise(plain)
    peaks = [step["memory/backward_activation_bytes"] for step in trained.metrics[:-1]]
    assert max(peaks) <= budget
    told = str(trained.effects[-1])
    assert "predicted" in told and "moved each way" in told
    predicted = float(told.partition(" MiB for backward")[0].rpartition(" ")[2]) * 2**20
    assert peaks[-1] == pytest.approx(predicted, rel=0.02, abs=0.06 * 2**20)


@pytest.mark.parametrize(("blocking_ns", "moved", "recomputed"), [(0.0, True, False), (1e6, False, True)])
def test_the_link_decides(
    blocking_ns: float, moved: bool, recomputed: bool, plain: memory_cases.Trained, batches: list[Any]
) -> None:
    with link_of(blocking_ns):
        trained = memory_cases.train(budget_of(900_000, **CPU), batches=batches)
    assert trained.is_bitwise(plain)
    step = trained.metrics[5]
    assert (step["offload/moved_modules"] > 0) == moved
    assert (step["checkpointing/modules"] > 0) == recomputed
    assert (step["memory/offloaded_activation_bytes"] > 0) == moved
    assert step["memory/backward_activation_bytes"] <= 900_000


def test_the_allocator_sees_what_was_planned() -> None:
    """Peaks by the profiler's memory events, which know nothing of our counting."""

    def peak(changes: dict[str, Any]) -> int:
        model = optim_cases.small_gpt(layers=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = trine.Config().with_changes(changes)
        engine = trine.optimize(model, optimizer, config, loss_fn=memory_cases.loss_of)
        data = optim_cases.batches(5, 8)
        for batch in data[:4]:
            engine.train_step(batch)
        found = memory_fit.measured_bytes(torch.device("cpu"), lambda: engine.train_step(data[4]))
        engine.close()
        return found

    kept = peak({})
    saved = memory_cases.held_by(optim_cases.small_gpt(layers=8), optim_cases.batches(1, 8)[0]).peak_bytes
    for blocking_ns in (0.0, 1e6):
        with link_of(blocking_ns):
            fitted = peak(budget_of(2_000_000, **CPU))
        # The host's buffers are made in earlier steps: within a step moving takes nothing.
        assert kept - fitted > 0.9 * (saved - 2_000_000)


def test_with_rounding_less_is_held_and_moved(batches: list[Any]) -> None:
    rounded = {"activations.dtype": "bf16"}
    control = memory_cases.train(rounded, batches=batches)
    trained = memory_cases.train(budget_of(700_000, **CPU, **rounded), batches=batches)
    assert trained.losses == pytest.approx(control.losses, rel=2e-3)
    assert trained.metrics[5]["memory/backward_activation_bytes"] <= 700_000


def test_a_budget_below_the_least_is_refused_with_the_number() -> None:
    with pytest.raises(UsageError, match=r"budget_bytes = 1000: 4 modules need (\d+) bytes") as raised:
        memory_cases.train(budget_of(1000, **CPU))
    needed = int(str(raised.value).partition("need ")[2].partition(" ")[0])
    trained = memory_cases.train(budget_of(needed, **CPU))
    assert trained.metrics[2]["memory/backward_activation_bytes"] <= needed
    with pytest.raises(UsageError):
        memory_cases.train(budget_of(needed - 1, **CPU))


def test_a_larger_batch_is_counted_anew() -> None:
    batches = [optim_cases.batches(1, size)[0] for size in (2, 2, 2, 2, 6, 2, 6)]
    with link_of(0.0):
        trained = memory_cases.train(budget_of(1_300_000, **CPU), batches=batches)
    assert trained.is_bitwise(memory_cases.train({}, batches=batches))
    moved = [step["offload/moved_modules"] for step in trained.metrics[:-1]]
    assert moved[:3] == [4] * 3 and moved[3] < moved[4] == moved[6]
    assert all(step["memory/backward_activation_bytes"] <= 1_300_000 for step in trained.metrics[:-1])


@pytest.mark.parametrize(("free", "is_moved"), [(10**9, False), (0, True)])
def test_auto_moves_what_memory_asks_for(free: int, is_moved: bool, batches: list[Any]) -> None:
    with mock.patch.object(memory_fit, "available_host_bytes", lambda: free), link_of(0.0):
        trained = memory_cases.train({"checkpointing.mode": "auto", **CPU}, batches=batches)
    assert (trained.metrics[5]["offload/moved_modules"] > 0) == is_moved


def test_compiled_blocks_are_refused() -> None:
    model = optim_cases.small_gpt()
    changes = budget_of(10**6, **CPU) | {"compute.compile": "blocks"}
    with pytest.raises(UsageError, match=r"checkpointing\.mode.*offload\.activations.*compute\.compile"):
        trine.optimize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), trine.Config().with_changes(changes)
        )


def test_ranks_choose_alike(two_ranks: RankPool) -> None:
    first, second = two_ranks.run("memory_cases:scheduled_on_ranks", 700_000)
    assert first[0] == second[0]  # though one of them is slow, and has other batches
    assert first[1] and second[1]


# --- copies beside the computation -------------------------------------------------------------


def test_under_way_is_bounded_by_the_window() -> None:
    host = HostMemory(torch.device("cpu"), LazyCopier())
    host.window_bytes = 50_000
    tensors = [torch.randn(5_000) for _ in range(12)]
    entries = []
    for tensor in tensors:
        entries.append(host.put(tensor))
        assert host.device_bytes_under_way <= 50_000
    for entry, tensor in zip(reversed(entries), reversed(tensors), strict=True):
        assert torch.equal(entry.get(), tensor)
        assert host.device_bytes_under_way <= 50_000
    assert host.device_bytes_under_way == 0


def test_backward_in_the_schedules_order_is_read_ahead_in_it() -> None:
    """Of two lines packed one after the other, the first is wanted first, as in 1F1B."""
    host = HostMemory(torch.device("cpu"), LazyCopier())
    lines: dict[int, list[Any]] = {}
    for number in (0, 1):
        host.line = number
        lines[number] = [host.put(torch.full((2_000,), float(10 * number + n))) for n in range(3)]
    host.following = {0: 1}.get
    assert float(lines[0][2].get()[0]) == 2.0
    assert [entry.arriving is not None for entry in lines[1]] == [False, False, True]
    lines[0].clear()
    assert float(lines[1][2].get()[0]) == 12.0
    assert [entry.arriving is not None for entry in lines[1]] == [True, True, False]
