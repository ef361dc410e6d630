"""Checkpoints: a folder written by PyTorch's distributed checkpoint (DCP), whole or not there at all.

    trine.json            what it is: step, ranks, layout, configuration, and the checksum of every item; written last
    .metadata, *.distcp   DCP's: tensors by the names of :mod:`trine.optim.runtime.training_state`
    common.pt             groups, scheduler
    rank-00000.pt         what is a rank's own: random streams, where its data stood, error feedback

``parts`` says what of each tensor a rank holds, ``writing`` and ``reading`` move it, ``background`` writes beside the
training, ``integrity`` sums what is written and verifies what is read, ``description`` is ``trine.json`` and folders of
checkpoints, ``ranks`` lets all of them fail together.
"""

from __future__ import annotations

from trine.optim.runtime.checkpoints.background import Saving
from trine.optim.runtime.checkpoints.description import SCHEMA
from trine.optim.runtime.checkpoints.keeper import Keeper
from trine.optim.runtime.checkpoints.memory import restore, snapshot
from trine.optim.runtime.checkpoints.reading import Loaded, load_model

__all__ = ["SCHEMA", "Keeper", "Loaded", "Saving", "load_model", "restore", "snapshot"]
