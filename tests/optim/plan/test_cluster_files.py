"""Clusters by name and from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from trine.optim.plan._tables import packaged
from trine.optim.plan.cluster_files import cluster_names, cluster_of
from trine.optim.plan.units import Bandwidth
from trine.record.errors import TrineError, UsageError


@pytest.mark.parametrize(
    ("name", "device", "node", "inside", "between", "kind"),
    [
        ("dgx-2", "V100 SXM3 32GB", 16, 150, 6.25, "infiniband"),
        ("dgx-a100-40", "A100 SXM4 40GB", 8, 300, 25, "infiniband"),
        ("dgx-a100-80", "A100 SXM4 80GB", 8, 300, 25, "infiniband"),
        ("aws-p4d", "A100 SXM4 40GB", 8, 300, 6.25, "efa"),
        ("jean-zay-a100", "A100 SXM4 80GB", 8, 300, 6.25, "omnipath"),
        ("jean-zay-v100", "V100 SXM2 32GB", 4, 150, 12.5, "omnipath"),
        ("dgx-h100", "H100 SXM5 80GB", 8, 450, 50, "infiniband"),
        ("gcp-a3", "H100 SXM5 80GB", 8, 450, 12.5, "ethernet"),
        ("h200", "H200 SXM", 8, 450, 50, "infiniband"),
        ("b200", "B200", 8, 900, 50, "infiniband"),
        ("gb200-nvl72", "GB200", 72, 900, 50, "infiniband"),
        ("mi250x-frontier", "MI250X (one GCD)", 8, 100, 12.5, "ethernet"),
        ("mi300x", "MI300X", 8, 448, 50, "roce"),
        ("gaudi2", "Gaudi 2", 8, 262.5, 37.5, "roce"),
        ("tpu-v5p", "TPU v5p", 4, 600, 600, "ici"),
    ],
)
def test_known_clusters(name: str, device: str, node: int, inside: float, between: float, kind: str) -> None:
    cluster = cluster_of(name)
    assert (cluster.device.name, cluster.devices_per_node, cluster.nodes) == (device, node, 1)
    assert cluster.inside is not None and cluster.between is not None
    assert cluster.inside.bandwidth.bytes_per_s == pytest.approx(inside * 1e9)
    assert cluster.between.bandwidth.bytes_per_s == pytest.approx(between * 1e9)
    assert cluster.between.kind == kind


def test_every_known_cluster_is_whole_and_says_where_it_is_published() -> None:
    for name in cluster_names():
        cluster = cluster_of(name.upper(), devices=2 * cluster_of(name).devices_per_node)
        assert (cluster.nodes, cluster.name) == (2, name)
        assert len(str(packaged("clusters.toml")[name]["source"])) > 20
        # A rack of 72 shares its CPUs' memory; no node has less than half a device's memory of its own.
        assert cluster.host_memory_bytes > cluster.device.memory_bytes / 2


def test_devices_fill_nodes_or_a_part_of_one() -> None:
    assert cluster_of("dgx-h100", 512).nodes == 64
    part = cluster_of("dgx-h100", 4)
    assert (part.nodes, part.devices_per_node, part.devices) == (1, 4, 4)
    assert cluster_of("dgx-h100", 1).inside is None
    with pytest.raises(TrineError, match="take 8 or 16"):
        cluster_of("dgx-h100", 12)
    with pytest.raises(TrineError, match="at least 1"):
        cluster_of("dgx-h100", 0)


def test_a_devices_name_is_a_cluster_of_its_usual_nodes() -> None:
    cluster = cluster_of("A100-SXM4-80GB", 16)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.between is not None and cluster.between.note


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        'device = "H100-SXM-80GB"\ndevices_per_node = 4\nnodes = 3\n'
        'between = { bandwidth = "200 Gb/s", kind = "roce", in_switch = true }\n'
        'host_memory = "1 TiB"\nhost_link = "64 GB/s"\nnvme = "6 GB/s"\n'
    )
    cluster = cluster_of(path)
    assert (cluster.name, cluster.devices) == ("ours", 12)
    assert cluster.between is not None and cluster.inside is not None
    assert (cluster.between.kind, cluster.between.in_switch) == ("roce", True)
    assert cluster.between.bandwidth == Bandwidth(25e9) and cluster.inside.bandwidth == Bandwidth(450e9)
    assert (cluster.host_memory_bytes, cluster.host_link, cluster.nvme) == (
        2**40,
        Bandwidth(64e9),
        Bandwidth(6e9),
    )
    assert cluster_of(path, 8).nodes == 2


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        'devices_per_node = 2\ninside = "PCIe Gen5"\n[device]\nname = "new"\nfamily = "hopper"\nmemory = "48 GiB"\n'
        'memory_bandwidth = "1 TB/s"\nflops_per_s = { bf16 = 200e12, fp32 = 50e12 }\nmatmul_flops_per_s = 150e12\n'
    )
    device = cluster_of(path).device
    assert (device.name, device.family, device.memory_bytes) == ("new", "hopper", 48 * 2**30)
    assert (device.peak("bf16"), device.matmul_flops_per_s) == (200e12, 150e12)
    path.write_text('[device]\nlike = "H100-SXM-80GB"\nmemory = "64 GiB"\n')
    device = cluster_of(path).device
    assert (device.family, device.memory_bytes, device.matmul_flops_per_s) == ("hopper", 64 * 2**30, 794.5e12)


def test_what_a_device_is_like_it_is_but_for_what_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('[device]\nlike = "H100 PCIe"\n')
    known, like = cluster_of("H100 PCIe").device, cluster_of(path).device
    assert known.multiprocessors == 114
    assert like.with_changes(source=known.source) == known


def test_a_link_that_is_named_is_the_devices_own(tmp_path: Path) -> None:
    path = tmp_path / "pair.toml"
    path.write_text('device = "H100 PCIe"\ndevices_per_node = 2\ninside = "NVLink"\n')
    inside = cluster_of(path).inside
    assert inside is not None
    assert (inside.kind, inside.bandwidth) == ("nvlink", Bandwidth(300e9))


OWN = '[device]\nname = "new"\nmemory = "48 GiB"\nmemory_bandwidth = "1 TB/s"\nflops_per_s = { bf16 = 200e12 }\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device = ", "is not TOML"),
        (
            'device = "H100"\nbetween = "carrier pigeon"\n',
            "between: 'carrier pigeon' names no link and no rate",
        ),
        (
            '[device]\nlike = "H100"\nfamily = "hoper"\n',
            r"no family is called 'hoper' \(did you mean 'hopper'\?\)",
        ),
        ('[device]\nlike = "H100"\nmatmul_flops_per_s = 9e15\n', "is above the peak of bf16"),
        (
            '[device]\nlike = "H100"\nmatmul_flops_per_s = 794\n',
            r"\[device\]: matmul_flops_per_s must be floating-point operations",
        ),
        ('[device]\nlike = "H100"\nmemory = 0\n', "memory: 0 is no memory of a device"),
        (
            '[device]\nlike = "H100"\nmemory = 80\n',
            "memory: 80 is no memory of a device, but 80 bytes: write it with",
        ),
        ('device = "H100"\nhost_memory = 2048\n', "host_memory: 2048 is no memory of a host"),
        ("nodes = 2\n", "has no device"),
        ('device = "H1000"\n', r"cluster\.toml: device: no device is known"),
        ('[device]\nlike = "H1000"\n', r"cluster\.toml: \[device\]: like: no device is known"),
        (
            'device = "A100"\nbetween = { bandwidth = "1 GB/s", kind = "rocee" }\n',
            r"cluster\.toml: between: no kind of link is called 'rocee' \(did you mean 'roce'",
        ),
        (
            'device = "A100"\nbetween = "1 Mb/s"\n',
            "between: '1 Mb/s' is no bandwidth of a device or a link, but 125000",
        ),
        (
            'device = "A100"\nbetween = { bandwidth = "400 b/s" }\n',
            "bandwidth: '400 b/s' is no bandwidth of a device",
        ),
        ('device = "A100"\nhost_link = "64 B/s"\n', "host_link: '64 B/s' is no bandwidth"),
        (
            '[device]\nlike = "H100"\nmemory_bandwidth = "1 B/s"\n',
            "memory_bandwidth: '1 B/s' is no bandwidth",
        ),
        ('device = "A100"\nsource = 3\n', "source must be text, not 3"),
        ('device = "A100"\nname = ""\n', "name must be a name of one line, not ''"),
        ('[device]\nlike = "A100"\nname = "x\\ny"\n', r"\[device\]: name must be a name of one line"),
        ("device = 3\n", "device must be a name or a table"),
        ('device = "A100"\nnodes = 0\n', "nodes must be a whole number of at least 1"),
        ('device = "A100"\nnode = 2\n', "did you mean 'nodes'"),
        ('device = "A100"\nbetween = 400\n', "between must be text or a table"),
        ('device = "A100"\nbetween = { bandwidth = 400 }\n', "is no bandwidth"),
        ('device = "A100"\nbetween = { kind = "roce" }\n', "between has no bandwidth"),
        ('device = "A100"\nbetween = { bandwidth = "1 GB/s", speed = 3 }\n', "no key 'speed'"),
        (
            'device = "A100"\nbetween = { bandwidth = "1 GB/s", in_switch = 1 }\n',
            "in_switch must be true or false",
        ),
        ('device = "A100"\nhost_memory = "much"\n', "host_memory: 'much' is no size"),
        ('device = "A100"\nhost_link = "64"\n', "host_link: '64' is no bandwidth"),
        (OWN.replace('memory = "48 GiB"\n', ""), r"\[device\] has no memory"),
        (OWN.replace("200e12", "200"), "must be floating-point operations a second"),
        (OWN.replace("bf16", "bf17"), "did you mean 'bf16'"),
        ("devices_per_node = 2\n" + OWN, "inside"),
        ("nodes = 2\n" + OWN, "between"),
    ],
)
def test_files_that_make_no_cluster_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(TrineError, match=message) as caught:
        cluster_of(path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_slow_links_are_taken_and_a_file_may_begin_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        'name = "slow"\ndevice = "A100"\nbetween = "100 Mb/s"\nsource = "here"\n', encoding="utf-8-sig"
    )
    cluster = cluster_of(path)
    assert cluster.between is not None
    assert (cluster.name, cluster.between.bandwidth) == ("slow", Bandwidth(12.5e6))


def test_one_node_of_ones_own_device_cannot_grow_without_a_link(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(OWN)
    assert cluster_of(path).between is None
    with pytest.raises(TrineError, match="does not say what links nodes"):
        cluster_of(path, 2)


@pytest.mark.parametrize("source", ["dgx-h1000", "no/such.toml", ""])
def test_sources_that_are_not_there(source: str) -> None:
    with pytest.raises(TrineError) as caught:
        cluster_of(source)
    assert "\n" not in str(caught.value)


def test_a_cluster_that_is_none_is_told_of_here_and_an_empty_one_of_its_variable() -> None:
    with pytest.raises(TrineError, match="; here is this machine"):
        cluster_of("dgx-h1000")
    with pytest.raises(TrineError, match="no cluster is named"):
        cluster_of("")


def test_of_racks_a_job_takes_an_even_part_and_of_servers_whole_ones() -> None:
    racks = cluster_of("gb200-nvl72", devices=512)
    assert (racks.nodes, racks.devices_per_node) == (8, 64)
    assert (
        cluster_of("gb200-nvl72", devices=144).devices_per_node,
        cluster_of("gb200-nvl72", devices=36).nodes,
    ) == (72, 1)
    with pytest.raises(UsageError, match="take 504 or 576"):
        cluster_of("gb200-nvl72", devices=509)
    with pytest.raises(UsageError, match="take 8 or 16"):
        cluster_of("dgx-h100", devices=12)
    with pytest.raises(UsageError, match="more than any job has: at most 10,000,000"):
        cluster_of("dgx-h100", devices=10**23 - 1)
