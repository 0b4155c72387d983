"""The command ``perfsearch``; it imports Hydra only when something is composed."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any

from perfsearch.cli.outcomes import Sweep
from perfsearch.cli.sweep import (
    SEARCH_PATH,
    check_before_anything_starts,
    check_group_choices,
    nearest_configuration,
    parsed,
)
from perfsearch.cli.terminal import (
    flush_output,
    named_lines,
    open_standard_streams,
    require_current_directory,
    require_supported_python,
    told,
    write_nowhere,
)
from perfsearch.config.compose import VERSION_BASE, merged, open_keys, plain
from perfsearch.config.messages import explain
from perfsearch.config.options import leaves, show
from perfsearch.config.schema import CONFIG_MODULE, Settings, validate
from perfsearch.core import shortage
from perfsearch.core.command import Command, carried_out
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.python import let_warnings_be_warnings
from perfsearch.core.signals import ExitCode, Interrupted, interruptible
from perfsearch.core.version import version

if TYPE_CHECKING:
    import argparse

    from perfsearch.pipeline.session import Result

_SIGPIPE = 141
"""What a shell reports of a command whose reader went away."""

COMMANDS = {
    "compare": "perfsearch.cli.compare",
    "join": "perfsearch.cli.join",
    "mcp": "perfsearch.cli.mcp",
    "session": "perfsearch.cli.session",
    "space": "perfsearch.cli.space",
    "try": "perfsearch.cli.tries",
}
"""First words that make another command, and the module of each, which has a ``command``."""

Act = Callable[[Settings], int]
"""Does what a command is for with checked settings; returns the exit code."""


def main(argv: Sequence[str] | None = None, given: Mapping[str, Any] | None = None) -> int:
    """Run the command and return its exit code; see ``ExitCode``.

    Args:
        argv: arguments without the program's name; ``None`` takes the command line's.
        given: keys whose values are taken as they are, not as Hydra would read them; they go
            before what ``argv`` says. Another command that has some is the one that hints are of.

    """
    open_standard_streams()
    let_warnings_be_warnings()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if given is not None:
            code = _main(arguments, given)
        else:
            with carried_out(_command(arguments)):
                code = _main(arguments, {})
        flush_output()
        return code
    except BrokenPipeError:
        write_nowhere()
        return _SIGPIPE
    except OSError as error:
        ended = told("perfsearch", error)
        if ended is None:
            raise
        return ended


def _command(words: Sequence[str]) -> Command:
    """The command line as hints are made of it."""
    ranks = [word for word in words if word.startswith("nproc=")]
    return Command("perfsearch", [w for w in words if w not in ranks], ranks_given=ranks)


def _main(arguments: list[str], given: Mapping[str, Any]) -> int:
    word = next((word for word in arguments[:1] if word in COMMANDS), "")
    named = f"perfsearch {word}".rstrip()
    try:
        if not word and _answered(arguments):
            return ExitCode.DONE
        require_supported_python()
        require_current_directory()
        with interruptible():
            if word:
                return int(import_module(COMMANDS[word]).command(arguments[1:]))
            return with_settings(arguments, given, Searches())
    except Interrupted as interrupted:
        return interrupted.exit_code
    except Exception as error:
        code = told(named, error)
        if code is None:
            raise
        return code


def _answered(arguments: list[str]) -> bool:
    """Whether help or the version was asked for, and is printed."""
    if any(word in ("--help", "-h", "--help-all") for word in arguments):
        from perfsearch.cli.help import help_text

        print(help_text(arguments), end="")
        return True
    if "--version" in arguments:
        print(f"perfsearch {version()}")
        return True
    return False


def with_settings(arguments: Sequence[str], given: Mapping[str, Any], act: Act) -> int:
    """Compose the settings that a command line asks for, and do something with them.

    Args:
        arguments: ``GROUP=OPTION`` and ``KEY=VALUE``, and Hydra's own options.
        given: keys whose values are taken as they are.
        act: what is done, for each job where there are several.

    Raises:
        BadInputError: nothing could be composed, and nothing was done.
        Interrupted: a signal came.

    """
    arguments = _overrides_first(open_keys(arguments))
    flags = _parse(arguments)
    if flags.config_path is not None:
        _take_recorded_configuration(arguments, flags)
    job = Job(given, act)
    sweep = Sweep()
    try:
        if flags.config_dir is not None:
            _take_option_directory(arguments, flags)
        check_group_choices(flags)
        if not (flags.cfg or flags.info or flags.hydra_help or flags.shell_completion):
            sweep.jobs = check_before_anything_starts(flags)
            job.sweep = sweep
        with _hydra_environment(arguments):
            import hydra

            place = f"pkg://{CONFIG_MODULE}"
            hydra.main(version_base=VERSION_BASE, config_path=place, config_name="config")(job)()
    except BadInputError:
        raise
    except JobFailedError as failed:
        job.exit_codes.append(failed.exit_code)
    except Exception as error:
        if shortage.remedy(error):
            raise
        from perfsearch.runners import why_no_knobs

        message = explain(error, lambda: nearest_configuration(flags), why_no_knobs)
        if message is None:
            raise
        raise BadInputError(message) from error
    if isinstance(act, Searches):
        sweep.show_outcomes(act.done)
    return max(job.exit_codes, default=ExitCode.DONE)


class Searches:
    """Searches, and keeps what came of it; the ``Act`` of the command without another name.

    Attributes:
        done: settings and result of each search, ``None`` where there was none.

    """

    def __init__(self) -> None:
        self.done: list[tuple[Settings, Result | None]] = []

    def __call__(self, settings: Settings) -> int:
        """Carry out what ``settings.mode`` asks for; return the exit code."""
        from perfsearch.cli.submit import submitted
        from perfsearch.cli.view import open_view
        from perfsearch.pipeline.search import carry_out

        self.done.append((settings, None))
        elsewhere = submitted(settings)
        if elsewhere is not None:
            return elsewhere
        result, code = carry_out(settings, open_view)
        self.done[-1] = settings, result
        return code


class Job:
    """What Hydra calls once a job, in this process or, by another launcher, in a new one.

    Args:
        given: keys that go before the composed ones, values as they are.
        act: what is done with the settings; by default a search.

    """

    def __init__(self, given: Mapping[str, Any], act: Act | None = None) -> None:
        self.given, self.act = dict(given), act or Searches()
        self.exit_codes: list[int] = []
        self.process = _this_process()
        self.sweep: Sweep | None = None

    def __call__(self, config: Any) -> None:
        """Do what is to be done with the settings in ``config``, and note the exit code.

        Raises:
            Interrupted: a signal ended it, so that no further job is started.
            JobFailedError: it failed in a process that cannot hand its code back otherwise.

        """
        os.environ.pop("HYDRA_FULL_ERROR", None)
        elsewhere = _this_process() != self.process
        with ExitStack() as stack:
            if self.sweep is not None:
                place = _job_number() if elsewhere else len(self.exit_codes)
                words = self.sweep.words(place)
                if elsewhere:
                    stack.enter_context(named_lines(self.sweep.name(place)))
                elif words is not None:
                    self.sweep.show_header(place)
                if words is not None:
                    stack.enter_context(carried_out(_command(words)))
            code = _exit_code(config, self.given, self.act)
        self.exit_codes.append(code)
        if code in (ExitCode.SIGHUP, ExitCode.SIGINT, ExitCode.SIGTERM):
            raise Interrupted(ExitCode(code))
        if code and elsewhere:
            raise JobFailedError(code)


def _this_process() -> tuple[str, int]:
    """The host and number of this process; a job may run on another host."""
    return os.uname().nodename, os.getpid()


def _job_number() -> int:
    """Hydra's number of the job that runs in this process, which it has started."""
    from hydra.core.hydra_config import HydraConfig

    return int(HydraConfig.get().job.num)


