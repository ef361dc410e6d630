"""Routes beside Dash's own: the timeline's columns, and the visible range as a Chrome trace."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, request

from trine.dashboard.catalogue import Run
from trine.dashboard.detail import LIMIT, encode, in_range, reduce_lane
from trine.dashboard.lanes import KINDS, RankLanes
from trine.dashboard.service import Service
from trine.record.errors import TrineError, UsageError

__all__ = ["guard", "install"]

#: How long a request waits for a rank to be read before it says "not yet".
_PATIENCE_S = 8.0
_MOST_COLUMNS = 20_000
#: A trace with more spans than this makes viewers stall; the range must be narrowed first.
_MOST_EXPORTED = 2_000_000


def install(server: Flask, service: Service) -> None:
    """Add the data routes to Dash's Flask server."""

    @server.get("/data/timeline")
    def timeline() -> Response:
        return _answer(lambda: _timeline(service))

    @server.get("/data/trace.json")
    def trace() -> Response:
        return _answer(lambda: _trace(service))


def guard(server: Flask, hosts: frozenset[str] | None) -> None:
    """Headers that keep the browser to this server, and a check of the Host header where we are local.

    The check stops a page of another site from reading runs through a name that it points at 127.0.0.1
    (DNS rebinding).
    """

    @server.before_request
    def check_host() -> Response | None:
        name = request.host.rsplit(":", 1)[0].strip("[]").lower()
        if hosts is not None and name not in hosts:
            return Response("this dashboard serves this machine only\n", 403, mimetype="text/plain")
        return None

    @server.after_request
    def headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = (
            "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
            "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; "
            "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response


def _answer(make: Any) -> Response:
    try:
        answer: Response = make()
    except TrineError as error:
        return _json({"error": " ".join(str(error).split())}, 400)
    return answer


def _json(value: Any, status: int) -> Response:
    return Response(json.dumps(value), status, mimetype="application/json")


def _timeline(service: Service) -> Response:
    run = service.catalogue.find(_text("run"))
    rank = int(_number("rank"))
    found = _lanes(service, run, rank)
    if isinstance(found, Response):
        return found
    lanes, shift, version = found
    begin, end = lanes.begin, lanes.end
    if request.args.get("from") and request.args.get("to"):
        begin, end = _number("from") - shift, _number("to") - shift
        if end <= begin:
            raise UsageError("the range is empty: 'to' must be after 'from'")
    limit = int(_number("limit", LIMIT))
    columns = min(max(int(_number("columns", 3000)), 16), _MOST_COLUMNS)
    inside = sum(_length(lane, begin, end) for lane in lanes.lanes)
    merge = inside > max(limit, 1)
    parts = [(lane, reduce_lane(lane, begin, end, columns if merge else None)) for lane in lanes.lanes]
    # All of the rank in one answer needs no further request, however far one zooms.
    whole = not merge and begin <= lanes.begin and end >= lanes.end
    header = {
        "rank": lanes.rank,
        "host": lanes.host_name,
        "notes": lanes.notes,
        "begin": lanes.begin + shift,
        "end": lanes.end + shift,
        "from": begin + shift,
        "to": end + shift,
        "whole": whole,
        "spans": lanes.spans,
        "version": version,
        "kinds": KINDS,
    }
    return Response(encode(parts, lanes.names, header, shift), mimetype="application/octet-stream")


def _length(lane: Any, begin: float, end: float) -> int:
    rows = in_range(lane, begin, end)
    return int(rows.stop - rows.start)


def _lanes(service: Service, run: Run, rank: int) -> tuple[RankLanes, float, int] | Response:
    """The rank's lanes, what brings them to the run's time zero, and their version; or why not (yet)."""
    deadline = time.monotonic() + _PATIENCE_S
    lowest = service.lowest_rank(run)
    outcomes = []
    for wanted in (rank, rank if lowest is None else lowest):
        outcome = service.lanes(run, wanted, wait_s=max(0.05, deadline - time.monotonic()))
        if outcome.state == "pending":
            return _json({"state": "reading"}, 202)
        if outcome.value is None:
            return _json({"error": outcome.error}, 400)
        outcomes.append(outcome)
    own, base = outcomes
    return own.value, service.shift_ns(run, own.value, base.value), own.version


def _trace(service: Service) -> Response:
    run = service.catalogue.find(_text("run"))
    begin, end = _number("from"), _number("to")
    parts: list[tuple[RankLanes, float]] = []
    for word in _text("rank").split(","):
        found = _lanes(service, run, int(_as_number("rank", word)))
        if isinstance(found, Response):
            return found
        parts.append(found[:2])
    spans = sum(_length(lane, begin - shift, end - shift) for lanes, shift in parts for lane in lanes.lanes)
    if spans > _MOST_EXPORTED:
        raise UsageError(f"the range holds {spans:,} spans; zoom in below {_MOST_EXPORTED:,} to download it")
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in run.id) or "trace"
    return Response(
        chrome_trace(parts, begin, end),
        mimetype="application/json",
        headers={"Content-Disposition": f'attachment; filename="{name}.json"'},
    )


def chrome_trace(parts: list[tuple[RankLanes, float]], begin: float, end: float) -> Iterator[str]:
    """The range as a Chrome trace (JSON), which Perfetto and chrome://tracing open; a process a rank.

    Times are microseconds with nanosecond digits, from the run's time zero.
    """
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    first = True
    for lanes, shift in parts:
        threads: dict[tuple[str, str], int] = {}
        for lane in lanes.lanes:
            threads.setdefault((lane.group, lane.label), len(threads))
        named = [
            {"ph": "M", "pid": lanes.rank, "name": "process_name", "args": {"name": f"rank {lanes.rank}"}}
        ]
        for (_, label), thread in threads.items():
            named.append(
                {"ph": "M", "pid": lanes.rank, "tid": thread, "name": "thread_name", "args": {"name": label}}
            )
        for event in named:
            yield ("" if first else ",\n") + json.dumps(event)
            first = False
        for lane in lanes.lanes:
            spans = reduce_lane(lane, begin - shift, end - shift, None)
            thread = threads[(lane.group, lane.label)]
            for start, length, kind, name in zip(
                spans.start.tolist(),
                spans.duration.tolist(),
                spans.kind.tolist(),
                spans.name.tolist(),
                strict=True,
            ):
                event = {
                    "ph": "X",
                    "pid": lanes.rank,
                    "tid": thread,
                    "name": lanes.names[name],
                    "cat": KINDS[kind],
                    "ts": round((start + shift) / 1000, 3),
                    "dur": round(length / 1000, 3),
                }
                yield ("" if first else ",\n") + json.dumps(event)
                first = False
    yield "\n]}\n"


def _text(name: str) -> str:
    value = request.args.get(name)
    if not value:
        raise UsageError(f"the request lacks {name!r}")
    return value


def _number(name: str, otherwise: float | None = None) -> float:
    if otherwise is not None and not request.args.get(name):
        return otherwise
    return _as_number(name, _text(name))


def _as_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e18:
        raise UsageError(f"{name} must be a number, not {text[:40]!r}")
    return value
