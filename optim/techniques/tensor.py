"""Tensor parallelism: ranks of one node share every large matrix (``parallel.tensor``), and what stands beside it.

Attention is cut by heads, the feed-forward by its inner features, embedding and head by the vocabulary (Shoeybi et al. 2019),
with PyTorch's DTensor and its tensor-parallel styles. ``parallel.sequence`` divides norms, dropout and residuals between
those regions by the sequence (Korthikanti et al. 2022), ``parallel.loss`` the loss by the vocabulary, so that no rank has all
logits. What a module does is found by its structure (:mod:`trine.optim.runtime.tensor_plans`); ``parallel.plan`` says it of
those where that fails. Ranks of one tensor group are given the same batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_by_element
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

    from trine.optim.runtime.tensor_plans import Plan

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("parallel.tensor", "parallel.sequence", "parallel.loss", "parallel.plan")
ORDER = 7  # on a pipeline's stages, and before anything that wraps, compiles or recomputes them
QUANTITY = "parameter, gradient, optimizer and activation bytes per rank"
NUMERICS = "unchanged but for the order of summation: losses within 1e-10 in fp64, 1e-5 relative in fp32"

_TENSOR, _SEQUENCE, _LOSS, _PLAN = KEYS


def refusal(config: Config) -> str | None:
    """Keys that say how, without the one that says that."""
    if config.parallel.tensor == 1:
        for key in KEYS[1:]:
            if key in config.changes():
                return f"{key} says how tensor parallelism divides a model: set parallel.tensor to 2 or more as well, or drop it"
    return None


def tolerance(config: Config) -> Tolerance | None:
    """Row-wise layers sum over ranks what one matrix product sums at once."""
    return Tolerance(1e-5, 1e-4) if config.parallel.tensor > 1 else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the model is not understood or does not divide, or other keys forbid it."""
    if config.parallel.tensor == 1:
        return
    _check_node(config, facts)
    _check_other_keys(config)
    _check_model(facts)
    plan = _plan(config, facts.model)
    from trine.optim.runtime.tensor_plans import cuts_of, require_owners

    require_owners(facts.model, cuts_of(plan, config.parallel.sequence))
    _check_heads(config.parallel.tensor, plan)
    _check_widths(config.parallel.tensor, plan)
    _check_vocabulary(config, plan)
    if config.parallel.sequence:
        _check_sequence(plan)
    _check_fused(config, plan)
    _check_optimizer(facts)


def apply(assembly: Assembly) -> None:
    """Cut parameters and state, and have modules exchange what they must."""
    config, facts = assembly.config, assembly.facts
    tensor = config.parallel.tensor
    if tensor == 1:
        return
    from trine.optim.runtime import tensor_plans
    from trine.optim.runtime.local_steps import step_on_shards
    from trine.optim.runtime.meshes import flat_mesh
    from trine.optim.runtime.sharding import start_alike

    start_alike(assembly)
    mesh = flat_mesh(facts, "tensor")
    assert mesh is not None, "degrees above one have a mesh"
    streams = None
    if tensor_plans.drops(assembly.model):
        tensor_plans.same_streams(facts.device, mesh.get_group())
        streams = tensor_plans.Streams(facts.device, facts.layout.place("tensor"))
        assembly.discard.append(streams.end)
    settings = tensor_plans.Settings(mesh, config.parallel.sequence, config.parallel.loss, streams)
    plans = [_plan(config, stage, is_stage=bool(assembly.parts)) for stage in assembly.stages]
    cuts = [cut for plan in plans for cut in tensor_plans.cuts_of(plan, config.parallel.sequence)]
    sizes = tensor_plans.bytes_of(cuts)
    blocks = [block for plan in plans for block in plan.blocks]
    unseen = _unseen(config)
    copies = {} if unseen else tensor_plans.copies_of(blocks, facts.model)
    tensor_plans.adopt(assembly, cuts, mesh)
    for plan in plans:
        tensor_plans.carry_out(plan, settings)
    tensor_plans.look_at(blocks, copies, cuts, mesh, settings.plain, _not_looked_at(assembly))
    step_on_shards(assembly.optimizer)
    stages = assembly.stages
    if facts.device.type == "cpu" and facts.backend != "fake" and not assembly.parts:
        assembly.closers.append(tensor_plans.look_at_inputs(assembly.model, mesh.get_group()).remove)
    assembly.collect.append(lambda: tensor_plans.complete(stages))
    if facts.backend != "fake":
        assembly.collect.append(tensor_plans.look_at_whole(stages, mesh, config.parallel.sequence))
    if config.parallel.loss:
        assembly.contexts.append(tensor_plans.over_vocabulary)
        assembly.backward_contexts.append(tensor_plans.over_vocabulary)
        for stage in stages:
            assembly.closers.append(tensor_plans.plain_outputs(stage).remove)
    _tell(assembly, plans, sizes, streams is not None)
    if unseen and blocks:
        _not_looked_at(assembly)("blocks", f"{unseen} is set")


