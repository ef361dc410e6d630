"""Workloads of live models: ``workload_of_module(model, sequence=2048)``.

Models of Hugging Face are read by their ``config``. Any other by its structure: the longest list of blocks, in each block the
matrices of attention (by name) and of the feed-forward or its experts (by shape), around them embeddings and the output head. Torch
is not imported: parameters have shapes, modules have names. What a structure does not show is asked for.

    workload_of_module(model, sequence=2048, heads=16)      # the model keeps its number of heads to itself
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from trine.optim.plan._tables import check_keys
from trine.optim.plan.huggingface import known_model_types, workload_from_config
from trine.optim.plan.workload import Workload
from trine.record.errors import UsageError

__all__ = ["workload_of_module"]

#: What wrappers call the model inside them: data parallel ones, and torch.compile's.
_INSIDE = ("module", "_orig_mod", "_fsdp_wrapped_module")
_LISTS = ("ModuleList", "Sequential", "ModuleDict")
_HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "nhead")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "key_heads")
_HEAD_SIZES = ("head_dim", "head_size", "d_head")
_PICKED = ("top_k", "num_experts_per_tok", "experts_per_token", "topk", "moe_top_k")
_ATTENTION = re.compile(
    r"attn|attention|mixer|(^|\.)(q|k|v|query|key|value|qkv|wq|wk|wv|wo|wqkv)(_proj|_lin)?(\.|$)",
    re.IGNORECASE,
)
_ROUTER = re.compile(r"router|(^|\.)gate(\.weight)?$", re.IGNORECASE)
_SHARED = re.compile(r"shared", re.IGNORECASE)
#: A count that is further from the true one than this is of a model that is sharded, or otherwise another.
_SAME = 0.02


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A parameter of two dimensions, or of three where experts are stacked: ``inputs`` to ``outputs``, in ``copies``."""

    name: str
    outputs: int
    inputs: int
    copies: int


@dataclass(frozen=True, slots=True)
class _Block:
    """What one block holds; sizes are widths. ``experts`` 0: dense."""

    queries: int
    keys: int
    ffn: int
    gated: bool
    experts: int
    shared_ffn: int
    attention_bias: bool
    mlp_bias: bool
    norms: int
    norm_bias: bool


def workload_of_module(module: Any, *, sequence: int, name: str = "", **known: Any) -> Workload:
    """The workload that a live model is. Its count of parameters is the model's own, to the last one.

    ``sequence``: tokens a sample. ``known``: fields of :class:`Workload` that the model does not show (``heads``,
    ``experts_per_token``, ``window``, ``causal``) or that are to be otherwise. Raises ``UsageError`` naming what is missing.
    """
    check_keys(known, [field.name for field in fields(Workload)], "a workload")
    for inside in _INSIDE:
        while hasattr(module, inside) and hasattr(getattr(module, inside), "named_modules"):
            module = getattr(module, inside)
    if not hasattr(module, "named_parameters") or not hasattr(module, "named_modules"):
        raise UsageError(
            f"{type(module).__name__} is no module: give the model itself, or a file that describes it"
        )
    name = name or type(module).__name__
    config: Any = getattr(module, "config", None)
    written = config.to_dict() if hasattr(config, "to_dict") else {}
    if isinstance(written, dict) and str(written.get("model_type")) in known_model_types():
        found = workload_from_config(
            written, sequence=sequence, name=name, where=f"the configuration of {name}"
        )
    else:
        found = _from_structure(module, sequence, name, known)
    return _exact(found.with_changes(**known), module)


def _exact(workload: Workload, module: Any) -> Workload:
    """The same with the module's own count; what is not explained is counted apart."""
    true = sum(math.prod(parameter.shape) for parameter in module.parameters())
    missing = true - workload.parameters
    if abs(missing) > _SAME * true:
        return workload  # a part of the model, or shards of it: what was read says more than what is there
    return workload.with_changes(other_parameters=workload.other_parameters + missing)


# --- structure ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outside:
    """What lies beside the blocks: the embedding's size, whether the head is another matrix, rows of learned positions."""

    hidden: int
    vocab: int
    has_head: bool
    positions: int


