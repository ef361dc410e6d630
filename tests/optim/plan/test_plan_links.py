"""Descriptions of links: whose rate, in which unit, of which direction."""

from __future__ import annotations

import pytest

from trine.optim.plan.cluster import Device
from trine.optim.plan.devices import device_named, device_names
from trine.optim.plan.links import default_link, link_of
from trine.optim.plan.units import Bandwidth
from trine.record.errors import UsageError


@pytest.mark.parametrize(
    ("text", "gigabytes_per_s", "kind"),
    [
        ("NVLink3 300GB/s/dir NVSwitch", 300, "nvlink"),
        ("NVLink3", 300, "nvlink"),
        ("NVLink2 NVSwitch", 150, "nvlink"),
        ("NVLink3 600 GB/s", 300, "nvlink"),  # the datasheet's figure of both directions
        ("NVLink4 900GB/s bidirectional", 450, "nvlink"),
        ("NVLink4 900GB/s per GPU", 450, "nvlink"),
        ("PCIe Gen4 x16 64GB/s", 32, "pcie"),
        ("NVLink4 450GB/s/dir", 450, "nvlink"),
        ("NVLink 5", 900, "nvlink"),
        ("NVLink5 900GB/s/dir", 900, "nvlink"),
        ("PCIe Gen4 x16", 32, "pcie"),
        ("PCIe 5.0", 64, "pcie"),
        ("xGMI 448 GB/s", 448, "xgmi"),
        ("200Gb/s HDR IB", 25, "infiniband"),
        ("200Gb/s HDR IB (8 HCA/node)", 25, "infiniband"),
        ("200 Gbps InfiniBand", 25, "infiniband"),
        ("HDR InfiniBand", 25, "infiniband"),
        ("4x HDR", 12.5, "infiniband"),  # adapters of a node
        ("2x HDR per GPU", 50, "infiniband"),
        ("8x200Gb/s HDR IB", 25, "infiniband"),
        ("4 x EDR InfiniBand", 6.25, "infiniband"),
        ("InfiniBand 3.2 Tb/s", 50, "infiniband"),  # no device has that alone
        ("800Gb/s XDR", 100, "infiniband"),
        ("EFA 400 Gbps/node", 6.25, "efa"),
        ("100GbE", 12.5, "ethernet"),
        ("NVLink 600GB/s total", 300, "nvlink"),
        ("400Gb/s NDR IB", 50, "infiniband"),
        ("NDR200", 25, "infiniband"),
        ("200Gb/s RoCE", 25, "roce"),
        ("RoCE over ConnectX-7 400GbE", 50, "roce"),
        ("400Gb/s CX-7", 50, "infiniband"),
        ("100Gb/s (800Gb/s per node in vTrain config)", 12.5, "infiniband"),
        ("200Gb/s (1.6Tb/s node)", 25, "infiniband"),
        ("4x100Gb/s Omni-Path per node (=50Gb/s per GPU)", 6.25, "omnipath"),
        ("4x100Gb/s Omni-Path per node", 6.25, "omnipath"),
        ("1.6 Tb/s per node", 25, "infiniband"),
        ("8 x 400 Gb/s NDR per node", 50, "infiniband"),
        ("8x NDR per node", 50, "infiniband"),
        ("3.2Tbps EFA per node", 50, "efa"),
        ("50 GB/s", 50, "infiniband"),
        ("25GbE Ethernet", 3.125, "ethernet"),
    ],
)
def test_rates_and_kinds(text: str, gigabytes_per_s: float, kind: str) -> None:
    between = kind in ("infiniband", "roce", "omnipath", "efa", "ethernet")
    link = link_of(text, between=between, devices_per_node=8)
    assert link.bandwidth.bytes_per_s == pytest.approx(gigabytes_per_s * 1e9)
    assert link.kind == kind


