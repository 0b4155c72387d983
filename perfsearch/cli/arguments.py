"""Arguments that commands beside a search have in common: numbers, a script by ``--command``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from perfsearch.core.errors import BadInputError


class OwnParser(argparse.ArgumentParser):
    """A parser that refuses what is wrong in one line, and takes options as they are spelt."""

    def __init__(self, **more: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            BadInputError: always.

        """
        raise BadInputError(f"{message}. See {self.prog} --help.")


def whole(low: int) -> Callable[[str], int]:
    """Reads a whole number of at least ``low``."""

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed: a whole number >= {low}")
        return int(text)

    return read


def positive(text: str) -> float:
    """Reads a number above 0."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: a number > 0")
    return value


def share(text: str) -> float:
    """Reads a share."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: a number from 0 to 1, 0.02 being 2%")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def of_script(command: str | None, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words of a search over a script, and the keys that are taken as they are.

    Args:
        command: how the script is started; ``None``: the words say all.
        words: ``GROUP=OPTION`` and ``KEY=VALUE``.

    Raises:
        BadInputError: there is no script in it, or a search could not start it so.

    """
    if command is None:
        return list(words), {}
    from perfsearch.cli import run
    from perfsearch.cli.arms import parse_command

    job = parse_command(command)
    if job.variables or job.python:
        cause = job.python or f"{next(iter(job.variables))}=..."
        raise BadInputError(
            f"--command {command!r}: {cause}: start perfsearch itself with it, and give the script "
            "and its arguments only"
        )
    ranks = [] if job.nproc is None else [f"--nproc-per-node={job.nproc}"]
    asked = run.split([*ranks, *(["-m"] if job.module else []), "--", *job.words])
    asked = replace(asked, search=True, overrides=list(words))
    run.check(asked)
    return run.as_search(asked)
