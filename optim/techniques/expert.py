"""Expert parallelism: ``parallel.expert`` ranks share the experts of each mixture, and tokens travel to them.

Each of these ranks sees a batch of its own, as under data parallelism, and holds E / expert of the E experts; everything
else of the model is replicated or sharded as ever. A token goes by all-to-all to the ranks of the experts that its
router picked and its results come back the same way (Lepikhin et al. 2021, GShard). Nothing is dropped, however
unequally the router spreads its tokens; how unequally is in the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trine.optim.config import Config
from trine.optim.techniques._assembly import Assembly, Effect, Facts
from trine.optim.techniques._needs import require_by_element
from trine.optim.verify import Tolerance
from trine.record.errors import UsageError

if TYPE_CHECKING:
    import torch

__all__ = ["KEYS", "NUMERICS", "ORDER", "QUANTITY", "apply", "check", "refusal", "tolerance"]

KEYS = ("parallel.expert",)
ORDER = 6
QUANTITY = "bytes of experts per rank"
NUMERICS = "unchanged but for the order of summation: losses within 1e-10 in fp64, 1e-5 relative in fp32"

#: After so many, what the router does is told in words.
_STEPS = 5


def refusal(config: Config) -> str | None:
    """Every degree can be applied to a model that has so many experts; that is ``check``'s."""
    return None


def tolerance(config: Config) -> Tolerance | None:
    """An expert sums its gradient over all tokens at once, a replica over ranks."""
    return Tolerance(1e-6, 1e-5) if config.parallel.expert > 1 else None


def check(config: Config, facts: Facts) -> None:
    """Raise ``UsageError`` where the model has no experts that can be spread, or other keys forbid it."""
    degree = config.parallel.expert
    if degree == 1:
        return
    from trine.optim.runtime.experts.spreading import experts_of

    found = experts_of(facts.model)
    if not found:
        raise UsageError(f"parallel.expert = {degree}: {_why_none(facts.model)}")
    for name, module in found.items():
        count: Any = module.num_experts
        if count % degree:
            fitting = [str(n) for n in range(1, count + 1) if count % n == 0]
            raise UsageError(
                f"parallel.expert = {degree} does not divide the {count} experts of {name}: use one of {', '.join(fitting)}"
            )
    _check_other_keys(config, facts)
    require_by_element("parallel.expert", facts, "a part of the experts")


def _why_none(model: torch.nn.Module) -> str:
    kind = type(model).__name__
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            return (
                f"{name} of {kind} is a {type(module).__name__}, and experts are spread where their weights are stacked: "
                "parameters of (num_experts, …), a num_experts attribute and "
                "forward(hidden_states, top_k_index, top_k_weights), as Transformers 5 has them"
            )
    return f"{kind} has no mixture of experts: take the key out"


def _check_other_keys(config: Config, facts: Facts) -> None:
    if config.compute.compile is not False:
        raise UsageError(
            f"compute.compile and parallel.expert = {config.parallel.expert} cannot be combined in this version: how many "
            "tokens go to which rank is known only while it runs, and breaks the graph in each block. Drop one of them"
        )
    if config.parallel.pipeline > 1:
        weighing = next(
            (n for n, m in facts.model.named_modules() if getattr(m, "weighs_balance", False)), None
        )
        if weighing is not None:
            raise UsageError(
                f"parallel.pipeline and the balance loss of {weighing} cannot be combined: the loss is computed on the last "
                "stage, and the routers of others would not be in it. Train without the balance loss, or drop one of the keys"
            )


def apply(assembly: Assembly) -> None:
    """Spread the experts, with the state that the optimizer has for them."""
    facts = assembly.facts
    degree = facts.layout.expert
    if assembly.config.parallel.expert == 1:
        return
    from trine.optim.runtime.experts.spreading import experts_of, spread_experts
    from trine.optim.runtime.meshes import flat_mesh, group_of
    from trine.optim.runtime.sharding import start_alike

    start_alike(assembly)
    found: dict[str, torch.nn.Module] = {}
    for stage in assembly.stages:
        found.update(experts_of(stage))
    mesh = flat_mesh(facts, "expert")
    assert mesh is not None, "degrees above one have a mesh"
    whole = sum(p.numel() * p.element_size() for m in found.values() for p in m.parameters())
    counts = sorted({int(module.num_experts) for module in found.values()})  # type: ignore[arg-type]
    spreads = spread_experts(assembly, mesh, found)
    group = group_of(facts, "replicate", "shard", "expert", "context")
    for module in assembly.model.modules():
        if hasattr(module, "balance_group"):
            setattr(module, "balance_group", group)  # noqa: B010 - a module's attributes are tensors to the type checker
    if spreads:
        _tell(assembly, spreads[0])
    assembly.effects.append(
        Effect(
            KEYS[0],
            f"{' and '.join(map(str, counts))} experts a rank",
            f"{' and '.join(str(count // degree) for count in counts)} a rank",
            f"{len(found)} mixtures, {whole / 2**20:.1f} MiB of experts over {degree} ranks; tokens travel by all-to-all, "
            "none is dropped",
        )
    )


def _tell(assembly: Assembly, spread: Any) -> None:
    """How equally tokens are spread and what travels: in each step's record, and in words after the first few."""
    load, traffic = spread.load, spread.traffic
    assembly.metrics["experts/balance"] = load.balance
    assembly.metrics["experts/rank_balance"] = load.rank_balance
    assembly.metrics["experts/sent_bytes"] = lambda: float(traffic.sent_bytes)
    assembly.metrics["experts/dropped_tokens"] = lambda: 0.0
    steps = 0

    def after() -> None:
        nonlocal steps
        steps += 1
        if steps == _STEPS and load.balance() is not None:
            assembly.effects.append(
                Effect(
                    KEYS[0],
                    "balance 1 at best",
                    f"balance {load.balance():.2f} over experts, {load.rank_balance():.2f} over ranks",
                    load.busiest(),
                )
            )
        load.forget()
        traffic.forget()

    assembly.after_step.append(after)
