"""Activations recomputed in backward instead of kept: ``checkpointing``.

``full`` keeps a block's input alone; ``selective`` also what is dear to compute; ``budget`` recomputes as many blocks as
it takes to stay below a number of bytes; ``auto`` as many as memory asks for, perhaps none. Blocks are the model's
repeated ones, every ``every``-th of them, or what ``checkpointing.modules`` names. See
:mod:`trine.optim.runtime.checkpointed` for what is done about dropout, batch norms and buffers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trine.optim._globs import matches
from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques.compilation import repeated_blocks
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from trine.optim.runtime.checkpointed import Region
    from trine.optim.runtime.recompute_plan import Plan

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "WATCH", "apply", "check", "refusal", "tolerance"]

KEYS = (
    "checkpointing.mode",
    "checkpointing.every",
    "checkpointing.modules",
    "checkpointing.operators",
    "checkpointing.budget_bytes",
)
ORDER = 25
QUANTITY = "memory/saved_activation_bytes"
NUMERICS = "bitwise, dropout included; under compute.compile within its tolerance"

logger = logging.getLogger("trine")

#: Environment variable: compare recomputed with original activations in every so many steps.
WATCH = "TRINE_WATCH_RECOMPUTATION"

_DECIDES = ("budget", "auto")


def refusal(config: Config) -> str | None:
    """Keys that mean nothing without another."""
    wanted = config.checkpointing
    if wanted.mode == "none":
        for key in KEYS[1:4]:
            if key in config.changes():
                return f'{key} needs a checkpointing.mode: "full", "selective", "budget" or "auto"'
    if wanted.mode == "budget" and wanted.budget_bytes is None:
        return (
            'checkpointing.mode = "budget" needs checkpointing.budget_bytes, what may be saved for backward; or '
            'write "auto"'
        )
    if wanted.operators and wanted.mode != "selective":
        return 'checkpointing.operators says what checkpointing.mode = "selective" keeps: set that, or take it out'
    if wanted.every > 1 and (wanted.modules or wanted.mode in _DECIDES):
        other = "checkpointing.modules" if wanted.modules else f'checkpointing.mode = "{wanted.mode}"'
        return f"checkpointing.every and {other} both say which modules are recomputed: keep one of them"
    return None


def tolerance(config: Config) -> Tolerance | None:
    """What is recomputed is the same in every bit."""
    return None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where nothing matches, or recomputation would not repeat what the forward did."""
    if config.checkpointing.mode == "none":
        return
    if config.checkpointing.mode in _DECIDES and config.parallel.pipeline > 1:
        raise UsageError(
            f'checkpointing.mode = "{config.checkpointing.mode}" and parallel.pipeline cannot be combined: it measures one '
            'micro-batch at a time, and a stage has several in flight. Use checkpointing.mode = "full" or "selective"'
        )
    _check_alone(config, facts)
    found = _targets(config, facts.model)
    _check_own_checkpoints(facts.model)
    from trine.optim.runtime.checkpointed import normalisations
    from trine.optim.runtime.selective import require_operators

    require_operators(config.checkpointing.operators)
    compiled = config.compute.compile is not False
    for name, module in found:
        if compiled and normalisations(module):
            raise UsageError(
                f"checkpointing.mode and compute.compile cannot be combined for {name}: compiled recomputation would "
                "update the running statistics of its batch norms twice. Drop one of them"
            )
    if compiled:
        _check_compilers_budget(facts.model)
    if compiled and config.checkpointing.mode in _DECIDES and config.offload.activations != "none":
        raise UsageError(
            f'checkpointing.mode = "{config.checkpointing.mode}" with offload.activations and compute.compile cannot be '
            "combined: what compiled blocks save cannot be told apart by block. Drop compute.compile, or use "
            'checkpointing.mode = "full"'
        )


def _check_alone(config: Config, facts: Facts) -> None:
    """Two measurements that wait for each other: ranks that exchange within blocks choose anew at a step's end alone."""
    from trine.optim.techniques.accumulation import plan_of

    layout, mode = facts.layout, config.checkpointing.mode
    cut = plan_of(config, layout.data_ranks)
    if mode in _DECIDES and layout.exchanges_in_modules and cut is not None and cut.automatic:
        raise UsageError(
            f'{cut.key} = "auto" and checkpointing.mode = "{mode}" cannot be combined under {layout.hybrid_key()}, where '
            "blocks hold exchanges between ranks: a choice made for a small trial would stay for the whole step. Write a "
            'number of samples, or use checkpointing.mode = "full" or "selective"'
        )


