"""One side of ``trine verify``, in one rank: run the script as Python would, with a witness beside it.

    python -m trine.commands._verify_side JSON SCRIPT ...

Started by :mod:`trine.commands.verify` alone, directly or by torchrun.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trine.optim.config import Config
from trine.profiler.after_import import call_after_import
from trine.profiler.launch import find_program, run_program
from trine.record.errors import TrineError

__all__ = ["main"]


def main() -> None:
    """Ends the process as the script does; 2 with one line where a configuration cannot be applied."""
    plan = json.loads(sys.argv[1])
    try:
        program = find_program(sys.argv[2], plan["is_module"])
        run_program(program, sys.argv[3:], lambda: _watched(plan))
    except TrineError as error:
        print(f"trine: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


@contextlib.contextmanager
def _watched(plan: dict[str, Any]) -> Iterator[None]:
    started: list[Any] = []
    call_after_import("torch", lambda: started.append(_begin(plan)))
    try:
        yield
    except TrineError as error:  # an engine's refusal: the script's traceback would say no more
        print(f"trine: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    finally:
        for finish in started:
            finish()


def _begin(plan: dict[str, Any]) -> Any:
    """Seed, and put the witness in place. Returns what ends it."""
    from trine.optim._override import set_override
    from trine.optim.runtime.witness import Witness, seed_all
    from trine.optim.techniques._unedited import install, refusals_without_code
    from trine.profiler.automatic import Discovery
    from trine.record.errors import UsageError

    seed_all(plan["seed"])
    config = None if plan["config"] is None else Config.from_dict(plan["config"])
    proved = None if plan["proved"] is None else Config.from_dict(plan["proved"])
    witness = Witness(Path(plan["folder"]), config, plan["steps"], proved)
    set_override(witness)
    # With an engine in the script, the configuration goes through it alone.
    prepare_loop = None
    if config is not None and config.changes() and not plan["has_engine"]:
        reasons = list(refusals_without_code(config).values())
        if not reasons:
            prepare_loop = install(config)

    def prepare(models: list[Any], optimizers: list[Any]) -> None:
        if not witness.has_engine and config is not None and config.changes():
            if prepare_loop is None:
                raise UsageError(reasons[0])
            prepare_loop(models, optimizers)
        witness.watch_loop(models, optimizers, config)

    discovery = Discovery(lambda models, optimizers: None, prepare)
    discovery.install()

    def finish() -> None:
        discovery.close(None, None, None)
        witness.finish()

    return finish


if __name__ == "__main__":
    main()
