"""Which perfsearch this is."""

from __future__ import annotations


def version() -> str:
    """The installed version, which ``pyproject.toml`` alone states."""
    import importlib.metadata  # a tenth of the time of a command that only prints its help

    try:
        return importlib.metadata.version("perfsearch")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "unknown"
