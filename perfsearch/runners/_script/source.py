"""What starts of a script are forked from: torch's launcher, or a process that imported ahead."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsearch.core import command
from perfsearch.core.hardware import Environment
from perfsearch.core.trial import Outcome, Status
from perfsearch.instrument.imports import Imports
from perfsearch.instrument.launch import AHEAD
from perfsearch.runners._script.group import IMPORTED, base_environment
from perfsearch.runners._script.ways import Way
from perfsearch.workers.preload import LauncherGone, Preloaded

_MODULE = "perfsearch.instrument.launch"

_ROUNDS = 3
"""How often importing ahead is tried, each time without what did more than define things."""

_MOST_NAMED = 4


class Source:
    """The process that starts are forked from, made when it is first needed.

    From the second start on it is one that has imported what the first start had imported. Where
    that fails, or a start fails in it that does not fail plainly, it is the plain one for good.

    Args:
        way: how the script is started.
        variables: environment of the script's processes as it is today.
        imports_once: whether anything may be imported ahead.

    """

    def __init__(self, way: Way, variables: Mapping[str, str], imports_once: bool) -> None:
        self._way = way
        self._environ = base_environment(way, variables)
        self._may_import = imports_once and way.nnodes == 1
        self._process: Preloaded | None = None
        self._imports: Imports | None = None
        self._left_out: dict[str, str] = {}
        self._why_plain = ""
        self._is_stale = False
        self._proved = False

    @property
    def asks(self) -> bool:
        """Whether a start is to tell what it has imported."""
        return self._may_import and self._imports is None

    def learn(self, told: dict[str, Any] | None) -> None:
        """Take up what a start has imported, if it told."""
        if told is not None and self.asks:
            self._imports = Imports.from_json(told)

    def process(self, environment: Environment, log: Path) -> Preloaded:
        """The process; where it must be made, it is put on record, and ``log`` gets its output."""
        imports = self._imports if self._may_import else None
        process = self._process
        if process is not None and process.alive and not self._is_stale:
            has_imported = IMPORTED in process.said
            if has_imported == (imports is not None):
                return process
        self.close(environment)
        self._is_stale = False
        if imports is not None and self._import_ahead(imports, environment, log):
            assert self._process is not None
            return self._process
        self._process = self._made(environment, log, None)
        return self._process

    def _made(self, environment: Environment, log: Path, imports: Imports | None) -> Preloaded:
        first = None
        if imports is not None:
            first = {"imports": imports.to_json(), "by_torchrun": self._way.by_torchrun}
        return Preloaded(
            self._environ,
            environment.run_dir,
            log,
            _MODULE,
            environment.directory,
            environment.python,
            [AHEAD] if first else [],
            first,
        )

    def _import_ahead(self, imports: Imports, environment: Environment, log: Path) -> bool:
        """Make a process that has imported ahead; ``False`` where there can be none."""
        deadline = time.monotonic() + environment.limits.startup_s
        for _ in range(_ROUNDS):
            self._process = self._made(environment, log, imports)
            try:
                said = self._process.await_ready(max(0.0, deadline - time.monotonic()))
            except (LauncherGone, TimeoutError) as error:
                self.close(environment)
                self._be_plain(f"importing ahead failed ({str(error) or 'it took too long'})")
                return False
            if not said[IMPORTED]:
                self._imports = imports
                return True
            self._left_out.update(said[IMPORTED])
            imports = imports.without(said["with_them"])
            self.close(environment)
        self._be_plain("importing ahead did more than define things each time")
        return False

    def _be_plain(self, why: str) -> None:
        self._may_import, self._why_plain = False, why

    def doubts(self, failure: Outcome) -> bool:
        """Whether a start that failed in a fork may not fail plainly.

        Once a fork has run, one that takes too long is not tried again.
        """
        if failure.status is Status.OOM or failure.status.is_from_outside:
            return False
        return not (self._proved and failure.status is Status.TIMEOUT)

    def note_success(self) -> None:
        """A start in a fork has made its first steps."""
        self._proved = True

    def note_failure(self, why: str, variable: str) -> None:
        """A start failed in a fork and ran plainly.

        All others are plain, too, unless it failed for a variable that the script sets otherwise in
        each start: then only what was imported before it did is imported ahead.

        Args:
            why: what it failed of.
            variable: that variable; empty: there is none.

        """
        fewer = self._imports.before(variable) if self._imports is not None else None
        if fewer is None or not fewer.modules:
            self._be_plain(f"a start failed that had it imported ahead, and ran without ({why})")
            return
        self._imports, self._is_stale = fewer, True
        self._left_out[f"all after {variable}"] = "which the script sets otherwise in each start"

    def lines(self) -> list[str]:
        """What to tell of starts that import anew, or modules that each start does."""
        if self._why_plain:
            switch = command.given().key("workload.import_once=false")
            return [f"each start imported everything anew: {self._why_plain}; {switch} has it so"]
        if not self._left_out:
            return []
        named = [f"{name} ({why})" for name, why in list(self._left_out.items())[:_MOST_NAMED]]
        more = len(self._left_out) - len(named)
        others = f" and {more} more" if more else ""
        return [f"imported anew by each start, with what imports them: {', '.join(named)}{others}"]

    def close(self, environment: Environment) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close(environment.limits.grace_s)