# --- checks ------------------------------------------------------------------------------------


def _plan(config: Config, model: torch.nn.Module, is_stage: bool = False) -> Plan:
    from trine.optim.runtime.tensor_plans import plan_of

    return plan_of(model, config.parallel.plan, config.parallel.expert > 1, is_stage)


def _check_node(config: Config, facts: Facts) -> None:
    tensor, node = config.parallel.tensor, facts.topology.ranks_per_node
    if node % tensor:
        fitting = [str(n) for n in range(2, node + 1) if node % n == 0]
        rest = f"use one of {', '.join(fitting)}" if fitting else "use pipelines or ZeRO between nodes"
        raise UsageError(
            f"parallel.tensor = {tensor} exchanges activations in every layer and must stay inside a node, and nodes have "
            f"{node} rank{'s' if node > 1 else ''}: {rest}"
        )


def _check_other_keys(config: Config) -> None:
    if config.compute.compile == "model":
        raise UsageError(
            'compute.compile = "model" and parallel.tensor cannot be combined: use compute.compile = "blocks"'
        )
    if config.precision.float8:
        raise UsageError(
            "precision.float8 and parallel.tensor cannot be combined in this version: float8 layers would gather their inputs "
            "in high precision. Drop one of them"
        )
    if config.precision.master_weights and config.zero.stage < 2:
        raise UsageError(
            "precision.master_weights beside parallel.tensor is FSDP2's, whose shards are the masters: set zero.stage = 2 or "
            "3 as well, or keep parameters in fp32 with precision.dtype alone"
        )
    if config.accumulation.delayed:
        raise UsageError(
            "accumulation.delayed and parallel.tensor cannot be combined: it delays what DistributedDataParallel averages. "
            "Drop one of them"
        )


def _check_model(facts: Facts) -> None:
    for name, parameter in facts.model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UsageError(
                f"parallel.tensor: {name} is cut already (a DTensor): give trine.optimize the plain model, or drop the key"
            )
    for name, module in facts.model.named_modules():
        if getattr(module, "sparse", False) is True or getattr(module, "max_norm", None) is not None:
            raise UsageError(
                f"parallel.tensor: {name} has sparse gradients or renormalises its rows, which a part of them cannot: turn "
                "sparse and max_norm off"
            )


def _check_heads(tensor: int, plan: Plan) -> None:
    for block in plan.blocks:
        for attention in block.attentions:
            for what, count in (
                ("heads", attention.heads),
                ("heads of keys and values", attention.key_heads),
            ):
                if count % tensor:
                    raise UsageError(
                        f"parallel.tensor = {tensor} does not divide the {count} {what} of {attention.name}: "
                        f"{_nearest(tensor, count)}"
                    )


def _check_widths(tensor: int, plan: Plan) -> None:
    from trine.optim.runtime.tensor_plans import cuts_of

    vocabulary = {id(pair[1]) for pair in (plan.embedding, plan.head) if pair is not None}
    for cut in cuts_of(plan, False):
        if cut.dim is None or id(cut.module) in vocabulary:
            continue
        sizes = cut.sections or (cut.parameter.shape[cut.dim],)
        for size in sizes:
            if size % tensor:
                raise UsageError(
                    f"parallel.tensor = {tensor} does not divide the {size} features of {cut.name}: {_nearest(tensor, size)}"
                )


