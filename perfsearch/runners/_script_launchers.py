"""The process that starts of a script are forked from: torch's launcher, imported once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from perfsearch.workers.environment import Environment
from perfsearch.workers.preload import Preloaded

_MODULE = "perfsearch.instrument.launch"


class Launchers:
    """Made when it is first needed, and anew where it has ended.

    Args:
        variables: environment of the script's processes as it is today.

    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._process: Preloaded | None = None

    def process(self, environment: Environment, log: Path) -> Preloaded:
        """The process; where it must be made, it is put on record, and ``log`` gets its output."""
        if self._process is None or not self._process.alive:
            self.close(environment)
            environ = {**os.environ, **self._variables}
            self._process = Preloaded(environ, environment.run_dir, log, _MODULE)
        return self._process

    def close(self, environment: Environment) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.close(environment.limits.grace_s)
