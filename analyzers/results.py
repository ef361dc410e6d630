"""Results: frozen dataclasses of numbers and small tables. Reports and the dashboard only render them.

Two layers, from the first day:

    Rank (tables) ──summarize──► RankSummary ─┐
    Rank (tables) ──summarize──► RankSummary ─┼─ conclude ──► Analysis
    ...            (in a pool)                 ┘

A :class:`RankSummary` is small and picklable: cross-rank analyses see nothing else, so 8 ranks and
8,000 take the same path. ``None`` means "cannot be said"; the reason is a ``Quality`` of the same
result. Times are integer nanoseconds, sizes bytes, rates per second, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trine.record.model import DeviceInfo, Group, Quality, Table

from ._study_access import known_key, reason_of, study_attribute, study_keys
from ._tabular import Columns, Frames, Tabular, frame_of

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Analysis",
    "Breakdown",
    "BusyTime",
    "CheckItem",
    "CollectiveResult",
    "Communication",
    "Finding",
    "Gain",
    "Hardware",
    "HeatCell",
    "IdleCauses",
    "LateActivity",
    "MemorySummary",
    "Mfu",
    "NamedTime",
    "NotBound",
    "Prediction",
    "RankResult",
    "RankSummary",
    "Recommendation",
    "Source",
    "StepStatistics",
    "Verdict",
    "to_pandas",
]


def to_pandas(rows: tuple[Any, ...]) -> pandas.DataFrame:
    """A data frame with a row per dataclass of ``rows``, such as ``analysis.collectives``; units end the columns' names."""
    return frame_of(rows)


# --- one rank ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BusyTime(Tabular):
    """Unions over all streams, in ns."""

    UNIT = "ns"

    any: int
    compute: int
    communication: int
    copy: int


@dataclass(frozen=True, slots=True)
class IdleCauses(Tabular):
    """Idle time by cause, in ns; sums to the breakdown's idle exactly."""

    UNIT = "ns"

    data: int = 0
    host: int = 0
    sync: int = 0
    dependency: int = 0
    bubble: int = 0
    other: int = 0


@dataclass(frozen=True, slots=True)
class Breakdown(Tabular):
    """Partition of the window: compute + exposed_communication + exposed_copy + idle == window.

    ``basis`` is ``device``, or ``host`` where the source has no device work (operators instead).
    A native record with several deep windows sums them. ``events`` counts the spans used.
    """

    window_ns: int
    compute_ns: int
    exposed_communication_ns: int
    exposed_copy_ns: int
    idle_ns: int
    idle: IdleCauses
    busy: BusyTime
    overlap_ns: int
    overlap_efficiency: float | None  # None without communication
    basis: Literal["device", "host"]
    steps: tuple[int, ...]  # step indexes the window covers
    events: int


@dataclass(frozen=True, slots=True)
class StepStatistics(Tabular):
    """Step time: median with a bootstrap interval. Warm-up and outliers are named, not dropped silently:
    the median is over the steady steps (all but ``warm_up``)."""

    count: int
    median_ns: int
    low_ns: int
    high_ns: int
    p95_ns: int
    warm_up: tuple[int, ...] = ()
    outliers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemorySummary(Tabular):
    """Memory of a rank. ``series`` is (time_ns, allocated_bytes, reserved_bytes or None), thinned to
    at most 2,000 points; ``lower_bound`` where history was lost; ``at_peak`` is category → bytes."""

    COLUMNS: ClassVar[Columns] = {
        "at_peak": "at_peak_bytes",
        "series": ("time_ns", "allocated_bytes", "reserved_bytes"),
    }

    peak_bytes: int | None
    reserved_peak_bytes: int | None
    capacity_bytes: int | None
    at_peak: Mapping[str, int]
    lower_bound: bool
    retries: int | None
    kind: Literal["device", "host"]
    series: tuple[tuple[int, int, int | None], ...] = ()


@dataclass(frozen=True, slots=True)
class NamedTime(Tabular):
    """A kernel or operator by name. ``total_ns`` sums durations (operators: self time)."""

    name: str
    kind: str
    calls: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class LateActivity(Tabular):
    """What a rank did before it entered collectives last, by activity (``compute``, ``loader``,
    ``python``, ``garbage_collection``, ``copy``, ``launching``, ``waiting`` in another group's collective,
    ``unknown``): ns, with an example name."""

    activity: str
    total_ns: int
    example: str | None = None


