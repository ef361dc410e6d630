"""torchtitan 0.3, which is configured in Python: a module with a function that ``--config`` names.

    torchrun … -m torchtitan.train --module trine_torchtitan --config exported

Fields are those of ``torchtitan/config/configs.py`` and of the policies in
``torchtitan/distributed/activation_checkpoint.py`` (github.com/pytorch/torchtitan). Models are torchtitan's own, each a
function of its ``config_registry``; for another the module has ``applied`` alone, which takes any configuration.
"""

from __future__ import annotations

from typing import Any

from trine.optim.config import Config
from trine.optim.exports._account import Account, Written
from trine.optim.exports._exported import Exported
from trine.optim.plan.stages import stage_counts
from trine.optim.plan.workload import Workload

__all__ = ["NAME", "TOOL", "export"]

NAME = "torchtitan"
TOOL = "torchtitan 0.3"

#: Our workloads that torchtitan has → its module, and the function of its registry.
_MODELS = {
    "llama3-8b": ("llama3", "llama3_8b"),
    "llama3.1-8b": ("llama3", "llama3_8b"),
    "llama3-70b": ("llama3", "llama3_70b"),
    "llama3.1-70b": ("llama3", "llama3_70b"),
    "llama3-405b": ("llama3", "llama3_405b"),
    "llama3.1-405b": ("llama3", "llama3_405b"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3_671b"),
    "qwen3-0.6b": ("qwen3", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "qwen3_1_7b"),
    "qwen3-14b": ("qwen3", "qwen3_14b"),
    "qwen3-30b-a3b": ("qwen3", "qwen3_30b_a3b"),
    "qwen3-32b": ("qwen3", "qwen3_32b"),
    "gpt-oss-20b": ("gpt_oss", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "gpt_oss_120b"),
}
#: Our schedules → PyTorch's classes, by whose names torchtitan finds them (``get_schedule_class``).
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "loopedbfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
#: Of these classes, those with one stage a rank (``PipelineScheduleSingle``), and those whose order is that of two.
_ONE_STAGE = frozenset({"GPipe", "1F1B"})
_TWO_STAGES = frozenset({"ZBVZeroBubble", "DualPipeV"})
Fields = dict[str, Any]


def export(exported: Exported) -> Written:
    """``trine_torchtitan.py``: ``applied(config)``, and ``exported()`` where the model is one of torchtitan's."""
    account = Account(exported, TOOL)
    account.says("engine")
    parallelism = _parallelism(exported, account)
    training = _training(exported, account)
    if parallelism["pipeline_parallel_degree"] > 1 or parallelism["expert_parallel_degree"] > 1:
        training["disable_cuda_graphs"] = True  # it insists: neither can be captured
    checkpoint = _recomputation(exported, account)
    compile_ = _compilation(exported, account)
    _name_the_rest(exported, account)
    model = None if exported.workload is None else _MODELS.get(exported.workload.name.casefold())
    if model is None:
        name = "it" if exported.workload is None else exported.workload.name
        account.notes(f"the model: torchtitan has no configuration of {name}: return applied(…) of yours")
    return account.written(
        {"trine_torchtitan.py": _module(parallelism, training, checkpoint, compile_, model)}
    )


def _module(
    parallelism: Fields, training: Fields, checkpoint: str, compile_: Fields, model: tuple[str, str] | None
) -> str:
    imports = ["from dataclasses import replace", ""]
    imports += [f"from torchtitan.models.{model[0]}.config_registry import {model[1]}"] if model else []
    kind = checkpoint.partition(".")[0]
    imports += (
        [f"from torchtitan.distributed.activation_checkpoint import {kind}"] if checkpoint != "None" else []
    )
    lines = [
        '"""A configuration of torchtitan 0.3, written by trine export."""',
        "",
        *imports,
        "from torchtitan.trainer import Trainer",
        "",
        "",
        "def applied(config: Trainer.Config) -> Trainer.Config:",
        '    """The layout, put into any configuration."""',
        "    return replace(",
        "        config,",
        *_replaced("parallelism", parallelism),
        *_replaced("training", training),
        *_replaced("compile", compile_),
        f"        activation_checkpoint={checkpoint},",
        "    )",
    ]
    if model:
        lines += ["", "", "def exported() -> Trainer.Config:", f'    """As planned, of {model[1]}."""']
        lines += [f"    return applied({model[1]}())"]
    return "".join(f"{line}\n" for line in lines)


def _replaced(name: str, fields: Fields) -> list[str]:
    lines = [f"            {key}={value!r}," for key, value in fields.items()]
    return [f"        {name}=replace(", f"            config.{name},", *lines, "        ),"] if lines else []


def _parallelism(exported: Exported, account: Account) -> Fields:
    config = exported.config
    parallel = config.parallel
    account.says("parallel.tensor", "parallel.context", "parallel.expert", "parallel.data")
    account.says("parallel.loss")  # the head is cut over the vocabulary by itself
    found: Fields = {
        "tensor_parallel_degree": parallel.tensor,
        "context_parallel_degree": parallel.context,
        "pipeline_parallel_degree": parallel.pipeline,
        "enable_sequence_parallel": parallel.sequence,
    }
    account.says("parallel.sequence")
    account.misses("parallel.plan", "its own models know how they are cut")
    found |= _sharding(exported, account)
    found["expert_parallel_degree"] = _expert_degree(exported, account, found["data_parallel_shard_degree"])
    return found | _pipeline(exported, account)


def _expert_degree(exported: Exported, account: Account, shards: int) -> int:
    """Experts are spread over all ranks of a stage that share its shards, as the planner spreads them over all of a stage."""
    parallel = exported.config.parallel
    if exported.layout is None or not exported.is_mixture:
        return parallel.expert
    planned = int(exported.layout["expert"])
    if shards < 1 or shards * parallel.context * parallel.tensor % planned:
        return parallel.expert
    account.says_column("expert")
    return planned


def _sharding(exported: Exported, account: Account) -> Fields:
    """Expert ranks are borrowed from the shards: dp_shard counts them (``expert_parallel_degree``)."""
    config, zero = exported.config, exported.config.zero
    if zero.stage == 0 and config.parallel.expert == 1:
        account.says("zero.stage")
        account.misses("parallel.shard", "nothing is sharded")
        found: Fields = {"data_parallel_shard_degree": 1}
        if exported.data_ranks is None:
            account.notes("data_parallel_replicate_degree: the number of ranks is not known: give --devices")
        else:
            found["data_parallel_replicate_degree"] = exported.data_ranks
        return found
    why = "gradients and optimizer state are sharded together: written as stage 2"
    if zero.stage == 1:
        account.misses("zero.stage", why)
    elif zero.stage == 0:
        account.notes(f"zero.stage: beside expert_parallel_degree {why}")
    account.says("zero.stage")
    found = {
        "data_parallel_shard_degree": -1,
        "data_parallel_replicate_degree": 1,
    }  # -1: the ranks that are left over
    if exported.data_ranks is not None and exported.replicas is not None:
        replicas = exported.replicas if zero.stage else 1
        found = {
            "data_parallel_replicate_degree": replicas,
            "data_parallel_shard_degree": exported.data_ranks // replicas,
        }
    if config.parallel.shard != "auto":
        account.says("parallel.shard")
    account.misses("parallel.shard", "links are not measured: write the number of shards")
    found["fsdp_reshard_after_forward"] = _resharding(config)
    if isinstance(zero.reshard_after_forward, bool):
        account.says("zero.reshard_after_forward")
    account.misses(
        "zero.reshard_after_forward", "it frees parameters or keeps them, and knows no second group"
    )
    return found


def _resharding(config: Config) -> str:
    """When parameters are freed; in pipelines FSDP keeps a stage's by default, as the planner counts, but for those that lie
    elsewhere."""
    if config.zero.stage < 3 or config.zero.reshard_after_forward is False:
        return "never"
    stays = config.parallel.pipeline > 1 and config.offload.parameters in (None, "none")
    return "default" if stays and config.zero.reshard_after_forward is None else "always"


def _pipeline(exported: Exported, account: Account) -> Fields:
    parallel, batch = exported.config.parallel, exported.batch
    if not account.takes("parallel.pipeline"):
        return {}
    schedule = parallel.schedule or ("interleaved" if parallel.chunks > 1 else "1f1b")
    found: Fields = {}
    name = _SCHEDULES.get(schedule.lower())
    if name is None:
        account.misses("parallel.schedule", "PyTorch has no such schedule: written as 1F1B")
    account.says("parallel.schedule")
    found["pipeline_parallel_schedule"] = name or "1F1B"
    if batch.micro is not None:
        found["pipeline_parallel_microbatch_size"] = batch.micro
    else:
        account.notes(
            "pipeline_parallel_microbatch_size: samples of a micro-batch are not known: give accumulation.global_batch"
        )
    account.says("parallel.microbatches")
    found |= _stages(exported, account, name or "1F1B")
    if parallel.split == "auto":
        account.says("parallel.split")
    account.misses("parallel.split", "stages are lists of modules: module_fqns_per_model_part")
    return found


def _stages(exported: Exported, account: Account, schedule: str) -> Fields:
    """How torchtitan comes to the stages; by itself it has the one or two a rank that the schedule wants."""
    parallel, workload = exported.config.parallel, exported.workload
    usual = 1 if schedule in _ONE_STAGE else 2
    a_rank = usual if schedule in _ONE_STAGE | _TWO_STAGES else max(parallel.chunks, usual)
    if parallel.chunks > a_rank:
        words = "one stage" if usual == 1 else "two stages"
        account.misses("parallel.chunks", f"{schedule} has {words} a rank")
    if workload is None:
        if a_rank == usual:
            account.says("parallel.chunks")
        account.misses(
            "parallel.chunks", "the model's layers are not known: pipeline_parallel_layers_per_stage"
        )
        return {}
    stages = parallel.pipeline * a_rank
    if workload.layers + 2 < stages:
        account.misses("parallel.chunks", f"{workload.layers} layers are too few for {stages} stages")
        return {}
    found = _cut(exported, workload, account, stages, by_itself=a_rank == usual)
    account.says("parallel.chunks")
    return found


def _cut(exported: Exported, workload: Workload, account: Account, stages: int, *, by_itself: bool) -> Fields:
    """The stages of the plan: as torchtitan cuts them, or as a list of modules, by the names of its own models.

    More stages than it has by itself it counts by ``pipeline_parallel_layers_per_stage``, rounded up
    (``_get_pipeline_metadata``), which not every number of stages is reached by.
    """
    own = _own_counts(workload.layers, stages)
    counts = own if exported.layout is None else stage_counts(workload.layers, stages)
    each = -(-(workload.layers + 2) // stages)
    comes_to_them = by_itself or -(-(workload.layers + 2) // each) == stages
    found: Fields = {} if by_itself else {"pipeline_parallel_layers_per_stage": each}
    if counts == own and comes_to_them:
        return found
    if workload.name.casefold() in _MODELS:
        return {"module_fqns_per_model_part": _modules(counts)}
    how = "list its modules, module_fqns_per_model_part"
    if not comes_to_them:
        account.misses("parallel.chunks", f"no number of layers a stage comes to {stages} stages: {how}")
        return {}
    account.notes(
        f"stages: embedding and head count as a layer each there, and stages have {min(own)} to {max(own)} layers where the plan "
        f"has {min(counts)} to {max(counts)}: {how}"
    )
    return found


def _own_counts(layers: int, stages: int) -> list[int]:
    """Layers of each stage as torchtitan spreads them: evenly, with embedding and head as one each, the first stages fuller."""
    even, fuller = divmod(layers + 2, stages)
    counts = [even + (stage < fuller) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def _modules(counts: list[int]) -> list[list[str]]:
    """The modules of stages of so many layers."""
    found, first = [], 0
    for count in counts:
        found.append([f"layers.{layer}" for layer in range(first, first + count)])
        first += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "lm_head"]
    return found


def _training(exported: Exported, account: Account) -> Fields:
    config, batch = exported.config, exported.batch
    found: Fields = {}
    if exported.workload is not None:
        found["seq_len"] = exported.workload.sequence
    account.says("accumulation.micro_batch", "accumulation.global_batch")
    if batch.micro is not None:
        # What a rank computes between synchronisations: under a pipeline all of its micro-batches.
        pieces = (batch.count or 1) if config.parallel.pipeline > 1 else 1
        found["local_batch_size"] = batch.micro * pieces
    else:
        account.notes(
            "local_batch_size: samples of a micro-batch are not known: give accumulation.micro_batch"
        )
    if batch.whole is not None:
        found["global_batch_size"] = batch.whole
    if batch.count is not None:
        account.says("accumulation.steps")
    account.misses("accumulation.steps", 'how many is not known; "auto" is measured by Trine')
    found |= _precision(exported, account)
    if config.offload.parameters == config.offload.optimizer == "cpu":
        account.says("offload.parameters", "offload.optimizer")
        found["enable_cpu_offload"] = True
    for key in ("optimizer", "parameters"):
        account.misses(
            f"offload.{key}", "it puts parameters, gradients and optimizer state into host memory, or none"
        )
    account.misses("offload.activations", "activations stay on the device")
    return found


def _precision(exported: Exported, account: Account) -> Fields:
    """FSDP gathers parameters in ``mixed_precision_param`` from float32 shards, which are the masters."""
    precision = exported.config.precision
    if precision.dtype == "fp16":
        account.misses("precision.dtype", "it has bfloat16 and float32: written as bfloat16")
    account.says("precision.dtype", "precision.master_weights")
    account.misses("precision.loss_scale", "bfloat16 needs none")
    account.misses(
        "precision.float8",
        "is of the model there: model_registry(…, converters=[Float8LinearConverter.Config()])",
    )
    account.misses("precision.tf32", "set torch.backends.cuda.matmul.allow_tf32 in the program")
    low = precision.dtype in ("bf16", "fp16")
    return {"dtype": "float32", "mixed_precision_param": "bfloat16" if low else "float32"}


def _recomputation(exported: Exported, account: Account) -> str:
    wanted = exported.config.checkpointing
    kinds = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}
    if wanted.mode in kinds:
        account.says("checkpointing.mode")
    if wanted.mode == "selective":
        _say_selective(exported, account)
    account.misses(
        "checkpointing.mode", "its budget is a share (MemoryBudgetAC), and the compiler's: written as full"
    )
    account.misses("checkpointing.every", "it recomputes all blocks or none: written as all")
    account.misses("checkpointing.modules", "it recomputes blocks: written as all")
    account.misses("checkpointing.operators", "a subclass of SelectiveAC says which: get_save_ops")
    account.misses("checkpointing.budget_bytes", "its budget is a share: MemoryBudgetAC")
    return kinds.get(wanted.mode, "FullAC.Config()")


def _say_selective(exported: Exported, account: Account) -> None:
    """SelectiveAC keeps every second matmul, as plans for torchtitan count."""
    if exported.operators == "alternate":
        account.says_column("recompute")
    elif exported.operators == "all":
        account.notes(
            "checkpointing.mode: selective keeps every second matmul there, not all: less memory, more is recomputed"
        )


def _compilation(exported: Exported, account: Account) -> Fields:
    wanted = exported.config.compute.compile
    if wanted == "model":
        account.misses("compute.compile", "it compiles blocks: written so")
    account.says("compute.compile")
    return {"enable": bool(wanted)}


def _name_the_rest(exported: Exported, account: Account) -> None:
    account.misses("compute.attention", "is of the model there: model_registry(…, attn_backend=…)")
    account.misses("compute.fuse", "is of the model there: override.imports")
    account.misses("zero.prefetch", "FSDP2 fetches a block ahead by itself")
    if exported.config.communication.overlap is True:
        account.says("communication.overlap")
    for key in (
        "bucket_mib",
        "first_bucket_mib",
        "gradient_as_view",
        "static_graph",
        "compression",
        "overlap",
    ):
        account.misses(f"communication.{key}", "is DistributedDataParallel's, and FSDP2 averages there")
