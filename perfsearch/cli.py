"""The command ``perfsearch``; it imports Hydra only when needed, as ``perfsearch.compose`` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perfsearch.cli_composed import (
    CONFIG_MODULE,
    check_before_anything_starts,
    check_group_choices,
    nearest_configuration,
)
from perfsearch.cli_errors import explain
from perfsearch.cli_job import Job, JobFailedError
from perfsearch.cli_knobs import open_knobs
from perfsearch.cli_recorded import take_recorded_configuration
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.signals import ExitCode, Interrupted, interruptible
from perfsearch.core.version import version
from perfsearch.surroundings import (
    flush_output,
    open_standard_streams,
    require_current_directory,
    require_supported_python,
    write_nowhere,
)

if TYPE_CHECKING:
    import argparse

    from perfsearch.config import Settings

_SIGPIPE = 141
"""What a shell reports of a command whose reader went away."""


def main(argv: Sequence[str] | None = None, given: Mapping[str, Any] | None = None) -> int:
    """Run the command and return its exit code; see ``ExitCode``.

    Args:
        argv: arguments without the program's name; ``None`` takes the command line's.
        given: keys whose values are taken as they are, not as Hydra would read them; they go
            before what ``argv`` says.

    """
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(arguments, given or {})
        flush_output()
        return code
    except BrokenPipeError:
        write_nowhere()
        return _SIGPIPE


def _main(arguments: list[str], given: Mapping[str, Any]) -> int:
    if "--help" in arguments or "-h" in arguments:
        from perfsearch.help import help_text

        print(help_text(), end="")
        return ExitCode.DONE
    if "--version" in arguments:
        print(f"perfsearch {version()}")
        return ExitCode.DONE
    try:
        require_supported_python()
        require_current_directory()
        with interruptible():
            return _command(arguments, given)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except BadInputError as error:
        print(f"perfsearch: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT


def _overrides_first(arguments: list[str]) -> list[str]:
    """Let options stand anywhere; Hydra's parser wants all KEY=VALUE side by side."""
    from hydra._internal.utils import get_args_parser

    takes_value = {
        name
        for action in get_args_parser()._actions
        for name in action.option_strings
        if action.nargs is None
    }
    overrides: list[str] = []
    options: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before in takes_value or (before in ("--info", "-i") and "=" not in argument)
        (options if argument.startswith("-") or is_value else overrides).append(argument)
    return [*overrides, *options]


def _command(arguments: list[str], given: Mapping[str, Any]) -> int:
    arguments = _overrides_first(open_knobs(arguments))
    flags = _parse(arguments)
    if flags.config_path is not None:
        take_recorded_configuration(arguments, flags)
    job = Job(_search, given)
    try:
        check_group_choices(flags)
        if not (flags.cfg or flags.info or flags.hydra_help or flags.shell_completion):
            check_before_anything_starts(flags)
        with _hydra_environment(arguments):
            import hydra

            hydra.main(version_base="1.3", config_path=CONFIG_MODULE, config_name="config")(job)()
    except BadInputError:
        raise
    except JobFailedError as failed:
        job.exit_codes.append(failed.exit_code)
    except Exception as error:
        from perfsearch.runners import why_no_knobs

        message = explain(error, lambda: nearest_configuration(flags), why_no_knobs)
        if message is None:
            raise
        raise BadInputError(message) from error
    return max(job.exit_codes, default=ExitCode.DONE)


def _search(settings: Settings) -> int:
    from perfsearch.pipeline.search import run
    from perfsearch.view import open_view

    return run(settings, open_view)


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Hydra's own arguments, with one clear message for what it cannot take."""
    from hydra._internal.utils import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    names = [name for action in parser._actions for name in action.option_strings]

    def refuse(message: str) -> None:
        raise BadInputError(f"{message}. See perfsearch --help.")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    flags, rest = parser.parse_known_args(arguments)
    if rest:
        name = rest[0].partition("=")[0]
        raise BadInputError(f"{name}: no such option. {nearest(name, names)}")
    actions = ("run", "multirun", "cfg", "info", "hydra_help", "shell_completion")
    asked = [f"--{name.replace('_', '-')}" for name in actions if getattr(flags, name)]
    if len(asked) > 1:
        raise BadInputError(f"{' '.join(asked)}: only one of these at a time.")
    if flags.resolve and not flags.cfg:
        raise BadInputError("--resolve: it goes with --cfg only.")
    if flags.experimental_rerun is not None:
        raise BadInputError("--experimental-rerun: give best/config.yaml's values as KEY=VALUE.")
    return flags


@contextmanager
def _hydra_environment(arguments: list[str]) -> Iterator[None]:
    """Let Hydra read ``arguments``, and let it raise its errors rather than print them."""
    before_argv, before = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [sys.argv[0], *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        sys.argv = before_argv
        if before is None:
            os.environ.pop("HYDRA_FULL_ERROR", None)
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


if __name__ == "__main__":
    sys.exit(main())
