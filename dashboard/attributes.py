"""Attributes with dashes, such as ``aria-label``, which Python cannot spell as keyword arguments."""

from __future__ import annotations

from typing import Any

__all__ = ["aria", "data"]


def aria(**values: str) -> dict[str, Any]:
    """``aria(label="x")`` is ``{"aria-label": "x"}``; spread it into a component."""
    return {f"aria-{name}": value for name, value in values.items()}


def data(**values: str) -> dict[str, Any]:
    """``data(state="x")`` is ``{"data-state": "x"}``."""
    return {f"data-{name}": value for name, value in values.items()}