@dataclass(frozen=True, slots=True, repr=False)
class RankSummary(Tabular):
    """One rank, reduced. ``collectives`` has the model's columns, its own compact strings, and only
    rows of the selected window; ``activity`` (same length, text) says what the rank was doing in the
    gap before each of its collectives, ``activity_example`` names it; ``activity_ns`` divides that gap
    (activity → ns) and ``activity_spans`` names spans (activity → row → name)."""

    COLUMNS: ClassVar[Columns] = {"dtypes": "products_ns", "parts": None, "activity_spans": None}

    rank: int
    source: str
    format: str
    world_size: int | None
    host_name: str | None
    devices: tuple[DeviceInfo, ...]
    groups: tuple[Group, ...]
    steps: Table | None  # the selected steps
    breakdown: Breakdown | None
    breakdown_missing: str | None  # why breakdown is None
    phases_ns: Mapping[str, int] | None  # sums over the selected steps
    step_statistics: StepStatistics | None
    collectives: Table | None
    activity: tuple[str, ...] = ()
    activity_example: tuple[str | None, ...] = ()
    activity_ns: Mapping[str, Any] = field(default_factory=dict)
    activity_spans: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    memory: MemorySummary | None = None
    kernels: tuple[NamedTime, ...] = ()
    operators: tuple[NamedTime, ...] = ()
    dtypes: Mapping[str, int] = field(default_factory=dict)  # matmul time by precision, ns
    metadata: Mapping[str, Any] = field(default_factory=dict)
    quality: tuple[Quality, ...] = ()
    parts: Mapping[str, Any] = field(default_factory=dict)  # study key → this rank's part

    def __repr__(self) -> str:
        from ._in_short import summary_in_short

        return summary_in_short(self)


# --- all ranks ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Communication(Tabular):
    """A rank's part in the matched collectives (sums over the window, ns).

    ``last_in`` counts the collectives it entered last; ``late_doing`` what it did meanwhile. The
    ``steady`` sums leave out warm-up steps, whose first meeting alone can wait longer than all others.
    """

    transfer_ns: int
    wait_ns: int
    caused_wait_ns: int
    lateness_ns: int
    last_in: int
    matched: int
    late_doing: tuple[LateActivity, ...] = ()
    steady_transfer_ns: int | None = None
    steady_wait_ns: int | None = None


@dataclass(frozen=True, slots=True)
class RankResult(Tabular):
    """A rank's summary joined with what only all ranks together can say."""

    summary: RankSummary
    communication: Communication | None
    clock_offset_ns: int | None

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.summary.rank


@dataclass(frozen=True, slots=True)
class CollectiveResult(Tabular):
    """Calls of one operation in one group. ``transfer_ns`` sums over calls; ``wait_ns`` over calls
    and ranks. Bandwidths are None where bytes are unknown. ``caused_by`` is rank → wait caused (ns);
    ``group_size`` counts absent members too, None where it is not stated."""

    COLUMNS: ClassVar[Columns] = {"caused_by": "caused_by_ns"}

    op: str
    group: str
    ranks: tuple[int, ...]
    bytes: int | None
    calls: int
    transfer_ns: int
    wait_ns: int
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    label: str | None = None
    caused_by: Mapping[int, int] = field(default_factory=dict)
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class HeatCell(Tabular):
    """Wait of one rank in one kind of collective, for the rank × collective heatmap."""

    rank: int
    collective: str
    wait_ns: int
    transfer_ns: int
    calls: int


@dataclass(frozen=True, slots=True)
class Hardware(Tabular):
    """The device and where each number came from (``measured``, ``declared``, ``looked up``)."""

    name: str | None
    count: int | None
    peak_flops_per_s: Mapping[str, float] = field(default_factory=dict)  # by dtype, dense
    memory_bytes: int | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict)  # key → source


@dataclass(frozen=True, slots=True)
class Mfu(Tabular):
    """Model FLOPs utilisation. ``value`` is None when no convention was chosen; ``range`` is
    convention → MFU. ``missing`` says what lacks where nothing can be said."""

    value: float | None
    convention: str | None
    flops_per_step: float | None
    peak_flops_per_s: float | None
    dtype: str | None
    range: Mapping[str, float] = field(default_factory=dict)
    hfu: float | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)  # name → value and provenance, in words


@dataclass(frozen=True, slots=True)
class Gain(Tabular):
    """low ≤ mid ≤ high. ns for times."""

    low: int
    mid: int
    high: int


@dataclass(frozen=True, slots=True)
class Prediction(Tabular):
    """What a change would gain per step; ``formula`` and ``inputs`` make it traceable."""

    gain_ns: Gain | None
    step_time_ns: Gain | None
    peak_bytes_change: int | None
    formula: str
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def is_replayed(self) -> bool:
        """Whether the gain is the recorded step's, replayed with the change; else it is an estimate by formula."""
        return "replay_error" in self.inputs


