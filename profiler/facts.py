"""What is being trained, read once: model, precision, optimizer, data parallelism, loader, versions.

Facts are plain values for ``rank.json``; a fact that cannot be known is ``None``. Nothing here runs a model, moves a
tensor or calls a collective.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from trine.record.cores import own_cores
from trine.record.hardware import processor_name

from .memory import bytes_of_gradients, bytes_of_optimizer, bytes_of_tensors

__all__ = [
    "autocast_dtype",
    "data_parallel_facts",
    "device_facts",
    "is_compiled",
    "loader_facts",
    "model_facts",
    "optimizer_facts",
    "precision_facts",
    "unwrap",
    "version_facts",
]

#: Where configurations keep a transformer's shape: Hugging Face, GPT-2, Megatron, nanoGPT, torchtitan, llama.
_SHAPE_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "layers", "depth"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "hidden", "width"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    "head_size": ("head_dim", "head_size", "kv_channels"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_query_groups", "n_kv_head", "kv_heads"),
    "ffn": ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff", "ffn", "hidden_dim", "ffn_dim"),
    "vocab": ("vocab_size", "padded_vocab_size", "vocab", "n_vocab"),
    "sequence": ("block_size", "n_positions", "max_position_embeddings", "max_seq_len", "context", "seq_len"),
}


def unwrap(model: Any) -> Any:
    """The user's own module inside DistributedDataParallel, torch.compile and a pipeline's stage."""
    for _ in range(8):
        inner = getattr(model, "_orig_mod", getattr(model, "_pipeline_model", None))
        if inner is None:
            inner = _first_stage(model)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = getattr(model, "module", None)
        if inner is None:
            return model
        model = inner
    return model


def _first_stage(model: Any) -> Any:
    """Of a rank that holds several."""
    named = model.named_children() if isinstance(model, torch.nn.Module) else ()
    return next((child for name, child in named if name.startswith("_pipeline_stage_")), None)


def model_facts(
    models: Sequence[Any], optimizers: Sequence[Any], sequence: int | None
) -> dict[str, Any] | None:
    """The ``model`` of a rank's metadata; sizes in bytes are those of this rank, counts those of the whole model."""
    if not models:
        return None
    parameters = _unique(parameter for model in models for parameter in model.parameters())
    embedding = _embedding_parameters(models)
    count = sum(parameter.numel() for parameter in parameters)
    shape = _shape(unwrap(models[0]))
    if sequence is not None:
        shape["sequence"] = sequence
    return {
        "class": " + ".join(_class_name(unwrap(model)) for model in models),
        "parameters": count,
        "parameters_without_embedding": count - sum(p.numel() for p in embedding),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "parameter_bytes": bytes_of_tensors(parameters),
        "gradient_bytes": bytes_of_gradients(parameters) or None,
        "optimizer_bytes": sum(bytes_of_optimizer(optimizer) for optimizer in optimizers) or None,
        "shape": shape,
    }


def _class_name(model: Any) -> str:
    """Of the program's class: FSDP2 and its replicas give a module a class that they derive from its own."""
    kind = type(model)
    while kind.__name__ in (f"{prefix}{kind.__bases__[-1].__name__}" for prefix in ("FSDP", "Replicate")):
        kind = kind.__bases__[-1]
    return kind.__name__


