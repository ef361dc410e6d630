"""How ``trine verify`` says what it found."""

from __future__ import annotations

from typing import Any

from trine.optim.verify import Check, Verification

__all__ = ["as_json", "as_text"]


def as_text(verification: Verification) -> str:
    """The terminal's table and the verdict under it."""
    one = verification
    place = "one rank" if one.ranks == 1 else f"{one.ranks} ranks ({one.backend})"
    lines = [f"{one.steps} optimizer steps on {place}, plain and with:"]
    lines += [f"    {line}" for line in _configuration(one)]
    lines.append("")
    width = max(len(check.name) for check in one.checks)
    lines += [_line(check, width) for check in one.checks]
    lines += ["", _verdict(one)]
    return "\n".join(lines)


def as_json(verification: Verification) -> dict[str, Any]:
    """The same, for programs."""
    one = verification
    return {
        "schema": "trine.verification/1",
        "verdict": one.verdict,
        "steps": one.steps,
        "ranks": one.ranks,
        "backend": one.backend,
        "configuration": one.configuration,
        "effects": list(one.effects),
        "tolerance": {"loss": one.tolerance.loss, "gradient": one.tolerance.gradient},
        "checks": [
            {
                "name": check.name,
                "holds": check.holds,
                "same_bits": check.is_same_bits,
                "relative_difference": _finite(check.measured),
                "tolerance": check.tolerance,
                "where": check.where,
                "said": check.said,
            }
            for check in one.checks
        ],
        "key_at_fault": one.key_at_fault,
    }


def _configuration(one: Verification) -> list[str]:
    if one.effects:
        return list(one.effects)
    keys = [
        f"{section}.{key} = {value!r}"
        for section, table in one.configuration.items()
        for key, value in table.items()
    ]
    return keys or ["nothing changed"]


def _line(check: Check, width: int) -> str:
    said = "ok  " if check.holds else "FAIL"
    allowed = "" if check.tolerance is None or check.is_same_bits else f" (at most {check.tolerance:.1e})"
    return f"{said}  {check.name:<{width}}  {check.said}{allowed}"


def _verdict(one: Verification) -> str:
    if one.holds:
        return one.verdict
    first = next(check for check in one.checks if not check.holds)
    where = f", first in {first.where}" if first.where else ""
    fault = ""
    if one.key_at_fault:
        fault = f"; the key at fault is {one.key_at_fault}"
    elif one.is_searched:
        fault = "; no key by itself explains it: they fail together"
    return f"{one.verdict}: {first.name}{where}{fault}"


def _finite(value: float | None) -> float | str | None:
    return value if value is None or value < float("inf") else "infinite"
