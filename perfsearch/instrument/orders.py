"""What the process of a script is told, through one environment variable. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from perfsearch.core.knob import Value

VARIABLE = "PERFSEARCH_SCRIPT"
"""Holds ``Orders`` as JSON in each rank that ``perfsearch-run`` starts."""

ENTRY = "perfsearch.instrument.main"
"""Module that torch's launcher runs in place of the script."""

FIRST_LOSSES = 5
"""Steps after the first whose losses are compared; the first is before the common start."""


@dataclass(frozen=True)
class Orders:
    """How a script is to be run.

    Attributes:
        script: its path, or the module's name.
        module: whether ``script`` is a module.
        knobs: values to put into force; ``None`` leaves what the script itself says.
        autotune: options of tuning while it trains; ``None``: none.
        report: whether rank 0 says what was, or could be, changed.
        report_after_steps: steps after which it says so.
        directory: of the search that started it, with a socket for each rank; empty: no search.
        log_directory: where the ranks of a search log.
        token: mark of the search's processes.
        controller_pid: the process whose death ends the script.
        controller_started: when that process was started.
        mapped: knobs that were given to the script by its own arguments or files, and how.
        given: their values.

    """

    script: str
    module: bool = False
    knobs: dict[str, Value] = field(default_factory=dict)
    autotune: dict[str, Any] | None = None
    report: bool = True
    report_after_steps: int = 3
    directory: str = ""
    log_directory: str = ""
    token: str = ""
    controller_pid: int = 0
    controller_started: float = 0.0
    mapped: dict[str, str] = field(default_factory=dict)
    given: dict[str, Value] = field(default_factory=dict)

    def to_environment(self) -> dict[str, str]:
        """The variable to set for the ranks."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Orders:
        """What ``to_environment`` set.

        Raises:
            KeyError: nothing was set.

        """
        return cls(**json.loads(environ[VARIABLE]))
