"""Software of published runs: the stack that a framework's cell means, of its container, of its year or of what it ran on.

Notes and schedules say facts about it (compiled, overlapped); a framework that the package does not know is its nearest
neighbour, and the run's assumptions say so.
"""

from __future__ import annotations

import re
from typing import Any

from planner_cells import Row
from planner_layouts import zero_stage_of

from trine.optim.plan import Device
from trine.optim.plan.constants import Stack, stack_named
from trine.record.errors import TrineError

__all__ = ["stack_of_row"]

#: Rounds of MLPerf Training → the month of NVIDIA's containers that its NeMo submissions ran (their system names say so).
_CONTAINERS = {
    "v3.0": "23.04",
    "v3.1": "23.09",
    "v4.0": "24.04",
    "v4.1": "24.09",
    "v5.0": "25.04",
    "v5.1": "25.09",
}
#: Frameworks that nothing was fitted for → what is nearest: NeoX is built on Megatron-DeepSpeed, the others by their compiler.
_NEAREST: tuple[tuple[str, str], ...] = (
    (r"neox", "megatron-deepspeed"),
    (r"colossal", "megatron-lm-2022"),
    (r"alpa\b|\bjax|levanter|easylm|flax", "maxtext"),
)
#: PyTorch without another's model parallelism.
_PLAIN = re.compile(
    r"transformers|hugging|\bhf\b|axolotl|llama.?factory|torchtune|lit-?gpt|lightning|olmo|\bddp\b"
)
#: Devices that came after FlashAttention: what trained on them had it, and Megatron-LM its core.
_RECENT = ("hopper", "blackwell", "cdna3", "cdna4")
_YEAR = r"\b(20[12]\d)\b|[A-Z]{3,}(\d\d)\b"


def stack_of_row(row: Row, device: Device) -> Stack:
    """The stack, with the traits that the row's cells say."""
    stack = _stack(row, device)
    traits = _traits(row, stack)
    return stack.with_traits(**traits) if traits else stack


def _stack(row: Row, device: Device) -> Stack:
    text = row.text("framework")
    source = row.text("source")
    if round_ := re.search(r"mlperf[^v]*(v\d\.\d)", source, re.IGNORECASE):
        text = f"{text} {_CONTAINERS.get(round_[1], '')}"
    elif re.search(r"megatron.?lm(?!.*(?:fork|zero.?bubble))", text, re.IGNORECASE):
        return _megatron(row, text, device)
    elif not re.search(r"\d", text):
        # A name alone: software of the year of its publication.
        year = re.search(_YEAR, source)
        text = f"{text} {year[1] or '20' + year[2]}" if year else text
    nearest = next((name for pattern, name in _NEAREST if re.search(pattern, text, re.IGNORECASE)), None)
    if nearest is None:
        try:
            stack = stack_named(text)
        except TrineError:
            nearest = _usual_stack(row)
        else:
            if stack.name != "deepspeed" or not _is_split(row):
                return stack
            nearest = "megatron-deepspeed"  # DeepSpeed's own engine splits no layers
    stack = stack_named(nearest)
    row.assume(f"{text or 'no framework'} as {stack.name}")
    return stack


def _megatron(row: Row, text: str, device: Device) -> Stack:
    """Megatron-LM of a year: that its version or container says, that of the publication, or what the hardware came with."""
    found = re.search(r"\b(20[12]\d)\b", text)
    container = re.search(r"\b(2\d)\.(?:0[1-9]|1[0-2])\b", text)
    version = re.search(r"\bv?([1-3])\.\d", text)
    published = re.search(_YEAR, row.text("source"))
    year = None
    if found is not None:
        year = int(found[1])
    elif container is not None:
        year = 2000 + int(container[1])
    elif version is not None:
        year = {"1": 2020, "2": 2021, "3": 2022}[version[1]]
    elif published is not None:
        year = int(published[1] or "20" + published[2])
    if re.search(r"core|\bmcore", text, re.IGNORECASE) or device.family in _RECENT:
        stack = stack_named(
            "megatron-core moe" if re.search(r"core[ -]moe", text, re.IGNORECASE) else "megatron-core"
        )
        row.assume(f"{text} as {stack.name}")
        return stack
    if year is None:
        # Selective recomputation came with it (Korthikanti 2022).
        year = 2022 if "selective" in row.text("recompute").lower() else 2021
        row.assume(f"{text} of {year}")
    return stack_named(f"megatron-lm {max(year, 2020)}")


def _traits(row: Row, stack: Stack) -> dict[str, Any]:
    """Facts about the software that notes, schedule and precision say."""
    notes, framework = row.text("notes").lower(), row.text("framework").lower()
    precision = row.text("precision").lower()
    traits: dict[str, Any] = {}
    if re.search(r"\beager\b", notes):
        traits["fused"] = False
    elif "compile" in notes or "compile" in framework:
        traits["fused"] = True
    if re.search(r"torchtitan (?:2025|.*\b2025)", framework) and traits.get("fused"):
        # Since 2025 its compilation takes in the loss.
        traits["fused_loss"] = True
    if not stack.fused_attention and re.search(r"flash.?att", f"{notes} {framework}"):
        traits["fused_attention"] = True
    if re.search(r"async ?-?tp", notes):
        traits["tensor_overlap"] = True
    if "deepep" in notes or "hybridep" in notes:
        traits["expert_once"] = True
    if "a2a overlap" in notes or "dualpipe" in row.text("pp_schedule").lower():
        # DualPipe runs a micro-batch's forward beside another's backward so that all-to-alls hide (DeepSeek-AI 2024).
        traits["expert_overlap"] = True
    if re.search(r"selective ?\((layer)?norm,(moe_)?act", row.text("recompute").lower()):
        # Matmuls' outputs are kept, what is element by element is repeated.
        traits["operators"] = "all"
    if "rowwise" in precision:
        traits["fp8_gain"] = 0.0
    if "fp4" in precision:
        traits["fp8_gain"] = 3.3 if "b300" in row.text("gpu").lower() else 2.0
    return traits


def _is_split(row: Row) -> bool:
    """Whether layers or matrices are split over devices."""
    return (row.count("tp") or 1) > 1 or (row.count("pp") or 1) > 1


def _usual_stack(row: Row) -> str:
    """What trains in such a layout where nobody says what does."""
    if _is_split(row) and not _PLAIN.search(row.text("framework").lower()):
        return "megatron-core"
    return "fsdp" if zero_stage_of(row) == 3 else "pytorch"
