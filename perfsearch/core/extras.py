"""What installs an optional package, as it works today: the package's own requirement."""

from __future__ import annotations

import re

_OF_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")


def how_to_install(package: str, extra: str) -> str:
    """The command that brings a missing package, as perfsearch's own metadata asks for it.

    The extra's requirements are named, and not ``perfsearch[EXTRA]``: that would be looked up where
    packages are published, whatever perfsearch was installed from.

    Args:
        package: that is missing; named by itself where the metadata is not known.
        extra: that brings it, by its name in ``pyproject.toml``.

    """
    wanted = requirements(extra) or [package]
    return "pip install " + " ".join(f"'{requirement}'" for requirement in wanted)


def requirements(extra: str) -> list[str]:
    """What an extra brings, as ``pip`` takes it; empty where that is not known."""
    import importlib.metadata  # a tenth of the time of a command that only prints its help

    try:
        listed = importlib.metadata.requires("perfsearch") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return []
    parted = [text.partition(";") for text in listed]
    return [
        requirement.strip()
        for requirement, _, marker in parted
        if (found := _OF_EXTRA.search(marker)) and found[1] == extra
    ]
