"""Predict: step time, MFU and memory of a layout before it is run; search layouts; say what a change of a run would gain.

Needs numpy alone. ``docs/plan.md`` says how, and how far its predictions are from published runs.
"""

from trine.optim.plan.cluster import Cluster, Device, Link
from trine.optim.plan.layouts import Layouts
from trine.optim.plan.units import Bandwidth
from trine.optim.plan.workload import LatentAttention, Workload

__all__ = ["Bandwidth", "Cluster", "Device", "LatentAttention", "Layouts", "Link", "Workload"]
