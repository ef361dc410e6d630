"""Train a Hugging Face causal language model, made from its configuration: nothing is downloaded.

    python -m trine.samples.pretrained --model llama
    torchrun --nproc-per-node 2 -m trine.samples.pretrained --model qwen --config pretrained_tensor
    torchrun --nproc-per-node 4 -m trine.samples.pretrained --model mixtral --config pretrained_tensor --record runs/a

The same loop, data and flags as train_gpt.py: windows of the standard library's sources, byte by byte. With a checkpoint of
yours, ``transformers.AutoModelForCausalLM.from_pretrained`` takes the place of :func:`model_of`, and the rest stays.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trine.samples.text import SourceText, standard_library
from trine.samples.training import add_arguments, place, share_of, train

__all__ = ["MODELS", "arguments_of", "build", "loss_of", "main", "model_of"]

MODELS = ("llama", "gpt2", "qwen", "mixtral")


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(prog="pretrained", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama")
    sizes = {
        "layers": 4,
        "hidden": 256,
        "heads": 8,
        "kv-heads": 4,
        "sequence": 256,
        "vocab": 256,
        "experts": 4,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument(
        "--dropout", type=float, default=0.0, metavar="P", help="of GPT-2; the others have none"
    )
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="samples a rank and step")
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="train on FILE, not on the standard library"
    )
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="with --config: a checkpoint at the end")
    parser.add_argument(
        "--resume", type=Path, metavar="FOLDER", help="with --config: go on from a checkpoint"
    )
    add_arguments(parser, rate=3e-4)
    arguments = parser.parse_args(argv)
    if arguments.config is None and (arguments.save or arguments.resume):
        parser.error("--save and --resume are the engine's: give a --config too")
    return arguments


def model_of(arguments: argparse.Namespace) -> nn.Module:
    """The model, with random weights. Raises ``ModuleNotFoundError`` where transformers is not installed."""
    import transformers

    if arguments.model == "gpt2":
        small: dict[str, Any] = {
            "vocab_size": arguments.vocab,
            "n_embd": arguments.hidden,
            "n_layer": arguments.layers,
            "n_head": arguments.heads,
            "n_positions": arguments.sequence,
            "resid_pdrop": arguments.dropout,
            "embd_pdrop": arguments.dropout,
            "attn_pdrop": arguments.dropout,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "use_cache": False,
            "loss_type": "ForCausalLM",
        }
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**small))
    shape: dict[str, Any] = {
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "max_position_embeddings": arguments.sequence,
        "use_cache": False,  # of keys and values, which generating wants
    }
    if arguments.model == "qwen":
        shape["head_dim"] = arguments.hidden // arguments.heads
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    if arguments.model == "mixtral":
        shape |= {"num_local_experts": arguments.experts, "num_experts_per_tok": min(2, arguments.experts)}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Mean cross-entropy of the next token, as the model itself computes it; ``batch``: ids and the ids one later."""
    ids, targets = batch
    loss: torch.Tensor = model(input_ids=ids, labels=ids, shift_labels=targets).loss
    return loss


def build(
    arguments: argparse.Namespace, rank: int, ranks: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Model, optimizer and loader, the same on every call with the same seed; ``rank`` of ``ranks`` shares of the data."""
    torch.manual_seed(arguments.seed)
    model = model_of(arguments).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate)
    text = arguments.text.read_bytes() if arguments.text else standard_library()
    data = SourceText(text, arguments.sequence)
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=arguments.seed)
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=arguments.batch, sampler=sampler, num_workers=arguments.workers, drop_last=True
    )
    return model, optimizer, loader


def main(argv: list[str] | None = None) -> int:
    """Train and return 0; 2 where transformers is missing."""
    arguments = arguments_of(argv)
    try:
        import transformers  # noqa: F401
    except ModuleNotFoundError:
        print(
            'pretrained: transformers is not installed: pip install "trine[transformers]", or train train_gpt instead',
            file=sys.stderr,
        )
        return 2
    with place() as (rank, ranks, device):
        model, optimizer, loader = build(arguments, *share_of(arguments, rank, ranks), device)
        train(arguments, model, optimizer, loader, loss_of, lambda: {"model": arguments.model})
    return 0


if __name__ == "__main__":
    sys.exit(main())
