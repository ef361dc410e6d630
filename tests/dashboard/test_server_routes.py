"""The server: only its own runs, only to whom it should, and one clear line when it cannot."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_samples import analyse, decode, read, write_million, write_record
from flask.testing import FlaskClient
from tiny_traces import write_job

from trine.cli import main
from trine.dashboard import serve
from trine.dashboard.application import create
from trine.dashboard.server import is_local
from trine.dashboard.service import Service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("served")
    write_record(root / "record", 20)
    write_job(root / "job", ranks=2, steps=4)
    write_million(root / "big")
    (root / "cut.json").write_text('{"traceEvents": [{"ph": "X"')
    made = Service([root], analyse=analyse, read=read)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(service: Service) -> FlaskClient:
    return create(service, frozenset({"localhost", "127.0.0.1"})).server.test_client()


def ask(client: FlaskClient, address: str) -> Any:
    """The answer, once the rank is read."""
    for _ in range(100):
        answer = client.get(address)
        if answer.status_code != 202:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"still not read: {address}")


def name_of(service: Service, ending: str) -> str:
    return next(run.id for run in service.catalogue.runs() if run.id.endswith(ending))


def test_the_timeline_of_a_record(client: FlaskClient, service: Service) -> None:
    head, columns = decode(ask(client, f"/data/timeline?run={name_of(service, 'record')}&rank=0").data)
    assert [lane["group"] for lane in head["lanes"]] == ["steps", "phases"]
    assert head["whole"] and head["merged"] == 0 and head["spans"] == 20 + 40
    assert columns["start"][:20].tolist() == [at * 50e6 for at in range(20)]
    assert any("not when" in note for note in head["notes"])


def test_streams_of_a_trace_from_time_zero_of_the_lowest_rank(client: FlaskClient, service: Service) -> None:
    run = name_of(service, "job")
    service.background.request(
        ("analysis", run, "complete"),
        "x",
        analyse,
        str(service.catalogue.find(run).path),
        "complete",
        0,
        wait_s=60,
    )
    head, columns = decode(ask(client, f"/data/timeline?run={run}&rank=1").data)
    assert {lane["group"] for lane in head["lanes"]} >= {"steps", "device"}
    assert abs(columns["start"].min()) < 1e9  # relative, not 1970


def test_a_million_spans_come_merged_and_a_narrow_range_whole(client: FlaskClient, service: Service) -> None:
    run = name_of(service, "million.json")
    answer = ask(client, f"/data/timeline?run={run}&rank=0&columns=2000&limit=1000000")
    head, _ = decode(answer.data)
    assert head["spans"] == 1_200_000 and head["merged"] > 500_000 and not head["whole"]
    assert sum(lane["count"] for lane in head["lanes"]) < 70_000
    near, columns = decode(ask(client, f"/data/timeline?run={run}&rank=0&from=1000000&to=1100000").data)
    assert near["merged"] == 0 and 0 < len(columns["start"]) < 20_000
    assert ((columns["start"] <= 1_100_000) & (columns["start"] + columns["duration"] >= 1_000_000)).all()


def test_the_range_as_a_chrome_trace(client: FlaskClient, service: Service) -> None:
    answer = ask(client, f"/data/trace.json?run={name_of(service, 'record')}&rank=0&from=0&to=120000000")
    assert "attachment" in answer.headers["Content-Disposition"]
    trace = json.loads(answer.data)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [e["name"] for e in spans if e["cat"] == "step"] == ["step 0", "step 1", "step 2"]
    assert {e["dur"] for e in spans if e["cat"] == "step"} == {50_000.0}
    assert any(e["ph"] == "M" and e["args"]["name"] == "rank 0" for e in trace["traceEvents"])


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("run=../../etc/passwd&rank=0", "no run"),
        ("run=/etc/passwd&rank=0", "no run"),
        ("rank=0", "lacks 'run'"),
        ("run={record}&rank=zero", "must be a number"),
        ("run={record}&rank=7", "no rank 7"),
        ("run={record}&rank=0&from=9&to=3", "after 'from'"),
        ("run={record}&rank=0&from=nan&to=3", "must be a number"),
    ],
)
def test_bad_requests_get_one_line(client: FlaskClient, service: Service, query: str, reason: str) -> None:
    answer = ask(client, "/data/timeline?" + query.format(record=name_of(service, "record")))
    assert answer.status_code == 400
    said = json.loads(answer.data)["error"]
    assert reason in said and "\n" not in said and "Traceback" not in said


def test_an_unreadable_run_gets_its_reason(client: FlaskClient, service: Service) -> None:
    (service.catalogue.roots[0] / "broken.json").write_text('{"traceEvents": [{"ph"')
    time.sleep(2.1)  # the catalogue looks again every two seconds
    answer = ask(client, f"/data/timeline?run={name_of(service, 'broken.json')}&rank=0")
    assert answer.status_code == 400 and json.loads(answer.data)["error"]


def test_assets_do_not_lead_out(client: FlaskClient) -> None:
    for path in ("/assets/../application.py", "/assets/%2e%2e/application.py", "/assets//etc/passwd"):
        answer = client.get(path)
        assert b"import" not in answer.data and b"root:" not in answer.data


def test_other_hosts_are_turned_away(client: FlaskClient) -> None:
    assert client.get("/", headers={"Host": "127.0.0.1:8050"}).status_code == 200
    assert client.get("/", headers={"Host": "localhost"}).status_code == 200
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert client.get("/data/timeline?run=x&rank=0", headers={"Host": "evil.example:80"}).status_code == 403


def test_the_browser_is_kept_to_this_server(client: FlaskClient) -> None:
    answer = client.get("/")
    assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
    assert b"http://" not in answer.data and b"https://" not in answer.data


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.3", False),
        ("node", False),
    ],
)
def test_which_hosts_are_this_machine(host: str, local: bool) -> None:
    assert is_local(host) is local


def test_a_taken_port_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["dashboard", str(tmp_path), "--no-browser", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said == f"trine: port {port} is in use; choose another with --port, or --port 0 for any\n"


def test_an_absent_path_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", str(tmp_path / "nowhere"), "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("trine: ") and "nowhere does not exist" in said and said.count("\n") == 1


def test_any_free_port_and_a_clean_end(tmp_path: Path) -> None:
    server = serve([tmp_path], port=0)
    assert server.port > 0 and server.address == f"http://127.0.0.1:{server.port}/"
    server.stop_background()
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # it is free again


def test_without_dash_the_reason_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['dash'] = None\n"
        "from trine.cli import main; sys.exit(main(['dashboard', sys.argv[1], '--no-browser', '--port', '0']))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 2
    assert (
        found.stderr == "trine: the dashboard needs Dash; install it with: pip install 'trine[dashboard]'\n"
    )


def test_importing_the_command_does_not_import_dash() -> None:
    code = "import sys, trine.commands.dashboard, trine.dashboard; print('dash' in sys.modules, 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_and_ends_in_order(tmp_path: Path, how: signal.Signals) -> None:
    write_record(tmp_path / "a", 3)
    command = [sys.executable, "-m", "trine", "dashboard", str(tmp_path), "--no-browser", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        assert started.stdout is not None
        line = started.stdout.readline()
        try:
            assert line.startswith("Trine shows 1 run at http://127.0.0.1:"), line
            address = line.split()[5] + f"data/timeline?run={tmp_path.name}/a&rank=0"
            answers = (urllib.request.urlopen(address, timeout=60).status for _ in range(20))
            assert 200 in answers  # it was read, so the worker process is there
            workers = children(started.pid)
            assert workers
        finally:
            os.killpg(started.pid, how)  # as a terminal does: to all of the group
        said = started.communicate(timeout=60)[1]
    assert started.returncode == 0 and said == ""
    for _ in range(100):
        if not any(Path(f"/proc/{worker}").exists() for worker in workers):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a worker process outlived the server")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
def test_a_killed_server_leaves_no_process_behind(tmp_path: Path) -> None:
    write_record(tmp_path / "a", 3)
    command = [sys.executable, "-m", "trine", "dashboard", str(tmp_path), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        assert started.stdout is not None
        address = started.stdout.readline().split()[5] + f"data/timeline?run={tmp_path.name}/a&rank=0"
        assert 200 in (urllib.request.urlopen(address, timeout=60).status for _ in range(20))
        workers = children(started.pid)
        started.kill()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker process outlived the server"
        time.sleep(0.1)


def children(process: int) -> list[int]:
    """Process numbers of a process's children, by what each process says of its parent.

    A thread's own list of children is not to be relied on while it runs (proc(5)): a child of a request's thread moves
    to another thread when that one ends, and may be in neither list while both are read.
    """
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == process:
                found.append(int(path.parent.name))
    return found
