"""The command that the user gave, so that every hint is printed as that command takes it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_KEY_OPTION = "-o"
"""The option of ``perfsearch-run`` that takes ``KEY=VALUE``."""


@dataclass(frozen=True)
class Command:
    """A command line of which hints are made.

    Attributes:
        name: ``perfsearch``, ``perfsearch-run``, or ``perfsearch.search`` for a call from Python,
            which has the keys of the first.
        options: its words before the script, those that say how many ranks are started apart;
            ``perfsearch`` has all its words here.
        script: the script and its arguments.
        ranks_given: the words that say how many ranks.

    """

    name: str = "perfsearch"
    options: Sequence[str] = ()
    script: Sequence[str] = ()
    ranks_given: Sequence[str] = ()

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

    def again(self, *keys: str) -> str:
        """The whole command once more, with these ``KEY=VALUE`` in the place of what it had."""
        named = {key.partition("=")[0] for key in keys}
        if not self.is_known:
            return f"{self.name}(..., {', '.join(map(repr, keys))})"
        words: list[str] = [self.name, *self.ranks_given]
        given = iter(self.options)
        for word in given:
            value = next(given, "") if self._runs_scripts and word == _KEY_OPTION else word
            if value.lstrip("+").partition("=")[0] not in named:
                words += [word] if value is word else [word, value]
        option = [_KEY_OPTION] if self._runs_scripts else []
        for key in keys:
            words += [*option, key]
        return shlex.join([*words, *self.script])

    @property
    def is_known(self) -> bool:
        """Whether it was given in a shell, so that it can be printed to be given again."""
        return self._runs_scripts or self.name == "perfsearch"

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