def apply(assembly: Assembly) -> None:
    """Replace forwards where they stand; the state dictionary's names stay."""
    wanted = assembly.config.checkpointing
    if wanted.mode == "none":
        return
    from trine.optim.runtime.checkpointed import Region, checkpoint_in_place
    from trine.optim.runtime.saved_tensors import saved_tensors_of
    from trine.optim.runtime.selective import DEFAULT

    operators = (wanted.operators or DEFAULT) if wanted.mode == "selective" else ()
    regions = [Region(name, module, operators) for name, module in _targets(assembly.config, assembly.model)]
    splits = _splits_backward(assembly.config)
    for region in regions:
        region.splits_backward = splits
        checkpoint_in_place(region)
    saved_tensors_of(assembly)
    if wanted.mode in _DECIDES:
        _decide_by_measurement(assembly, regions)
    else:
        what = "recomputed" if not operators else f"recomputed but for {', '.join(operators)}"
        assembly.effects.append(Effect(KEYS[0], "everything kept", f"{_said(regions)} {what}"))
    assembly.metrics["checkpointing/modules"] = lambda: float(sum(region.active for region in regions))
    if every := os.environ.get(WATCH):
        _watch(assembly, every)


def _splits_backward(config: Config) -> bool:
    from trine.optim.runtime.pipelining.schedules import schedule_of

    parallel = config.parallel
    return parallel.pipeline > 1 and schedule_of(parallel.schedule, parallel.chunks).split


