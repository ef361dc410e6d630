"""The sample with experts: it learns, its balance loss has a gradient, and its configuration asks for ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trine.record.errors import UsageError
from trine.samples import train_moe
from trine.samples.gpt import loss_of
from trine.samples.moe import MixtureConfig, MixtureGPT

TINY = ["--layers=1", "--hidden=32", "--heads=2", "--sequence=32", "--steps=8", "--rate=0.01", "--experts=4"]


def small(**changes: object) -> MixtureGPT:
    torch.manual_seed(0)
    shape = {"layers": 1, "hidden": 32, "heads": 2, "sequence": 16, "experts": 4, **changes}
    return MixtureGPT(MixtureConfig(**shape))


def test_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_bytes(b"def function(x):\n    return x\n" * 200)
    assert train_moe.main([*TINY, "--text=text"]) == 0
    said = capsys.readouterr().out
    first, last = said.rpartition("loss ")[2].split(" to ")
    assert float(last) < float(first) - 1.0


def test_experts_compute_what_each_would_alone() -> None:
    experts = small(mlp="swiglu").blocks[0].mixture.experts
    tokens = torch.randn(5, 32)
    index = torch.tensor([[0, 3], [1, 0], [3, 2], [0, 1], [2, 3]])
    weights = torch.rand(5, 2)
    expected = torch.zeros(5, 32)
    for token in range(5):
        for slot in range(2):
            e = index[token, slot]
            gate = torch.nn.functional.silu(experts.gate[e] @ tokens[token])
            out = experts.down[e] @ (gate * (experts.up[e] @ tokens[token]))
            expected[token] += weights[token, slot] * out
    torch.testing.assert_close(experts(tokens, index, weights), expected)


def test_the_balance_loss_counts_while_it_trains() -> None:
    ids = torch.randint(0, 64, (2, 16))
    plain, balanced = small(), small(balance=1.0)
    apart = loss_of(balanced, (ids, ids)) - loss_of(plain, (ids, ids))
    assert float(apart.detach()) == pytest.approx(1.0, abs=0.2)  # 1 where experts are picked equally often
    apart.backward()
    assert balanced.blocks[0].mixture.router.linear.weight.grad is not None
    with torch.no_grad():
        evaluated = [float(loss_of(model.eval(), (ids, ids))) for model in (balanced, plain)]
    assert evaluated[0] == evaluated[1]


def test_the_configuration_asks_for_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"parallel.expert = 2 must divide the 1 rank"):
        train_moe.main([*TINY, "--config=moe"])


@pytest.mark.parametrize("changes", [{"top_k": 5}, {"top_k": 0}, {"balance_over": "nobody"}])
def test_shapes_that_cannot_be(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"experts|balance_over"):
        small(**changes)
