"""A small decoder-only transformer whose feed-forward is a mixture of experts.

The GPT of :mod:`trine.samples.gpt` with each feed-forward in several copies, the experts, of which a router picks a few
for every token: softmax over all experts, the ``top_k`` largest, their weights scaled to sum to one, as Mixtral has it
(Jiang et al. 2024, section 2.1). No token is dropped, however unequally the router spreads them. Experts' weights are
stacked along their first dimension, one tensor a matrix, so that names and checkpoints are the same however many ranks
share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from trine.optim.runtime.documents import Documents
from trine.optim.runtime.packed_attention import Visible
from trine.samples.gpt import GPT, IGNORED, Attention, GPTConfig, Tables, norm_of

__all__ = ["Experts", "Mixture", "MixtureBlock", "MixtureConfig", "MixtureGPT", "Router"]

#: What the balance loss counts tokens over: this rank's batch, or all ranks'.
BALANCES = ("rank", "all")


@dataclass(frozen=True)
class MixtureConfig(GPTConfig):
    """The shape of the model. Raises ``ValueError`` where the router could not pick ``top_k`` of ``experts``."""

    experts: int = 8
    top_k: int = 2
    #: Weight of the loss that keeps experts equally busy; 0.01 in Fedus et al. 2022.
    balance: float = 0.0
    balance_over: str = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"a router cannot pick {self.top_k} of {self.experts} experts")
        if self.balance_over not in BALANCES:
            raise ValueError(f"balance_over {self.balance_over!r} is none of {BALANCES}")


class Router(nn.Module):
    """Picks experts for tokens, and remembers how unequally for the balance loss."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.num_experts = config.experts
        self.balance_over = config.balance_over
        #: The ranks whose tokens are counted together where ``balance_over`` is "all"; ``None``: all of the job.
        self.balance_group: Any = None
        self.weighs_balance = config.balance > 0
        self.linear = nn.Linear(config.hidden, config.experts, bias=False)
        #: Of the last training forward; 1 where every expert is picked equally often.
        self.balance_loss: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of (tokens, hidden): the indices of the experts picked and their weights, both (tokens, top_k)."""
        logits = self.linear(hidden_states)
        if logits.element_size() < 4:  # bf16 cannot tell near probabilities apart
            logits = logits.float()
        probabilities = logits.softmax(-1)
        weights, indices = probabilities.topk(self.top_k, dim=-1)
        if self.weighs_balance and self.training and torch.is_grad_enabled():
            self.balance_loss = self._balance_loss(probabilities, indices)
        weights = weights / weights.sum(-1, keepdim=True)
        return indices, weights.to(hidden_states.dtype)

    def _balance_loss(self, probabilities: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """E Σ f·P over the experts (Fedus et al. 2022, equations 4 to 6): f the share of picks that an expert got, P its
        mean probability.

        f has no gradient, so sharing it over ranks makes the ranks' mean the loss of the whole batch (Qiu et al. 2025,
        "Demons in the Detail").
        """
        picks = torch.zeros_like(probabilities).scatter_(-1, indices, 1.0).sum(0)
        if self.balance_over == "all" and distributed.is_initialized():
            distributed.all_reduce(picks, group=self.balance_group)
        share = picks / picks.sum()
        return self.num_experts * (share * probabilities.mean(0)).sum()


class Experts(nn.Module):
    """Feed-forwards side by side, their weights stacked: expert e has ``up[e]`` and ``down[e]``, gated ones ``gate[e]``."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        gated = config.mlp == "swiglu"
        inner = -(-8 * config.hidden // 3 // 16) * 16 if gated else 4 * config.hidden
        self.gate = nn.Parameter(torch.empty(config.experts, inner, config.hidden)) if gated else None
        self.up = nn.Parameter(torch.empty(config.experts, inner, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, inner))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Of (tokens, hidden), with the picks and their weights of (tokens, top_k) each; to (tokens, hidden)."""
        picked = top_k_index.flatten()
        order = picked.argsort(stable=True)  # all of the first expert's tokens, then the second's, ...
        sizes = picked.bincount(minlength=self.num_experts).tolist()
        parts = torch.split(hidden_states[order // top_k_index.shape[1]], sizes)
        gates = [None] * self.num_experts if self.gate is None else self.gate.unbind()
        outputs = [
            self._expert(part, gate, up, down)
            for part, gate, up, down in zip(parts, gates, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        back = torch.cat(outputs)[order.argsort()].view(*top_k_index.shape, -1)
        return (back * top_k_weights.unsqueeze(-1)).sum(1)

    def _expert(
        self, x: torch.Tensor, gate: torch.Tensor | None, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        inner = functional.linear(x, up)
        inner = (
            functional.gelu(inner) if gate is None else functional.silu(functional.linear(x, gate)) * inner
        )
        return functional.linear(inner, down)


class Mixture(nn.Module):
    """A router and its experts in the place of a feed-forward, (batch, sequence, hidden) to the same."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what each token's experts make of it."""
        tokens = x.flatten(0, 1)
        mixed: torch.Tensor = self.experts(tokens, *self.router(tokens))
        return mixed.view_as(x)


class MixtureBlock(nn.Module):
    """Attention and a mixture of experts, each normalised before and added to its input."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.norm1 = norm_of(config)
        self.attention = Attention(config)
        self.norm2 = norm_of(config)
        self.mixture = Mixture(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: torch.Tensor, visible: Visible | None = None, tables: Tables | None = None
    ) -> torch.Tensor:
        """Of (batch, sequence, hidden); ``visible`` and ``tables`` as for :class:`trine.samples.gpt.Attention`."""
        x = x + self.dropout(self.attention(self.norm1(x), visible, tables))
        result: torch.Tensor = x + self.dropout(self.mixture(self.norm2(x)))
        return result


class MixtureGPT(GPT):
    """The GPT with experts. With ``targets``, its loss holds the balance loss too while it trains."""

    config: MixtureConfig
    layer = MixtureBlock

    def _initialise(self, module: nn.Module) -> None:
        super()._initialise(module)
        if isinstance(module, Experts):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: Documents | None = None,
        targets: torch.Tensor | None = None,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """As :class:`trine.samples.gpt.GPT`; the balance loss is the mean over layers, weighted by ``config.balance``."""
        routers = [module for module in self.modules() if isinstance(module, Router)]
        for router in routers:  # recomputation leaves some behind
            router.balance_loss = None
        result = super().forward(ids, positions, documents, targets, reduction)
        losses = [router.balance_loss for router in routers if router.balance_loss is not None]
        if targets is None or not losses:
            return result
        balance = self.config.balance * torch.stack(losses).mean()
        return result + (balance if reduction == "mean" else balance * (targets != IGNORED).sum())
