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
#: Of a mixture, more parameters than this times the stated ones: its experts are narrower than what is given.
_WIDER = 1.25
#: What a cell says of a model without experts.
_NO_EXPERTS = ("", "-", "–", "none", "no", "n/a", "na", "nan", "null", "false", "dense")
#: Up to as many experts, a token meets two of them (GShard, Mixtral, Grok, Phi); of more, narrower ones it meets about eight.
_FEW_EXPERTS = 16
#: Sizes of a head that models have, commonest first.
_HEAD_SIZES = (128, 64, 96, 80, 256, 160)

#: Gated models came after kernels that want heads of a multiple of this.
_EVEN = 8


def workload_of_row(row: Row) -> Workload:
    """The model of a row. Raises ``Missing``."""
    return _known_model(row) or _as_counted(_described(row), row)


def _described(row: Row) -> Workload:
    """From its dimensions: what has gates has the other habits of models since Llama, too."""
    hidden = row.needed("hidden")
    vocab = _or_assumed(row, "vocab", 51200, "vocabulary of {:,}")
    name = row.text("model")
    gated = any(word in row.text("mlp").lower() for word in ("swiglu", "geglu", "silu", "gated"))
    heads, head_size = _heads(row, hidden, gated)
    kv_heads = row.count("kv_heads") or heads
    if heads % kv_heads:
        row.assume(f"{heads} key-value heads, since {kv_heads} do not divide {heads} heads")
        kv_heads = heads
    usual_ffn = round(8 * hidden / 3) if gated else 4 * hidden
    ffn = _or_assumed(row, "ffn", usual_ffn, "feed-forward of {}")
    layers = row.count("layers")
    return Workload(
        name=name or "model",
        layers=_layers_from_parameters(row, hidden, ffn, vocab, gated) if layers is None else layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=128 if "qwen3" in name.lower() else head_size,
        ffn=ffn,
        vocab=vocab,
        sequence=_sequence(row, gated),
        gated=gated,
        bias=not gated,
        tied_embeddings=not gated,
        learned_positions=not gated,
        dropout=not gated and "mpt" not in name.lower(),
        **_mixture(row, ffn),
    )


def _heads(row: Row, hidden: int, gated: bool) -> tuple[int, int]:
    """Heads, and their size where it is not hidden over heads."""
    stated = row.count("heads")
    if stated is None:
        size = next((each for each in _HEAD_SIZES if hidden % each == 0), 1 if hidden < 64 else 0)
        heads = hidden // (size or 128)
        row.assume(f"{heads} heads of {size or 128}")
        return heads, 0 if size else 128
    share = hidden / stated
    if hidden % stated == 0 and not (gated and share % _EVEN):
        return stated, 0
    # No model has heads of a broken size, and whoever projects to another width takes one that kernels like.
    size = min(_HEAD_SIZES, key=lambda each: abs(each - share))
    why = "do not divide" if hidden % stated else f"would be of {share:g} in"
    row.assume(f"heads of {size}, since {stated} of them {why} {hidden}")
    return stated, size


def _sequence(row: Row, gated: bool) -> int:
    """As stated; else what the model, or models of its kind, were trained with."""
    if (stated := row.count("seq_len")) is not None:
        return stated
    found = _named(row)
    sequence = found.sequence if found is not None else 4096 if gated else 2048
    row.assume(f"sequences of {sequence}")
    return sequence


def _or_assumed(row: Row, cell: str, usual: int, words: str) -> int:
    """A cell's count, or the usual one, said in ``words``."""
    stated = row.count(cell)
    if stated is not None:
        return stated
    row.assume(words.format(usual))
    return usual


def _mixture(row: Row, ffn: int) -> dict[str, Any]:
    """Fields of a mixture of experts; none of a dense model. Raises ``Missing`` for a mixture of no one knows how many."""
    found = _named(row)
    known = found if found is not None and found.is_mixture else None
    experts = row.count("experts")
    if experts is None and known is not None and known.hidden == row.count("hidden"):
        experts = known.experts
        row.assume(f"{experts} experts, as the model is published")
    if experts is None:
        _check_dense(row)
    if experts is None or experts <= 1:
        return {}
    return {
        "experts": experts,
        "experts_per_token": row.count("topk") or _usual_topk(row, experts, known),
        "expert_ffn": ffn,
        "load_imbalance": _imbalance(row),
    }


