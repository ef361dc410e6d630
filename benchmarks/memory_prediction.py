"""Memory that was predicted beside memory that real ranks allocate, and predictions for ranks that this machine lacks.

    python benchmarks/memory_prediction.py [--quick]

Real ranks are processes of a gloo group, 2 and 4 of them; each counts the storages of its tensors. Then the same
configurations on 8, 64 and 1024 ranks, predicted alone. Bytes are of one rank. 1 where a kind is not as predicted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from spawned_ranks import in_one_line, on_ranks

__all__ = ["CONFIGURATIONS", "main"]

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "gradients as views": {"communication.gradient_as_view": True},
    "ZeRO 1": {"zero.stage": 1},
    "ZeRO 2": {"zero.stage": 2},
    "ZeRO 3": {"zero.stage": 3},
    "ZeRO 3, shards in pairs": {"zero.stage": 3, "parallel.shard": 2},
    "ZeRO 3, full checkpointing": {"zero.stage": 3, "checkpointing.mode": "full"},
    "selective checkpointing": {"checkpointing.mode": "selective"},
    "bf16 autocast": {"precision.dtype": "bf16"},
    "ZeRO 3, bf16, masters": {
        "zero.stage": 3,
        "precision.dtype": "bf16",
        "precision.master_weights": True,
    },
    "two micro-batches": {"accumulation.steps": 2},
}
#: On so many ranks that ZeRO 1, which copies the rows of each, would take minutes.
MANY = ("replicas", "ZeRO 3", "ZeRO 3, shards in pairs", "ZeRO 3, full checkpointing")
#: Kinds in the table; the rest are in the peak.
SHOWN = (
    "parameters",
    "gathered_parameters",
    "gradients",
    "optimizer_state",
    "communication",
    "activations",
    "temporary",
)


def main(argv: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two real ranks and three configurations alone")
    quick = parser.parse_args(argv).quick
    names = list(CONFIGURATIONS)[3:6] if quick else list(CONFIGURATIONS)
    apart = 0
    _head("predicted and allocated, bytes of rank 0 at the peak of a step", ["ranks", "peak", "error"])
    for ranks in (2,) if quick else (2, 4):
        wanted = [name for name in names if CONFIGURATIONS[name].get("parallel.shard", ranks) <= ranks // 2]
        wanted += [name for name in names if "parallel.shard" not in CONFIGURATIONS[name]]
        real = on_ranks(ranks, _counted, [CONFIGURATIONS[name] for name in wanted])[0]
        for name, kinds in zip(wanted, real, strict=True):
            said = _predicted(name, ranks).at_peak_bytes
            worst = max(abs(said[kind] - kinds[kind]) for kind in kinds)
            apart += worst > 0
            _row(name, ranks, kinds, f"{sum(kinds.values()):,}", f"{worst:,}")
    _head("predicted, bytes of rank 0 at the peak of a step", ["ranks", "peak", ""])
    for ranks in (64,) if quick else (8, 64, 1024):
        for name in names if ranks < 1024 else MANY:
            said = _predicted(name, ranks)
            _row(name, ranks, said.at_peak_bytes, f"{said.peak_bytes:,}", "")
    print(
        f"{'no configuration is' if not apart else f'{apart} configurations are'} apart from its prediction"
    )
    return 1 if apart else 0


def _head(title: str, columns: list[str]) -> None:
    print(f"\n{title}\n")
    print(
        f"{'configuration':28}{columns[0]:>6}{columns[1]:>13}{columns[2]:>8}"
        + "".join(f"{kind.replace('_', ' '):>21}" for kind in SHOWN)
    )


def _row(name: str, ranks: int, kinds: Any, peak: str, error: str) -> None:
    print(f"{name:28}{ranks:>6}{peak:>13}{error:>8}" + "".join(f"{kinds[kind]:>21,}" for kind in SHOWN))


def _made() -> tuple[Any, Any, Any]:
    import torch

    from trine.samples.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, hidden=64, heads=4, sequence=64))
    ids = torch.zeros(4, 64, dtype=torch.int64)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), (ids, ids.clone())


def _predicted(name: str, ranks: int) -> Any:
    import trine
    from trine.samples.gpt import loss_of

    model, optimizer, batch = _made()
    return trine.predict_memory(
        model, CONFIGURATIONS[name], ranks=ranks, batch=batch, loss_fn=loss_of, optimizer=optimizer
    )


def _counted(rank: int, configurations: list[dict[str, Any]]) -> list[dict[str, int]]:
    """What this rank allocated at the peak of a step, in order."""
    from trine.optim import Config
    from trine.optim.runtime import meshes, sharding
    from trine.optim.runtime.counted_steps import counted
    from trine.optim.runtime.memory_ledger import Ledger
    from trine.samples.gpt import loss_of

    found = []
    for changes in configurations:
        sharding._meshes.clear()  # a mesh that an earlier configuration made would be in no ledger
        meshes._made.clear()
        model, optimizer, batch = _made()
        config = Config().with_changes(changes)
        found.append(counted(Ledger(), (model, optimizer), config, loss_of, batch)["peak"])
    return found


if __name__ == "__main__":
    sys.exit(in_one_line(main))
