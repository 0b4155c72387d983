"""The command that the user gave, so that every hint is printed as that command takes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command line of which hints are made.

    Attributes:
        name: ``perfsearch``, ``perfsearch-run``, or ``perfsearch.search`` for a call from Python,
            which has the keys of the first.
        options: its words before the script, those that say how many ranks are started apart;
            ``perfsearch`` has all its words here.
        script: the script and its arguments.

    """

    name: str = "perfsearch"
    options: Sequence[str] = ()
    script: Sequence[str] = ()

    def key(self, text: str) -> str:
        """``KEY=VALUE`` as the command takes it."""
        quoted = shlex.quote(text)
        return f"-o {quoted}" if self._runs_scripts else quoted

    def ranks(self, number: int | str) -> str:
        """The option for so many ranks."""
        return f"--nproc-per-node {number}" if self._runs_scripts else f"nproc={number}"

    @property
    def without_ranks(self) -> str:
        """The whole command without a number of ranks; the key by itself where it is not known."""
        words = [*self.options, *self.script]
        return shlex.join([self.name, *words]) if words else self.ranks("auto")

    @property
    def sweeps(self) -> bool:
        """Whether it can be given several values of a key, by ``-m``."""
        return self.name == "perfsearch"

    @property
    def _runs_scripts(self) -> bool:
        return self.name == "perfsearch-run"


_given: ContextVar[Command] = ContextVar("command", default=Command())  # noqa: B039 - frozen


def given() -> Command:
    """The command that is being carried out."""
    return _given.get()


@contextmanager
def carried_out(command: Command) -> Iterator[None]:
    """Have hints be of this command while the block runs."""
    token = _given.set(command)
    try:
        yield
    finally:
        _given.reset(token)
