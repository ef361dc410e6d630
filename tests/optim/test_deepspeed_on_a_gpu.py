"""``engine = "deepspeed"`` on a CUDA device: ``pytest -m gpu``. Skipped, and said, where there is none.

In a process of its own: DeepSpeed is of one kind of device a process, and other tests use it on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason='engine = "deepspeed" needs DeepSpeed; install trine[deepspeed]')

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

PROGRAM = """
import json
import sys

import torch
import trine
from trine.samples.gpt import GPT, GPTConfig, loss_of

generator = torch.Generator().manual_seed(0)
data = [torch.randint(0, 256, (8, 65), generator=generator) for _ in range(6)]
found = []
for changes in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, hidden=64, heads=4, sequence=64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = trine.optimize(model, optimizer, trine.Config().with_changes(changes), loss_fn=loss_of, clip_norm=0.5)
    found.append([float(engine.train_step((ids[:, :-1], ids[:, 1:]))) for ids in engine.steps(data)])
    engine.close()
print(json.dumps(found))
"""

LOW = {"precision.dtype": "bf16", "precision.master_weights": True}
CASES: list[tuple[dict[str, Any], float]] = [
    ({}, 1e-4),
    ({"zero.stage": 2, "accumulation.steps": 2}, 1e-4),
    ({"zero.stage": 3}, 1e-4),
    ({"zero.stage": 2, "offload.optimizer": "cpu"}, 1e-4),
    ({"zero.stage": 2, **LOW}, 1e-2),
    ({"zero.stage": 3, "precision.dtype": "bf16"}, 1e-2),
]


def test_losses_are_those_of_the_plain_run(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    runs = [{}, *({"engine": "deepspeed", **changes} for changes, _ in CASES)]
    done = subprocess.run(
        [sys.executable, "program.py", json.dumps(runs)],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    plain, *found = json.loads(done.stdout.splitlines()[-1])
    for (changes, tolerance), losses in zip(CASES, found, strict=True):
        assert losses == pytest.approx(plain, rel=tolerance), changes
