"""One server and one browser for all browser tests; a page that watches what the browser asks for and says."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dashboard_samples import Recorder, analyse, read, write_evil, write_million, write_record
from data_folder import data_folder
from tiny_traces import write_job

from trine.dashboard.background import Background
from trine.dashboard.server import Server
from trine.dashboard.service import Service

CHROMIUM = Path(os.environ.get("TRINE_CHROMIUM", "/usr/bin/chromium"))
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
REAL_DATA = data_folder()


@dataclass
class Site:
    """The server under test and what it serves."""

    address: str
    root: Path
    live: Recorder

    def __call__(self, page: str, run: str = "", **query: Any) -> str:
        """The address of a page of a run under the root."""
        values = [f"run={self.root.name}/{run}"] if run else []
        values += [f"{name}={value}" for name, value in query.items()]
        return self.address + page + ("?" + "&".join(values) if values else "")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("runs")
    write_record(root / "record", 40)
    write_job(root / "job", ranks=2, steps=6)
    write_million(root / "big")
    write_evil(root / "evil")
    (root / "broken").mkdir()
    (root / "broken" / "cut.json").write_text('{"schemaVersion": 1, "traceEvents": [{"ph": "X", "na')
    live = Recorder(root / "live")
    live.steps(5)
    traces = REAL_DATA / "traces"
    real = [traces / name for name in ("kineto", "pipeline_schedule", "memory_snapshot", "flight_recorder")]
    roots = [root, *(folder for folder in real if folder.is_dir())]
    service = Service(roots, Background(interval_s=1.0), analyse=analyse, read=read)
    server = Server(service, "127.0.0.1", 0)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield Site(server.address, root, live)
    server.close()
    thread.join(10)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no browser: {CHROMIUM} does not exist (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        # One context: scripts are fetched and compiled once, as for a user who opens several tabs.
        context = launched.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
        context.set_default_timeout(45_000)
        yield context
        launched.close()


@dataclass
class Watch:
    """What a page did that it must not do."""

    outside: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def page(browser: Any, site: Site, watch: Watch) -> Iterator[Any]:
    """A fresh page; afterwards: nothing was asked of another host, and the console has no error."""
    made = browser.new_page()
    inside = (site.address, "data:", "blob:")
    made.on("request", lambda r: None if r.url.startswith(inside) else watch.outside.append(r.url))
    made.on("console", lambda m: watch.errors.append(m.text) if m.type == "error" else None)
    made.on("pageerror", lambda error: watch.errors.append(str(error)))
    yield made
    errors = list(watch.errors)
    made.evaluate("localStorage.clear()")
    made.close()
    assert not watch.outside, watch.outside
    assert not errors, errors
