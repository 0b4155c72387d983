"""Search strategies, one module each, imported when used."""

from __future__ import annotations

import importlib
import pkgutil

from perfsearch.search.suggest import nearest
from perfsearch.strategies.base import Hints, Prediction, Strategy

__all__ = ["Hints", "Prediction", "Strategy", "load", "names"]


def names() -> list[str]:
    """Names that ``strategy=`` can take: the public modules of this package."""
    modules = pkgutil.iter_modules(__path__)
    return sorted(m.name for m in modules if not m.name.startswith("_") and m.name != "base")


def load(name: str) -> type[Strategy]:
    """Import the strategy ``name``.

    Raises:
        LookupError: there is none of that name.

    """
    if name not in names():
        raise LookupError(f"strategy={name}: unknown. {nearest(name, names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    for item in vars(module).values():
        if (
            isinstance(item, type)
            and issubclass(item, Strategy)
            and item.__module__ == module.__name__
        ):
            return item
    raise LookupError(f"{module.__name__} defines no subclass of Strategy")
