"""What a plan's figures rest on, a line each: where constants come from, and what nobody said."""

from __future__ import annotations

from trine.optim.plan.bridges import bridge_words
from trine.optim.plan.candidates import NEW_SOFTWARE, Candidate, is_published
from trine.optim.plan.cluster import Link
from trine.optim.plan.columns import Conditions
from trine.optim.plan.constants import device_constants, network_constants, spread
from trine.optim.plan.layouts import OFFLOADED
from trine.optim.plan.network import LinkConstants, Network
from trine.optim.plan.problem import Problem, usual_tokens

__all__ = ["assumptions_of", "unfitted_of"]

#: How provenances of constants begin that are not taken for granted.
_KNOWN = ("fitted", "measured")


def assumptions_of(problem: Problem, best: Candidate) -> tuple[str, ...]:
    """Of a plan whose winner is ``best``."""
    bridge = bridge_words(problem.cluster)
    return (
        *(f"{what}: {source}" for what, source in _constants(problem)),
        *_latencies(problem),
        *_drives(problem, best),
        *(() if bridge is None else (bridge,)),
        *_of_software(problem, best),
        *_unsaid(problem),
    )


def unfitted_of(problem: Problem) -> tuple[str, ...]:
    """Those of them whose constants no run was fitted on."""
    return tuple(f"{what}: {source}" for what, source in _constants(problem) if not source.startswith(_KNOWN))


def _links(problem: Problem) -> dict[str, tuple[Link | None, LinkConstants]]:
    """Those that the job uses, by where they are."""
    cluster, network = problem.cluster, Network.of(problem.cluster)
    return {
        "inside a node": (cluster.inside, network.inside_constants),
        "between nodes": (cluster.between if cluster.nodes > 1 else None, network.between_constants),
    }


def _constants(problem: Problem) -> list[tuple[str, str]]:
    """What constants the plan rests on, and where they come from."""
    device = problem.cluster.device
    own = "measured on this machine" if device.constants else device_constants(device.family).provenance
    found = [
        (f"software {problem.stack.name}", problem.stack.provenance),
        (f"device family {device.family}", own),
    ]
    for where, (link, _) in _links(problem).items():
        if link is not None:
            note = f", {link.note}" if link.note else ""
            measured = (
                "measured on this machine" if link.constants else network_constants(link.kind).provenance
            )
            found.append((f"{where} {link.kind} at {link.bandwidth} a device and direction{note}", measured))
    return [(what, source or "starting values") for what, source in found]


def _latencies(problem: Problem) -> list[str]:
    """Of links on whose logs no latency was fitted: what is taken, and where it is from."""
    found = []
    for where, (link, constants) in _links(problem).items():
        source = constants.latency_source or constants.source
        if link is None or source.startswith(_KNOWN):
            continue
        if constants.hop_s is None:
            start, hop = f"{constants.start_factor:g}", f"{constants.latency_factor:g}"
            taken = f"start in {start} times what NCCL's tuner has, and hop in {hop} times"
        else:
            taken = f"take {constants.hop_s * 1e6:g} µs a step"
        found.append(f"collectives {where} over {link.kind} {taken}: {source}")
    return found


def _drives(problem: Problem, best: Candidate) -> list[str]:
    """That nobody said what drives give, where something lies on them."""
    on_drives = [column for column in OFFLOADED if best.layout[column] == "nvme"]
    if not on_drives or problem.cluster.nvme is not None:
        return []
    taken = float(Conditions.of(problem.cluster, problem.stack).nvme_per_s[0])
    unsaid = f"nobody said whether {problem.cluster.name} has drives, nor what they give"
    return [
        f"{on_drives[0]}=nvme: {unsaid}: {taken / 1e9:g} GB/s a device are taken, and room for all; nvme in the cluster's file"
    ]


def _of_software(problem: Problem, best: Candidate) -> list[str]:
    """How far its constants hold, and what it does not offer."""
    stack, family = problem.stack, problem.cluster.device.family
    found = [f"another software than {stack.name} may differ by a quarter and more on the same layout"]
    if "(" in stack.provenance and family not in stack.provenance:
        found.insert(
            0,
            f"no run that {stack.name} was fitted on is of {family}: its constants are carried over from others",
        )
    if not is_published(stack):
        known = spread()
        found.append(
            f"intervals of steps: no published run is of {stack.name}, so where nine of ten runs lay of tables whose software no "
            f"other table has ({NEW_SOFTWARE.low:g} to {NEW_SOFTWARE.high:g} times the prediction) or of all tables ({known.low:g} "
            f"to {known.high:g}), whichever is wider"
        )
    if best.beyond:
        found.append(f"{stack.name} does not offer {', '.join(best.beyond)}: planned because it is asked for")
    return found


def _usual_words(problem: Problem) -> str:
    if problem.cluster.device.is_processor:
        return f"{usual_tokens(problem.cluster) // problem.devices // 2**10} Ki tokens a rank, as processors take them"
    return f"{usual_tokens(problem.cluster) // 2**20} Mi tokens"


def _unsaid(problem: Problem) -> list[str]:
    """What nobody said, and what nobody can."""
    found = []
    if problem.batch_is_usual:
        found.append(
            f"global batch {problem.global_batch}: nobody said, so about {_usual_words(problem)}; --global-batch"
        )
    workload = problem.workload
    if workload.sequence_is_most:
        found.append(
            f"sequences of {workload.sequence:,} tokens: nobody said, so the longest that the model takes, which is more than most "
            "train with; --sequence"
        )
    if workload.learned_positions and not workload.positions:
        found.append(
            f"learned positions: a row for each of a sequence's {workload.sequence} tokens; a checkpoint's own table may have fewer"
        )
    if workload.multi_token_modules:
        found.append(
            f"without modules of multi-token prediction, of which the model has {workload.multi_token_modules}: where they are "
            "trained, each takes about a layer and an output head more; layers"
        )
    if problem.workload.is_mixture and problem.workload.load_imbalance == 1:
        found.append(
            "experts get equally many tokens: nobody said by how much the busiest has more; load_imbalance"
        )
    numbers = [name for name in ("precision", "compression") if name in problem.searched]
    if numbers:
        found.append(
            f"{' and '.join(numbers)} searched for time and memory: what other numbers do to the loss is not known"
        )
    return found
