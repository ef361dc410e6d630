"""A script for `trine verify`: the sample GPT by an engine, with faults that a technique could have.

verified_training.py [fault]        and the engine's own configuration: a fused optimizer, accumulation of 2
"""

from __future__ import annotations

import os
import random
import sys

import torch
from optim_cases import batches, small_gpt
from torch import distributed

import trine
from trine.optim._override import current_override
from trine.samples.gpt import loss_of


def main(fault: str) -> None:
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    if ranks > 1:
        distributed.init_process_group("gloo")
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    changes = {"compute.fuse": ["optimizer"], "accumulation.steps": 2}
    if fault in ("random", "checkpointing"):
        changes |= {"checkpointing.mode": "full"}
    config = trine.Config().with_changes(changes)
    engine = trine.optimize(model, optimizer, config, loss_fn=loss_of)
    is_plain = not current_override().configuration(config).changes()  # type: ignore[union-attr]
    weight = model.blocks[1].up.weight
    if fault == "random":
        model.blocks[0].norm1.register_forward_pre_hook(lambda norm, inputs: (inputs[0] * random.random(),))
    if fault == "scale" and not is_plain:
        weight.register_hook(lambda gradient: gradient * 1.5)
    for step, batch in enumerate(engine.steps(batches(12, 4, rank, ranks))):
        if fault == "replica" and step == 2 and rank == 1 and not is_plain:
            with torch.no_grad():
                weight.view(-1)[7] += 1e-6
        if fault == "fewer" and step == 3 and not is_plain:
            break
        if fault == "crash" and step == 1:
            raise RuntimeError(f"something broke {random.random():.1f}")
        engine.train_step(batch)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
