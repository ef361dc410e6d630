"""Tensor parallelism: which matrices of a live model are cut how, and the hooks that make it compute the same.

    plan = plan_of(model, own)            what is understood, by name; refuses the rest
    adopt(assembly, cuts_of(plan, sequence), mesh)
    carry_out(plan, Settings(mesh, sequence, loss, streams))

Parameters are DTensors over the mesh's ``tensor`` dimension, as PyTorch's ``parallelize_module`` makes them, so that FSDP2
shards them once more. Where rows were put into another order, ``Assembly.reordered`` says which.
"""

from __future__ import annotations

from trine.optim.runtime.tensor_plans.alike import look_at_inputs
from trine.optim.runtime.tensor_plans.carrying import Settings, carry_out
from trine.optim.runtime.tensor_plans.cutting import adopt, bytes_of, cuts_of, require_owners
from trine.optim.runtime.tensor_plans.gradients import complete
from trine.optim.runtime.tensor_plans.interleaving import Interleaved, in_given_order
from trine.optim.runtime.tensor_plans.look import copies_of, look_at
from trine.optim.runtime.tensor_plans.loss import over_vocabulary, plain_loss, plain_outputs
from trine.optim.runtime.tensor_plans.own import STYLES
from trine.optim.runtime.tensor_plans.roles import Plan
from trine.optim.runtime.tensor_plans.streams import Streams, drops, same_streams
from trine.optim.runtime.tensor_plans.structure import plan_of
from trine.optim.runtime.tensor_plans.whole import look_at_whole

__all__ = [
    "STYLES",
    "Interleaved",
    "Plan",
    "Settings",
    "Streams",
    "adopt",
    "bytes_of",
    "carry_out",
    "complete",
    "copies_of",
    "cuts_of",
    "drops",
    "in_given_order",
    "look_at",
    "look_at_inputs",
    "look_at_whole",
    "over_vocabulary",
    "plain_loss",
    "plain_outputs",
    "plan_of",
    "require_owners",
    "same_streams",
]
