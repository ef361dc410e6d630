"""Models of published runs: what a row does not say is what models of its kind have."""

from __future__ import annotations

import re

from planner_cells import Missing, Row

from trine.optim.plan import Workload
from trine.optim.plan.reconcile import reconciled
from trine.optim.plan.workload_files import workload_of
from trine.record.errors import TrineError

__all__ = ["workload_of_row"]

#: Routers' imbalance costs 8 to 20 % of a step (Megatron-Core's own notes on its best practice).
_IMBALANCE = 1.15
#: How far a parameter count may be rounded.
_ROUNDED = 0.03


def workload_of_row(row: Row) -> Workload:
    """The model of a row. Raises ``Missing``."""
    if known := _known_model(row):
        return known
    hidden, sequence = row.needed("hidden"), row.needed("seq_len")
    heads = row.count("heads")
    if heads is None:
        heads = max(1, hidden // 128)
        row.assume(f"{heads} heads of 128")
    kv_heads = row.count("kv_heads") or heads
    vocab = row.count("vocab")
    if vocab is None:
        vocab = 51200
        row.assume("vocabulary of 51,200")
    mlp = row.text("mlp").lower()
    gated = any(word in mlp for word in ("swiglu", "geglu", "silu", "gated"))
    ffn = row.count("ffn")
    if ffn is None:
        ffn = round(8 * hidden / 3) if gated else 4 * hidden
        row.assume(f"feed-forward of {ffn}")
    experts = row.count("experts") or 0
    modern = gated
    layers = row.count("layers")
    if layers is None:
        layers = _layers_from_parameters(row, hidden, ffn, vocab, gated)
    head_size = 128 if "qwen3" in row.text("model").lower() else 0
    workload = Workload(
        name=row.text("model") or "model",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_size=head_size,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence,
        gated=gated,
        bias=not modern,
        tied_embeddings=not modern,
        learned_positions=not modern,
        dropout=not modern and "mpt" not in row.text("model").lower(),
        experts=experts if experts > 1 else 0,
        experts_per_token=(row.count("topk") or 1) if experts > 1 else 0,
        expert_ffn=ffn if experts > 1 else 0,
        load_imbalance=_imbalance(row) if experts > 1 else 1.0,
    )
    stated = row.number("params_b")
    if stated:
        workload, why = reconciled(workload, stated * 1e9)
        if why:
            row.assume(why)
    return workload


def _known_model(row: Row) -> Workload | None:
    """A model that is known by name, where a row lacks its width, or where it is one whose attention no cell tells.

    What the row states stands before it.
    """
    name = re.sub(r"\(.*?\)", "", row.text("model")).replace("_", "-").strip()
    try:
        found = workload_of(name) if name and not re.search(r"[/.](toml|json)$|^[./]", name) else None
    except TrineError:
        return None
    hidden = row.count("hidden")
    if found is None or (hidden is not None and (found.latent is None or hidden != found.hidden)):
        return None
    stated = {"layers": "layers", "vocab": "vocab", "experts": "experts", "topk": "experts_per_token"}
    changes = {field: row.count(cell) for cell, field in stated.items() if row.count(cell)}
    if not found.is_mixture:
        changes = {field: value for field, value in changes.items() if not field.startswith("experts")}
    if (sequence := row.count("seq_len")) is not None:
        changes["sequence"] = sequence
    row.assume(f"{row.text('model')} as it is published")
    imbalance = _imbalance(row) if found.is_mixture else 1.0
    return found.with_changes(name=row.text("model"), load_imbalance=imbalance, **changes)


def _imbalance(row: Row) -> float:
    """The busiest expert rank's load over the mean's: even where a run forces it, else what routers are seen to leave."""
    text = row.text("notes").lower()
    if "forced balance" in text or "drop" in row.text("model").lower():
        return 1.0
    row.assume(f"expert load {_IMBALANCE} times the mean's")
    return _IMBALANCE


def _layers_from_parameters(row: Row, hidden: int, ffn: int, vocab: int, gated: bool) -> int:
    """From the published parameter count, where the model is dense."""
    billions = row.number("params_b")
    if billions is None or row.count("experts"):
        raise Missing("no layers")
    layer = 4 * hidden**2 + (3 if gated else 2) * hidden * ffn
    exact = (billions * 1e9 - vocab * hidden) / layer
    if exact < 0.5:
        raise Missing("no layers")
    # Stages are even where the count, which is rounded, allows it.
    stages = row.count("pp") or 1
    even = max(1, round(exact / stages)) * stages
    found = even if abs(even / exact - 1) < _ROUNDED else round(exact)
    row.assume(f"{found} layers, from {billions:g} billion parameters")
    return found
