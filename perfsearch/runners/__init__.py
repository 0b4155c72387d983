"""Runners, one module each, imported when used."""

from __future__ import annotations

import importlib
import pkgutil

from perfsearch.runners.base import Outcome, Plan, Runner
from perfsearch.search.suggest import nearest

__all__ = ["Outcome", "Plan", "Runner", "load", "names"]


def names() -> list[str]:
    """Names that ``runner=`` can take: the public modules of this package."""
    modules = pkgutil.iter_modules(__path__)
    return sorted(m.name for m in modules if not m.name.startswith("_") and m.name != "base")


def load(name: str) -> type[Runner]:
    """Import the runner ``name``.

    Raises:
        LookupError: there is none of that name.

    """
    if name not in names():
        raise LookupError(f"runner={name}: unknown. {nearest(name, names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    for item in vars(module).values():
        if (
            isinstance(item, type)
            and issubclass(item, Runner)
            and item.__module__ == module.__name__
        ):
            return item
    raise LookupError(f"{module.__name__} defines no subclass of Runner")
