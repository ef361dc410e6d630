"""Models of published runs: what a row does not say is what models of its kind have."""

from __future__ import annotations

import re
from typing import Any

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
    return _known_model(row) or _as_counted(_described(row), row)


def _described(row: Row) -> Workload:
    """From its dimensions: what has gates has the other habits of models since Llama, too."""
    hidden, sequence = row.needed("hidden"), row.needed("seq_len")
    heads = _or_assumed(row, "heads", max(1, hidden // 128), "{} heads of 128")
    kv_heads = row.count("kv_heads") or heads
    vocab = _or_assumed(row, "vocab", 51200, "vocabulary of {:,}")
    gated = any(word in row.text("mlp").lower() for word in ("swiglu", "geglu", "silu", "gated"))
    usual_ffn = round(8 * hidden / 3) if gated else 4 * hidden
    ffn = _or_assumed(row, "ffn", usual_ffn, "feed-forward of {}")
    layers = row.count("layers")
    name = row.text("model")
    return Workload(
        name=name or "model",
        layers=_layers_from_parameters(row, hidden, ffn, vocab, gated) if layers is None else layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_size=128 if "qwen3" in name.lower() else 0,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence,
        gated=gated,
        bias=not gated,
        tied_embeddings=not gated,
        learned_positions=not gated,
        dropout=not gated and "mpt" not in name.lower(),
        **_mixture(row, ffn),
    )


def _or_assumed(row: Row, cell: str, usual: int, words: str) -> int:
    """A cell's count, or the usual one, said in ``words``."""
    stated = row.count(cell)
    if stated is not None:
        return stated
    row.assume(words.format(usual))
    return usual


def _mixture(row: Row, ffn: int) -> dict[str, Any]:
    """Fields of a mixture of experts; none of a dense model."""
    experts = row.count("experts") or 0
    if experts <= 1:
        return {}
    return {
        "experts": experts,
        "experts_per_token": row.count("topk") or 1,
        "expert_ffn": ffn,
        "load_imbalance": _imbalance(row),
    }


def _as_counted(workload: Workload, row: Row) -> Workload:
    """With what the stated number of parameters shows that the row left out."""
    stated = row.number("params_b")
    if not stated:
        return workload
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
