"""Finds attention, feed-forward, mixture, embedding, head and norms in a live model. Changes nothing.

A linear layer is known by its neighbours: in attention by the names that the field gives to queries, keys and values,
whose widths must then be those of heads; in a feed-forward by its widths, up from the hidden size and down to it again.
What remains without a place is refused by name, since a wrong guess would train another model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from trine.optim.runtime.tensor_plans.own import styles_of
from trine.optim.runtime.tensor_plans.roles import (
    HEADS,
    KEY_HEADS,
    Attention,
    Block,
    Column,
    Experts,
    FeedForward,
    Plan,
    is_linear,
    widths,
)
from trine.record.errors import UsageError

__all__ = ["plan_of"]

_QUERY = frozenset({"q_proj", "query", "q", "wq", "to_q", "q_lin", "query_proj"})
_KEY = frozenset({"k_proj", "key", "k", "wk", "to_k", "k_lin", "key_proj"})
_VALUE = frozenset({"v_proj", "value", "v", "wv", "to_v", "v_lin", "value_proj"})
#: Queries, keys and values one after the other in one matrix. Not ``query_key_value``, which has them head by head.
_FUSED = frozenset({"qkv", "qkv_proj", "c_attn", "Wqkv", "wqkv", "in_proj", "to_qkv"})
_OUT = frozenset({"out", "o_proj", "out_proj", "wo", "c_proj", "proj", "to_out", "out_lin", "dense"})
#: Gate and up in one matrix, gate first.
_GATE_AND_UP = frozenset({"gate_up_proj", "gate_up", "w13"})
_WAY_OUT = "say what it is in parallel.plan, or drop parallel.tensor"

_Named = tuple[str, nn.Module]


def plan_of(
    model: nn.Module, own: Mapping[str, str] | None = None, spread: bool = False, is_stage: bool = False
) -> Plan:
    """What each module does. ``own``: pattern of names → style, for what is not to be found or found otherwise.

    ``spread``: experts are spread over other ranks already, and stay as they are. ``is_stage``: ``model`` is a pipeline's
    part of one, where not everything need be found. Raises ``UsageError`` with the module's name for what is not understood.
    """
    styles = styles_of(model, own or {}, is_stage)
    plan = Plan()
    names = {id(module): name for name, module in model.named_modules()}
    inside: set[int] = set()
    for block in _blocks(model):
        plan.blocks.append(_block(names[id(block)], block, styles, spread))
        inside |= {id(module) for module in block.modules()}
    if not plan.blocks and not styles and not is_stage:
        raise UsageError(
            f"parallel.tensor: {type(model).__name__} has no list of blocks with attention or a feed-forward: {_WAY_OUT}"
        )
    _vocabulary(model, plan, inside, styles)
    for name, module in model.named_modules():
        style = styles.get(name) if id(module) not in inside else None
        if style in ("column", "qkv", "gate_up") and not _is_planned(plan, module):
            plan.columns.append(_column(name, module, style))
        elif style == "row" and not _is_planned(plan, module):
            plan.rows.append((name, module))
    return plan


def _is_planned(plan: Plan, module: nn.Module) -> bool:
    return module in {each[1] for each in (plan.head, plan.embedding) if each is not None}


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of modules that hold linear layers; where there is no list, none."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            members = [each for each in module.children() if _holds_matrices(each)]
            if members and not any(is_linear(each) for each in members):
                found.extend(members)
                return
        for child in module.children():
            walk(child)

    walk(model)
    return found


def _holds_matrices(module: nn.Module) -> bool:
    return any(is_linear(each) for each in module.modules())


# --- a block -----------------------------------------------------------------------------------


def _block(name: str, block: nn.Module, styles: Mapping[str, str], spread: bool) -> Block:
    named = [
        (f"{name}.{inner}" if name else inner, module) for inner, module in block.named_modules() if inner
    ]
    taken: set[int] = {
        id(module) for full, module in named if full in styles and styles[full] in ("replicate",)
    }
    attentions, mixtures = [], []
    for full, module in named:
        if id(module) in taken:
            taken |= {id(each) for each in module.modules()}
            continue
        attention = _attention(full, module, styles)
        if attention is not None:
            attentions.append(attention)
            taken |= {id(each) for each in module.modules()}
            continue
        mixture = _mixture(full, module, spread)
        if mixture is not None:
            mixtures.append(mixture)
            taken |= {id(each) for each in module.modules()}
    inline = _mixture(name, block, spread)
    if inline is not None:
        mixtures.append(inline)
        taken |= {id(each) for each in inline.experts.modules()}
        taken |= _router(block, taken)
    own = [
        (full, module) for full, module in named if styles.get(full) in ("column", "qkv", "gate_up", "row")
    ]
    own = [(full, module) for full, module in own if id(module) not in taken]
    of_own, forwards = _own_regions(name, own, named, styles)
    attentions += of_own
    taken |= {id(module) for _, module in own}
    left = [(full, module) for full, module in named if id(module) not in taken and is_linear(module)]
    norms = [
        (full, module)
        for full, module in named
        if id(module) not in taken and (is_norm(module) or styles.get(full) == "sequence")
    ]
    forwards += _feed_forwards(name, left, norms, named)
    placed = taken | {id(m) for f in forwards for m in _of_forward(f)} | {id(m) for _, m in norms}
    whole = [
        (full, module)
        for full, module in named
        if id(module) not in placed and any(True for _ in module.parameters(recurse=False))
    ]
    whole += [(full, module) for full, module in named if styles.get(full) == "replicate"]
    return Block(name, block, tuple(attentions), tuple(forwards), tuple(mixtures), tuple(norms), tuple(whole))


def _of_forward(forward: FeedForward) -> Iterable[nn.Module]:
    yield from (column.module for column in forward.columns)
    yield from (module for _, module in forward.rows)


def is_norm(module: nn.Module) -> bool:
    """PyTorch's layer and RMS norms, and classes that are called so and hold a scale alone."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    held = dict(module.named_parameters())
    return (
        type(module).__name__.endswith("Norm")
        and set(held) <= {"weight", "bias"}
        and not list(module.children())
    )


