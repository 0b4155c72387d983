"""The command ``perfsearch session``: a job held open, for ``perfsearch try``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfsearch.cli.arguments import OwnParser, of_script, positive
from perfsearch.core.errors import BadInputError
from perfsearch.core.signals import ExitCode

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

_DESCRIPTION = """\
Starts a job, measures it as it is, and keeps its processes warm: perfsearch try, in another
terminal, then measures one configuration beside it within seconds. All other words are those of a
search. Nothing is searched.
"""

_EPILOG = """\
It ends by Ctrl-C, by perfsearch try --end, or when nothing was tried for so long. Exit: 0; 1 the
job does not run as it is; 2 bad input; 129, 130 and 143 where a signal ended a measurement.
"""


def command(arguments: Sequence[str]) -> int:
    """Hold a session; return the exit code.

    Raises:
        BadInputError: something asked for cannot be done; nothing was started.
        Interrupted: a signal came.

    """
    parser = make_parser()
    if any(word in ("--help", "-h") for word in arguments):
        print(parser.format_help(), end="")
        return ExitCode.DONE
    from perfsearch.cli.search import with_settings

    asked, rest = parser.parse_known_args(list(arguments))
    if any(word in ("-m", "--multirun") for word in rest):
        raise BadInputError("--multirun: a session is of one job. Open one for each.")
    words, given = of_script(asked.command, rest)

    def hold(settings: Settings) -> int:
        from perfsearch.cli.view import open_view
        from perfsearch.pipeline import tries

        return tries.hold(settings, open_view, 60 * asked.idle_minutes)

    return with_settings(words, given, hold)


def make_parser() -> OwnParser:
    """The parser of the command's own words."""
    parser = OwnParser(
        prog="perfsearch session",
        usage="perfsearch session [options] [GROUP=OPTION | KEY=VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--command", metavar="'SCRIPT ...'", help="a script, as you start it")
    parser.add_argument(
        "--idle-minutes", type=positive, default=30.0, metavar="M",
        help="it ends when nothing was tried for so long (default 30)",
    )  # fmt: skip
    return parser