@dataclass(frozen=True, slots=True)
class Recommendation(Tabular):
    """``change`` is configuration key → value, as in a Trine TOML file (``{"precision.dtype": "bf16"}``);
    empty where no key of the runtime mends it, and then ``why`` says what to do by hand."""

    change: Mapping[str, Any]
    why: str
    numerics: str  # what it does to the numbers: "unchanged", or how and by how much
    predicted: Prediction | None


@dataclass(frozen=True, slots=True)
class Finding(Tabular):
    """``fault`` (something is wrong) or ``opportunity`` (something could be better).
    ``severity`` is the share of the step at stake, 0..1, by which findings are ordered."""

    id: str
    kind: Literal["fault", "opportunity"]
    title: str  # one sentence with the number in it
    evidence: Mapping[str, Any]
    recommendation: Recommendation | None
    severity: float = 0.0


@dataclass(frozen=True, slots=True)
class NotBound(Tabular):
    """What the run is not held back by, with the number that says so."""

    id: str
    statement: str


@dataclass(frozen=True, slots=True)
class CheckItem(Tabular):
    """One line of the field's own order of work."""

    id: str
    title: str
    state: Literal["pass", "fail", "unknown"]
    evidence: str
    next: str


@dataclass(frozen=True, slots=True)
class Verdict(Tabular):
    """One sentence: what bounds this run, how sure, what to do, what it would gain.

    ``triangle`` is (computation, communication, memory), summing to 1: the place between the three
    sides; ``hull`` one such point a rank. ``bound_by`` is a finding id, ``computation``, or None.
    """

    sentence: str
    bound_by: str | None
    confidence: Literal["high", "medium", "low"]
    triangle: tuple[float, float, float] | None
    hull: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Source(Tabular):
    """What was read. ``steps`` counts the selected steps (0 when the source marks none)."""

    path: str
    format: str
    world_size: int | None
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    steps: int
    selection: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    formats: tuple[str, ...] = ()  # all kinds of files that make the job, the main one first


@dataclass(frozen=True, slots=True, repr=False)
class Analysis(Tabular):
    """The whole answer about one job.

    Each study's result is also an attribute: ``analysis.critical_path``, None where there is none.
    """

    source: Source
    data_quality: tuple[Quality, ...]
    hardware: Hardware
    ranks: tuple[RankResult, ...]
    collectives: tuple[CollectiveResult, ...]
    heatmap: tuple[HeatCell, ...]
    step_statistics: StepStatistics | None  # over the slowest path: per step, the longest of the ranks
    mfu: Mfu | None
    kernels: tuple[NamedTime, ...]
    operators: tuple[NamedTime, ...]
    checklist: tuple[CheckItem, ...]
    not_bound_by: tuple[NotBound, ...]
    findings: tuple[Finding, ...]
    verdict: Verdict
    studies: Mapping[str, Any] = field(default_factory=dict)  # key → result (analyzers/studies)

    def study(self, key: str) -> Any:
        """A study's result, None where it has none (:meth:`why_without` says why). Raises ``UsageError`` for no study."""
        return self.studies.get(known_key(key))

    def why_without(self, key: str) -> str | None:
        """Why a study has no result, and how to get one; None where it has one. Raises ``UsageError`` as above."""
        return None if known_key(key) in self.studies else reason_of(self.data_quality, key)

    def to_pandas(self) -> Frames:
        """Data frames by name: ``ranks`` with the main numbers of each, ``steps``, ``collectives``, ``kernels``,
        ``operators``, ``findings`` and what else is a table. Units end the columns' names; of studies,
        ``analysis.critical_path.to_pandas()``."""
        from ._analysis_frames import analysis_frames

        return analysis_frames(self)

    if not TYPE_CHECKING:  # a type checker shall go on finding misspelt fields; for it there is study()

        def __getattr__(self, name: str) -> Any:
            return study_attribute(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *study_keys()})

    def __repr__(self) -> str:
        from ._in_short import analysis_in_short

        return analysis_in_short(self)

    def _repr_html_(self) -> str:
        """For notebooks: the report, in a frame of its own so that neither's style touches the other's."""
        from .reports.html import framed

        return framed(self)

    @property
    def is_timed(self) -> bool:
        """Whether anything is known of what takes time. Dumps and snapshots alone know where things stood, times of
        micro-batches the pipeline alone, and a page of what they cannot know would bury what they do."""
        return not self.ranks or any(
            rank.summary.phases_ns is not None
            or rank.summary.breakdown is not None
            or rank.summary.collectives is not None
            or rank.summary.format not in _UNTIMED_FORMATS
            for rank in self.ranks
        )


#: Sources that hold no steps, kernels or operators.
_UNTIMED_FORMATS = frozenset({"flight_recorder", "memory_snapshot", "memory_timeline", "pipeline_schedule"})