def _check_dense(row: Row) -> None:
    """Raises ``Missing`` where another cell, or one without a number, says that there are experts."""
    said = row.text("experts")
    if said.lower() not in _NO_EXPERTS and row.number("experts") is None:
        raise Missing(f"experts {said[:30]!r} are no number of experts")
    if "moe" in row.text("arch").lower():
        raise Missing(f"no number of experts, though arch is {row.text('arch')[:30]}")
    if (row.count("topk") or 1) > 1:
        raise Missing(f"no number of experts, though topk is {row.text('topk')}")


def _usual_topk(row: Row, experts: int, known: Workload | None) -> int:
    """Experts that a token meets where a row does not say how many: the known model's, or as many as such mixtures have."""
    usual = 2 if experts <= _FEW_EXPERTS else 8
    if known is not None and known.experts == experts:
        usual = known.experts_per_token
    row.assume(f"{usual} experts a token")
    return usual


def _as_counted(workload: Workload, row: Row) -> Workload:
    """With what the stated number of parameters shows that the row left out."""
    stated = row.number("params_b")
    if not stated:
        return workload
    workload = _of_narrower_experts(workload, row, stated * 1e9)
    workload, why = reconciled(workload, stated * 1e9)
    if why:
        row.assume(why)
    return workload


def _of_narrower_experts(workload: Workload, row: Row, parameters: float) -> Workload:
    """A mixture whose feed-forward cell is a dense layer's: experts as the known model has them, or as the parameters leave."""
    if not workload.is_mixture or workload.parameters < _WIDER * parameters:
        return workload
    found = _named(row)
    if found is not None and (found.hidden, found.experts) == (workload.hidden, workload.experts):
        width = found.expert_ffn
    else:
        outside = workload.parameters - workload.layers * workload.experts * workload.expert_parameters
        each = workload.expert_parameters / workload.expert_ffn
        width = round((parameters - outside) / (workload.layers * workload.experts * each * 64)) * 64
    if not 64 <= width < workload.expert_ffn:
        return workload
    row.assume(
        f"experts of {width}, since {workload.expert_ffn} would be {workload.parameters / 1e9:.4g} billion"
    )
    return workload.with_changes(expert_ffn=width, shared_ffn=0)


def _named(row: Row) -> Workload | None:
    """The model that is known by the row's name for it, with its size behind that or not ("DeepSeek V3 671B")."""
    name = re.sub(r"\(.*?\)", "", row.text("model")).replace("_", "-").strip()
    if not name or re.search(r"[/.](toml|json)$|^[./]", name):
        return None
    found = _called(name)
    size = re.search(r"[\s-]+(\d+(?:\.\d+)?)\s?([bt])$", name, re.IGNORECASE)
    if found is None and size is not None:
        found = _called(name[: size.start()])
        stated = float(size[1]) * (1e12 if size[2].lower() == "t" else 1e9)
        if found is not None and abs(found.parameters / stated - 1) > _ROUNDED:
            return None
    return found


def _called(name: str) -> Workload | None:
    """The model that is known by this name."""
    try:
        return workload_of(name)
    except TrineError:
        return None


def _known_model(row: Row) -> Workload | None:
    """A model that is known by name, where a row lacks its width, or where it is one whose attention no cell tells.

    What the row states stands before it.
    """
    found = _named(row)
    hidden = row.count("hidden")
    if found is None or (hidden is not None and not (_is_untold(found) and hidden == found.hidden)):
        return None
    if row.count("heads") not in (None, found.heads):
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


def _is_untold(workload: Workload) -> bool:
    """Whether no cells tell the model's attention: latent, or of a window in some layers."""
    return workload.latent is not None or 0 < workload.window_layers < workload.layers


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
