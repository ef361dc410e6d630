"""Which package of Python's standard library is a piece of source code from? A small transformer learns to tell.

python -m trine.samples.plain_loop                              the loop as its author wrote it
python -m trine.samples.plain_loop_tuned                        the same with five lines changed
torchrun --nproc-per-node 2 -m trine.samples.plain_loop_tuned
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HERE = Path(__file__).parent
PACKAGES = (
    "asyncio",
    "ctypes",
    "email",
    "http",
    "importlib",
    "json",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
LENGTH = 128


class Snippets(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of bytes from each package's sources, with the package's number."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        self.windows: list[tuple[bytes, int]] = []
        for label, package in enumerate(PACKAGES):
            text = b"".join(path.read_bytes() for path in sorted((root / package).rglob("*.py")))
            starts = range(0, min(len(text), 200_000) - LENGTH, LENGTH)
            self.windows += [(text[start : start + LENGTH], label) for start in starts]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text, label = self.windows[index]
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), torch.tensor(label)


class Classifier(nn.Module):
    """Bytes (batch, length) to scores (batch, packages)."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, hidden)
        self.positions = nn.Parameter(torch.randn(LENGTH, hidden) * 0.02)
        layer = nn.TransformerEncoderLayer(
            hidden, 8, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, len(PACKAGES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Of (batch, length), int64."""
        x = self.layers(self.bytes(ids) + self.positions)
        scores: torch.Tensor = self.head(x.mean(1))
        return scores


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Mean cross-entropy, in nats."""
    ids, labels = (tensor.to(next(model.parameters()).device) for tensor in batch)
    return functional.cross_entropy(model(ids), labels)


def train(arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> None:
    """An epoch, or as many steps of it as were asked for."""
    torch.manual_seed(0)
    data = Snippets()
    sampler: DistributedSampler[object] = DistributedSampler(data, ranks, rank)
    loader = DataLoader(data, arguments.batch, sampler=sampler, drop_last=True)
    model: nn.Module = Classifier(arguments.hidden, arguments.layers).to(device)
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    begin = time.perf_counter()
    for step, batch in enumerate(loader, 1):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            each = (time.perf_counter() - begin) / step
            print(f"step {step}: loss {loss.item():.4f}, {1000 * each:.0f} ms a step", flush=True)
        if step == arguments.steps:
            break


def main() -> None:
    """Parse the command line, join the process group if there is one, and train."""
    parser = argparse.ArgumentParser(description="Tell from which package a piece of source code is.")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="samples a rank and step")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")
    if ranks > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(arguments, rank, ranks, device)
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
