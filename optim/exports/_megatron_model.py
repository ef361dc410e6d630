"""What Megatron-LM and Megatron-DeepSpeed call a model's dimensions and a batch's."""

from __future__ import annotations

from trine.optim.exports._account import Account
from trine.optim.exports._exported import Exported
from trine.optim.exports._text import Flags
from trine.optim.plan.workload import Workload

__all__ = ["add_batch", "add_model", "add_rotary", "add_sizes", "name_kinds", "say_selective"]


def add_sizes(flags: Flags, exported: Exported, account: Account) -> Workload | None:
    """The dimensions whose names both have had from the start, and the workload that has them; without one, that they are the
    program's to say. Both refuse fewer positions than a sequence has."""
    workload = exported.workload
    if workload is None:
        account.notes("the model: its flags (--num-layers, --hidden-size, …) are yours to add")
        return None
    flags.add("--num-layers", workload.layers)
    flags.add("--hidden-size", workload.hidden)
    flags.add("--ffn-hidden-size", workload.ffn)
    flags.add("--num-attention-heads", workload.heads)
    if workload.head_size * workload.heads != workload.hidden:
        flags.add("--kv-channels", workload.head_size)
    flags.add("--seq-length", workload.sequence)
    flags.add("--max-position-embeddings", max(workload.positions, workload.sequence))
    if workload.gated:
        flags.add("--swiglu")
    if not workload.bias:
        flags.add("--disable-bias-linear")
    if not workload.tied_embeddings:
        flags.add("--untie-embeddings-and-output-weights")
    return workload


def add_rotary(flags: Flags, workload: Workload, base_flag: str) -> None:
    """The base of rotary positions, which both take as a whole number, and the share of a head that turns."""
    if workload.position_kind == "rotary" and workload.rotary_base:
        flags.add(base_flag, round(workload.rotary_base))
    if workload.rotary_share != 1:
        flags.add("--rotary-percent", workload.rotary_share)


def name_kinds(workload: Workload, account: Account, base_flag: str, unlike: tuple[str, ...]) -> None:
    """Name what sizes do not tell, and how it is written; and what neither has flags for.

    A workload knows what a model holds, not all that it computes: a norm without a bias may be either; a gate may be SiLU's or
    GELU's; and positions that are not learned may be of any kind, where it does not say. ``base_flag``: the tool's for the base
    of rotary positions; ``unlike``: what else the tool has no flag for.
    """
    kinds = ["SiLU gates" if workload.gated else "GELU without gates"]
    if not workload.norm_bias:
        kinds.append("RMSNorm")
    if workload.position_kind in ("", "rotary") and not workload.rotary_base:
        kinds.append(f"rotary positions of base 10000 ({base_flag})")
    account.notes(f"the model: its sizes do not tell its kinds: written as {', '.join(kinds)}")
    found = [words for words, has in _unlike(workload) if has]
    for words in (*found, *unlike):
        account.notes(f"the model: it does not have {words}")
    if workload.learned_positions and 0 < workload.positions < workload.sequence:
        account.notes(
            f"the model: --max-position-embeddings: {workload.positions} there, and a sequence has {workload.sequence}: "
            "written as that"
        )


def _unlike(workload: Workload) -> tuple[tuple[str, bool], ...]:
    """What a model of Megatron's has not, and whether this one has it."""
    plain = workload.bias
    return (
        (f"layers with {workload.norms} norms: two are written", workload.norms != 2),
        ("norms without weights", not workload.norm_weights),
        ("queries, keys and values without biases beside others with", plain and not workload.attention_bias),
        ("a bias of attention's output unlike the others", workload.output_bias != plain),
        ("a bias of the feed-forward unlike the others", workload.mlp_bias != plain),
        ("attention that looks ahead", not workload.causal),
        ("ALiBi: rotary positions are written", workload.position_kind == "alibi"),
        (f"rotary positions scaled by {workload.rotary_scaling}", bool(workload.rotary_scaling)),
        (f"{workload.other_layer_parameters} more parameters a layer", workload.other_layer_parameters > 0),
        (f"{workload.other_parameters} more parameters beside layers", workload.other_parameters > 0),
    )


def add_model(flags: Flags, exported: Exported, account: Account) -> None:
    """The model's own flags, of Megatron-LM; without a workload that is said to be the program's."""
    workload = add_sizes(flags, exported, account)
    if workload is None:
        return
    if workload.latent is not None:
        _add_latent(flags, workload)
    elif workload.kv_heads != workload.heads:
        flags.add("--group-query-attention")
        flags.add("--num-query-groups", workload.kv_heads)
    if workload.attention_bias and not workload.bias:
        flags.add("--add-qkv-bias")
    kinds = {"learned": "learned_absolute", "none": "none"}
    flags.add("--position-embedding-type", kinds.get(workload.position_kind, "rope"))
    add_rotary(flags, workload, "--rotary-base")
    flags.add("--normalization", "LayerNorm" if workload.norm_bias else "RMSNorm")
    if workload.query_key_norm or workload.latent is not None:  # of latents it norms what is compressed
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
    whole = bool(workload.query_key_norm) and workload.query_key_norm != 2 * workload.head_size
    unlike = ("norms over all heads' queries and keys: one a head is written",) if whole else ()
    name_kinds(workload, account, "--rotary-base", unlike)


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


def say_selective(exported: Exported, account: Account) -> None:
    """Their selective recomputation repeats attention's scores alone; what a plan or a program means by it may be more."""
    account.says("checkpointing.mode")
    if exported.layout is not None:
        account.says_column("recompute")
    if exported.layout is None or exported.operators != "none":
        account.notes(
            "checkpointing.mode: selective is attention's scores alone there: more memory, and less is recomputed"
        )


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
