"""Listening to an engine that says where its own steps are: then those count, whoever feeds it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from trine.record.model import PHASES

from .phases import OTHER

if TYPE_CHECKING:
    from .session import Session

__all__ = ["EngineEvents"]


class EngineEvents:
    """Turns events of :mod:`trine.record.events` into the session's parts.

    Where the loop itself uses ``steps(loader)``, parts stay the loader's batches and the engine only says which of them
    ends a step. Else a part reaches from the end of one step to the end of the next, so that loading belongs to it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._regions = ExitStack()

    def on_event(self, kind: str, values: dict[str, Any]) -> None:
        """Called in the training thread for each event."""
        session = self._session
        if not session.is_alive():
            return
        if kind == "step_begin":
            session.progress.engine = True
            session.guard.run("steps", self._begin, values.get("index"))
        elif kind == "step_end":
            session.progress.engine = True
            session.guard.run("steps", self._end, values)
        elif kind == "step_cancel":
            if session.watches_loaders:
                session.guard.run("steps", session.close_step)
        elif kind == "phase":
            name = values.get("name")
            session.marker.base(PHASES.index(name) if name in PHASES else OTHER)
        elif kind == "metric":
            session.log(**{str(values["name"]): values.get("value")})
        elif kind == "microbatches" and session.background is not None:
            session.background.take_microbatches(values["rows"])
        elif kind == "region_begin":
            session.guard.run("regions", self._enter, values)
        elif kind == "region_end":
            session.guard.run("regions", self._regions.close)
        elif kind == "configuration":
            session.guard.run("configuration", self._describe, values)

    def _describe(self, values: dict[str, Any]) -> None:
        """What the engine applies stands in ``run.json``, unless the program has said it itself."""
        self._session.describe(configuration=values.get("configuration"), effects=values.get("effects"))

    def _enter(self, values: dict[str, Any]) -> None:
        self._regions.enter_context(self._session.regions.inside(values["region"], values["name"]))

    def _begin(self, index: int | None) -> None:
        session = self._session
        if session.progress.engine_ended:
            return  # engine.steps(steps(loader)): the part that is open is still that of the step before
        if index is not None and session.progress.pending == 0:
            session.progress.index = index
        if session.part is None and session.watches_loaders:
            session.begin_part()
        session.renumber()

    def _end(self, values: dict[str, Any]) -> None:
        session = self._session
        part = session.part
        late = not session.watches_loaders and part is not None and not part.has_backward
        if late and session.progress.pending and session.last_part is not None:
            # steps(engine.steps(loader)): the engine ends its step only when it is asked for the next batch.
            part = session.last_part
            self._take(part, values)
            session.turn_over(part)
            return
        self._take(part, values)
        if session.watches_loaders:
            session.end_part(True)
            session.begin_part()
        else:
            session.progress.engine_ended = True

    def _take(self, part: Any, values: dict[str, Any]) -> None:
        self._session.take_values(part, values.get("loss"), values.get("tokens"), values.get("samples"), {})
