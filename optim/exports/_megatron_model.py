"""What Megatron-LM and Megatron-DeepSpeed call a model's dimensions and a batch's."""

from __future__ import annotations

from trine.optim.exports._account import Account
from trine.optim.exports._exported import Exported
from trine.optim.exports._text import Flags
from trine.optim.plan.workload import Workload

__all__ = ["add_batch", "add_model", "add_sizes"]


def add_sizes(flags: Flags, workload: Workload) -> None:
    """The dimensions whose names both have had from the start."""
    flags.add("--num-layers", workload.layers)
    flags.add("--hidden-size", workload.hidden)
    flags.add("--ffn-hidden-size", workload.ffn)
    flags.add("--num-attention-heads", workload.heads)
    if workload.head_size * workload.heads != workload.hidden:
        flags.add("--kv-channels", workload.head_size)
    flags.add("--seq-length", workload.sequence)
    flags.add("--max-position-embeddings", workload.positions or workload.sequence)
    if workload.gated:
        flags.add("--swiglu")
    if not workload.bias:
        flags.add("--disable-bias-linear")
    if not workload.tied_embeddings:
        flags.add("--untie-embeddings-and-output-weights")


def add_model(flags: Flags, exported: Exported, account: Account) -> None:
    """The model's own flags, of Megatron-LM; without a workload that is said to be the program's."""
    workload = exported.workload
    if workload is None:
        account.notes("the model: its flags (--num-layers, --hidden-size, …) are yours to add")
        return
    add_sizes(flags, workload)
    if workload.latent is not None:
        _add_latent(flags, workload)
    elif workload.kv_heads != workload.heads:
        flags.add("--group-query-attention")
        flags.add("--num-query-groups", workload.kv_heads)
    if workload.attention_bias and not workload.bias:
        flags.add("--add-qkv-bias")
    flags.add("--position-embedding-type", "learned_absolute" if workload.learned_positions else "rope")
    flags.add("--normalization", "LayerNorm" if workload.norm_bias else "RMSNorm")
    if workload.query_key_norm:
        flags.add("--qk-layernorm")
    if not workload.dropout:
        flags.add("--attention-dropout", 0.0)
        flags.add("--hidden-dropout", 0.0)
    if workload.window:
        flags.add("--window-size", f"{workload.window},0")
        if workload.window_layers != workload.layers:
            account.notes("the model: which layers have a window is --window-attn-skip-freq's to say")
    if workload.is_mixture:
        _add_experts(flags, workload)
    flags.add("--vocab-size", workload.vocab)


def _add_latent(flags: Flags, workload: Workload) -> None:
    latent = workload.latent
    assert latent is not None
    flags.add("--multi-latent-attention")
    if latent.query_rank:
        flags.add("--q-lora-rank", latent.query_rank)
    flags.add("--kv-lora-rank", latent.kv_rank)
    flags.add("--qk-head-dim", workload.head_size)
    flags.add("--qk-pos-emb-head-dim", latent.rope_head_size)
    flags.add("--v-head-dim", latent.value_head_size)


def _add_experts(flags: Flags, workload: Workload) -> None:
    flags.add("--num-experts", workload.experts)
    flags.add("--moe-router-topk", workload.experts_per_token)
    flags.add("--moe-ffn-hidden-size", workload.expert_ffn)
    if workload.shared_experts:
        flags.add("--moe-shared-expert-intermediate-size", workload.shared_experts * workload.shared_ffn)
    if workload.dense_layers:
        flags.add("--moe-layer-freq", f"([0]*{workload.dense_layers}+[1]*{workload.mixture_layers})")
    flags.add("--moe-token-dispatcher-type", "alltoall")  # dropless, as planned
    flags.add("--moe-grouped-gemm")


def add_batch(flags: Flags, exported: Exported, account: Account) -> None:
    """A micro-batch and a step's samples; what is not known is said to be the program's."""
    batch = exported.batch
    account.says("parallel.microbatches")
    for key, flag, value in (
        ("accumulation.micro_batch", "--micro-batch-size", batch.micro),
        ("accumulation.global_batch", "--global-batch-size", batch.whole),
    ):
        account.says(key)
        if value is not None:
            flags.add(flag, value)
        else:
            account.notes(f"{flag}: {key} is not known: give it")
    if batch.count is not None:
        account.says("accumulation.steps")
    account.misses("accumulation.steps", 'how many is not known; "auto" is measured by Trine')
    for key in ("accumulation.delayed", "accumulation.delayed_warmup_steps"):
        account.misses(key, "updates are never late there")
