"""Cuts a live model and its optimizer: this rank keeps what its stages own, and the rest of the memory is freed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trine.optim.runtime.meshes import group_of
from trine.optim.runtime.pipelining.plan import Cutter, Plan
from trine.optim.runtime.pipelining.runner import Runner
from trine.optim.runtime.pipelining.stage_module import LocalStages, Stage, Task
from trine.optim.runtime.pipelining.ties import Copy, Tie, Ties, group_of_places
from trine.optim.runtime.sharding import start_alike
from trine.optim.techniques._assembly import Effect
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from trine.optim.techniques._assembly import Assembly

__all__ = ["cut"]


def cut(assembly: Assembly, plan: Plan) -> None:
    """Put this rank's stages in the place of the model, and a runner in that of the engine's loop. Collective."""
    facts, model = assembly.facts, assembly.model
    group = group_of(facts, "pipeline")
    assert group is not None, "a layout with a pipeline has a group of its ranks"
    start_alike(assembly)
    place = facts.layout.place("pipeline")
    task = Task()
    stages = [
        Stage(
            model,
            plan.chain,
            index,
            plan.stages,
            plan.blocks(index),
            facts.device,
            plan.behind,
            frozenset(module for module, needing in plan.needed.items() if index in needing),
        )
        for index in plan.local(place)
    ]
    for stage in stages:
        object.__setattr__(stage, "task", task)
    owners = _owners(model, plan)
    _keep_own(assembly, stages, owners, plan)
    assembly.model = stages[0] if len(stages) == 1 else LocalStages(stages)
    assembly.parts = list(stages)
    runner = Runner(stages, plan.schedule, group, facts.device, task, assembly.backward_contexts)
    assembly.pipeline = runner
    _set_cutter(assembly, plan)
    _retire(model)
    assembly.collect.insert(0, runner.settled)
    assembly.metrics["pipeline/bubble"] = runner.bubble
    assembly.metrics["pipeline/ideal_bubble"] = runner.ideal
    # Behind all other last things: blocks are compiled and wrapped by then.
    assembly.finish.append(lambda ready: ready.finish.append(lambda _: _watch(stages)))


def _watch(stages: Sequence[Stage]) -> None:
    for stage in stages:
        stage.watch_blocks()


def _set_cutter(assembly: Assembly, plan: Plan) -> None:
    """The pipeline cuts, unless accumulation says how."""
    cutter = Cutter(plan)
    accumulation = assembly.config.accumulation
    if accumulation.micro_batch is None:
        assembly.uncounted = cutter.uncounted

    def finish(ready: Assembly) -> None:
        ready.accumulation = plan.microbatches or ready.accumulation
        if accumulation.micro_batch is None:
            regroups = ready.cut
            ready.cut = cutter if regroups is None else lambda batch: _again(cutter, regroups(batch))

    told: list[int] = []

    def tell() -> None:
        for size, count in list(cutter.chosen.items())[len(told) :]:
            told.append(size)
            assembly.effects.append(
                Effect(
                    "parallel.microbatches",
                    "1",
                    f"{count} of a batch of {size}",
                    f"chosen: ideal bubble {plan.ideal(count):.1%}",
                )
            )

    if plan.microbatches is None and accumulation.micro_batch is None:
        assembly.after_step.append(tell)
    assembly.finish.append(finish)


def _again(cutter: Cutter, parts: list[Any]) -> list[Any]:
    from trine.optim.batches import Gathered

    return cutter(parts[0] if len(parts) == 1 else Gathered(tuple(parts)))


# --- whose parameters --------------------------------------------------------------------------------


def _owners(model: nn.Module, plan: Plan) -> dict[nn.Parameter, set[int]]:
    """Each parameter's stages: of its block, the first for what comes before the blocks, the last for what comes behind,
    and those that an example showed to need it.

    Parameters of the containers themselves belong to both ends, since their use cannot be seen.
    """
    owners: dict[nn.Parameter, set[int]] = {}
    last = plan.stages - 1
    stage_of = {
        id(module): stage
        for stage in range(plan.stages)
        for block in plan.chain.blocks[slice(*plan.blocks(stage))]
        for module in block.modules()
    }
    ancestors = {id(model.get_submodule(name)) for name in plan.chain.above}
    for module in model.modules():
        if id(module) in stage_of:
            stages = {stage_of[id(module)]}
        elif id(module) in ancestors:
            stages = {0, last}
        else:
            stages = {last} if id(module) in plan.behind else {0}
        stages.update(plan.needed.get(id(module), ()))
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).update(stages)
    return owners


def _keep_own(
    assembly: Assembly, stages: Sequence[Stage], owners: dict[nn.Parameter, set[int]], plan: Plan
) -> None:
    local = {stage.index: stage for stage in stages}
    place = assembly.facts.layout.place("pipeline")
    names = {parameter: name for name, parameter in assembly.parameters.items()}
    ties: list[Tie] = []
    others: set[nn.Parameter] = set()
    for parameter, held in owners.items():  # in the model's order, alike on all ranks: groups are made
        holders = sorted({_place_of(stage, plan) for stage in held})
        group = group_of_places(assembly.facts, tuple(holders))
        own = sorted(held & set(local))
        if not own:
            others.add(parameter)
        if len(held) == 1 or not own:
            continue
        copies = [_copy_in(assembly, local[index], parameter, first=index == own[0]) for index in own]
        if parameter not in names:  # frozen
            continue
        ties.append(Tie(names[parameter], tuple(copies), group))
        if _place_of(min(held), plan) != place:
            assembly.duplicates.add(names[parameter])
    for parameter in others & set(names):
        del assembly.parameters[names[parameter]]
    _forget(assembly, others)
    if ties:
        assembly.collect.insert(0, Ties(ties).collect)


def _place_of(stage: int, plan: Plan) -> int:
    from trine.optim.runtime.pipelining.split import rank_of_stage

    return rank_of_stage(stage, plan.ranks, plan.schedule.turned)


def _copy_in(assembly: Assembly, stage: Stage, parameter: nn.Parameter, first: bool) -> Copy:
    """Where the stage has the parameter. A second stage of one rank gets a copy of its own, which the optimizer holds too."""
    places = [
        (module, name, key)
        for name, module in stage.model.named_modules()
        for key, held in module._parameters.items()
        if held is parameter
    ]
    module, name, key = places[0]
    if not first:
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        for each, _, attribute in places:
            each._parameters[attribute] = copy
        _hold_too(assembly, parameter, copy)
        if parameter.requires_grad:
            full = f"{name}.{key}" if name else key
            assembly.parameters[full] = copy
            assembly.duplicates.add(full)
    return Copy(module, key)


def _hold_too(assembly: Assembly, parameter: nn.Parameter, copy: nn.Parameter) -> None:
    optimizer = assembly.optimizer
    for group in optimizer.param_groups:
        if any(held is parameter for held in group["params"]):
            group["params"].append(copy)
    if parameter in optimizer.state:
        optimizer.state[copy] = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in optimizer.state[parameter].items()
        }


def _forget(assembly: Assembly, others: set[nn.Parameter]) -> None:
    """Of other stages: no longer optimized here, and without memory; groups stay, since schedulers count them."""
    optimizer = assembly.optimizer
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in others]
    for parameter in others:
        optimizer.state.pop(parameter, None)
        parameter.grad = None
        parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)


def _retire(model: nn.Module) -> None:
    """The model that was given has parts without parameters from now on: called, it says what to call instead."""

    @functools.wraps(model.forward)  # its arguments are looked at, as by packing
    def forward(*arguments: Any, **named: Any) -> Any:
        raise UsageError(
            "this model was cut into the stages of a pipeline by trine.optimize: use engine.train_step(batch), and "
            "engine.evaluate(batch) without gradients"
        )

    model.forward = forward
