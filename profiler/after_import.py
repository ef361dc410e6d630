"""Do something when a module has been imported, without importing it."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["call_after_import"]


def call_after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Call ``action`` once, right after ``name`` was imported: now if it has been already.

    Returns a function that gives up waiting for it.
    """
    if name in sys.modules:
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.forget


class _Finder(MetaPathFinder):
    """Finds nothing itself; has the loader that the others find tell us when it is done."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._busy = False

    def forget(self) -> None:
        """Wait no more."""
        with contextlib.suppress(ValueError):  # another thread may import while a session ends
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Called by the import system for every import until ours was found."""
        if fullname != self._name or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None or isinstance(
            loader, type
        ):  # not ours to change: the module is imported unnoticed
            return spec

        def exec_module(module: ModuleType) -> None:
            original(module)
            if self in sys.meta_path:
                self.forget()
                self._action()

        with contextlib.suppress(AttributeError):  # it may have slots
            loader.exec_module = exec_module
        return spec
