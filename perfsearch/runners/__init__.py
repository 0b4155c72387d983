"""Runners, one module each, imported when used."""

from __future__ import annotations

from perfsearch.core import registry
from perfsearch.core.trial import Outcome
from perfsearch.runners.base import NoKnobs, Plan, Runner

__all__ = ["Outcome", "Plan", "Runner", "load", "names"]


def names() -> list[str]:
    """Names that ``runner=`` can take: the public modules of this package."""
    return registry.names(__name__)


def load(name: str) -> type[Runner]:
    """Import the runner ``name``.

    Raises:
        LookupError: there is none of that name.

    """
    return registry.load(__name__, "runner", name, Runner)  # type: ignore[type-abstract]


def why_no_knobs(name: str) -> str:
    """Why that runner has no keys ``runner.knobs``; empty where it has, or is none."""
    runner = load(name) if name in names() else Runner
    return runner.no_knobs if issubclass(runner, NoKnobs) else ""