class JobFailedError(Exception):
    """A job of a sweep in another process ended with an exit code other than 0.

    Attributes:
        exit_code: which.

    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def _exit_code(config: Any, given: Mapping[str, Any], act: Act) -> int:
    try:
        try:
            settings = validate(merged(plain(config), given))
        except BadInputError:
            raise
        except Exception as error:
            message = None if shortage.remedy(error) else explain(error, dict)
            if message is None:
                raise
            raise BadInputError(message) from error
        return act(settings)
    except Exception as error:
        code = told("perfsearch", error)
        if code is None:
            traceback.print_exc()
        return ExitCode.NO_TRIAL_SUCCEEDED if code is None else code


# -----------------------------------------------------------------------------
# The command line, before Hydra reads it.


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Hydra's own arguments, with one clear message for what it cannot take."""
    parser = _hydra_parser()
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


def _overrides_first(arguments: list[str]) -> list[str]:
    """Let options stand anywhere; Hydra's parser wants all KEY=VALUE side by side."""
    takes_value = {
        name
        for action in _hydra_parser()._actions
        for name in action.option_strings
        if action.nargs is None
    }
    overrides: list[str] = []
    options: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = before in takes_value or (before in ("--info", "-i") and "=" not in argument)
        (options if argument.startswith("-") or is_value else overrides).append(argument)
    return [*overrides, *options]


