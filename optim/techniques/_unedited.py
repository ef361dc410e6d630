"""A configuration on a script that nobody edited: what ``trine run --config`` can do, and what it cannot.

Constructors are patched (DataLoader, DistributedDataParallel), and the model and optimizer are changed where they stand
just before training begins. Keys that change what the loop does (accumulation, sharding, parallelism) need the
loop: :func:`refusals_without_code` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from trine.optim._facts import facts_of
from trine.optim._override import engine_was_made
from trine.optim.config import Config
from trine.optim.techniques import refusals
from trine.optim.techniques._assembly import Assembly, Facts
from trine.record.errors import UsageError

__all__ = ["APPLICABLE", "install", "refusals_without_code"]

#: Keys that need no code. All others do.
APPLICABLE = frozenset(
    {
        "precision.dtype",
        "precision.tf32",
        "compute.attention",
        "compute.compile",
        "compute.fuse",
        "communication.bucket_mib",
        "communication.first_bucket_mib",
        "communication.gradient_as_view",
        "communication.static_graph",
        "data.workers",
        "data.pin_memory",
        "data.prefetch",
    }
)

Prepare = Callable[[list[Any], list[Any]], None]


def refusals_without_code(config: Config) -> dict[str, str]:
    """Key path → why ``trine run`` cannot apply it; empty when all of ``config`` needs no code. Imports no torch."""
    found = refusals(config)
    found |= {
        key: f"{key} changes the training loop: apply it with trine.optimize in the script, or take the key out"
        for key in config.changes()
        if key not in APPLICABLE
    }
    if config.precision.dtype == "fp16":
        found["precision.dtype"] = (
            'precision.dtype = "fp16" scales the loss, which needs trine.optimize in the script: without code use "bf16"'
        )
    around = "precision.dtype" if config.precision.dtype is not None else "compute.attention"
    if config.compute.compile == "model" and _surrounds_forward(config):
        found["compute.compile"] = (
            f'compute.compile = "model" with {around} = {config[around]!r} needs trine.optimize in the script: without '
            'code use compute.compile = "blocks"'
        )
    if config.communication.bucket_mib == "auto":
        found["communication.bucket_mib"] = (
            'communication.bucket_mib = "auto" needs trine.optimize in the script: without code give a number'
        )
    return found


def _surrounds_forward(config: Config) -> bool:
    """Whether hooks enter something around the outermost forward; of a compiled model they would be compiled too."""
    return config.precision.dtype is not None or config.compute.attention == "flash"


def install(config: Config) -> Prepare:
    """Patch constructors for the rest of the process; what is returned changes the models and optimizers."""
    import torch

    if config.precision.tf32 is not None:
        from trine.optim.techniques.tf32 import switch

        switch(config.precision.tf32)  # for the rest of the process: there is no engine to close
    loading = _loader_arguments(config)
    if loading:
        _patch_loader(torch.utils.data.DataLoader, loading, config.data.prefetch)
    buckets = _bucket_arguments(config)
    if buckets:
        _patch_data_parallel(buckets)
    return lambda models, optimizers: _prepare(config, models, optimizers)


def _loader_arguments(config: Config) -> dict[str, Any]:
    data = config.data
    found: dict[str, Any] = {}
    if data.workers is not None:
        from trine.optim.techniques.loading import automatic_workers

        found["num_workers"] = automatic_workers(_ranks()) if data.workers == "auto" else data.workers
        found["persistent_workers"] = found["num_workers"] > 0
    if data.pin_memory is not None:
        found["pin_memory"] = data.pin_memory
    return found


def _ranks() -> int:
    import os

    return int(os.environ.get("WORLD_SIZE", "1"))


def _patch_loader(loader: Any, arguments: Mapping[str, Any], prefetch: int | None) -> None:
    """Loaders of datasets that are read by index; others would repeat their samples in every worker."""
    from torch.utils.data import IterableDataset

    original = loader.__init__

    def __init__(self: Any, dataset: Any, *positional: Any, **named: Any) -> None:  # noqa: N807
        if not isinstance(dataset, IterableDataset):
            named.update(arguments)
            if named.get("num_workers"):
                named["prefetch_factor"] = prefetch or named.get("prefetch_factor")
            elif "num_workers" in arguments:
                named.pop("prefetch_factor", None)
                named.pop("multiprocessing_context", None)
        # batch_size, shuffle, sampler, batch_sampler come before num_workers, which few give by position.
        original(self, dataset, *positional[:4], **named)

    loader.__init__ = __init__


def _bucket_arguments(config: Config) -> dict[str, Any]:
    communication = config.communication
    found: dict[str, Any] = {}
    if communication.bucket_mib is not None:
        found["bucket_cap_mb"] = communication.bucket_mib
    if communication.first_bucket_mib is not None:
        found["bucket_cap_mb_list"] = [communication.first_bucket_mib, communication.bucket_mib or 25.0]
    if communication.gradient_as_view is not None:
        found["gradient_as_bucket_view"] = communication.gradient_as_view
    if communication.static_graph is not None:
        found["static_graph"] = communication.static_graph
    return found


def _patch_data_parallel(arguments: Mapping[str, Any]) -> None:
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.__init__

    def __init__(self: Any, module: Any, *positional: Any, **named: Any) -> None:  # noqa: N807
        named.update(arguments)
        original(self, module, *positional, **named)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def _prepare(config: Config, models: list[Any], optimizers: list[Any]) -> None:
    """Change what is there just before training. Raises ``UsageError`` where a technique forbids it."""
    if engine_was_made():
        raise UsageError(
            "this script calls trine.optimize, which applies a configuration itself: give it there, and leave --config out"
        )
    from trine.optim.techniques import attention, autocast, compilation, fused_regions

    if not models or not optimizers:
        wanted = [key for key in config.changes() if key == "precision.dtype" or key.startswith("compute.")]
        if wanted:
            raise UsageError(
                f"{wanted[0]}: no model was found that an optimizer trains; apply it in the script"
            )
        return
    # Several models (a GAN) or several optimizers: each pair in turn, for a technique looks at one of each.
    whole = config.compute.fuse
    for model in models:
        inner = getattr(model, "module", model)
        facts = facts_of(inner, optimizers[0])
        _check_constructed(config, facts)
        config = config.with_changes({"compute.fuse": [name for name in whole if name != "optimizer"]})
        assembly = Assembly(inner, optimizers[0], config, facts)
        for technique in (attention, fused_regions, compilation):
            technique.check(config, facts)
            technique.apply(assembly)
        if config.precision.dtype is not None:
            autocast.check(config, facts)
        if _surrounds_forward(config):
            flash = config.compute.attention == "flash"
            around = _AroundForward(facts.device_type, config.precision.dtype, flash)
            model.register_forward_pre_hook(around.before)
            model.register_forward_hook(around.after, always_call=True)
    for optimizer in optimizers:
        facts = facts_of(getattr(models[0], "module", models[0]), optimizer)
        config = config.with_changes({"compute.fuse": [name for name in whole if name == "optimizer"]})
        fused_regions.check(config, facts)
        fused_regions.apply(Assembly(models[0], optimizer, config, facts))


def _check_constructed(config: Config, facts: Facts) -> None:
    """Of what is switched, or given to constructors, before there is a model to look at."""
    from trine.optim.techniques import data_parallel, loading, tf32

    tf32.check(config, facts)
    loading.check(config, facts)
    if _bucket_arguments(config):
        data_parallel.check(config, facts)


class _AroundForward:
    """What holds around the outermost forward: autocast, and the flash kernel alone.

    The script computes its loss outside of it, so low-precision outputs return to fp32, as autocast would have it
    for a loss. A class, not closures: models are copied and pickled with their hooks.
    """

    def __init__(self, device_type: str, dtype: str | None, flash: bool) -> None:
        self._device_type = device_type
        self._dtype = dtype
        self._flash = flash
        self._open: list[ExitStack] = []

    def before(self, module: Any, arguments: Any) -> None:
        """Enter."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        stack = ExitStack()
        if self._dtype is not None:
            low = self._dtype == "bf16"
            stack.enter_context(torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=low))
        if self._flash:
            stack.enter_context(sdpa_kernel([SDPBackend.FLASH_ATTENTION]))
        self._open.append(stack)

    def after(self, module: Any, arguments: Any, output: Any) -> Any:
        """Leave, also when the forward raised."""
        from torch.utils._pytree import tree_map

        if self._open:
            self._open.pop().close()
        return tree_map(_to_float, output) if self._dtype == "bf16" else output


def _to_float(value: Any) -> Any:
    import torch

    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value
