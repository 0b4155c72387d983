"""The command ``perfsearch try``: one configuration beside the baseline, in an open session."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.cli.arguments import OwnParser, whole
from perfsearch.core.errors import BadInputError
from perfsearch.core.signals import ExitCode

_DESCRIPTION = """\
Measures one configuration beside the baseline in the warm processes of an open session (perfsearch
session). KEY is a knob, with or without runner.knobs. before it; all others are as the job has
them. One reading of each shows no speed-up; --repeats N measures both N times, in an order that is
drawn, and gives the 95% interval.
"""

_EPILOG = """\
Exit: 0 measured, however it compares; 1 it failed, or the session ended; 2 bad input, nothing was
measured.
"""

_BEFORE = "runner.knobs."


def command(arguments: Sequence[str]) -> int:
    """Ask an open session; return the exit code.

    Raises:
        BadInputError: no session is open, or it refuses what is asked.

    """
    parser = make_parser()
    if not arguments or any(word in ("--help", "-h") for word in arguments):
        print(parser.format_help(), end="")
        return ExitCode.DONE if arguments else ExitCode.BAD_INPUT
    asked = parser.parse_args(list(arguments))
    if bool(asked.knobs) == asked.end:
        raise BadInputError("give KEY=VALUE ..., or --end. See perfsearch try --help.")
    from perfsearch.pipeline.session_socket import SessionEndedError, ask

    request: dict[str, Any] = {"op": "end"}
    if not asked.end:
        request = {"op": "try", "knobs": read_knobs(asked.knobs), "repeats": asked.repeats}
    run_dir = asked.run_dir or the_open_one()
    try:
        reply = ask(run_dir, request)
    except SessionEndedError as error:
        print(f"perfsearch try: {error}", file=sys.stderr)
        return ExitCode.NO_TRIAL_SUCCEEDED
    if "error" in reply:
        raise BadInputError(str(reply["error"]))
    if asked.json:
        print(json.dumps(reply, indent=1))
    elif not asked.end:
        print("\n".join(table(reply)))
    both = [reply["tried"], reply["baseline"]] if "tried" in reply else []
    failed = any(arm is not None and arm["status"] != "ok" for arm in both)
    return ExitCode.NO_TRIAL_SUCCEEDED if failed else ExitCode.DONE


def make_parser() -> OwnParser:
    """The parser of the command's words."""
    parser = OwnParser(
        prog="perfsearch try",
        usage="perfsearch try [options] KEY=VALUE ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("knobs", nargs="*", metavar="KEY=VALUE", help=argparse.SUPPRESS)
    add("--repeats", type=whole(1), default=1, metavar="N", help="pairs of readings (default 1)")
    add("--run-dir", type=Path, metavar="DIR", help="of the session, where several are open")
    add("--json", action="store_true", help="for programs, one object")
    add("--end", action="store_true", help="end the session")
    return parser


def the_open_one() -> Path:
    """The directory of the session that is open below ``outputs``.

    Raises:
        BadInputError: there is none, or there are several.

    """
    from perfsearch.pipeline.session_socket import DIRECTORY, SOCKET, NoSessionError, is_open

    places = [socket.parent for socket in sorted(DIRECTORY.parent.glob(f"*/{SOCKET}"))]
    found = [place for place in places if is_open(place)]
    if not found:
        raise NoSessionError(
            f"no session is open below {DIRECTORY.parent}. Open one in another terminal: "
            "perfsearch session; or name its directory by --run-dir"
        )
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise BadInputError(f"several sessions are open: {listed}. Name one by --run-dir")
    return found[0]


def read_knobs(words: Sequence[str]) -> dict[str, Any]:
    """The values of ``KEY=VALUE`` words, as a search reads them.

    Raises:
        BadInputError: one is not of that form.

    """
    from perfsearch.cli.sweep import parsed
    from perfsearch.config.messages import explain

    knobs: dict[str, Any] = {}
    for word in words:
        word = word if word.startswith(_BEFORE) else f"{_BEFORE}{word}"
        try:
            (override,) = parsed([word])
        except Exception as error:
            message = explain(error, dict)
            if message is None:
                raise
            raise BadInputError(message) from error
        key = override.key_or_group
        plain = not (override.is_add() or override.is_delete() or override.is_sweep_override())
        value = override.value() if plain else None
        if not plain or isinstance(value, list | dict):
            raise BadInputError(f"{word}: one value at a time is tried. Give NAME=VALUE")
        if not key.startswith(_BEFORE) or "." in key.removeprefix(_BEFORE):
            raise BadInputError(f"{word}: knobs alone can be tried. Give NAME=VALUE")
        knobs[key.removeprefix(_BEFORE)] = value
    return knobs


def table(reply: Mapping[str, Any]) -> Iterator[str]:
    """What came of it, for people."""
    arms = [("baseline", reply["baseline"]), ("tried", reply["tried"])]
    rows = [["", reply.get("unit", ""), "ms/step", "peak GiB", "trials"]]
    failed = []
    for name, arm in arms:
        if arm is None:
            continue
        if arm["status"] != "ok":
            log = f" Full log: {arm['log']}" if arm["log"] else ""
            failed.append(f"{name}: {arm['status']}: {arm['reason']}.{log}")
        numbers = (arm.get(key) for key in ("rate", "step_ms", "peak_gib"))
        cells = ["" if number is None else f"{number:.4g}" for number in numbers]
        rows.append([name, *cells, ", ".join(map(str, arm["trials"]))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if len(failed) < len(rows) - 1:
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            yield "  ".join(cells).rstrip()
    yield from failed
    if reply["ratio"] is not None:
        yield str(reply["said"])
