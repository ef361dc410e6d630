"""A cluster as a plan holds it: predictions from it are those of the cluster itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trine.optim.plan.cluster_files import cluster_names, cluster_of
from trine.optim.plan.cluster_json import cluster_from_dict, cluster_to_dict
from trine.optim.plan.constants import stack_named
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.memory import memory_of
from trine.optim.plan.step import predict
from trine.optim.plan.workload_files import workload_of
from trine.record.errors import UsageError


@pytest.mark.parametrize("name", cluster_names())
def test_predictions_are_those_of_the_cluster_itself(name: str) -> None:
    cluster = cluster_of(name)
    again = cluster_from_dict(json.loads(json.dumps(cluster_to_dict(cluster), allow_nan=False)))
    workload, stack = workload_of("llama3-8b"), stack_named("trine")
    layouts = Layouts.of(data=cluster.devices, zero_stage=3, optimizer_offload="cpu")
    assert (
        predict(workload, again, stack, layouts).step_s == predict(workload, cluster, stack, layouts).step_s
    )
    needed = (memory_of(workload, one, stack, layouts).needed_bytes for one in (again, cluster))
    assert next(needed) == next(needed)
    assert cluster_to_dict(again) == cluster_to_dict(cluster)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory_bytes": "80"}, "memory_bytes of its cluster is '80', no whole number"),
        ({"memory_bytes_per_s": -1.0}, "a bandwidth must be a positive number"),
        ({"flops_per_s": {"bf16": "fast"}}, "flops_per_s of its cluster is"),
        ({"inside": 450e9}, "inside of its cluster is 450000000000.0, no table"),
        ({"inside": {"kind": "nvlink"}}, "its cluster has no bytes_per_s"),
        ({"family": 3}, "family of its cluster is 3, no text"),
        ({"nodes": 0}, "at least one node"),
        ({"nvme_bytes_per_s": "6 GB/s"}, "a bandwidth must be a positive number"),
    ],
)
def test_what_is_no_cluster_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        cluster_from_dict(cluster_to_dict(cluster_of("dgx-h100")) | changes)
    assert words in str(caught.value)


def test_what_is_missing_is_named() -> None:
    known = cluster_to_dict(cluster_of("dgx-h100"))
    for key in known.keys() - {
        "devices",
        "multiprocessors",
    }:  # the first follows, the second is a family's usual
        with pytest.raises(UsageError, match=f"its cluster has no {key}"):
            cluster_from_dict({name: value for name, value in known.items() if name != key})
