"""Following a record: everything once, nothing twice, and no harm from half a frame."""

from __future__ import annotations

from pathlib import Path

from dashboard_samples import MS, Recorder

from trine.dashboard.live import Feed, Feeds
from trine.dashboard.pages import live


def test_rows_come_once_and_in_order(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    feed, cursor, seen = Feed(tmp_path / "run"), 0, []
    assert feed.since(0).steps == ()
    for count in (3, 0, 1, 7):
        recorder.steps(count)
        update = feed.since(cursor)
        assert len(update.steps) == count and len(update.memory) == count
        cursor = update.cursor
        seen += [row.index for row in update.steps]
    assert seen == list(range(11))
    assert feed.since(cursor).steps == ()
    assert [row.index for row in feed.since(0).steps] == seen


def test_a_step_has_its_time_loss_phases_and_memory(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.steps(2, step_ns=40 * MS)
    update = Feed(tmp_path / "run").since(0)
    last = update.steps[-1]
    assert (last.rank, last.index, last.duration_ns, last.loss) == (0, 1, 40 * MS, 1.5)
    assert last.phases_ns is not None and sum(last.phases_ns) == 40 * MS
    assert update.memory[-1].bytes == 300 * 2**20 + 1


def test_parts_of_one_step_are_joined_when_it_ends(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    feed = Feed(tmp_path / "run")
    recorder.part(0, 100, 200, loss=2.0, complete=0)
    first = feed.since(0)
    assert first.steps == ()
    recorder.part(0, 200, 350, complete=1)
    (step,) = feed.since(first.cursor).steps
    assert (step.start_ns, step.duration_ns, step.loss) == (100, 250, 2.0)
    assert step.phases_ns is not None and sum(step.phases_ns) == 250
    recorder.part(1, 350, 400, complete=0)
    recorder.part(2, 400, 500, complete=1)  # the step before never said that it ended
    assert [row.index for row in feed.since(0).steps] == [0, 1, 2]


def test_half_a_frame_is_read_when_it_is_whole(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.steps(4)
    (segment,) = (tmp_path / "run").glob("rank-*/rows-*.trine")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-5])
    feed = Feed(tmp_path / "run")
    first = feed.since(0)
    assert [row.index for row in first.steps] == [
        0,
        1,
        2,
        3,
    ]  # samples of the last step are torn, not its part
    segment.write_bytes(whole)
    second = feed.since(first.cursor)
    assert second.steps == () and len(second.memory) == 1


def test_a_new_segment_and_a_new_attempt_are_followed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    feed = Feed(tmp_path / "run")
    recorder.steps(2)
    cursor = feed.since(0).cursor
    recorder.writer._close_segment()
    recorder.steps(2)
    update = feed.since(cursor)
    assert [row.index for row in update.steps] == [2, 3]
    assert len(list((tmp_path / "run").glob("rank-*/rows-*.trine"))) == 2
    recorder.close()
    again = Recorder(tmp_path / "run")
    assert again.writer.attempt == 2
    again.steps(1)
    later = feed.since(update.cursor)
    assert [row.index for row in later.steps] == [0] and later.attempt == "attempt-0002"
    assert [row.index for row in feed.since(0).steps] == [0]  # what was drawn is of another start
    drawn = live.drawing(feed, later, live._store(update), "light", 10_000)
    assert drawn[0]["data"][0]["x"] == [0] and drawn[-1]["attempt"] == "attempt-0002"


def test_feeds_are_shared_and_few(tmp_path: Path) -> None:
    feeds = Feeds(most=2)
    first = feeds.of(tmp_path / "a")
    assert feeds.of(tmp_path / "a") is first
    feeds.of(tmp_path / "b")
    feeds.of(tmp_path / "c")
    assert feeds.of(tmp_path / "a") is not first


def test_patches_append_only_what_is_new(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.steps(3)
    feed = Feed(tmp_path / "run")
    first = feed.since(0)
    recorder.steps(2)
    update = feed.since(first.cursor)
    steps, phases, loss, memory = live.extend(update, [0], [0])
    operations = steps.to_plotly_json()["operations"]
    assert [op["params"]["value"] for op in operations] == [[3, 4], [50.0, 50.0]]
    assert {op["operation"] for op in operations} == {"Extend"}
    assert len(phases.to_plotly_json()["operations"]) == 14  # x and y of each phase
    assert loss.to_plotly_json()["operations"] and memory.to_plotly_json()["operations"]


def test_a_new_rank_makes_the_figures_whole_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", 0, 2)
    recorder.steps(3)
    feed = Feed(tmp_path / "run")
    first = feed.since(0)
    store = {"cursor": first.cursor, "ranks": [0], "memory": [0], "attempt": "run", "drawn": 0}
    other = Recorder(tmp_path / "run", 1, 2)
    other.steps(2)
    drawn = live.drawing(feed, feed.since(first.cursor), store, "light", 10_000)
    assert [trace["name"] for trace in drawn[0]["data"]] == ["rank 0", "rank 1"]
    assert drawn[-1]["ranks"] == [0, 1] and drawn[-1]["drawn"] == 0


def test_figures_that_grew_long_start_over(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.steps(5)
    feed = Feed(tmp_path / "run")
    store = {"cursor": 0, "ranks": [0], "memory": [0], "attempt": "run", "drawn": 0}
    whole = live.drawing(feed, feed.since(0), store, "dark", most_patched=4)
    assert len(whole[0]["data"][0]["x"]) == 5 and whole[-1]["drawn"] == 0