def _unique(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def _embedding_parameters(models: Sequence[Any]) -> list[Any]:
    """Weights that are only looked up. A weight shared with the output head is multiplied by, so it is not one."""
    looked_up: dict[int, Any] = {}
    used: set[int] = set()
    for model in models:
        for module in model.modules():
            own = module.parameters(recurse=False)
            if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                looked_up.update({id(parameter): parameter for parameter in own})
            else:
                used.update(id(parameter) for parameter in own)
    return [parameter for key, parameter in looked_up.items() if key not in used]


def _shape(model: Any) -> dict[str, int | None]:
    """A transformer's shape from its configuration, and from its modules where that says nothing."""
    shape: dict[str, int | None] = dict.fromkeys(_SHAPE_NAMES)
    for holder in (getattr(model, name, None) for name in ("config", "cfg", "args", "model_args", "params")):
        for key, names in _SHAPE_NAMES.items():
            if shape[key] is None:
                shape[key] = _first_integer(holder, names)
    _shape_from_modules(model, shape)
    if shape["head_size"] is None and shape["hidden"] and shape["heads"]:
        shape["head_size"] = shape["hidden"] // shape["heads"]
    if shape["kv_heads"] is None:
        shape["kv_heads"] = shape["heads"]
    return shape


def _first_integer(holder: Any, names: Sequence[str]) -> int | None:
    for name in names:
        value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _shape_from_modules(model: Any, shape: dict[str, int | None]) -> None:
    embeddings = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    if not embeddings:
        return  # not a language model: a shape would be a guess
    largest = max(embeddings, key=lambda module: module.num_embeddings)
    shape["vocab"] = shape["vocab"] or int(largest.num_embeddings)
    shape["hidden"] = shape["hidden"] or int(largest.embedding_dim)
    blocks = max(_runs_of_blocks(model), key=len, default=[])
    if not blocks:
        return
    shape["layers"] = shape["layers"] or len(blocks)
    attention = next(
        (module for module in blocks[0].modules() if isinstance(module, torch.nn.MultiheadAttention)), None
    )
    heads = _first_integer(attention, ("num_heads",)) if attention is not None else None
    if heads is None:
        found = (_first_integer(module, _SHAPE_NAMES["heads"]) for module in blocks[0].modules())
        heads = next((value for value in found if value), None)
    shape["heads"] = shape["heads"] or heads


def _runs_of_blocks(model: Any) -> Iterable[list[Any]]:
    """Lists of repeated blocks of one class: a transformer's layers."""
    for module in model.modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)):
            children = list(module.children())
            classes = {type(unwrap(child)) for child in children}
            if len(children) > 1 and len(classes) == 1 and any(True for c in children for _ in c.children()):
                yield children


def precision_facts(models: Sequence[Any], autocast: str | None) -> dict[str, Any]:
    """Parameters' commonest dtype (by elements), what autocast or FSDP2 computes in, and how fp32 matmuls are done."""
    elements: Counter[str] = Counter()
    computed = autocast
    for model in models:
        for parameter in model.parameters():
            elements[_dtype_name(parameter.dtype)] += parameter.numel()
        computed = computed or _fsdp_dtype(model)
    return {
        "parameter_dtype": elements.most_common(1)[0][0] if elements else None,
        "autocast_dtype": computed,
        "float32_matmul": torch.get_float32_matmul_precision(),
    }


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def autocast_dtype(device_type: str) -> str | None:
    """What autocast computes in at this place of the program; ``None`` when it is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return _dtype_name(torch.get_autocast_dtype(device_type))


def _fsdp_dtype(model: Any) -> str | None:
    state = getattr(model, "_get_fsdp_state", None)
    policy = getattr(state(), "_mp_policy", None) if callable(state) else None
    dtype = getattr(policy, "param_dtype", None)
    return None if dtype is None else _dtype_name(dtype)


def optimizer_facts(optimizers: Sequence[Any]) -> dict[str, Any] | None:
    """Class and implementation; of several optimizers the one with most parameters."""
    if not optimizers:
        return None
    optimizer = max(optimizers, key=lambda o: sum(len(group["params"]) for group in o.param_groups))
    return {
        "class": type(optimizer).__name__,
        "implementation": _implementation(optimizer),
        "parameter_groups": len(optimizer.param_groups),
    }


def _implementation(optimizer: Any) -> str | None:
    group = optimizer.param_groups[0]
    if "foreach" not in group and "fused" not in group:
        return None
    if group.get("fused"):
        return "fused"
    if group.get("foreach") is not None:
        return "foreach" if group["foreach"] else "for-loop"
    # Neither was chosen: PyTorch takes foreach where all parameters are on a device (_default_to_fused_or_foreach).
    on_device = all(parameter.device.type != "cpu" for parameter in group["params"])
    return "foreach" if on_device and group["params"] else "for-loop"


def is_compiled(models: Sequence[Any]) -> bool:
    """Whether any module was given to ``torch.compile``."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for model in models
        for module in model.modules()
    )