def _column(name: str, module: nn.Module, style: str) -> Column:
    parts = {"column": 1, "qkv": 3, "gate_up": 2}[style]
    out = widths(module)[1]
    return Column(name, module, (out // parts,) * parts if parts > 1 else ())


def _own_regions(
    block_name: str, own: Sequence[_Named], named: Sequence[_Named], styles: Mapping[str, str]
) -> tuple[list[Attention], list[FeedForward]]:
    """The user's layers, those of one module together: it is where their input enters, once for all of them."""
    by_name = dict(named)
    groups: dict[str, list[_Named]] = {}
    for name, module in own:
        groups.setdefault(name.rpartition(".")[0], []).append((name, module))
    attentions, forwards = [], []
    for parent, members in groups.items():
        columns = tuple(_column(name, each, styles[name]) for name, each in members if styles[name] != "row")
        rows = tuple((name, each) for name, each in members if styles[name] == "row")
        entry = by_name.get(parent) if columns and parent != block_name else None
        heads = None if entry is None else _number(entry, HEADS)
        if entry is not None and heads is not None:
            key_heads = _number(entry, KEY_HEADS) or heads
            attentions.append(Attention(parent, entry, columns, rows, heads, key_heads))
        else:
            forwards.append(FeedForward(columns, rows, None if entry is None else (parent, entry)))
    return attentions, forwards


# --- attention ---------------------------------------------------------------------------------


def _attention(name: str, module: nn.Module, styles: Mapping[str, str]) -> Attention | None:
    children = dict(module.named_children())
    linears = {inner: child for inner, child in children.items() if is_linear(child)}
    query, key, value = (next((n for n in linears if n in known), None) for known in (_QUERY, _KEY, _VALUE))
    fused = next((n for n in linears if n in _FUSED), None)
    out = next((n for n in linears if n in _OUT and n not in (query, key, value)), None)
    if isinstance(module, nn.MultiheadAttention):
        raise UsageError(
            f"parallel.tensor: {name} is PyTorch's MultiheadAttention, which reads its matrices past every hook: use "
            "linear layers and scaled_dot_product_attention, or drop parallel.tensor"
        )
    if fused is None and (query is None or key is None or value is None):
        if "query_key_value" in linears and f"{name}.query_key_value" not in styles:
            raise UsageError(
                f"parallel.tensor: whether {name}.query_key_value has queries, keys and values head by head or one after "
                'the other is not to be seen: say "column" or "qkv" for it and "row" for the output in parallel.plan'
            )
        return None
    parts = [linears[n] for n in ((fused,) if fused else (query, key, value)) if n is not None]
    if any(f"{name}.{inner}" in styles for inner in linears):
        return None  # the user says so himself
    if out is None:
        names = ", ".join(sorted(_OUT))
        raise UsageError(
            f"parallel.tensor: {name} is attention whose output layer is not found among {', '.join(linears)} (known are "
            f'{names}): name it so, or say "column", "qkv" or "row" for each of them in parallel.plan'
        )
    heads, key_heads = _heads_of(name, module, parts, linears[out])
    columns = _of_attention(name, fused, (query, key, value), linears, heads, key_heads, linears[out])
    size = widths(linears[out])[0] // heads
    norms = _norms_of_heads(name, children, {fused, query, key, value, out}, size)
    _require_nothing_else(name, module, [*columns, linears[out], *(m for _, m in norms)])
    return Attention(name, module, columns, ((f"{name}.{out}", linears[out]),), heads, key_heads, norms)


def _heads_of(name: str, module: nn.Module, parts: Sequence[nn.Module], out: nn.Module) -> tuple[int, int]:
    heads = _number(module, HEADS)
    if heads is None:
        raise UsageError(
            f"parallel.tensor: {name} does not say how many heads it has, and a head must stay on one rank: give it "
            f"num_heads, or {_WAY_OUT}"
        )
    width = widths(out)[0]
    if width % heads:
        raise UsageError(
            f"parallel.tensor: {heads} heads do not divide the {width} features of {name}'s output"
        )
    size = width // heads
    if len(parts) == 3:
        key_heads = widths(parts[1])[1] // size
        expected = [heads * size, key_heads * size, key_heads * size]
        found = [widths(part)[1] for part in parts]
    else:
        key_heads = _number(module, KEY_HEADS) or heads
        expected, found = [(heads + 2 * key_heads) * size], [widths(parts[0])[1]]
    if expected != found:
        raise UsageError(
            f"parallel.tensor: {name} projects to {found} features, where {heads} heads of {size} need {expected}: "
            f"{_WAY_OUT}"
        )
    return heads, key_heads


def _number(module: nn.Module, names: Sequence[str]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value: Any = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _of_attention(
    name: str,
    fused: str | None,
    separate: Sequence[str | None],
    linears: Mapping[str, nn.Module],
    heads: int,
    key_heads: int,
    out: nn.Module,
) -> tuple[Column, ...]:
    if fused is None:
        return tuple(Column(f"{name}.{inner}", linears[inner]) for inner in separate if inner is not None)
    size = widths(out)[0] // heads
    sections = (heads * size, key_heads * size, key_heads * size)
    return (Column(f"{name}.{fused}", linears[fused], sections),)


def _norms_of_heads(
    name: str, children: Mapping[str, nn.Module], but: set[str | None], size: int
) -> tuple[_Named, ...]:
    found = []
    for inner, child in children.items():
        if inner in but or not is_norm(child):
            continue
        lengths = {parameter.numel() for parameter in child.parameters()}
        if lengths - {size}:
            raise UsageError(
                f"parallel.tensor: {name}.{inner} normalises over several heads at once, which lie on several ranks: "
                "drop parallel.tensor"
            )
        found.append((f"{name}.{inner}", child))
    return tuple(found)


def _require_nothing_else(name: str, module: nn.Module, known: Sequence[Any]) -> None:
    """Parameters that see a rank's own heads would have gradients of those alone."""
    seen = {id(p) for each in known for p in getattr(each, "module", each).parameters()}
    for inner, parameter in module.named_parameters():
        if id(parameter) not in seen:
            raise UsageError(f"parallel.tensor: {name}.{inner} has no known place in attention: {_WAY_OUT}")


# --- feed-forward ------------------------------------------------------------------------------


def _feed_forwards(
    block_name: str,
    left: Sequence[_Named],
    norms: Sequence[_Named],
    named: Sequence[_Named],
) -> list[FeedForward]:
    """Linear layers that are left, by the module that they stand in."""
    groups: dict[str, list[_Named]] = {}
    for name, module in left:
        groups.setdefault(name.rpartition(".")[0], []).append((name, module))
    by_name = dict(named)
    found = []
    for parent, members in groups.items():
        columns, row = _up_and_down(members)
        if parent == block_name:
            entry, behind = _norm_before(members[0][0], norms, named), True
        else:
            entry, behind = (parent, by_name[parent]), False
        found.append(FeedForward(columns, (row,), entry, behind and entry is not None))
    return found


def _up_and_down(members: Sequence[_Named]) -> tuple[tuple[Column, ...], _Named]:
    shapes = [widths(module) for _, module in members]
    *ups, down = members
    hidden = shapes[-1][1]
    inner = shapes[-1][0]
    last = down[0].rpartition(".")[2]
    if len(members) == 3 and last in ("w3",):  # Llama's own names: w1 the gate, w2 down, w3 up
        ups, down = [members[0], members[2]], members[1]
        inner, hidden = widths(down[1])
    if (
        len(ups) == 1
        and widths(ups[0][1]) == (hidden, 2 * inner)
        and ups[0][0].rpartition(".")[2] in _GATE_AND_UP
    ):
        return (Column(*ups[0], (inner, inner)),), down
    if len(ups) in (1, 2) and all(widths(module) == (hidden, inner) for _, module in ups):
        return tuple(Column(name, module) for name, module in ups), down
    listed = ", ".join(name for name, _ in members)
    pattern = ".".join("*" if part.isdecimal() else part for part in members[0][0].split("."))
    raise UsageError(
        f"parallel.tensor: {listed} are no feed-forward (one or two layers up, one down again), nor attention: {_WAY_OUT} "
        f'(a line for each, such as "{pattern}" = "column")'
    )


def _norm_before(first: str, norms: Sequence[_Named], named: Sequence[_Named]) -> _Named | None:
    """The last norm that was made before the feed-forward's first layer: the order in which they are called."""
    order = {name: place for place, (name, _) in enumerate(named)}
    before = [norm for norm in norms if order[norm[0]] < order[first]]
    return before[-1] if before else None


# --- mixtures ----------------------------------------------------------------------------------


def _mixture(name: str, module: nn.Module, spread: bool) -> Experts | None:
    """Experts whose matrices are stacked, as Transformers has them and :mod:`trine.samples.moe`; others stay whole.

    (experts, inner, hidden) up and gate, or both in one of (experts, 2 × inner, hidden), and (experts, hidden, inner) down.
    """
    experts = getattr(module, "experts", None)
    if not isinstance(experts, nn.Module):
        return None
    held = dict(experts.named_parameters())
    down = held.get("down_proj", held.get("down"))
    cuts: dict[str, tuple[int, tuple[int, ...]]] = {}
    if down is not None and down.dim() == 3 and not spread:
        count, hidden, inner = down.shape
        for key, parameter in held.items():
            if parameter is down:
                cuts[key] = (2, ())
            elif parameter.shape == (count, 2 * inner, hidden) and key in _GATE_AND_UP:
                cuts[key] = (1, (inner, inner))
            elif parameter.shape == (count, inner, hidden):
                cuts[key] = (1, ())
    # Biases, and anything else inside, would be added once a rank.
    return Experts(
        name,
        module,
        f"{name}.experts" if name else "experts",
        experts,
        cuts if len(cuts) == len(held) else {},
    )


def _router(block: nn.Module, taken: set[int]) -> set[int]:
    """What a block that holds experts itself has beside them and attention: it picks experts, and stays whole."""
    found: set[int] = set()
    for name, child in block.named_children():
        if id(child) not in taken and name in ("router", "gate"):
            found |= {id(each) for each in child.modules()}
    return found


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# --- embedding and head ------------------------------------------------------------------------


def _vocabulary(model: nn.Module, plan: Plan, inside: set[int], styles: Mapping[str, str]) -> None:
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
    tables = [(n, m) for n, m in outside if isinstance(m, nn.Embedding) and styles.get(n) != "replicate"]
    heads = [(n, m) for n, m in outside if isinstance(m, nn.Linear) and n not in styles]
    own = [(n, m) for n, m in outside if styles.get(n) == "head"]
    for name, head in own or heads:
        rows = widths(head)[1]
        tied = [each for each in tables if each[1].weight is head.weight]
        like = tied or [each for each in tables if each[1].num_embeddings == rows]
        if like or (name, head) in own:
            plan.head = (name, head)
            plan.embedding = like[0] if like else None
            break
    named = next(((n, m) for n, m in tables if styles.get(n) == "embedding"), None)
    if named is not None:
        plan.embedding = named
    elif plan.head is None and len(tables) == 1 and plan.blocks:
        plan.embedding = tables[0]  # an encoder without a head
    # A tied pair is one matrix: whole, where one of them is to stay whole.
    for name, module in outside:
        tied_whole = styles.get(name) == "replicate" and isinstance(module, nn.Embedding)
        if tied_whole and plan.head is not None and plan.head[1].weight is module.weight:
            plan.head = None
