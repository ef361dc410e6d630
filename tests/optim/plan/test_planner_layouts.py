"""What rows of published runs leave open and their software settles: batches, recomputation, schedules, racks."""

from __future__ import annotations

from typing import Any

import pytest
from test_planner_rows import one

MODEL = {
    "hidden": "8192",
    "ffn": "28672",
    "heads": "64",
    "layers": "80",
    "gpu": "H100-SXM-80GB",
    "precision": "bf16",
}


@pytest.mark.parametrize(
    ("framework", "mbs", "gbs", "cut"),
    [
        ("torchtitan", "16", "64", (2, 8)),  # a local batch, in as many parts as there are stages
        ("torchtitan", "12", "48", (2, 6)),  # six divide it, eight do not
        ("torchtitan", "4", "64", (4, 4)),  # said apart: taken as said
        ("Megatron-Core", "16", "64", (16, 1)),
    ],
)
def test_a_local_batch_is_cut_by_software_that_cuts_it(
    framework: str, mbs: str, gbs: str, cut: tuple[int, int]
) -> None:
    run = one(**MODEL, framework=framework, tp="2", pp="8", mbs=mbs, gbs=gbs)
    assert (run.layout["micro_batch"], run.layout["microbatches"]) == cut
    assert any("cut into" in note for note in run.assumed) == (framework == "torchtitan" and mbs != "4")


@pytest.mark.parametrize(
    ("framework", "text", "found"),
    [
        ("MaxText 25.01", "none (recipe default)", "full"),
        ("MaxText 25.01", "none", "none"),
        ("NeMo 24.12", "none (recipe default)", "none"),
        ("Megatron-LM 2022", "0", "none"),
        ("Megatron-LM 2022", "disabled", "none"),
        ("Megatron-LM 2022", "activation checkpointing", "full"),
        ("torchtitan", "SAC", "selective"),
        ("Megatron-Core", "8 of 80 layers", "budget"),
    ],
)
def test_recomputation_that_is_the_softwares_own(framework: str, text: str, found: str) -> None:
    run = one(**MODEL, framework=framework, recompute=text)
    assert run.layout["recompute"] == found
    assert run.layout.get("recomputed_layers", 0) == (4 if found == "budget" else 0)  # of two stages


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("zero-bubble", "zb-h1"),
        ("ZB1P", "zb-h1"),
        ("Zero Bubble V", "zb-v"),
        ("ZB-V", "zb-v"),
        ("ZB2P", "zb-h2"),
        ("1F1B", "1f1b"),
    ],
)
def test_zero_bubbles_as_people_write_them(text: str, found: str) -> None:
    assert one(pp_schedule=text).layout["schedule"] == found


@pytest.mark.parametrize(
    ("gpu", "stated", "node"), [("GB200", "4", 72), ("GB200", "72", 72), ("H100-SXM-80GB", "4", 4)]
)
def test_a_tray_is_no_node_where_links_reach_further(gpu: str, stated: str, node: int) -> None:
    changes: dict[str, Any] = {
        **MODEL,
        "gpu": gpu,
        "gpus_per_node": stated,
        "n_gpus": "144",
        "pp": "1",
        "gbs": "72",
    }
    run = one(**changes)
    assert run.cluster.devices_per_node == node
    assert any("a tray holds 4" in note for note in run.assumed) == (gpu == "GB200" and stated == "4")
