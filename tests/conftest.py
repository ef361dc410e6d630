"""What all tests share: the real data and where it lies, and when a skipped test is a failed one.

On a machine without real traces or without Chromium, tests that need them skip with the reason. Where
``TRINE_REQUIRE_DATA`` or ``TRINE_REQUIRE_BROWSER`` is set, as CI does, such a skip is a failure.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no defect: what is slow is found by the tests of speed, which compare ratios.
settings.register_profile("trine", deadline=None, derandomize=True)
settings.load_profile("trine")

#: Tests and benchmarks share what starts ranks and finds data.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

# A shell without job control ignores Ctrl-C on behalf of what it starts in the background (nohup pytest &), and so would all
# that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Tests of several processes that a busy machine can upset: once more before they count as failed. The
#: summary names each that needed it; a defect fails twice.
AGAIN = ("browser", "torchrun", "slow", "timing")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in AGAIN):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever runs the tests may have calibrated this machine, and predictions would differ; what was built is shared."""
    from trine.record.hardware import cache_folder

    folder, theirs = tmp_path_factory.mktemp("cache"), cache_folder()
    for built in theirs.glob("observer-*.so") if theirs.is_dir() else ():
        (folder / built.name).symlink_to(built)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRINE_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real traces; without it the test skips, and says where it looked."""
    from data_folder import data_folder

    folder = data_folder()
    if not (folder / "traces").is_dir():
        pytest.skip(f"no real traces: neither $TRINE_TEST_DATA nor {folder} holds a traces folder")
    return folder


def must_not_skip(item: pytest.Item) -> str | None:
    """The variable that forbids this test to skip, None where it may."""
    if item.get_closest_marker("browser") and os.environ.get("TRINE_REQUIRE_BROWSER"):
        return "TRINE_REQUIRE_BROWSER"
    if "data" in getattr(item, "fixturenames", ()) and os.environ.get("TRINE_REQUIRE_DATA"):
        return "TRINE_REQUIRE_DATA"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    variable = must_not_skip(item) if report.skipped and not hasattr(report, "wasxfail") else None
    if variable is not None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped although ${variable} is set: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    # A whole file that skips (an absent playwright, say) would never reach the hook above.
    if report.skipped and os.environ.get("TRINE_REQUIRE_BROWSER") and "dashboard" in collector.path.parts:
        report.outcome = "failed"
        report.longrepr = (
            f"{collector.nodeid} skipped although $TRINE_REQUIRE_BROWSER is set: {report.longrepr}"
        )
    return report
