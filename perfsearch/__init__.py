"""perfsearch finds the fastest configuration of a PyTorch training job and proves the gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from perfsearch.api import apply, autotune, search

__all__ = ["apply", "autotune", "search"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: neither the functions nor the version are for free."""
    if name == "__version__":
        from perfsearch.core.version import version

        return version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("perfsearch.api"), name)
