"""The flags that exports may use, as Megatron-LM's and Megatron-DeepSpeed's own parsers have them.

From ``megatron/training/arguments.py`` of github.com/NVIDIA/Megatron-LM at 000c4ac24f61 (late 2025; Megatron-Core 0.16), and
``megatron/arguments.py`` of github.com/deepspeedai/Megatron-DeepSpeed at 207b2d5aad1e. Neither file is in a package that can
be installed: Megatron-Core is without the training script's arguments.
"""

from __future__ import annotations

import argparse

__all__ = ["MEGATRON", "MEGATRON_DEEPSPEED", "parsed"]

#: Flag → its type; ``bool`` for ``store_true``, a tuple for ``choices``.
_BOTH: dict[str, object] = {
    "--num-layers": int,
    "--hidden-size": int,
    "--ffn-hidden-size": int,
    "--num-attention-heads": int,
    "--kv-channels": int,
    "--seq-length": int,
    "--max-position-embeddings": int,
    "--swiglu": bool,
    "--disable-bias-linear": bool,
    "--untie-embeddings-and-output-weights": bool,
    "--rotary-percent": float,
    "--attention-dropout": float,
    "--hidden-dropout": float,
    "--tensor-model-parallel-size": int,
    "--pipeline-model-parallel-size": int,
    "--sequence-parallel": bool,
    "--micro-batch-size": int,
    "--global-batch-size": int,
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-num-layers": int,
    "--bf16": bool,
    "--fp16": bool,
    "--loss-scale": float,
    "--num-workers": int,
    "--num-layers-per-virtual-pipeline-stage": int,
}

MEGATRON: dict[str, object] = {
    **_BOTH,
    "--group-query-attention": bool,
    "--num-query-groups": int,
    "--add-qkv-bias": bool,
    "--position-embedding-type": ("learned_absolute", "rope", "mrope", "relative", "none"),
    "--rotary-base": int,
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--qk-layernorm": bool,
    "--window-size": str,  # tuple_type
    "--vocab-size": int,
    "--multi-latent-attention": bool,
    "--q-lora-rank": int,
    "--kv-lora-rank": int,
    "--qk-head-dim": int,
    "--qk-pos-emb-head-dim": int,
    "--v-head-dim": int,
    "--num-experts": int,
    "--moe-router-topk": int,
    "--moe-ffn-hidden-size": int,
    "--moe-shared-expert-intermediate-size": int,
    "--moe-layer-freq": str,  # moe_freq_type
    "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "--moe-grouped-gemm": bool,
    "--context-parallel-size": int,
    "--expert-model-parallel-size": int,
    "--expert-tensor-parallel-size": int,
    "--microbatch-group-size-per-virtual-pipeline-stage": int,
    "--num-virtual-stages-per-pipeline-rank": int,
    "--pipeline-model-parallel-layout": str,
    "--use-distributed-optimizer": bool,
    "--use-megatron-fsdp": bool,
    "--data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "--ckpt-format": ("torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"),
    "--no-gradient-accumulation-fusion": bool,
    "--num-distributed-optimizer-instances": int,
    "--fp8-format": ("e4m3", "hybrid"),
    "--fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "--recompute-modules": str,
    "--optimizer-cpu-offload": bool,
    "--use-precision-aware-optimizer": bool,
    "--overlap-cpu-optimizer-d2h-h2d": bool,
    "--cpu-offloading-num-layers": int,
    "--overlap-grad-reduce": bool,
    "--overlap-param-gather": bool,
    "--ddp-bucket-size": int,
    "--grad-reduce-in-bf16": bool,
    "--attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "--cross-entropy-loss-fusion": bool,
}

MEGATRON_DEEPSPEED: dict[str, object] = {
    **_BOTH,
    "--num-key-value-heads": int,
    "--use-rotary-position-embeddings": bool,
    "--rotary-position-embeddings-theta": int,
    "--no-position-embedding": bool,  # store_false
    "--normalization": ("layernorm", "rmsnorm"),
    "--num-experts": int,
    "--topk": int,
    "--expert-interval": int,
    "--create-moe-param-group": bool,
    "--ds-sequence-parallel-size": int,
    "--moe-expert-parallel-size": int,
    "--use-flash-attn-v2": bool,
    "--no-pipeline-parallel": bool,
    "--enable-zbh1-pipeline": bool,
    "--checkpoint-activations": bool,
    "--deepspeed-activation-checkpointing": bool,
    "--checkpoint-in-cpu": bool,
    "--deepspeed": bool,  # deepspeed.add_config_arguments
    "--deepspeed_config": str,
    "--zero-stage": int,
    "--cpu-optimizer": bool,
    "--remote-device": ("none", "cpu", "nvme"),
    "--clip-grad": float,
}


def parsed(text: str, flags: dict[str, object]) -> argparse.Namespace:
    """The text as their parser takes it: no abbreviations, no flag that it has not, none twice."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for flag, kind in flags.items():
        if kind is bool:
            parser.add_argument(flag, action="store_true")
        elif isinstance(kind, tuple):
            parser.add_argument(flag, choices=kind)
        else:
            parser.add_argument(flag, type=kind)  # type: ignore[arg-type]
    words = text.split()
    given = [word for word in words if word.startswith("--")]
    assert len(given) == len(set(given)), given
    return parser.parse_args(words)
