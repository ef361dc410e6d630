"""Configurations of other tools, read into ours and, where they can say it, written from ours. Imports no torch.

    imported = read_deepspeed("ds_config.json")     # Imported: config, arguments, notes
    imported = read_accelerate("accelerate.yaml")
    to_deepspeed(config)                            # ours, as DeepSpeed's JSON

A dialect is one module here: a table of every key that the tool knows, each of them translated, told (an argument of
``trine.optimize`` or something that the program does itself), accepted with a reason, refused with what to write instead,
or removed by the tool. A key in no table is an error with the nearest known one.
"""

from __future__ import annotations

from trine.optim.dialects.accelerate import read_accelerate
from trine.optim.dialects.deepspeed import read_deepspeed
from trine.optim.dialects.deepspeed_writing import to_deepspeed
from trine.optim.dialects.reading import Imported

__all__ = ["Imported", "read_accelerate", "read_deepspeed", "to_deepspeed"]