def data_parallel_facts(models: Sequence[Any]) -> dict[str, Any] | None:
    """How the model is replicated or sharded: PyTorch's DistributedDataParallel or FSDP2."""
    for model in models:
        for module in model.modules():
            name = type(module).__name__
            if name == "DistributedDataParallel":
                return _ddp_facts(module)
            if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
                return _fsdp2_facts(module)
            if name == "FullyShardedDataParallel":
                return {"kind": "fsdp1"}
    return None


def _ddp_facts(ddp: Any) -> dict[str, Any]:
    hooks = getattr(ddp, "_comm_hooks", None) or []
    facts: dict[str, Any] = {
        "kind": "ddp",
        "bucket_mib": getattr(ddp, "bucket_bytes_cap", 0) / 2**20 or None,
        "gradient_as_bucket_view": getattr(ddp, "gradient_as_bucket_view", None),
        "static_graph": getattr(ddp, "static_graph", None),
        "find_unused_parameters": getattr(ddp, "find_unused_parameters", None),
        "compression": getattr(hooks[0][0], "__name__", None) if hooks else None,
        "ranks": ddp.process_group.size() if getattr(ddp, "process_group", None) is not None else None,
    }
    read = getattr(ddp, "_get_ddp_logging_data", None)
    if callable(read):
        sizes = str(read().get("rebuilt_bucket_sizes") or read().get("bucket_sizes") or "")
        facts["bucket_bytes"] = [int(size) for size in sizes.split(",") if size.strip().isdecimal()]
    return facts


def _fsdp2_facts(module: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": "fsdp2"}
    state = module._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", None)
    mesh = getattr(getattr(group, "mesh_info", None), "mesh", None)
    facts["ranks"] = mesh.size() if mesh is not None else None
    after = getattr(group, "post_forward_mesh_info", None)
    facts["reshard_after_forward"] = after is not None
    return facts


def loader_facts(loader: Any) -> dict[str, Any] | None:
    """Workers, pinning and batch size of a torch ``DataLoader``; ``None`` for anything else."""
    for name in (None, "base_dataloader", "dataloader", "loader"):
        candidate = loader if name is None else getattr(loader, name, None)
        if isinstance(candidate, DataLoader):
            return {
                "workers": candidate.num_workers,
                "pin_memory": candidate.pin_memory,
                "batch_size": candidate.batch_size,
                "prefetch_factor": candidate.prefetch_factor,
                "persistent_workers": candidate.persistent_workers,
            }
    return None


def device_facts(device_type: str, index: int) -> dict[str, Any]:
    """The ``device`` of a rank's metadata: type, name, how many, memory in bytes, host threads, and the cores that
    this process may use."""
    facts: dict[str, Any] = {
        "type": device_type,
        "name": processor_name(),
        "count": 1,
        "memory_bytes": None,
        "threads": torch.get_num_threads(),
        "cores": own_cores(),
        "index": index,
    }
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(index)
        facts.update(name=properties.name, memory_bytes=properties.total_memory)
    elif device_type != "cpu":
        facts["name"] = device_type
    return facts


def version_facts() -> dict[str, str | None]:
    """Versions that decide how fast a run is."""
    nccl = None
    if torch.version.cuda is not None and torch.cuda.is_available():
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return {
        "trine": metadata.version("trine"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": nccl,
        "driver": _driver_version(),
        "platform": platform.platform(),
    }


def _driver_version() -> str | None:
    """Version of NVIDIA's kernel driver, ``None`` where there is none; the file is read, no device is touched."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return None
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", first)
    return found[0] if found else None
