"""The command ``perfsearch space``: what can be tuned in a job, without searching."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from perfsearch.cli.arguments import OwnParser, of_script
from perfsearch.config.options import show
from perfsearch.core.errors import printable
from perfsearch.core.signals import ExitCode

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings
    from perfsearch.core.knob import Knob
    from perfsearch.pipeline.tunable import Tunable, Tunables

_DESCRIPTION = """\
Prints what a search with the same words would tune: each knob with its value today, its values,
what must restart to change it, what it does to the result, and what it can gain, as far as that is
known without starting anything; then what is fixed, and what is left out, and why.
"""

_WIDTH = 100


def command(arguments: Sequence[str]) -> int:
    """Print it; return the exit code.

    Raises:
        BadInputError: a search with these words would be refused.

    """
    parser = make_parser()
    if any(word in ("--help", "-h") for word in arguments):
        print(parser.format_help(), end="")
        return ExitCode.DONE
    from perfsearch.cli.search import with_settings

    asked, rest = parser.parse_known_args(list(arguments))
    words, given = of_script(asked.command, rest)
    return with_settings(words, given, _print_json if asked.json else _print_table)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's own words; all others are those of a search."""
    parser = OwnParser(
        prog="perfsearch space",
        usage="perfsearch space [--json] [--command 'SCRIPT ...'] [GROUP=OPTION | KEY=VALUE ...]",
        description=_DESCRIPTION,
    )
    parser.add_argument("--command", metavar="'SCRIPT ...'", help="a script, as you start it")
    parser.add_argument("--json", action="store_true", help="for programs, one object")
    return parser


def _print_json(settings: Settings) -> int:
    from perfsearch.pipeline.tunable import tunables

    print(json.dumps(tunables(settings).to_plain(), indent=1))
    return ExitCode.DONE


def _print_table(settings: Settings) -> int:
    from perfsearch.pipeline.tunable import tunables

    print("\n".join(table(tunables(settings))))
    return ExitCode.DONE


# -----------------------------------------------------------------------------
# For people.


def table(found: Tunables) -> Iterator[str]:
    """The lines of it."""
    from perfsearch.pipeline.tunable import State

    by_state = {state: [one for one in found.knobs if one.state is state] for state in State}
    if found.unseen:
        yield from textwrap.wrap(f"note: {found.unseen}", _WIDTH)
    yield from _searched(by_state[State.SEARCHED], bounded=found.profile is not None)
    if by_state[State.FIXED]:
        yield "\nfixed"
    for one in by_state[State.FIXED]:
        yield from _wrapped(f"{one.name}={show(one.today)}", _of(one, one.why))
    reasons: dict[str, list[str]] = {}
    for one in by_state[State.LEFT_OUT]:
        reasons.setdefault(one.why, []).append(one.name)
    if reasons:
        yield "\nleft out"
    for why, names in reasons.items():
        yield from _wrapped(", ".join(names), why)
    if found.rules:
        yield "\nevery configuration keeps"
        yield from (f"  {printable(rule)}" for rule in found.rules)
    if found.profile is not None:
        yield f"\nat most: by the profile of the baseline in {found.profile}"


def _searched(knobs: Sequence[Tunable], bounded: bool) -> Iterator[str]:
    if not knobs:
        yield "nothing is searched"
        return
    from perfsearch.pipeline.cards import values_of

    rows = [["searched", "today", "values", "restarts", "result", "can shorten", "at most"]]
    for one in knobs:
        assert one.knob is not None
        shortens = ", ".join(one.knob.shortens) or "anything"
        first = [one.name, show(one.today), values_of(one.knob), _restarts(one.knob)]
        rows.append([*first, str(one.knob.numerics), shortens, _gain(one)])
    if not bounded:
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, about in zip(rows, [None, *knobs], strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield line.rstrip()
        if about is not None:
            yield from _wrapped("", _of(about))


def _of(one: Tunable, more: str = "") -> str:
    """What the knob is, and when it matters."""
    words = [] if one.knob is None or not one.knob.help else [one.knob.help]
    for other, values in one.knob.when.items() if one.knob is not None else ():
        words.append(f"only with {other}={' or '.join(map(show, values))}")
    return "; ".join([*words, *([more] if more else [])])


def _restarts(knob: Knob) -> str:
    from perfsearch.core.knob import Scope

    words = {Scope.STEP: "nothing", Scope.GROUP: "process group", Scope.PROCESS: "processes"}
    return words[knob.scope]


def _gain(one: Tunable) -> str:
    from perfsearch.metrics.bounds import gain_text

    return "" if one.bound is None else "?" if math.isinf(one.bound) else gain_text(one.bound)


def _wrapped(head: str, text: str) -> Iterator[str]:
    indent = " " * 4
    yield from textwrap.wrap(head, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
