"""Implementations that a package holds, one public module each, imported when used."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TypeVar

from perfsearch.core.suggest import nearest

Kind = TypeVar("Kind")


def names(package: str) -> list[str]:
    """The public modules of a package, apart from ``base``, which holds the contract.

    Args:
        package: its dotted name.

    """
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return sorted(m.name for m in modules if not m.name.startswith("_") and m.name != "base")


def load(package: str, key: str, name: str, kind: type[Kind]) -> type[Kind]:
    """Import the implementation ``name``: the class of that module that is a ``kind``.

    Args:
        package: dotted name of the package that holds it.
        key: of the configuration, which names it in an error.
        name: of the module.
        kind: the contract.

    Raises:
        LookupError: there is none of that name.

    """
    if name not in (known := names(package)):
        raise LookupError(f"{key}={name}: unknown. {nearest(name, known)}")
    module = importlib.import_module(f"{package}.{name}")
    for item in vars(module).values():
        if isinstance(item, type) and issubclass(item, kind) and item.__module__ == module.__name__:
            return item
    raise LookupError(f"{module.__name__} defines no subclass of {kind.__name__}")
