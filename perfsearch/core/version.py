"""Which perfsearch this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed version, which ``pyproject.toml`` alone states."""
    try:
        return importlib.metadata.version("perfsearch")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "unknown"