def _from_structure(module: Any, sequence: int, name: str, known: Mapping[str, Any]) -> Workload:
    blocks = _blocks(module)
    if not blocks:
        raise UsageError(
            f"{name} has no list of blocks with matrices: describe it in TOML (docs/plan_inputs.md)"
        )
    outside = _outside(module, blocks, name, known)
    read = [_block(block, outside.hidden, name) for block in blocks]
    first = _alike(read, name)
    mixtures = [block for block in read if block.experts]
    dense = [block for block in read if not block.experts]
    heads = known.get("heads") or _heads(module, blocks[0], first.queries, name)
    if first.queries % heads:
        raise UsageError(f"{name}: {heads} heads do not divide queries of {first.queries}")
    head_size = first.queries // heads
    return Workload(
        name=name,
        layers=len(blocks),
        hidden=outside.hidden,
        heads=heads,
        kv_heads=max(1, first.keys // head_size),
        head_size=head_size,
        ffn=(dense or mixtures)[0].ffn,
        vocab=outside.vocab,
        sequence=sequence,
        gated=first.gated,
        bias=first.norm_bias,
        attention_bias=first.attention_bias,
        output_bias=first.attention_bias,
        mlp_bias=first.mlp_bias,
        norm_bias=first.norm_bias,
        norms=first.norms,
        tied_embeddings=not outside.has_head,
        learned_positions=outside.positions > 0,
        positions=outside.positions,
        dropout=_drops(module),
        **_mixture(module, mixtures, len(dense), name, known),
    )


def _outside(module: Any, blocks: list[Any], name: str, known: Mapping[str, Any]) -> _Outside:
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [
        (label, parameter) for label, parameter in module.named_parameters() if id(parameter) not in inside
    ]
    tables = [
        parameter for label, parameter in outside if len(parameter.shape) == 2 and _is_table(module, label)
    ]
    if not tables and "vocab" not in known:
        raise UsageError(
            f"{name} has no embedding of tokens, so it is no language model: describe it in TOML"
        )
    tokens = max(tables, key=lambda table: table.shape[0]) if tables else None
    shape = (0, 0) if tokens is None else (int(tokens.shape[0]), int(tokens.shape[1]))
    hidden = int(known.get("hidden") or shape[1]) or _narrowest(blocks[0])
    vocab = int(known.get("vocab") or shape[0])
    others = [parameter for _, parameter in outside if parameter is not tokens]
    rows = [table.shape[0] for table in tables if table is not tokens and table.shape[1] == hidden]
    has_head = any(tuple(parameter.shape) == (vocab, hidden) for parameter in others)
    return _Outside(hidden, vocab, has_head, max(rows, default=0))


def _drops(module: Any) -> bool:
    return any("Dropout" in type(each).__name__ and getattr(each, "p", 0) > 0 for each in module.modules())


def _mixture(
    module: Any, mixtures: list[_Block], dense: int, name: str, known: Mapping[str, Any]
) -> dict[str, Any]:
    if not mixtures:
        return {}
    picked = known.get("experts_per_token") or _number(module, list(module.modules()), _PICKED)
    if not picked:
        raise UsageError(f"{name} does not say how many experts a token visits: give experts_per_token=…")
    one = mixtures[0]
    return {
        "experts": one.experts,
        "experts_per_token": int(picked),
        "expert_ffn": one.ffn,
        "shared_experts": int(one.shared_ffn > 0),
        "shared_ffn": one.shared_ffn,
        "dense_layers": dense,
    }


def _blocks(module: Any) -> list[Any]:
    """Members of the outermost list of modules that holds most parameters; those that hold matrices and are none."""
    best: list[Any] = []
    most = 0

    def walk(each: Any) -> None:
        nonlocal best, most
        if any(kind.__name__ in _LISTS for kind in type(each).__mro__):
            members = [
                child for child in each.children() if any(len(p.shape) >= 2 for p in child.parameters())
            ]
            if members and not any(_is_matrix_module(member) for member in members):
                size = sum(math.prod(p.shape) for member in members for p in member.parameters())
                if size > most:
                    best, most = members, size
                return
        for child in each.children():
            walk(child)

    walk(module)
    return best


def _is_matrix_module(module: Any) -> bool:
    return any(len(parameter.shape) >= 2 for _, parameter in module.named_parameters(recurse=False))


def _is_table(module: Any, label: str) -> bool:
    """Whether a parameter is looked up, or is added to what is: an embedding's, or positions on their own."""
    owner = module
    for part in label.split(".")[:-1]:
        owner = getattr(owner, part)
    return (
        hasattr(owner, "num_embeddings")
        or "mbedding" in type(owner).__name__
        or "pos" in label.split(".")[-1]
    )


def _narrowest(block: Any) -> int:
    return min(int(min(parameter.shape)) for parameter in block.parameters() if len(parameter.shape) == 2)


def _matrices(block: Any) -> Iterator[_Matrix]:
    """Matrices of a block, outputs and inputs told apart (GPT-2's modules of Hugging Face have them the other way round)."""
    turned = {
        label
        for label, module in block.named_modules()
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    }
    for label, parameter in block.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) not in (2, 3):
            continue
        rows, columns = shape[-2:]
        if label.rpartition(".")[0] in turned:
            rows, columns = columns, rows
        yield _Matrix(label, rows, columns, shape[0] if len(shape) == 3 else 1)


def _queries_and_keys(block: Any, attention: list[_Matrix], hidden: int, name: str) -> tuple[int, int]:
    """Outputs of a block's projections: of queries, and of keys as of values."""
    outputs = [each for each in attention if each.outputs == hidden and _is_output(each, attention)]
    if len(outputs) != 1:
        raise UsageError(
            f"{name}: which matrix closes attention is not clear in {type(block).__name__}: describe the model in TOML"
        )
    queries = outputs[0].inputs
    joined = sum(each.outputs for each in attention if each is not outputs[0])
    if (
        joined < queries
        or (joined - queries) % 2
        or any(each.inputs != hidden for each in attention if each is not outputs[0])
    ):
        raise UsageError(
            f"{name}: attention of {type(block).__name__} is not queries, keys and values alone: describe the model in TOML"
        )
    return queries, (joined - queries) // 2


