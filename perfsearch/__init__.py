"""perfsearch finds the fastest configuration of a PyTorch training job and proves the gain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from perfsearch.api import apply, autotune, search
    from perfsearch.result import SearchResult

__all__ = ["SearchResult", "apply", "autotune", "search"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: neither the functions nor the version are for free."""
    if name == "__version__":
        from perfsearch.core.version import version

        return version()
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = "perfsearch.result" if name == "SearchResult" else "perfsearch.api"
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    """What completion and ``help`` are to find, though it is not imported yet."""
    return sorted({*globals(), *__all__})
