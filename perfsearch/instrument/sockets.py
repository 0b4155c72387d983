"""Where the ranks of a search meet the controller. No torch here."""

from __future__ import annotations

from pathlib import Path


def socket_path(directory: str | Path, rank: int) -> Path:
    """The socket of rank ``rank``."""
    return Path(directory) / f"rank{rank}.sock"
