"""perfsearch finds the fastest configuration of a PyTorch training job and proves the gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from perfsearch.api import apply, autotune, search

__all__ = ["apply", "autotune", "search"]


def __getattr__(name: str) -> Any:
    """Import the functions for use from Python when one is used: they are not for free."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("perfsearch.api"), name)
