"""Fitted constants: whose they are, how software is recognised, and that they know no table."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from trine.optim.plan import constants
from trine.optim.plan.constants import (
    STACK_CONSTANTS,
    device_constants,
    network_constants,
    spread,
    stack_named,
    stacks,
)
from trine.optim.plan.network import LINK_CONSTANTS
from trine.record.errors import UsageError

PLAN = Path(constants.__file__).parent


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Megatron-LM v1.1", "megatron-lm-2020"),
        ("Megatron-LM 2021-04", "megatron-lm-2021"),
        ("Megatron-LM 2022", "megatron-lm-2022"),
        ("Megatron-LM 2024", "megatron-lm-2023"),
        ("Megatron-LM fork 2023", "megatron-lm-zero-bubble"),
        ("zero bubble", "megatron-lm-zero-bubble"),
        ("Megatron-DeepSpeed", "megatron-deepspeed"),
        ("DeepSpeed ZeRO-3 (Azure ND A100 v4)", "deepspeed"),
        ("NeMo 24.12 / Megatron-Core", "megatron-core"),
        ("NeMo/Megatron-Core (MLPerf) 23.04", "nemo-23"),
        ("NeMo/Megatron-Core (MLPerf) 23.09", "nemo-23-09"),
        ("Megatron-Core MoE dev", "megatron-core-moe"),
        ("Megatron-Bridge 25.11", "megatron-bridge"),
        ("Megatron-Bridge 26.08", "megatron-bridge-26"),
        ("MegaScale", "megascale"),
        ("torchtitan 2024-12", "torchtitan"),
        ("fms-fsdp", "fsdp"),
        ("PyTorch fully_shard", "fsdp"),
        ("Accelerate, FSDP", "fsdp"),
        ("DeepSpeed ZeRO-2 by Accelerate", "deepspeed"),
        ("pytorch", "pytorch"),
        ("trine", "trine"),
    ],
)
def test_software_is_known_by_what_it_calls_itself(text: str, name: str) -> None:
    assert stack_named(text).name == name


def test_unknown_software_is_refused_in_one_line() -> None:
    with pytest.raises(UsageError, match="no software stack is called 'mine': one of ") as error:
        stack_named("mine")
    assert "\n" not in str(error.value)


def test_a_stack_takes_what_it_does_not_state_from_its_parent() -> None:
    assert (
        stacks()["megatron-lm-2022"].fused_attention is stacks()["megatron-lm-2021"].fused_attention is False
    )
    assert stack_named("megatron-core").with_traits(captured=True).captured


def test_four_constants_a_stack_and_no_more() -> None:
    assert len(STACK_CONSTANTS) == 4
    for stack in stacks().values():
        assert 0.5 < stack.compute < 2 and stack.provenance
        assert all(getattr(stack, name) >= 0 for name in STACK_CONSTANTS)


def test_a_family_that_was_never_fitted_says_so() -> None:
    assert "no run of the family volcano" in device_constants("volcano").provenance
    assert "no run over string" in network_constants("string").provenance
    assert 0.3 < device_constants("ampere").matmul < 1.2


def test_no_network_is_above_its_line_rate_and_no_overlap_above_what_was_measured() -> None:
    for kind, link in LINK_CONSTANTS.items():
        found = network_constants(kind.partition("/")[0])
        assert (
            found.bandwidth * link.bandwidth_efficiency < 1.0 + 1e-3 or "published" not in found.provenance
        ), kind
        assert 0 < found.overlap <= 0.4


def test_intervals_hold_the_prediction() -> None:
    assert 0.5 < spread().low < 1 < spread().high < 2


#: Of tables' names and sources, what says nothing of a table: ordinary words, and who makes devices, software or clusters.
ORDINARY = frozenset(
    [
        "table",
        "tables",
        "paper",
        "benchmarks",
        "examples",
        "performance",
        "scripts",
        "train",
        "training",
        "micro",
        "multi",
        "single",
        "practice",
        "projection",
        "sweep",
        "topology",
        "arxiv",
        "cloud",
        "nvidia",
        "intel",
        "google",
        "oracle",
        "coreweave",
        "mosaicml",
        "bigscience",
        "pytorch",
    ]
)
NAMED = ("gpu", "framework", "model", "precision", "intra_link", "inter_link_per_gpu", "pp_schedule")


def _words(text: str) -> set[str]:
    return {word for word in re.findall("[a-z]+", text.lower()) if len(word) >= 5}


def test_the_model_names_no_table_and_no_source(tables: Path) -> None:
    with (tables / "training_runs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = {name for row in rows for name in (row["table"], row["source"]) if len(name) > 8}
    known = set[str]().union(*(_words(row[column]) for row in rows for column in NAMED))
    # Papers are cited where a formula is theirs.
    runs = {name for row in rows if "et al" not in row["source"] for name in (row["table"], row["source"])}
    telling = set[str]().union(*map(_words, runs)) - known - ORDINARY
    assert len(telling) > 10
    for path in PLAN.rglob("*"):
        if path.suffix in (".py", ".toml", ".csv"):
            text = path.read_text(encoding="utf-8")
            assert not [name for name in names if name in text], path
            assert not telling & _words(text), path
