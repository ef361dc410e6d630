"""Bridges between a few cards: never taken for granted, and stated in a cluster's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trine.optim.plan.bridges import bridge_of, bridge_words
from trine.optim.plan.cluster import Cluster
from trine.optim.plan.cluster_files import cluster_of
from trine.optim.plan.devices import device_named, device_names
from trine.optim.plan.links import default_link, link_of
from trine.optim.plan.planning import plan

BRIDGED = [name for name in device_names() if bridge_of(device_named(name)) is not None]


def stated(folder: Path, text: str) -> Cluster:
    path = folder / "ours.toml"
    path.write_text(text)
    return cluster_of(path)


@pytest.mark.parametrize("name", BRIDGED)
def test_without_a_word_cards_talk_over_pcie_no_faster_than_it_is(name: str) -> None:
    link = default_link(device_named(name))
    assert link.kind == "pcie"
    assert link.bandwidth.bytes_per_s in (16e9, 32e9, 64e9)


@pytest.mark.parametrize(
    ("device", "gigabytes_per_s", "joins"),
    [
        ("A100 PCIe", 300, 2),
        ("H100 PCIe", 300, 2),
        ("H100 NVL", 300, 2),
        ("H200 NVL", 450, 4),
        ("A30", 100, 2),
    ],
)
def test_a_bridge_has_its_cards_rate_and_not_its_generations(
    device: str, gigabytes_per_s: float, joins: int
) -> None:
    card = device_named(device)
    bridge = bridge_of(card)
    assert bridge is not None and bridge.joins == joins
    both = f"NVLink {2 * gigabytes_per_s:g} GB/s"  # as data sheets add directions up
    for text in ("NVLink", "NVLink4", "NVLink bridge", both, f"NVLink4 {gigabytes_per_s:g} GB/s"):
        link = link_of(text, card)
        assert (link.kind, link.in_switch) == ("nvlink", False)
        assert link.bandwidth.bytes_per_s == gigabytes_per_s * 1e9, text


def test_a_plan_says_how_a_bridge_is_stated_and_what_it_says_works(tmp_path: Path) -> None:
    found = plan("gpt2-xl", "A100 PCIe", devices=2, top=1)
    told = [line for line in found.assumptions if "bridge" in line]
    assert len(told) == 1 and found.problem.cluster.inside is not None
    assert found.problem.cluster.inside.kind == "pcie"
    example = told[0].partition("a file with ")[2].replace(", ", "\n")
    bridged = stated(tmp_path, example)
    assert bridged.inside is not None and bridged.inside.bandwidth.bytes_per_s == 300e9
    assert bridge_words(bridged) is None


def test_what_a_bridge_cannot_join_is_told(tmp_path: Path) -> None:
    eight = 'device = "H100 PCIe"\ndevices_per_node = 8\n'
    assert "joins 2 H100 PCIe at most, and a node has 8" in str(
        bridge_words(stated(tmp_path, eight + 'inside = "NVLink"\n'))
    )
    assert "leaves bridges out" in str(bridge_words(cluster_of("H100 PCIe")))


def test_who_says_pcie_or_has_no_bridge_is_told_nothing(tmp_path: Path) -> None:
    pair = 'device = "H100 PCIe"\ndevices_per_node = 2\ninside = "PCIe Gen5"\n'
    assert bridge_words(stated(tmp_path, pair)) is None
    assert bridge_words(cluster_of("dgx-h100")) is None
    assert bridge_words(cluster_of("H100 PCIe", 1)) is None