def _hydra_parser() -> argparse.ArgumentParser:
    """Hydra's own parser.

    Hydra shows it nowhere else, and ``hydra.main`` reads the same command line with it, so that a
    copy of ours could come to disagree.
    """
    from hydra._internal.utils import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    return parser


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


def _take_recorded_configuration(arguments: list[str], flags: argparse.Namespace) -> None:
    """``--config-path RUN/best`` runs exactly what ``RUN/best/config.yaml`` says."""
    directory = os.path.abspath(flags.config_path)
    file = os.path.join(directory, f"{flags.config_name or 'config'}.yaml")
    if not os.path.isfile(file):
        raise BadInputError(
            f"--config-path {flags.config_path}: there is no {file}. Give the directory of a "
            "config.yaml that a search wrote; options of your own come by --config-dir."
        )
    settings = _hydra_settings()
    arguments[:0] = settings
    arguments += ["--config-path", directory]
    flags.overrides[:0] = settings
    flags.config_path = directory


def _hydra_settings() -> list[str]:
    """What ``conf/config.yaml`` says of Hydra, for a configuration file that does not."""
    import yaml  # type: ignore[import-untyped]

    file = resources.files(CONFIG_MODULE).joinpath("config.yaml")
    ours = yaml.safe_load(file.read_text(encoding="utf-8"))
    chosen = [item for entry in ours["defaults"] if entry != "_self_" for item in entry.items()]
    groups = [(key.split()[-1], name) for key, name in chosen if key.startswith("override ")]
    keys = [(f"hydra.{key}", value) for key, value in leaves(ours["hydra"])]
    return [f"{key}={show(value)}" for key, value in [*keys, *groups]]


def _take_option_directory(arguments: list[str], flags: argparse.Namespace) -> None:
    """``--config-dir DIRECTORY`` is ``hydra.searchpath=[file://DIRECTORY]``.

    That is the one of the two that can be composed without Hydra's private parts. Directories
    that the command line names there come after it.
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    directory = os.path.abspath(flags.config_dir)
    if not os.path.isdir(directory):
        raise BadInputError(f"--config-dir {flags.config_dir}: there is no such directory.")
    given = [o for o in parsed(flags.overrides) if o.key_or_group == SEARCH_PATH]
    further = given[0].value() if given else []
    if not isinstance(further, list):
        return  # which Hydra refuses
    places = [f"file://{directory}", *further]
    quoted = (QuotedString(str(place), Quote.double).with_quotes() for place in places)
    word = f"{SEARCH_PATH}=[{','.join(quoted)}]"
    dropped = {o.input_line for o in given}
    for words in (arguments, flags.overrides):
        words[:] = [word, *(w for w in words if w not in dropped)]


if __name__ == "__main__":
    sys.exit(main())
