"""The address bar is the state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trine.dashboard.urls import PAGES, State, parse

text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(
    lambda t: t.strip() != ""
)
states = st.builds(
    State,
    page=st.sampled_from([page for page in PAGES if page != "runs"]),
    run=text,
    ranks=st.sets(st.integers(0, 10_000), max_size=5).map(lambda ranks: tuple(sorted(ranks))),
    steps=st.sampled_from(["complete", "all", "3:8", "3:", ":8"]),
    against=st.none() | text,
    theme=st.sampled_from(["light", "dark"]),
)


@given(states)
def test_an_address_gives_its_state_back(state: State) -> None:
    assert parse(state.path, state.search) == state


@given(states, st.integers(-(10**15), 10**15), st.integers(1, 10**15))
def test_a_range_survives_to_the_nanosecond(state: State, begin: int, length: int) -> None:
    shown = state.with_(begin_ns=float(begin), end_ns=float(begin + length))
    assert parse(shown.path, shown.search) == shown


@given(st.text(max_size=80), st.text(max_size=200))
def test_whatever_is_typed_is_some_state(path: str, search: str) -> None:
    state = parse(path, search)
    assert state.page in PAGES and state.theme in ("light", "dark")
    assert parse(state.path, state.search).page == state.page


@pytest.mark.parametrize(
    ("path", "search", "page"),
    [
        (None, None, "runs"),
        ("/", "", "runs"),
        ("/overview", "", "runs"),  # a page of a run, and no run
        ("/overview", "?run=a/b", "overview"),
        ("/nowhere", "?run=a", "runs"),
        ("/../etc/passwd", "?run=a", "runs"),
    ],
)
def test_pages(path: str | None, search: str | None, page: str) -> None:
    assert parse(path, search).page == page


def test_what_is_malformed_falls_back() -> None:
    state = parse("/timeline", "?run=a&rank=x,2,-1,2&steps=soon&from=9&to=3&theme=pink")
    assert state == State(page="timeline", run="a", ranks=(2,))
    assert parse("/timeline", "?run=a&from=nan&to=inf").begin_ns is None


def test_addresses_stay_readable() -> None:
    state = State(page="timeline", run="runs/a b", ranks=(0, 3), steps="3:8", theme="dark")
    assert state.address == "/timeline?run=runs/a%20b&steps=3:8&rank=0,3&theme=dark"
    assert State(theme="dark").address == "/?theme=dark"
