"""The command ``perfsearch compare``: which of several jobs is faster, start by start."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.cli.arguments import OwnParser, positive, share, whole
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.signals import ExitCode

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

_DESCRIPTION = """\
Starts each of several training jobs in turn, each once in a block and in an order that is drawn,
until it is decided which is faster, and compares their losses and their work. The first is what
the others are compared with. Each is one of:
  'train.py --lr 1'               a command, as you start it: also python, torchrun, NAME=VALUE ...
  git:REVISION                    the script at a commit (with --command), checked out elsewhere
  python:/path/to/python          the script in another environment (with --command)
  outputs/RUN/best/config.yaml    what a search over the script has found
  outputs/RUN#12                  trial 12 of that search
"""

_EPILOG = """\
Exit: 0 faster, 4 no difference shown, 5 slower, 6 not the same computation; 1 one of them does not
run, 2 bad input, 3 no more files, memory or disk, 129, 130 and 143 for SIGHUP, SIGINT and SIGTERM.
Of several the best decides.
"""


def command(arguments: Sequence[str]) -> int:
    """Compare; return the exit code.

    Raises:
        BadInputError: something asked for cannot be done; nothing was started.
        Interrupted: a signal came.

    """
    parser = make_parser()
    if not arguments or any(word in ("--help", "-h") for word in arguments):
        print(parser.format_help(), end="")
        return ExitCode.DONE if arguments else ExitCode.BAD_INPUT
    asked = parser.parse_args(list(arguments))
    if asked.baseline is not None:
        Baseline.read(asked.baseline).fill(asked)
    if len(asked.arms) < 2:
        raise BadInputError(
            f"{' '.join(asked.arms) or 'no arm'}: two or more are needed, the reference first. "
            "See perfsearch compare --help"
        )
    return _compare(asked)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's own words."""
    parser = OwnParser(
        prog="perfsearch compare",
        usage="perfsearch compare [options] REFERENCE OTHER [OTHER ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("arms", nargs="*", metavar="ARM", help=argparse.SUPPRESS)
    add("--command", metavar="'SCRIPT ...'", help="what is started at a commit or by a Python")
    add("--nproc-per-node", type=whole(1), metavar="N", help="ranks, where torchrun is not named")
    add("--max-starts", type=whole(2), metavar="N", help="most starts of each (default 8)")
    add("--budget-seconds", type=positive, metavar="S", help="time for all of it")
    add("--min-gain", type=share, metavar="X", help="relative difference that matters (0.02: 2%%)")
    add("--allowed-slowdown", type=share, metavar="X", help="up to which nothing counts as slower")
    add("--baseline", type=Path, metavar="FILE", help="what to compare with, for CI: see the docs")
    add("--json", type=Path, metavar="FILE", help="write the result there, too")
    add("--seed", type=whole(0), default=0, metavar="N", help="of orders and random numbers")
    add("--samples-per-step", type=whole(1), metavar="N", help="over all ranks, if not counted")
    add("--loss-tolerance", type=positive, metavar="X", help="as limits.loss_tolerance")
    add("--preset", metavar="NAME", help="silences a framework's loggers, as perfsearch-run's")
    add("--link", action="append", metavar="PATH", help="data that commits do not have (git:)")
    add("--one-at-a-time", action="store_true", help="never have starts of several alive at once")
    add("--run-dir", type=Path, metavar="DIR", help="where its files go (outputs/compare)")
    add("--no-tracking", action="store_true", help="without MLflow")
    return parser


@dataclass(frozen=True)
class Baseline:
    """What a project compares with, in a file of its own, for CI.

    Both are measured on the same machine: a stored number from another day would be compared with
    that machine's load as well.

    Attributes:
        reference: an arm, such as ``git:origin/main``.
        command: what is started.
        arm: what is compared with it; by default the command on the files as they are.
        allowed_slowdown: up to which nothing counts as slower.

    """

    reference: str
    command: str
    arm: str = ""
    allowed_slowdown: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Read it from YAML or JSON.

        Raises:
            BadInputError: it is not as it should be.

        """
        from perfsearch.config.options import build_options
        from perfsearch.core.settings_file import read_settings

        names = [f.name for f in fields(cls)]
        try:
            plain = read_settings(path)
        except ValueError as error:
            raise BadInputError(f"--baseline {path} {error}. {nearest('', names)}") from error
        try:
            return build_options(cls, plain, "")
        except BadInputError as error:
            raise BadInputError(f"--baseline {path}: {error}") from error

    def fill(self, asked: argparse.Namespace) -> None:
        """Put it before what the command line says."""
        asked.command = asked.command or self.command
        if asked.allowed_slowdown is None:
            asked.allowed_slowdown = self.allowed_slowdown
        asked.arms = [self.reference, *(asked.arms or [self.arm or asked.command])]


def _compare(asked: argparse.Namespace) -> int:
    from perfsearch.cli.arms import Workshop, parse_arms
    from perfsearch.cli.view import open_view
    from perfsearch.core.files import remove_left_directories, temporary_directory
    from perfsearch.instrument.user_files import UserFiles
    from perfsearch.pipeline.compare import Question, compare
    from perfsearch.runners._arms import Arms
    from perfsearch.runners.base import environment_of
    from perfsearch.tracking import store_files

    arms = parse_arms(asked.arms, asked.command)
    settings = _settings(asked, [arm.name for arm in arms])
    environment = environment_of(settings)
    options: dict[str, Any] = {}
    if asked.samples_per_step is not None:
        options["samples_per_step"] = asked.samples_per_step
    if asked.preset is not None:
        options["preset"] = asked.preset
    question = Question(
        max_starts=asked.max_starts or Question.max_starts,
        min_gain=asked.min_gain or 0.0,
        allowed_slowdown=asked.allowed_slowdown or 0.0,
        seconds=asked.budget_seconds,
        json_file=asked.json,
    )
    remove_left_directories()
    with temporary_directory() as directory:
        stores = store_files(settings)
        workshop = Workshop(environment, options, stores, UserFiles(), directory, asked.link or [])
        runner = workshop.switched(arms) or Arms(
            {arm.name: workshop.make(arm) for arm in arms}, environment, not asked.one_at_a_time
        )
        with open_view(settings) as view:
            return int(compare(settings, runner, question, view).exit_code)


def _settings(asked: argparse.Namespace, names: Sequence[str]) -> Settings:
    from perfsearch.config.schema import Selected, Settings, TrackingSettings
    from perfsearch.core.objective import Limits

    limits = (
        Limits() if asked.loss_tolerance is None else Limits(loss_tolerance=asked.loss_tolerance)
    )
    return Settings(
        runner=Selected("compare"),
        strategy=Selected("compare"),
        workload=Selected("script", {"arms": list(names)}),
        nproc=asked.nproc_per_node or "auto",
        seed=asked.seed,
        limits=limits,
        run_dir=asked.run_dir or Path("outputs") / "compare",
        resume="never",
        tracking=TrackingSettings(enabled=not asked.no_tracking),
    )
