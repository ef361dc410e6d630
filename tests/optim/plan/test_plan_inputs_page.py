"""The page on models and clusters names what there is, and its examples say what they say."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from trine.optim.plan import LatentAttention, Workload
from trine.optim.plan.cluster_files import cluster_from_table, cluster_names, cluster_of
from trine.optim.plan.huggingface import known_model_types
from trine.optim.plan.workload_files import model_names, workload_from_table, workload_of

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "plan_inputs.md").read_text(encoding="utf-8")


def named_after(start: str, end: str) -> list[str]:
    part = TEXT.partition(start)[2].partition(end)[0]
    return [word.strip(",.") for word in part.split()]


def test_every_name_is_on_the_page() -> None:
    models, clusters = (
        TEXT.split("**By name**: ")[number].split(". Each" if number == 1 else " (`optim")[0]
        for number in (1, 2)
    )
    assert re.split(r",\s+", models) == list(model_names())
    assert re.split(r",\s+", clusters) == list(cluster_names())
    assert TEXT.partition("`model_type` may be one of")[2].partition("Parameters are")[0].split() == list(
        known_model_types()
    )


def test_every_field_is_on_the_page() -> None:
    table = TEXT.partition("| field | meaning |")[2].partition("**From a live")[0]
    named = set(re.findall(r"`(\w+)`", table))
    written = (*(field for field in fields(Workload) if field.compare), *fields(LatentAttention))
    assert {field.name for field in written} - named == {
        "name",
        "latent",
    }


def test_the_examples_say_what_they_say() -> None:
    assert workload_of("llama3-8b").parameters == 8030261248
    assert round(workload_of("deepseek-v3").active_parameters / 1e9, 1) == 36.6
    assert cluster_of("dgx-h100", devices=512).nodes == 64
    link = cluster_of("jean-zay-a100").between
    assert link is not None and str(link.bandwidth) == "6.25 GB/s"


def test_the_files_on_the_page_are_read() -> None:
    model, cluster, device, pair = (
        tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    )
    assert workload_from_table(model, "m", "m").layers == 48
    assert cluster_from_table(cluster, "c", "c").devices == 128
    whole = {key: value for key, value in device["device"].items() if key != "like"}
    for table in (device["device"], whole):
        found = cluster_from_table({"device": table, "devices_per_node": 1}, "c", "c").device
        assert (found.name, found.peak("bf16")) == ("ours", pytest.approx(835e12))
    bridged = cluster_from_table(pair, "c", "c").inside
    assert bridged is not None and (bridged.kind, str(bridged.bandwidth)) == ("nvlink", "300 GB/s")