def _block(block: Any, hidden: int, name: str) -> _Block:
    matrices = list(_matrices(block))
    attention = [each for each in matrices if _ATTENTION.search(each.name) and each.copies == 1]
    rest = [each for each in matrices if each not in attention]
    queries, keys = _queries_and_keys(block, attention, hidden, name)
    shared = [each for each in rest if _SHARED.search(each.name) and hidden in (each.outputs, each.inputs)]
    plain = [each for each in rest if each not in shared]
    experts = _experts(plain)
    ffn, gated = _feed_forward(
        [each for each in plain if not _is_router(each, experts, hidden)], hidden, max(1, experts), name
    )
    shared_ffn = (
        _feed_forward([each for each in shared if each.outputs != 1], hidden, 1, name)[0] if shared else 0
    )
    small = [(label, parameter) for label, parameter in block.named_parameters() if len(parameter.shape) == 1]
    norms = [label for label, parameter in small if parameter.shape[0] == hidden and label.endswith("weight")]
    owners = {label.rpartition(".")[0] for label in norms}
    biases = [label for label, _ in small if label.rpartition(".")[0] not in owners and "bias" in label]
    return _Block(
        queries=queries,
        keys=keys,
        ffn=ffn,
        gated=gated,
        experts=experts,
        shared_ffn=shared_ffn,
        attention_bias=any(_ATTENTION.search(label) for label in biases),
        mlp_bias=any(not _ATTENTION.search(label) for label in biases),
        norms=len(norms),
        norm_bias=any(label.endswith("bias") and label.rpartition(".")[0] in owners for label, _ in small),
    )


def _is_output(each: _Matrix, attention: list[_Matrix]) -> bool:
    """The last by name that says so, else the last that there is: ``out``, ``o_proj``, ``c_proj``, ``wo``, ``dense``."""
    said = [
        m
        for m in attention
        if re.search(
            r"(^|[._])(o|out|wo|c_proj|proj|dense|output)([._]|$)", m.name.rpartition(".")[0] or m.name
        )
        and not re.search(r"qkv|query|key|value|(^|[._])[qkv]_?proj|in_proj|c_attn", m.name)
    ]
    return each is (said[-1] if said else attention[-1])


def _experts(plain: list[_Matrix]) -> int:
    """How many experts there are: stacked, or modules of a list that is called so; 0 where there are none."""
    stacked = {each.copies for each in plain if each.copies > 1}
    listed = {match[1] for each in plain if (match := re.search(r"experts\.(\d+)\.", each.name))}
    return max(stacked, default=len(listed))


def _is_router(each: _Matrix, experts: int, hidden: int) -> bool:
    return (
        experts > 0
        and each.copies == 1
        and (each.outputs, each.inputs) == (experts, hidden)
        and (_ROUTER.search(each.name) is not None or "experts" not in each.name)
    )


def _feed_forward(matrices: list[_Matrix], hidden: int, experts: int, name: str) -> tuple[int, bool]:
    """The width, and whether it is gated: weights are 2·h·f or 3·h·f, an expert."""
    widths = [
        each.inputs if each.outputs == hidden else each.outputs
        for each in matrices
        if hidden in (each.outputs, each.inputs)
    ]
    if len(widths) != len(matrices) or not widths:
        raise UsageError(
            f"{name}: the feed-forward is not matrices from {hidden} up and down again: describe the model in TOML"
        )
    total = sum(each.outputs * each.inputs * each.copies for each in matrices) // (hidden * experts)
    ffn = min(widths)
    if total not in (2 * ffn, 3 * ffn):
        raise UsageError(
            f"{name}: a feed-forward of {total / ffn:.1f} matrices of {hidden} × {ffn} is not known: describe the model in TOML"
        )
    return ffn, total == 3 * ffn


def _alike(read: list[_Block], name: str) -> _Block:
    """The block that all are like, but for their experts. Raises ``UsageError``."""
    first = read[0]
    for position, block in enumerate(read):
        if (block.queries, block.keys, block.gated) != (first.queries, first.keys, first.gated):
            raise UsageError(
                f"{name}: block {position} has other attention than the first: only equal blocks can be planned"
            )
        others = [each.ffn for each in read if bool(each.experts) == bool(block.experts)]
        if others[0] != block.ffn:
            raise UsageError(
                f"{name}: block {position} has a feed-forward of {block.ffn}, not {others[0]}: only equal blocks can be planned"
            )
    return first


def _heads(module: Any, block: Any, queries: int, name: str) -> int:
    parts = list(block.modules())
    heads = _number(module, parts, _HEADS)
    if heads:
        return heads
    size = _number(module, parts, _HEAD_SIZES)
    if size:
        return queries // size
    raise UsageError(f"{name} does not say how many heads it has: give heads=…")


def _number(module: Any, parts: list[Any], names: tuple[str, ...]) -> int:
    """The first whole number by one of these names, of a part or of the configuration; 0 where there is none."""
    for owner in (*parts, getattr(module, "config", None), module):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0
