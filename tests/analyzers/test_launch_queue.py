"""The launch queue against every nanosecond by itself, and on real runs that are fed and that are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from device_simulator import Host, Launch, Step, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

import trine
from trine.analyzers.selection import parse_selection, select
from trine.analyzers.studies import Scope, result_of
from trine.analyzers.studies.launch_queue import LaunchQueue, QueuePart, reduce
from trine.record.model import Rank

ALL = parse_selection("all")


def queue_of(rank: Rank) -> QueuePart | None:
    selected = select(rank, ALL)
    return reduce(Scope(rank, ALL, selected, ((rank, selected),), None))


bodies = st.lists(
    st.one_of(
        st.builds(Launch, st.integers(1, 40), st.sampled_from([7, 20])), st.builds(Host, st.integers(1, 60))
    ),
    min_size=1,
    max_size=12,
)


@given(bodies)
@settings(max_examples=40)
def test_every_nanosecond_is_starved_last_or_fed(body) -> None:
    rank = simulate([Step((Launch(5), *body))])
    part = queue_of(rank)
    assert part is not None and rank.device is not None and rank.host is not None
    work = list(
        zip(
            rank.host["start_ns"][rank.device["launch"]].tolist(),
            rank.device["start_ns"].tolist(),
            rank.device["end_ns"].tolist(),
            strict=True,
        )
    )
    begin, stop = min(start for _, start, _ in work), max(end for _, _, end in work)
    counts = {"starved": 0, "last": 0, "fed": 0}
    edges = sorted({begin, stop, *(t for times in work for t in times if begin <= t < stop)})
    for low, high in pairwise(edges):
        waiting = sum(launch <= low < start for launch, start, _ in work)
        running = sum(start <= low < end for _, start, end in work)
        counts["fed" if waiting else "last" if running else "starved"] += high - low
    assert (part.starved_ns, part.last_ns, part.fed_ns) == (counts["starved"], counts["last"], counts["fed"])
    assert part.starved_ns + part.last_ns + part.fed_ns == part.window_ns == stop - begin
    assert len(part.series) <= 500


def test_a_fast_host_fills_the_queue_and_a_slow_one_does_not() -> None:
    fast = queue_of(simulate([Step(tuple([Launch(50_000)] * 40))] * 2))
    slow = queue_of(simulate([Step(tuple([Launch(2_000), Host(40_000)] * 40))] * 2))
    assert fast is not None and slow is not None
    assert fast.host_bound_share < 0.05 and fast.median_lead_ns > 500_000 and fast.deepest > 20
    assert slow.starved_ns > 0.8 * slow.window_ns and slow.median_lead_ns < 10_000
    assert [step.step for step in slow.steps] == [0, 1]
    assert all(step.nothing_waits_share > 0.8 for step in slow.steps)
    assert max(value for _, value in fast.series) > 20 > max(value for _, value in slow.series)


def test_without_launches_nothing_is_said() -> None:
    rank = simulate([Step((Launch(1_000),))])
    assert rank.device is not None
    rank.device.columns["launch"][:] = -1
    assert queue_of(rank) is None
    assert queue_of(replace(rank, host=None)) is None


def test_real_runs(data: Path) -> None:
    found = {}
    for name in ("a100_nccl_metadata", "v100_ns_resolution"):
        path = data / "traces" / "kineto" / "single" / f"{name}.json.gz"
        found[name] = result_of(trine.analyze(trine.load(path), workers=1), "launch_queue", LaunchQueue)
    starving, fed = found["a100_nccl_metadata"], found["v100_ns_resolution"]
    assert starving is not None and fed is not None
    assert starving.host_bound_share > 0.7 and starving.median_lead_ns < 20_000
    # CUDA holds 1,024 launches; this host filled the queue and was held up by it.
    assert fed.host_bound_share < 0.01 and 1_000 < fed.ranks[0].queue.deepest <= 1_024