def _check_vocabulary(config: Config, plan: Plan) -> None:
    tensor, size = config.parallel.tensor, plan.vocabulary
    pair = plan.head or plan.embedding
    if size % tensor and pair is not None:
        more = -(-size // tensor) * tensor
        raise UsageError(
            f"parallel.tensor = {tensor} does not divide the vocabulary of {size} in {pair[0]}: make it {more} (in Transformers, "
            f'resize_token_embeddings({more})), or keep it whole with "replicate" for embedding and head in parallel.plan'
        )
    if config.parallel.loss and plan.head is None:
        raise UsageError(
            "parallel.loss divides the loss by the vocabulary, and no head that is cut is found: say which linear layer is the "
            '"head" in parallel.plan, or drop parallel.loss'
        )


def _nearest(wanted: int, count: int) -> str:
    fitting = [n for n in range(1, count + 1) if count % n == 0]
    return f"the nearest degree that does is {min(fitting, key=lambda n: (abs(n - wanted), n))}"


def _check_sequence(plan: Plan) -> None:
    for block in plan.blocks:
        for name, module in block.whole:
            raise UsageError(
                f"parallel.sequence: {name} ({type(module).__name__}) would see a part of the sequence, and its gradient would be "
                'that part\'s: say "sequence" in parallel.plan where it is a norm, or drop parallel.sequence'
            )
        for mixture in block.mixtures:
            if mixture.module is block.module:
                raise UsageError(
                    f"parallel.sequence: {mixture.name} routes tokens itself, between its norms, and would route a part of them: "
                    "put router and experts into a module of their own, or drop parallel.sequence"
                )
    if not plan.blocks:
        raise UsageError("parallel.sequence divides what lies between blocks, and there are none: drop it")


def _check_fused(config: Config, plan: Plan) -> None:
    if "cross_entropy" in config.compute.fuse and plan.head is not None:
        raise UsageError(
            f'compute.fuse = ["cross_entropy"] and parallel.tensor cannot be combined: {plan.head[0]} is cut by the vocabulary, '
            "and the fused loss wants it whole. Use parallel.loss, which has no whole logits either"
        )


def _check_optimizer(facts: Facts) -> None:
    require_by_element(_TENSOR, facts, "a part of each matrix")
    for parameter, values in facts.optimizer.state.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            shape: Any = getattr(value, "shape", None)
            if shape is not None and value.numel() > 1 and shape != getattr(parameter, "shape", None):
                raise UsageError(
                    f"parallel.tensor: {type(facts.optimizer).__name__} keeps {key} of shape {tuple(shape)} for a parameter of "
                    f"shape {tuple(parameter.shape)}, which cannot be cut: drop the key"
                )


def _unseen(config: Config) -> str | None:
    """The key beside which a block of one rank cannot be compared with a whole one."""
    if config.compute.compile:
        return "compute.compile"
    if config.parallel.expert > 1:
        return "parallel.expert"
    return "parallel.context" if config.parallel.context > 1 else None


# --- what is told ------------------------------------------------------------------------------


def _not_looked_at(assembly: Assembly) -> Callable[[str, str], None]:
    def tell(name: str, why: str) -> None:
        after = "not compared with the whole block before training: trine verify compares losses"
        assembly.effects.append(Effect(_TENSOR, name, after, why))

    return tell


def _tell(assembly: Assembly, plans: list[Plan], sizes: Any, drops: bool) -> None:
    config = assembly.config.parallel
    blocks = [block for plan in plans for block in plan.blocks]
    attentions = [each for block in blocks for each in block.attentions]
    parts = []
    if attentions:
        one = attentions[0]
        of_keys = (
            ""
            if one.key_heads == one.heads
            else f" and {one.key_heads // config.tensor} of {one.key_heads} of keys"
        )
        parts.append(f"{one.heads // config.tensor} of {one.heads} heads{of_keys}")
    experts = sum(bool(mixture.cuts) for block in blocks for mixture in block.mixtures)
    if any(block.feed_forwards for block in blocks) or experts:
        parts.append("a part of each feed-forward" + (" (of every expert)" if experts else ""))
    vocabulary = next((plan.vocabulary for plan in plans if plan.vocabulary), 0)
    if vocabulary:
        parts.append(f"{vocabulary // config.tensor} of {vocabulary} rows of the vocabulary")
    exchanges = "all-gather and reduce-scatter" if config.sequence else "all-reduce"
    regions = sum(len(block.attentions) + len(block.feed_forwards) + len(block.mixtures) for block in blocks)
    note = f"{exchanges} at each of {regions} regions; {sizes['cut'] / config.tensor / 2**20:.3g} of "
    note += f"{sizes['cut'] / 2**20:.3g} MiB of parameters a rank"
    assembly.effects.append(
        Effect(
            _TENSOR,
            "whole matrices",
            f"{config.tensor} parts: a rank has {', '.join(parts) or 'its own'}",
            note,
        )
    )
    if config.plan:
        styles = ", ".join(f"{pattern}: {style}" for pattern, style in config.plan.items())
        assembly.effects.append(Effect(_PLAN, "found by structure", styles))
    if config.sequence:
        norms = sum(len(block.norms) for block in blocks)
        assembly.effects.append(
            Effect(
                _SEQUENCE,
                "rows whole between regions",
                f"a rank has 1/{config.tensor} of each",
                f"{norms} norms",
            )
        )
    if config.loss:
        assembly.effects.append(
            Effect(_LOSS, "all logits on each rank", f"1/{config.tensor} of them, by the vocabulary")
        )
    if drops:
        assembly.effects.append(
            Effect(
                _TENSOR,
                "random numbers as each rank has them",
                "the first rank's in a tensor group, its own where a rank has a part of the activations",
            )
        )
