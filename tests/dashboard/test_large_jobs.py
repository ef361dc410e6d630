"""Jobs of many ranks: analysed once whatever is opened, and no page grows with the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from plotly.utils import PlotlyJSONEncoder
from tiny_traces import write_job

from trine.analyzers import Analysis, analyze
from trine.dashboard import application, figures, urls
from trine.dashboard.background import Background
from trine.dashboard.pages.explain import MOST_ROWS
from trine.dashboard.service import Service
from trine.record import load

RANKS = 96
#: What a page may weigh, as the browser gets it.
MOST_BYTES = 1_500_000


class Counted:
    """Analyses in this process, and counts them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def __call__(self, path: str, steps: str, size_bytes: int) -> Analysis:
        self.calls.append((Path(path).name, steps))
        return analyze(load(Path(path)), steps=steps, workers=1)


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, counted: Counted) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("many")
    write_job(root / "job", ranks=RANKS, steps=3)
    made = Service([root], Background(executor=lambda: ThreadPoolExecutor(1)), analyse=counted)
    yield made
    made.close()


def page(service: Service, name: str) -> Any:
    run = service.catalogue.runs()[0]
    return application._page(service, urls.parse(f"/{name}", f"?run={run.id}"))


def test_every_page_and_the_list_share_one_analysis(service: Service, counted: Counted) -> None:
    run = service.catalogue.runs()[0]
    for _ in range(2):
        service.unasked(service.catalogue.runs())
        for name in urls.PAGES:
            page(service, name)
    key = ("analysis", run.id, "complete")
    outcome = service.background.request(
        key, run.fingerprint, counted, str(run.path), "complete", 0, wait_s=60
    )
    assert outcome.state == "ready" and len(outcome.value.ranks) == RANKS
    for name in urls.PAGES:
        page(service, name)
    service.unasked(service.catalogue.runs())
    assert counted.calls == [("job", "complete")]


@pytest.mark.parametrize("name", [name for name in urls.PAGES if name != "runs"])
def test_a_page_does_not_grow_with_the_ranks(service: Service, counted: Counted, name: str) -> None:
    run = service.catalogue.runs()[0]
    key = ("analysis", run.id, "complete")
    service.background.request(key, run.fingerprint, counted, str(run.path), "complete", 0, wait_s=60)
    shown = json.loads(json.dumps(page(service, name), cls=PlotlyJSONEncoder))
    assert len(json.dumps(shown)) < MOST_BYTES
    bodies = [len(children) for children in found(shown, "Tbody")]
    assert max(bodies, default=0) <= max(MOST_ROWS, figures.MOST_BARS + 1)  # a row a bar, and one of all


def found(component: Any, kind: str) -> Iterator[list[Any]]:
    """The children of all components of a kind."""
    if isinstance(component, list):
        for part in component:
            yield from found(part, kind)
    elif isinstance(component, dict):
        children = component.get("props", {}).get("children")
        if component.get("type") == kind:
            yield children if isinstance(children, list) else [children]
        yield from found(children, kind)
