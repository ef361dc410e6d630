"""FLOPs a token by named conventions: against published utilisation, and by what must hold for any workload."""

from __future__ import annotations

from statistics import median
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trine.optim.plan import LatentAttention, Workload
from trine.optim.plan.devices import device_named
from trine.optim.plan.reconcile import reconciled
from trine.optim.plan.workload import Convention
from trine.record.errors import UsageError


def count(row: dict[str, str], name: str) -> int:
    return int(float(row[name])) if row[name] else 0


def workload(row: dict[str, str]) -> Workload:
    gated = "glu" in row["mlp"]
    found = Workload(
        name=row["model"],
        layers=count(row, "layers"),
        hidden=count(row, "hidden"),
        heads=count(row, "heads"),
        kv_heads=count(row, "kv_heads"),
        ffn=count(row, "ffn") or 4 * count(row, "hidden"),
        vocab=count(row, "vocab"),
        sequence=count(row, "seq_len"),
        gated=gated,
        bias=not gated,
        tied_embeddings=not gated,
        learned_positions=not gated,
        experts=count(row, "experts"),
        experts_per_token=count(row, "topk"),
    )
    return reconciled(found, float(row["params_b"]) * 1e9)[0] if row["params_b"] else found


@pytest.mark.parametrize(
    ("table", "convention"),
    [
        ("llmfoundry_mpt_fsdp", "palm"),
        ("nvidia_dgxc_benchmarking", "palm"),
        ("megascale_table2", "palm"),
        ("mlperf_gpt3_llama405b", "palm"),
        ("megatron_bridge_perf", "megatron"),
        ("palm_table3", "palm"),
    ],
)
def test_reported_rates_are_those_of_their_convention(
    published_runs: list[dict[str, str]], table: str, convention: Convention
) -> None:
    """FLOPs × tokens a second over what was reported; a wrong convention is 5 to 8 % off."""
    ratios = []
    for row in published_runs:
        needed = ("layers", "heads", "vocab", "tokens_per_s_gpu")
        if row["table"] != table or not all(row[name] for name in needed) or "LoRA" in row["notes"]:
            continue
        if row["tflops_gpu"]:
            reported = float(row["tflops_gpu"]) * 1e12
        elif row["mfu_pct"] and "fp8" not in row["precision"].lower():
            reported = float(row["mfu_pct"]) / 100 * device_named(row["gpu"]).peak("bf16")
        else:
            continue
        ratios.append(workload(row).model_flops(convention) * float(row["tokens_per_s_gpu"]) / reported)
    if not ratios:
        pytest.skip(f"no row of {table} has both a rate and utilisation")
    assert median(ratios) == pytest.approx(1, abs=0.01)


WORKLOADS = st.builds(
    lambda layers, heads, size, kv, ffn, vocab, sequence, gated, bias, experts, window, latent: Workload(
        "any",
        layers,
        heads * size,
        heads,
        ffn,
        vocab,
        sequence,
        kv_heads=max(1, heads // kv) if heads % kv == 0 else heads,
        gated=gated,
        bias=bias,
        experts=experts,
        experts_per_token=min(2, experts),
        window=window,
        latent=LatentAttention(8, rope_head_size=4, value_head_size=8) if latent else None,
    ),
    *[st.integers(1, limit) for limit in (12, 16, 64, 4, 4096, 100_000, 8192)],
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 2, 8]),
    st.sampled_from([0, 16, 4096]),
    st.booleans(),
)


@given(WORKLOADS)
@settings(max_examples=60, deadline=None)
def test_what_holds_for_any_workload(each: Workload) -> None:
    flops = {convention: each.model_flops(convention) for convention in get_args(Convention)}
    assert flops["6n"] <= flops["megatron"] <= flops["palm"] == flops["narayanan"]
    assert 0 < each.attended <= each.sequence
    more = each.with_changes(layers=each.layers + 1)
    layer = each.layer_parameters(mixture=each.is_mixture)
    assert more.parameters == each.parameters + layer
    untied = each.with_changes(tied_embeddings=False)
    assert untied.parameters == each.parameters + each.vocab * each.hidden
    assert untied.active_parameters == each.active_parameters
    if each.experts:
        idle = (each.experts - each.experts_per_token) * each.expert_parameters
        assert each.layer_parameters(mixture=True) - each.layer_parameters(mixture=True, active=True) == idle
    assert Workload(**{**each.to_dict(), "latent": each.latent}) == each


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(UsageError, match="palm, megatron, narayanan or 6n"):
        Workload("w", 1, 8, 1, 8, 8, 8).model_flops("hfu")  # type: ignore[arg-type]
