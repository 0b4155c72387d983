"""Implementations that a package holds, a public module or sub-package each, and a user's own code.

They are imported when used; their names are read from the package's directory alone.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from typing import Any, TypeVar

from perfsearch.core.errors import nearest
from perfsearch.core.python import large_imports

Contract = TypeVar("Contract")


def names(package: str) -> list[str]:
    """The public modules and sub-packages of a package, whose own code is not executed.

    Args:
        package: its dotted name; its ``base`` holds the contract and is left out.

    """
    modules = pkgutil.iter_modules(_directories(package))
    return sorted(m.name for m in modules if not m.name.startswith("_") and m.name != "base")


def _directories(package: str) -> list[str]:
    if package in sys.modules:  # whose path may have been added to
        return list(sys.modules[package].__path__)
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None, package
    return list(spec.submodule_search_locations)


def load(package: str, key: str, name: str, kind: type[Contract]) -> type[Contract]:
    """Import the implementation ``name``: the class of that module that is a ``kind``.

    In a sub-package it is the class of the module that is called as ``key``, such as ``runner``,
    or where there is none of the sub-package itself.

    Args:
        package: dotted name of the package that holds it.
        key: of the configuration, which names it in an error.
        name: of the module or sub-package.
        kind: the contract.

    Raises:
        LookupError: there is none of that name.

    """
    if name not in (known := names(package)):
        raise LookupError(f"{key}={name}: unknown. {nearest(name, known)}")
    with large_imports():
        module = importlib.import_module(f"{package}.{name}")
        if hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{key}"):
            module = importlib.import_module(f"{module.__name__}.{key}")
    for item in vars(module).values():
        if isinstance(item, type) and issubclass(item, kind) and item.__module__ == module.__name__:
            return item
    raise LookupError(f"{module.__name__} defines no subclass of {kind.__name__}")


def imported(reference: str) -> Any:
    """What ``MODULE:NAME`` stands for; the current directory can be imported from.

    Raises:
        Exception: whatever importing it raises, ``AttributeError`` where the module has none.

    """
    module, _, name = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), name)
