"""What is trained: the dimensions of a transformer, what they hold in parameters, and what a token costs.

    Workload(name="gpt-22b", layers=48, hidden=6144, heads=64, ffn=24576, vocab=51200, sequence=2048)
    Workload(name="llama3-70b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated=True, vocab=128256, sequence=8192)

Symbols in the formulas: s sequence, l layers, h hidden, a heads, k key and value heads, d head size, f feed-forward,
V vocabulary. Parameters are counted to the last one, with biases and norms where a model has them, since memory is compared
to the percent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from trine.record.errors import UsageError

__all__ = ["POSITIONS", "Convention", "LatentAttention", "Workload"]

#: How a model tells positions apart.
POSITIONS = ("learned", "rotary", "alibi", "none")

#: The conventions of ``mfu`` in the design, without ``counted``, which needs a run.
Convention = Literal["palm", "megatron", "narayanan", "6n"]
#: Far above any model that is, so that what is mistyped is refused before a search looks for devices that hold it.
_MOST = {
    "layers": 100_000,
    "hidden": 1_000_000,
    "heads": 100_000,
    "head_size": 100_000,
    "ffn": 10_000_000,
    "expert_ffn": 10_000_000,
    "experts": 1_000_000,
    "vocab": 100_000_000,
}
#: Of other sizes: below what counting in floats can bear.
_LARGEST = 10**12


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): ranks and head sizes. ``query_rank`` 0: queries are not compressed.

    Each compressed vector passes an RMS norm of its own.
    """

    kv_rank: int
    query_rank: int = 0
    rope_head_size: int = 64
    value_head_size: int = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """A decoder-only transformer, dense or a mixture of experts. Sizes are counts of elements.

    ``gated``: SwiGLU and GeGLU, three matrices a feed-forward instead of two. ``window``: tokens that attention looks back
    over, 0 for all; ``window_layers`` of the layers do. ``experts`` 0: dense; else each token visits ``experts_per_token`` of
    them and all ``shared_experts``, each of ``expert_ffn``; the first ``dense_layers`` are dense, of ``ffn``.
    ``load_imbalance``: the busiest expert rank's share over the mean's. Raises ``UsageError`` naming the field.

    What most models need not say. Of biases (None: as ``bias``): ``attention_bias`` of queries, keys and values,
    ``output_bias`` of attention's output, ``mlp_bias``, ``norm_bias``. ``norms``: of a layer, over ``hidden``, with weights or
    without (``norm_weights``). ``query_key_norm``: weights of a layer's norms over queries and keys. ``positions``: rows of the
    learned positions, 0 for ``sequence``. ``shared_ffn``: of a shared expert, 0 for ``expert_ffn``. ``other_layer_parameters`` and
    ``other_parameters``: what else a layer, and the model outside its layers, hold (sinks, gates, norms of embeddings).
    ``position_kind``: of :data:`POSITIONS`, "" where nobody said; of rotary ones ``rotary_base`` (0 where nobody said), the
    ``rotary_share`` of a head that turns, and how they are scaled for longer sequences (``rotary_scaling``, "" not at all).
    ``multi_token_modules``: of multi-token prediction, which are in no count and in no time: a plan says so.
    ``sequence_is_most``: nobody said ``sequence``, and it is the longest that the model takes.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    kv_heads: int = 0
    head_size: int = 0
    gated: bool = False
    bias: bool = True
    tied_embeddings: bool = True
    learned_positions: bool = False
    causal: bool = True
    dropout: bool = False
    window: int = 0
    window_layers: int = -1
    latent: LatentAttention | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    load_imbalance: float = 1.0
    attention_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    norm_bias: bool | None = None
    norms: int = 2
    norm_weights: bool = True
    query_key_norm: int = 0
    positions: int = 0
    shared_ffn: int = 0
    other_layer_parameters: int = 0
    other_parameters: int = 0
    position_kind: str = ""
    rotary_base: float = 0.0
    rotary_share: float = 1.0
    rotary_scaling: str = ""
    multi_token_modules: int = 0
    sequence_is_most: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_sizes()
        defaults = {
            "kv_heads": self.kv_heads or self.heads,
            "head_size": self.head_size or max(1, self.hidden // self.heads),
            "expert_ffn": self.expert_ffn or (self.ffn if self.experts else 0),
            "window_layers": (self.layers if self.window else 0)
            if self.window_layers < 0
            else self.window_layers,
            "shared_ffn": self.shared_ffn or self.expert_ffn or (self.ffn if self.experts else 0),
            "position_kind": self.position_kind or ("learned" if self.learned_positions else ""),
        }
        for name in ("attention_bias", "output_bias", "mlp_bias", "norm_bias"):
            defaults[name] = self.bias if getattr(self, name) is None else getattr(self, name)
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _check_sizes(self) -> None:
        for name in ("layers", "hidden", "heads", "ffn", "vocab", "sequence"):
            if getattr(self, name) < 1:
                raise UsageError(f"{self.name}: {name} must be at least 1, not {getattr(self, name)}")
        for each in fields(self):
            value = getattr(self, each.name)
            most = _MOST.get(each.name, _LARGEST)
            if isinstance(value, int) and value > most:
                raise UsageError(f"{self.name}: {each.name} must be at most {most}, not {value}")
        if not 1 <= self.load_imbalance <= max(self.experts, 1):
            raise UsageError(
                f"{self.name}: load_imbalance is the busiest expert rank's share over the mean, from 1 to experts "
                f"({self.experts}), not {self.load_imbalance}"
                if self.experts
                else f"{self.name}: load_imbalance {self.load_imbalance} is of experts, and there are none: leave it out"
            )
        if not self.head_size and self.hidden % self.heads:
            raise UsageError(
                f"{self.name}: hidden {self.hidden} is no multiple of heads {self.heads}: say head_size, of one head"
            )

    def _check_positions(self) -> None:
        if self.position_kind not in ("", *POSITIONS):
            raise UsageError(
                f"{self.name}: no position_kind is called {self.position_kind!r}: one of {', '.join(POSITIONS)}"
            )
        if self.learned_positions != (self.position_kind == "learned"):
            raise UsageError(
                f"{self.name}: position_kind {self.position_kind!r} and learned_positions {str(self.learned_positions).lower()} "
                "contradict each other: keep one"
            )
        if not 0 < self.rotary_share <= 1:
            raise UsageError(
                f"{self.name}: rotary_share must be above 0 and at most 1, not {self.rotary_share}"
            )
        if not self.rotary_base < float("inf"):
            raise UsageError(
                f"{self.name}: rotary_base must be finite, such as 10000, not {self.rotary_base}"
            )

    def _check_together(self) -> None:
        self._check_positions()
        if self.heads % self.kv_heads:
            raise UsageError(
                f"{self.name}: heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"
            )
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise UsageError(
                f"{self.name}: experts_per_token must be from 1 to experts ({self.experts}), not {self.experts_per_token}"
            )
        if self.dense_layers > self.layers:
            raise UsageError(
                f"{self.name}: dense_layers {self.dense_layers} is more than layers {self.layers}"
            )
        if self.window_layers > self.layers:
            raise UsageError(
                f"{self.name}: window_layers {self.window_layers} is more than layers {self.layers}"
            )

    def with_changes(self, **changes: Any) -> Workload:
        """A copy with other dimensions; what was derived from those that change must be given too."""
        said: dict[str, Any] = {"sequence_is_most": False} if "sequence" in changes else {}
        return replace(self, **said, **changes)

    @property
    def is_mixture(self) -> bool:
        """Whether there are experts."""
        return self.experts > 0

    @property
    def mixture_layers(self) -> int:
        """Layers whose feed-forward is a mixture of experts."""
        return self.layers - self.dense_layers if self.is_mixture else 0

    @property
    def attention_parameters(self) -> int:
        """Weights and biases of a layer's attention: 2·h·d·(a + k), or the low-rank projections."""
        output_bias = self.hidden * bool(self.output_bias)
        if self.latent is not None:
            return self._latent_parameters(self.latent) + output_bias
        found = 2 * self.hidden * self.head_size * (self.heads + self.kv_heads)
        biases = self.head_size * (self.heads + 2 * self.kv_heads) * bool(self.attention_bias)
        return found + biases + output_bias

    def _latent_parameters(self, latent: LatentAttention) -> int:
        """DeepSeek-V2, appendix C: down-projections with norms and, where there are any, biases; up-projections."""
        query_size = self.heads * (self.head_size + latent.rope_head_size)
        query = self.hidden * query_size
        if latent.query_rank:
            query = (self.hidden + query_size + 1 + bool(self.attention_bias)) * latent.query_rank
        down_size = latent.kv_rank + latent.rope_head_size
        down = self.hidden * down_size + latent.kv_rank + down_size * bool(self.attention_bias)
        up = latent.kv_rank * self.heads * (self.head_size + latent.value_head_size)
        return query + down + up + self.heads * latent.value_head_size * self.hidden

    def _feed_forward(self, size: int) -> int:
        matrices = 3 if self.gated else 2
        return matrices * self.hidden * size + ((matrices - 1) * size + self.hidden) * bool(self.mlp_bias)

    @property
    def dense_mlp_parameters(self) -> int:
        """Weights of a dense layer's feed-forward."""
        return self._feed_forward(self.ffn)

    @property
    def expert_parameters(self) -> int:
        """Weights of one routed expert."""
        return self._feed_forward(self.expert_ffn) if self.is_mixture else 0

    @property
    def shared_parameters(self) -> int:
        """Weights of a mixture layer's shared experts together."""
        return self.shared_experts * self._feed_forward(self.shared_ffn) if self.is_mixture else 0

    @property
    def final_norm_parameters(self) -> int:
        """Of one norm over ``hidden``: a weight and a bias each, where there are any."""
        return self.hidden * (int(self.norm_weights) + bool(self.norm_bias))

    @property
    def norm_parameters(self) -> int:
        """Of a layer: its norms over ``hidden``, and those over queries and keys."""
        return self.norms * self.final_norm_parameters + self.query_key_norm

    def layer_parameters(self, *, mixture: bool, active: bool = False) -> int:
        """Of one layer; ``active``: those that one token meets."""
        always = self.attention_parameters + self.norm_parameters + self.other_layer_parameters
        if not mixture:
            return always + self.dense_mlp_parameters
        visited = self.experts_per_token if active else self.experts
        router = self.hidden * self.experts
        return always + visited * self.expert_parameters + self.shared_parameters + router

    def _all_layers(self, active: bool) -> int:
        dense = self.layers - self.mixture_layers
        return dense * self.layer_parameters(mixture=False) + self.mixture_layers * self.layer_parameters(
            mixture=True, active=active
        )

    @property
    def embedding_parameters(self) -> int:
        """The look-up table, with learned positions where there are any."""
        rows = (self.positions or self.sequence) if self.learned_positions else 0
        return (self.vocab + rows) * self.hidden

    @property
    def head_parameters(self) -> int:
        """The output head's own; 0 where it is tied to the look-up table."""
        return 0 if self.tied_embeddings else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        outside = self.embedding_parameters + self.head_parameters + self.other_parameters
        return self._all_layers(False) + outside + self.final_norm_parameters

    @property
    def active_parameters(self) -> int:
        """Those that are multiplied for one token: layers and the output head, without look-ups."""
        return self._all_layers(True) + self.vocab * self.hidden + self.final_norm_parameters

    @property
    def attended(self) -> float:
        """Positions that a token attends to on average: s, s/2 where causal, the window where there is one."""
        full = self.sequence / 2 if self.causal else float(self.sequence)
        if not self.window or self.window >= self.sequence:
            return full
        # The first tokens see fewer: w − w²/2s on average.
        windowed = self.window - self.window**2 / (2 * self.sequence) if self.causal else float(self.window)
        return (windowed * self.window_layers + full * (self.layers - self.window_layers)) / self.layers

    @property
    def score_size(self) -> int:
        """Elements of a head that scores and values are made over, together: 2d."""
        if self.latent is None:
            return 2 * self.head_size
        return self.head_size + self.latent.rope_head_size + self.latent.value_head_size

    def model_flops(self, convention: Convention = "megatron") -> float:
        """FLOPs of one token of training (forward and backward, nothing recomputed) by a named convention."""
        attention = 2.0 * self.layers * self.heads * self.score_size  # forward, a position
        matmul = 2.0 * self.active_parameters
        if convention == "6n":
            return 3 * matmul
        if convention in ("palm", "narayanan"):
            return 3 * (matmul + attention * self.sequence)
        if convention == "megatron":
            return 3 * (matmul + attention * self.attended)
        raise UsageError(f"no FLOPs convention is called {convention!r}: palm, megatron, narayanan or 6n")

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain values, for JSON."""
        return {
            each.name: (
                None
                if (value := getattr(self, each.name)) is None
                else {part.name: getattr(value, part.name) for part in fields(value)}
                if isinstance(value, LatentAttention)
                else value
            )
            for each in fields(self)
        }
