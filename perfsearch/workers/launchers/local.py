"""Ranks on this node alone (``launcher=local``)."""

from __future__ import annotations

import shlex
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perfsearch.core.files import private
from perfsearch.core.secrets import Redactor
from perfsearch.workers import processes
from perfsearch.workers.launchers.base import CannotStartError, Launch, Launcher, Process
from perfsearch.workers.preload import Preloaded


class Local(Launcher):
    """Starts ranks on this node."""

    def launch(
        self, preloaded: Preloaded, arguments: Callable[[Path], list[str]] | None = None
    ) -> Launch:
        """See ``Launcher``."""
        return Fork(preloaded, arguments)


@dataclass(frozen=True)
class Fork(Launch):
    """A group in a fork of a process that has imported what takes long, and that outlives it.

    Attributes:
        preloaded: that process.
        arguments: of the fork, which may name the group's directory; ``None``: it has none.

    """

    preloaded: Preloaded
    arguments: Callable[[Path], list[str]] | None = None

    @property
    def token(self) -> str:
        """See ``Launch``."""
        return self.preloaded.token

    @property
    def outliving(self) -> Sequence[int]:
        """See ``Launch``."""
        return (self.preloaded.pid,)

    def record(self, directory: Path) -> None:
        """See ``Launch``."""
        self.preloaded.record(directory)

    def forget(self) -> None:
        """Strike the group's directory; the process that it was forked from stays on record."""
        self.preloaded.strike_directory()

    def start(
        self, directory: Path, environment: Mapping[str, str], log: Path, limit_s: float
    ) -> Process:
        """See ``Launch``."""
        more = {} if self.arguments is None else {"arguments": self.arguments(directory)}
        return self.preloaded.fork(directory, environment, log, limit_s, **more)


@dataclass(frozen=True)
class Command(Launch):
    """A group that is started as its user would start it, in a session of its own.

    Attributes:
        words: the command.
        run_dir: where it is put on record.

    """

    words: Sequence[str]
    run_dir: Path
    _token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def token(self) -> str:
        """See ``Launch``."""
        return self._token

    def record(self, directory: Path) -> None:
        """See ``Launch``."""
        processes.record_group(self.run_dir, self.token, directory)

    def forget(self) -> None:
        """See ``Launch``."""
        processes.forget_group(self.run_dir, self.token)

    def start(
        self, directory: Path, environment: Mapping[str, str], log: Path, limit_s: float
    ) -> Process:
        """See ``Launch``."""
        with open(log, "ab", opener=private) as file:
            file.write(f"{shlex.join(Redactor().words(self.words))}\n".encode())
            file.flush()
            try:
                return subprocess.Popen(
                    list(self.words),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=dict(environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise CannotStartError(f"{self.words[0]}: {error.strerror}") from error
