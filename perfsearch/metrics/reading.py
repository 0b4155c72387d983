"""Readings that may fail one by one without ending the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Guard:
    """Runs readings; one that fails is left out and named once in ``unsupported``.

    Drivers, containers and exotic devices each lack something else, and the exception's class
    differs from library to library, so every class is caught and kept with its reading's name.
    """

    def __init__(self) -> None:
        self.unsupported: dict[str, str] = {}

    def read(self, name: str, reading: Callable[[], T]) -> T | None:
        """Return the reading, or ``None`` where it failed."""
        try:
            return reading()
        except Exception as error:
            self.missing(name, f"{type(error).__name__}: {error}")
            return None

    def missing(self, name: str, why: str) -> None:
        """Note that the reading ``name`` is not to be had here."""
        if name not in self.unsupported:
            self.unsupported[name] = why
            _log.debug("no reading of %s: %s", name, why)
