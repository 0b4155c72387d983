"""The command line of ``perfsearch-run``: ours and torchrun's options, then the script's own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, get_args, get_type_hints

from perfsearch.core.docstrings import attribute_help
from perfsearch.core.errors import BadInputError
from perfsearch.online.options import AutotuneOptions


@dataclass(frozen=True)
class RunArguments:
    """What ``perfsearch-run`` was asked to do.

    Attributes:
        script: path of the script, or a module's name.
        arguments: the script's own, exactly as given.
        torchrun: torchrun's options, exactly as given.
        parsed: the same, parsed by torchrun's own parser.
        knobs: file whose knobs are put into force.
        search: whether to search.
        profile: whether to say what holds it back, without a search.
        autotune: options of tuning while it trains; ``None``: not asked for.
        overrides: ``-o KEY=VALUE``.
        maps: ``--map NAME=ARGUMENT``.
        map_files: ``--map-file FILE:KEY``.
        preset: ``--preset NAME``.
        quiet: whether nothing is said of knobs.

    """

    script: str
    arguments: list[str]
    torchrun: list[str]
    parsed: argparse.Namespace
    knobs: str | None = None
    search: bool = False
    profile: bool = False
    autotune: dict[str, Any] | None = None
    overrides: list[str] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)
    map_files: list[str] = field(default_factory=list)
    preset: str | None = None
    quiet: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message}. See perfsearch-run --help.")


def own_parser() -> argparse.ArgumentParser:
    """The parser of our own options; torchrun's stand beside them."""
    parser = _Parser(
        prog="perfsearch-run",
        usage="perfsearch-run [torchrun's options] [these options] SCRIPT ARGUMENTS...",
        description="Starts a script as torchrun does, with knobs that a search has found, tuned "
        "while it trains, profiled, or searched. Without any of these it changes nothing, and says "
        "what it could change. Everything after SCRIPT reaches it untouched.",
        epilog="All options of torchrun are passed on: see torchrun --help.",
        allow_abbrev=False,
        add_help=False,
    )
    what = parser.add_argument_group("what to do")
    what.add_argument("--search", action="store_true", help="search over launched trials")
    what.add_argument(
        "--profile", action="store_true",
        help="start it once, measure where its time goes, and say what holds it back",
    )  # fmt: skip
    what.add_argument(
        "--knobs", metavar="FILE", help="put the knobs of best/config.yaml into force"
    )
    what.add_argument("--autotune", action="store_true", help="tune while it trains")
    what.add_argument("--quiet", action="store_true", help="say nothing of what is in force")
    search = parser.add_argument_group("of the search or profile, and of what was found")
    search.add_argument(
        "-o", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
        help="a key of perfsearch, as in -o budget.trials=40",
    )  # fmt: skip
    search.add_argument(
        "--map", action="append", default=[], metavar="NAME=ARGUMENT", dest="maps",
        help="the script takes this knob by this argument: micro_batch=--batch-size",
    )  # fmt: skip
    search.add_argument(
        "--map-file", action="append", default=[], metavar="FILE:KEY", dest="map_files",
        help="the script reads this knob from a JSON or YAML file: "
        "ds_config.json:train_micro_batch_size_per_gpu, or NAME=FILE:KEY",
    )  # fmt: skip
    search.add_argument(
        "--preset", choices=("hf-trainer", "lightning", "accelerate", "deepspeed"),
        help="arguments of a framework: which knobs it takes, and how checkpoints and loggers are "
        "silenced in trials; none is chosen by itself",
    )  # fmt: skip
    tuning = parser.add_argument_group("of tuning while it trains (each implies --autotune)")
    _add_tuning(tuning)
    return parser


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    """An option for each field of the options of tuning; what is not given is left to them."""
    hints, texts = get_type_hints(AutotuneOptions), attribute_help(AutotuneOptions)
    for member in fields(AutotuneOptions):
        name, text = member.name, texts[member.name].replace("`", "").replace("%", "%%")
        option, hint = f"--autotune-{name.replace('_', '-')}", hints[name]
        if name == "knobs":
            group.add_argument(
                option, action="append", metavar="NAME=VALUE",
                help="a value that is fixed, so that it is not tuned; [A,B]: the values to try",
            )  # fmt: skip
        elif hint is bool:
            spellings = [option, f"--{name.replace('_', '-')}"]
            group.add_argument(*spellings, action="store_true", default=None, help=text)
        else:
            kind = next((kind for kind in (int, float) if kind in (hint, *get_args(hint))), str)
            group.add_argument(option, type=kind, help=text)


