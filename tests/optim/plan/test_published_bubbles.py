"""Published bubble rates, scored as ``benchmarks/planner_bubbles.py`` does."""

from __future__ import annotations

import json
from pathlib import Path

import planner_bubbles
import pytest


def test_profiled_times_give_the_published_rates(tables: Path) -> None:
    """Eight ranks: hand-made orders to a hundredth of a point; interleaved, whose messages the authors count only for the first
    micro-batch of a round, and the automatic schedule, whose orders are searched, to half a point."""
    rows = planner_bubbles.read_rows(tables / "zero_bubble_rates_table5.csv")
    rows = [row for row in rows if row.ranks == 8 and row.microbatches <= 32]
    assert len({row.schedule for row in rows}) == 6
    for row in rows:
        found = planner_bubbles.rate_of(row, row.profiled[:3], row.profiled[3])
        exact = row.schedule in ("1F1B", "ZB-H1", "ZB-H2", "ZB-1p")
        assert found == pytest.approx(row.rate, abs=1e-4 if exact else 5e-3), row


@pytest.mark.slow
def test_times_from_dimensions_give_them_within_a_point(tables: Path) -> None:
    """Constants come from the other three models, or are the package's; the model at hand is known by its dimensions alone."""
    rows = planner_bubbles.read_rows(tables / "zero_bubble_rates_table5.csv")
    least = {row.hidden: min(each.microbatches for each in rows if each.hidden == row.hidden) for row in rows}
    quick = {"ZB-H1", "1F1B"}
    chosen = [
        row
        for row in rows
        if row.microbatches == least[row.hidden]
        and row.schedule in (quick if row.ranks > 8 else planner_bubbles.NAMES)
    ]
    scored, skipped = planner_bubbles.score(chosen)
    assert len(scored) == 12 and not skipped
    for each in scored:
        assert abs(each.error("dimensions")) <= planner_bubbles.POINT, each
        assert abs(each.error("package")) <= planner_bubbles.POINT, each


@pytest.mark.slow
def test_every_row_of_short_steps_is_within_a_point(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of up to 96 micro-batches; the benchmark itself takes them all."""
    lines = (tables / "zero_bubble_rates_table5.csv").read_text(encoding="utf-8").splitlines()
    place = lines[0].split(",").index("m")
    short = [line for line in lines[1:] if int(line.split(",")[place]) <= 96]
    rates = tmp_path / "short.csv"
    rates.write_text("\n".join([lines[0], *short]), encoding="utf-8")
    assert planner_bubbles.main(["--rates", str(rates), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["summary"]
    assert found["package"]["within_a_point"] >= len(short) - 1
    for way in ("profiled", "dimensions"):
        assert found[way]["within_a_point"] == found[way]["rows"] == len(short) == 54


def test_rows_of_other_models_are_predicted_and_what_is_not_known_is_said(tmp_path: Path) -> None:
    rates = tmp_path / "rates.csv"
    head = "model,layers,hidden,pp,mbs,m,schedule,bubble_rate"
    lines = ["7B,30,4096,4,1,16,ZB-H1,0.07", "7B,30,4096,4,1,16,ZB-V,0.03", "7B,30,4096,4,1,16,Chimera,0.1"]
    rates.write_text("\n".join([head, *lines]))
    scored, skipped = planner_bubbles.score(planner_bubbles.read_rows(rates))
    assert [sorted(each.rates) for each in scored] == [["dimensions", "package"]] * 2
    assert all(0 < each.rates["dimensions"] < 0.15 for each in scored)
    assert skipped == {"no schedule of the planner is called Chimera": 1}


def test_a_file_of_something_else_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit) as caught:
        planner_bubbles.main(["--rates", str(other)])
    assert caught.value.code == 2
    assert "holds no bubble rates" in capsys.readouterr().err
