"""``padding``: waste from the record, replays against slow references, the finding with its controls, real runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_builders import MS, build, rank_result, shares, steps_table
from analysis_tables import rank_of
from hypothesis import given
from hypothesis import strategies as st

import trine
from trine.analyzers.findings import gather, padding
from trine.analyzers.selection import parse_selection, select
from trine.analyzers.studies import Scope, result_of
from trine.analyzers.studies.padding import GROUPED_BATCHES, Padding, _first_fit_rows, _grouped_slots, reduce
from trine.record.model import MISSING

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=120)


@given(lengths)
def test_first_fit_opens_as_many_rows_as_the_textbook(found: list[int]) -> None:
    rooms: list[int] = []
    for length in found:
        for place, room in enumerate(rooms):
            if room >= length:
                rooms[place] -= length
                break
        else:
            rooms.append(40 - length)
    assert _first_fit_rows(np.array(found), 40) == len(rooms)


@given(lengths, st.integers(1, 7))
def test_grouping_pads_each_batch_to_its_longest(found: list[int], batch: int) -> None:
    slots = 0
    for first in range(0, len(found), batch * GROUPED_BATCHES):
        ordered = sorted(found[first : first + batch * GROUPED_BATCHES], reverse=True)
        for start in range(0, len(ordered), batch):
            one = ordered[start : start + batch]
            slots += max(one) * len(one)
    assert _grouped_slots(np.array(found), batch) == slots
    assert sum(found) <= slots <= max(found) * len(found)


def test_waste_is_of_the_selected_steps_and_of_all_tokens() -> None:
    rank = rank_of(steps=[(n, n * 10, n * 10 + 10) for n in range(4)], format="trine")
    assert rank.steps is not None
    rank.steps.columns["tokens"] = np.array([100, 100, 100, 70])
    rank.steps.columns["padding_tokens"] = np.array([10, MISSING, 30, 30])

    def part(steps: str) -> Any:
        selection = parse_selection(steps)
        return reduce(Scope(rank, selection, select(rank, selection), (), None))

    assert (part("all").tokens, part("all").padding, part("all").steps) == (270, 70, 3)
    assert (part("2:3").tokens, part("2:3").padding) == (100, 30)
    assert part("1:2") is None
    rank.metadata["padding"] = {"tokens_exclude_padding": True}
    assert part("all").tokens == 340
    rank.metadata["padding"] = {"lengths": "damaged"}
    assert part("all").replay is None


# --- the finding ---------------------------------------------------------------------------------------


def found(
    waste: float = 0.4, grouped: float | None = 0.03, packed: float | None = 0.02, **changes: Any
) -> Padding:
    given = Padding(
        tokens=100_000,
        padding_tokens=round(100_000 * waste),
        waste=waste,
        steps=40,
        ranks=2,
        worst=1,
        worst_waste=waste,
        packed=False,
        source="attention_mask",
        width=512,
        fixed_width=False,
        sampled_sequences=640,
        sampled_waste=waste,
        grouped_waste=grouped,
        packed_waste=packed,
        lengths=(),
    )
    return replace(given, **changes)


def facts_with(result: Padding | None, **phases: float) -> Any:
    ranks = [rank_result(rank, steps=steps_table(shares(**phases))) for rank in (0, 1)]
    return gather(build(ranks, studies={} if result is None else {"padding": result}))


def test_much_padding_that_grouping_would_save_is_an_opportunity() -> None:
    finding = padding.find(facts_with(found()))
    assert finding is not None and finding.kind == "opportunity" and finding.recommendation is not None
    assert finding.recommendation.change == {"data.length_grouped": True}
    assert (
        finding.title
        == "40 % of the tokens that are computed are padding; grouping by length would leave 3.0 %"
    )
    predicted = finding.recommendation.predicted
    assert predicted is not None and predicted.gain_ns is not None
    # 90 % of 100 ms in forward and backward, of which 1 − 0.6/0.97 of the slots go.
    assert predicted.gain_ns.mid == pytest.approx(90 * MS * (1 - 0.6 / 0.97) * 0.8, rel=0.01)


def test_packing_is_recommended_where_it_saves_clearly_more() -> None:
    finding = padding.find(facts_with(found(grouped=0.35, fixed_width=True)))
    assert finding is not None and finding.recommendation is not None
    assert finding.recommendation.change == {"data.packing": True}
    assert "every batch is padded to 512" in finding.recommendation.why


@pytest.mark.parametrize(
    "control",
    [
        None,
        found(waste=0.05),
        found(packed=None, grouped=None),
        replace(found(), packed=True),
        found(grouped=0.4, packed=0.39),
        replace(found(), sampled_sequences=8),
    ],
    ids=["unknown", "little", "no lengths", "packed already", "nothing to save", "too few sequences"],
)
def test_controls_have_no_finding(control: Padding | None) -> None:
    assert padding.find(facts_with(control)) is None


def test_a_loader_bound_run_would_gain_little() -> None:
    assert padding.find(facts_with(found(waste=0.2, grouped=0.1, packed=0.1), data=0.6)) is None


def test_a_healthy_run_says_how_little() -> None:
    assert (
        padding.healthy(facts_with(found(waste=0.02)))
        == "Padding: 2.0 % of the tokens (an opportunity from 10 %)"
    )
    assert padding.healthy(facts_with(found())) is None and padding.healthy(facts_with(None)) is None


# --- real runs -----------------------------------------------------------------------------------------


def train(path: Path, grouped: bool) -> trine.Analysis:
    """A small model on sequences of 4 to 96 tokens, padded to the longest of each batch of four."""
    torch = pytest.importorskip("torch", reason="recording needs torch; analysing does not")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 96), torch.nn.Linear(96, 384), torch.nn.GELU(), torch.nn.Linear(384, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(4, 97, (96,), generator=generator).tolist()
    sizes = sorted(sizes) if grouped else sizes
    batches = []
    for first in range(0, len(sizes), 4):
        own = torch.tensor(sizes[first : first + 4])
        mask = (torch.arange(int(own.max()))[None] < own[:, None]).long()
        ids = torch.randint(0, 64, mask.shape, generator=generator)
        batches.append({"input_ids": ids, "attention_mask": mask})
    with trine.profile(path, model=model, optimizer=optimizer, windows=None, flops=False) as prof:
        for batch in prof.steps(batches):
            logits = model(batch["input_ids"])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return trine.analyze(trine.load(path))


def test_a_run_that_pads_much_is_told_so_and_one_grouped_by_length_is_not(tmp_path: Path) -> None:
    padded, grouped = train(tmp_path / "padded", grouped=False), train(tmp_path / "grouped", grouped=True)
    one, other = result_of(padded, "padding", Padding), result_of(grouped, "padding", Padding)
    assert one is not None and other is not None
    assert one.tokens - one.padding_tokens == other.tokens - other.padding_tokens
    assert one.waste > 0.2 and other.waste < 0.05
    assert one.grouped_waste == pytest.approx(other.waste, abs=0.03), (
        "what was foretold is what grouping gives"
    )
    assert "padding" in {finding.id for finding in padded.findings}
    assert "padding" not in {finding.id for finding in grouped.findings}
    assert any(item.id == "padding" for item in grouped.not_bound_by)