def _targets(config: Config, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of what is to be recomputed, in the model's order. Raises ``UsageError`` where there is nothing."""
    from trine.optim.runtime.adoption import plain_name

    wanted = config.checkpointing
    named = [(plain_name(name + ".")[:-1], module) for name, module in model.named_modules()]
    if wanted.modules:
        return _matching(wanted.modules, named)
    blocks = repeated_blocks(model)
    if not blocks:
        raise UsageError(
            f'checkpointing.mode = "{wanted.mode}": {type(model).__name__} has no list of like modules (an '
            "nn.ModuleList of two or more): name the modules to recompute in checkpointing.modules"
        )
    if wanted.every > len(blocks):
        raise UsageError(
            f"checkpointing.every = {wanted.every}: {type(model).__name__} has {len(blocks)} blocks; it takes at most "
            "that"
        )
    names = {id(module): name for name, module in named}
    # The last block's activations are needed first, so they are worth keeping most: count from the first.
    return [(names[id(block)], block) for block in blocks[:: wanted.every]]


def _matching(patterns: Sequence[str], named: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    import torch

    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = [(name, module) for name, module in named if name and matches(pattern, name)]
        if not matched:
            listed = ", ".join(name for name, _ in named if name.count(".") <= 1 and name)[:200]
            raise UsageError(
                f'checkpointing.modules: no module is called "{pattern}"; * stands for one part of a name, ** for any '
                f"number. There are {listed}"
            )
        chosen.update(matched)
    for name, module in chosen.items():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            raise UsageError(f'checkpointing.modules: {name} is a list of modules: write "{name}.*"')
        outer = next((other for other in chosen if name.startswith(other + ".")), None)
        if outer is not None:
            raise UsageError(f"checkpointing.modules: {name} lies inside {outer}: name one of the two")
    return [(name, module) for name, module in named if name in chosen]


def _check_own_checkpoints(model: Any) -> None:
    """Models that recompute by themselves, or keep what recomputation would add once more."""
    inner = getattr(model, "module", model)
    # Transformers renamed it, and warns of the old name.
    own = getattr(inner, "is_activation_checkpointing", None)
    if getattr(inner, "is_gradient_checkpointing", False) if own is None else own:
        raise UsageError(
            f"checkpointing.mode: {type(inner).__name__} recomputes its blocks already: call "
            "gradient_checkpointing_disable() on it, or take the key out"
        )
    if getattr(getattr(inner, "config", None), "use_cache", False) is True:
        raise UsageError(
            f"checkpointing.mode: {type(inner).__name__} fills a cache of keys and values as it runs, and "
            "recomputation would fill it twice: set model.config.use_cache = False"
        )
    for name, module in model.named_modules():
        if type(module).__name__ == "CheckpointWrapper" or _is_replaced(module):
            raise UsageError(f"checkpointing.mode: {name} is checkpointed already: take the key out")


def _is_replaced(module: Any) -> bool:
    from trine.optim.runtime.checkpointed import Region

    given = getattr(vars(module).get("forward"), "args", ())
    return any(isinstance(each, Region) for each in given)


def _check_compilers_budget(model: nn.Module) -> None:
    """PyTorch's own budget draws dropout's numbers anew in its recomputation (pytorch#190758)."""
    import torch
    from torch._functorch import config as compiler

    budget = getattr(compiler, "activation_memory_budget", 1.0)
    dropout = next((n for n, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0), None)
    if budget < 1.0 and dropout is not None:
        raise UsageError(
            f"compute.compile with torch._functorch.config.activation_memory_budget = {budget:g} corrupts the "
            f'gradients behind {dropout}: set it to 1.0; checkpointing.mode = "budget" is exact'
        )


# --- by measurement ----------------------------------------------------------------------------


def _decide_by_measurement(assembly: Assembly, regions: list[Region]) -> None:
    from trine.optim.runtime import recompute_plan
    from trine.optim.runtime.saved_tensors import saved_tensors_of

    wanted = assembly.config.checkpointing
    saved = saved_tensors_of(assembly)
    resume = _pause_compilation(assembly)

    when = "step" if assembly.config.offload.activations == "none" else "steps"

    def told(what: str) -> None:
        resume()
        assembly.effects.append(Effect(KEYS[0], "everything kept", what, f"measured in the first {when}"))
        logger.info("%s", assembly.effects[-1])

    plan: Plan
    ranks = assembly.facts.ranks
    if assembly.config.offload.activations != "none":
        plan = _decide_with_offload(assembly, regions, told)
    elif wanted.mode == "budget":
        budget = int(wanted.budget_bytes or 0)
        plan = recompute_plan.Plan(regions, saved, lambda least, most: budget, KEYS[4], told, ranks)
    else:
        room = _free_bytes(assembly)
        plan = recompute_plan.PlanAfterStep(
            regions, saved, lambda least, most: least + room(), KEYS[0], told, ranks
        )

        def after_first_step() -> None:
            if plan.is_measured:
                assembly.after_step.remove(after_first_step)
                plan.decide()

        assembly.after_step.append(after_first_step)
    assembly.finish.append(lambda done: _change_together(done, plan, regions))
    assembly.effects.append(
        Effect(
            KEYS[0],
            "everything kept",
            f"decided by measurement among {_said(regions)}",
            "all recomputed in the first step" if when == "step" else "all moved in the first steps",
        )
    )


def _change_together(assembly: Assembly, plan: Plan, regions: list[Region]) -> None:
    """Where a rank that recomputes a module alone would wait in it for the others."""
    from torch.distributed.fsdp import FSDPModule

    layout = assembly.facts.layout
    gathers = layout.gathers and any(
        isinstance(module, FSDPModule) and module is not region.module
        for region in regions
        for module in region.module.modules()
    )
    if layout.exchanges_in_modules or gathers:
        plan.decide_together(assembly.facts.device)
        assembly.after_update.append(plan.renew)


def _decide_with_offload(assembly: Assembly, regions: list[Region], told: Callable[[str], None]) -> Plan:
    from trine.optim.runtime.activation_plan import ScheduledPlan
    from trine.optim.runtime.saved_tensors import saved_tensors_of

    wanted, facts = assembly.config.checkpointing, assembly.facts
    stated = wanted.budget_bytes
    room = _free_bytes(assembly)
    plan = ScheduledPlan(
        regions,
        saved_tensors_of(assembly),
        lambda least, most: least + room() if stated is None else stated,
        KEYS[0] if stated is None else KEYS[4],
        told,
        facts.device,
        facts.ranks,
    )
    assembly.after_step.append(plan.step_ended)
    assembly.metrics["offload/moved_modules"] = lambda: float(sum(bool(region.moves) for region in regions))
    return plan


def _pause_compilation(assembly: Assembly) -> Callable[[], None]:
    """The first forward runs uncompiled, where what is saved can be seen; what comes back undoes that."""
    paused: list[tuple[Any, Any]] = []

    def pause(done: Assembly) -> None:
        for module in done.model.modules():
            if module._compiled_call_impl is not None:
                paused.append((module, module._compiled_call_impl))
                module._compiled_call_impl = None

    def resume() -> None:
        while paused:
            module, compiled = paused.pop()
            module._compiled_call_impl = compiled

    assembly.finish.append(pause)
    return resume


def _free_bytes(assembly: Assembly) -> Callable[[], int]:
    """Bytes that were free at the first step's peak, but for a share that is left alone."""
    import torch

    from trine.optim.runtime.memory_fit import MARGIN, available_host_bytes

    facts = assembly.facts

    def on_device() -> int:
        free, total = torch.cuda.mem_get_info(facts.device)
        unused = torch.cuda.memory_reserved(facts.device) - torch.cuda.max_memory_allocated(facts.device)
        return max(0, int(free + unused - (1 - MARGIN) * total))

    def on_host() -> int:
        return max(0, int(MARGIN * available_host_bytes() / facts.topology.ranks_per_node))

    return on_device if facts.device_type == "cuda" else on_host


def _watch(assembly: Assembly, every: str) -> None:
    from trine.optim.runtime.recomputation import install

    if not every.isascii() or not every.isdigit() or int(every) < 1:
        raise UsageError(f"{WATCH}={every}: it takes a whole number of steps, 1 or more")
    install(assembly, int(every))


def _said(regions: Sequence[Region]) -> str:
    kinds = {type(region.module).__name__ for region in regions}
    kind = f" of {kinds.pop()}" if len(kinds) == 1 else ""
    return f"{len(regions)} modules{kind}" if len(regions) > 1 else f"{regions[0].name}{kind}"