@pytest.mark.parametrize(
    ("device", "text", "between", "gigabytes_per_s", "kind", "in_switch"),
    [
        ("A100", "NVSwitch", False, 300, "nvlink", False),
        ("H100", "NVSwitch", False, 450, "nvlink", True),
        ("B200", "", False, 900, "nvlink", True),
        ("H100", "", True, 50, "infiniband", False),
        ("A100", "RoCE 4 nodes (bw not listed)", True, 25, "roce", False),
        ("V100-SXM3-32GB (DGX-2)", "", True, 6.25, "infiniband", False),
        ("TPU v5p", "", True, 600, "ici", False),
        ("MI300X", "", False, 448, "xgmi", False),
        ("Gaudi2", "", True, 37.5, "roce", False),
        # A kind that is not the device's usual one has its own rate.
        ("A100", "PCIe", False, 32, "pcie", False),
        ("H100", "PCIe", False, 64, "pcie", False),
        ("V100", "PCIe", False, 16, "pcie", False),
        ("L40S", "PCIe", False, 32, "pcie", False),
        ("H100", "Ethernet", True, 12.5, "ethernet", False),
        ("H100", "TCP", True, 12.5, "ethernet", False),
        ("H100", "GPUDirect-TCPX", True, 12.5, "ethernet", False),
        ("A100", "Slingshot-11", True, 25, "ethernet", False),
        ("MI250X", "Slingshot-11", True, 12.5, "ethernet", False),
        ("A100", "EFA", True, 6.25, "efa", False),
        ("H100", "EFAv2", True, 50, "efa", False),
        ("MI300X", "InfiniBand", True, 50, "infiniband", False),
        ("GB200", "NVLink (NVL72)", True, 900, "nvlink", False),
    ],
)
def test_the_device_fills_what_a_text_leaves_open(
    device: str, text: str, between: bool, gigabytes_per_s: float, kind: str, in_switch: bool
) -> None:
    link = link_of(text, device_named(device), between=between)
    assert link.bandwidth.bytes_per_s == pytest.approx(gigabytes_per_s * 1e9)
    assert (link.kind, link.in_switch) == (kind, in_switch)
    assert link.note  # what was taken is said


def test_what_is_said_needs_no_note_and_sharp_reduces_in_the_switch() -> None:
    link = link_of("400Gb/s NDR IB with SHARP", device_named("H100"), between=True)
    assert (link.note, link.in_switch) == ("", True)


@pytest.mark.parametrize("text", ["", "fast", "NVSwitch", "RoCE"])
def test_nothing_is_guessed_without_a_device(text: str) -> None:
    with pytest.raises(UsageError, match="rate"):
        link_of(text)


@pytest.mark.parametrize(
    ("device", "text"), [("L40S", "NVLink"), ("V100 PCIe", "NVLink"), ("A100", "xGMI"), ("A100", "ICI")]
)
def test_no_rate_of_another_kind_is_taken(device: str, text: str) -> None:
    with pytest.raises(UsageError, match="says no rate"):
        link_of(text, device_named(device))


def test_both_directions_of_a_switch_are_halved() -> None:
    assert link_of("NVSwitch 600 GB/s", device_named("A100")).bandwidth.bytes_per_s == 300e9


def test_a_nodes_rate_needs_to_be_shared() -> None:
    with pytest.raises(UsageError, match="devices_per_node"):
        link_of("1.6Tb/s per node")
    assert link_of("1.6Tb/s per node", device_named("V100 SXM3 32GB")).bandwidth == Bandwidth(200e9 / 16)


def test_every_device_has_a_link_inside_and_between() -> None:
    for name in device_names():
        device = device_named(name)
        for between in (False, True):
            assert 1e9 < default_link(device, between=between).bandwidth.bytes_per_s < 1e12, name


@pytest.mark.parametrize(
    ("name", "kind", "rate"), [("H100 PCIe", "pcie", 64e9), ("H100 SXM", "nvlink", 450e9)]
)
def test_bridges_of_two_devices_do_not_join_a_node(name: str, kind: str, rate: float) -> None:
    link = default_link(device_named(name))
    assert (link.kind, link.bandwidth.bytes_per_s) == (kind, rate)


def test_a_device_of_ones_own_must_say_its_links() -> None:
    own = Device("mine", "unknown", {"bf16": 1e14}, 2**34, Bandwidth(1e12))
    with pytest.raises(UsageError, match=r"inside = "):
        default_link(own)
    with pytest.raises(UsageError, match=r"between = "):
        default_link(own, between=True)


def test_every_link_of_the_published_runs_is_understood(published_runs: list[dict[str, str]]) -> None:
    seen = {
        (row["gpu"], row["intra_link"], row["inter_link_per_gpu"]) for row in published_runs if row["gpu"]
    }
    assert len(seen) > 20
    for gpu, inside, between in seen:
        device = device_named(gpu)
        assert link_of(inside, device).bandwidth.bytes_per_s > 1e10
        assert 5e9 < link_of(between, device, between=True).bandwidth.bytes_per_s < 1e12
