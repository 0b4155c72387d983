"""What the callbacks of all frameworks do, each at the framework's own moments."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch import online
from perfsearch.api import prepare, read_knobs
from perfsearch.instrument.report import lines

if TYPE_CHECKING:
    from perfsearch.instrument.script import Script

_ALL_BUILT = 3
"""Optimizer steps after which everything is built, and what is in force can be read back."""


class Tuning:
    """Tunes the model that a run wraps with ``DistributedDataParallel``, and no other.

    Args:
        options: fields of ``perfsearch.online.AutotuneOptions``.

    Raises:
        BadInputError: an option that there is not, or a value that it cannot have.

    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = online.AutotuneOptions.from_mapping(options)

    def before_wrapping(self) -> None:
        """Tune what is wrapped from now on."""
        online.enable(self._options)

    def after_wrapping(self) -> None:
        """Leave alone what is wrapped from now on."""
        online.disable()


class Applying:
    """Sets a found configuration in what a run builds, and says once what is in force.

    Args:
        source: ``best/config.yaml``, the run's directory, or settings by name.

    Raises:
        BadInputError: there are none to be had from it.

    """

    def __init__(self, source: str | Path | Mapping[str, Any]) -> None:
        self._knobs = read_knobs(source)
        self._script: Script | None = None
        self._told = False

    def before_building(self) -> None:
        """Have everything that is built from now on take the settings."""
        if self._script is None:
            self._script = prepare(self._knobs)

    def report(self, steps: int = _ALL_BUILT, leads: bool = True) -> None:
        """Say what is in force and what is not, once it can be known.

        Args:
            steps: that the optimizer has made.
            leads: whether this is the rank that speaks.

        """
        if self._told or self._script is None or steps < _ALL_BUILT:
            return
        self._told = True
        if leads:
            for line in lines(self._knobs, {}, self._script.facts()):
                print(f"perfsearch: {line}", file=sys.stderr, flush=True)