def torchrun_parser() -> argparse.ArgumentParser:
    """The parser of torchrun, which raises instead of ending the process."""
    from torch.distributed import run

    parser: argparse.ArgumentParser = run.get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign, assignment]
    return parser


def _refuse(message: str) -> NoReturn:
    raise BadInputError(f"{message}. See perfsearch-run --help and torchrun --help.")


def split(argv: Sequence[str]) -> RunArguments:
    """Find the script, and whose each option before it is.

    Raises:
        BadInputError: there is no script, or an option is wrong.

    """
    ours, theirs = own_parser(), torchrun_parser()
    own: list[str] = []
    torchrun: list[str] = []
    place = 0
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "-":
        if argv[place] == "--":
            place += 1
            break
        token = argv[place]
        name = token.partition("=")[0]
        is_ours = name in ours._option_string_actions
        parser, taken = (ours, own) if is_ours else (theirs, torchrun)
        action = _action(parser, token)
        taken.append(token)
        place += 1
        if action.nargs is None and "=" not in token and not _joined(action, token):
            if place == len(argv):
                raise BadInputError(f"{token}: a value is missing. See perfsearch-run --help.")
            taken.append(argv[place])
            place += 1
    if place == len(argv):
        raise BadInputError(
            "no script was given. perfsearch-run [torchrun's options] SCRIPT ARGUMENTS..."
        )
    options = ours.parse_args(own)
    script, arguments = argv[place], list(argv[place + 1 :])
    parsed = theirs.parse_args([*torchrun, script])
    given = {f.name: getattr(options, f"autotune_{f.name}") for f in fields(AutotuneOptions)}
    tuning = {name: value for name, value in given.items() if value is not None}
    if "knobs" in tuning:
        tuning["knobs"] = dict(_fixed(text) for text in tuning["knobs"])
    return RunArguments(
        script=script,
        arguments=arguments,
        torchrun=torchrun,
        parsed=parsed,
        knobs=options.knobs,
        search=options.search,
        profile=options.profile,
        autotune=tuning if tuning or options.autotune else None,
        overrides=options.overrides,
        maps=options.maps,
        map_files=options.map_files,
        preset=options.preset,
        quiet=options.quiet,
    )


def _fixed(text: str) -> tuple[str, Any]:
    """``NAME=VALUE`` with the value as a list, number or truth value where it is one."""
    import yaml  # type: ignore[import-untyped]

    from perfsearch.instrument.mapping import as_value

    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise BadInputError(
            f"--autotune-knobs {text}: give it as NAME=VALUE, as in bucket_cap_mb=25"
        )
    if not value.startswith("["):
        return name, as_value(value)
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise BadInputError(
            f"--autotune-knobs {text}: not a list; give it as in bucket_cap_mb=[8,25]"
        ) from error


def _action(parser: argparse.ArgumentParser, token: str) -> argparse.Action:
    """The option that a token names, abbreviations of torchrun's included."""
    name = token.partition("=")[0]
    known = parser._option_string_actions
    if name in known:
        return known[name]
    if not name.startswith("--"):
        short = name[:2]  # as in -nVALUE
        if short in known and known[short].nargs is None:
            return known[short]
    found = {id(known[o]): known[o] for o in known if o.startswith(name) and name != "-"}
    if len(found) == 1:
        return next(iter(found.values()))
    what = "fits several options" if found else "is no option of perfsearch-run or torchrun"
    raise BadInputError(f"{name} {what}. See perfsearch-run --help and torchrun --help.")


def _joined(action: argparse.Action, token: str) -> bool:
    """Whether a short option carries its value, as in ``-t3``."""
    return not token.startswith("--") and token not in action.option_strings
