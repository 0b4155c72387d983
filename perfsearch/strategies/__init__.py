"""Search strategies, one module each, imported when used."""

from __future__ import annotations

from perfsearch.core import registry
from perfsearch.strategies.base import Hints, Prediction, Strategy

__all__ = ["Hints", "Prediction", "Strategy", "load", "names"]


def names() -> list[str]:
    """Names that ``strategy=`` can take: the public modules of this package."""
    return registry.names(__name__)


def load(name: str) -> type[Strategy]:
    """Import the strategy ``name``.

    Raises:
        LookupError: there is none of that name.

    """
    return registry.load(__name__, "strategy", name, Strategy)  # type: ignore[type-abstract]
