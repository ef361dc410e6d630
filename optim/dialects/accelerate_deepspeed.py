"""Accelerate's table ``deepspeed_config``: a file of DeepSpeed's own, or the few keys of it that stand there.

Both are read by the other dialect, :mod:`trine.optim.dialects.deepspeed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trine.optim.dialects.deepspeed import imported_from, read_tables
from trine.optim.dialects.reading import Reading, spelled
from trine.record.errors import UsageError

__all__ = ["read_inside"]

#: Keys that say what DeepSpeed's file says; ``accelerate launch`` refuses them beside one (``DeepSpeedPlugin``).
_IN_THE_FILE = (
    *("zero_stage", "gradient_accumulation_steps", "gradient_clipping"),
    *("offload_optimizer_device", "offload_optimizer_nvme_path"),
    *("offload_param_device", "offload_param_nvme_path"),
)


def read_inside(
    reading: Reading, tables: Mapping[str, Any], precision: str, ranks: int | None, folder: Path | None
) -> None:
    """Put into ``reading`` what the table of ``tables`` says, under ``mixed_precision`` = ``precision``.

    ``folder``: where a relative path of DeepSpeed's file begins; ``None``: at the working directory.
    """
    given = tables.get("deepspeed_config") or {}
    inline = given if isinstance(given, Mapping) else {}  # what is no table, the walk has named
    file = inline.get("deepspeed_config_file")
    if file is None or str(file).lower() == "none":
        name = f"{reading.source}: deepspeed_config"
        described: Mapping[str, Any] = _inline(inline, precision)
    elif isinstance(file, str):
        _refuse_beside(reading, inline, precision, file)
        described, name = read_tables(Path(file) if folder is None else folder / file)
    else:
        reading.errors.append(
            f"deepspeed_config.deepspeed_config_file = {spelled(file)}: it takes the path of DeepSpeed's JSON file"
        )
        return
    try:
        found = imported_from(described, name, ranks)
    except UsageError as error:
        reading.errors.append(str(error))
        return
    for key, value in found.config.changes().items():
        reading.set(key, value, "deepspeed_config")
    if precision == "fp8":  # over parameters in bf16
        reading.set("precision.float8", True, "mixed_precision")
    reading.arguments |= found.arguments
    reading.to_do += found.to_do
    reading.notes += found.notes


def _refuse_beside(reading: Reading, inline: Mapping[str, Any], precision: str, file: str) -> None:
    beside = [f"deepspeed_config.{name}" for name in _IN_THE_FILE if inline.get(name) is not None]
    if precision != "no":
        beside.append("mixed_precision")
    if beside:
        reading.errors.append(
            f"{', '.join(beside)} beside deepspeed_config_file, which Accelerate refuses: say it in {file} and take it out here"
        )


def _inline(values: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """Accelerate's short keys as DeepSpeed's; stage 2 where none is said, as its plugin has it."""
    stage = values.get("zero_stage")
    zero: dict[str, Any] = {"stage": 2 if stage is None else stage}
    for table in ("offload_optimizer", "offload_param"):
        for name in ("device", "nvme_path"):
            value = values.get(f"{table}_{name}")
            if value is not None and (name, value) != ("nvme_path", "none"):
                zero.setdefault(table, {})[name] = value
    found: dict[str, Any] = {"zero_optimization": zero}
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        if values.get(key) is not None:
            found[key] = values[key]
    if (
        precision != "no"
    ):  # for fp8 too, DeepSpeed's parameters are in bf16 (its plugin's set_mixed_precision)
        found["fp16" if precision == "fp16" else "bf16"] = {"enabled": True}
    return found
