"""The command ``perfsearch-run``: start a script as torchrun does, with knobs from outside."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.signals import ExitCode
from perfsearch.core.version import version
from perfsearch.instrument.facts import ENTRY, Orders
from perfsearch.instrument.mapping import Mapped, apply
from perfsearch.instrument.presets import gather
from perfsearch.run_arguments import RunArguments, own_parser, split
from perfsearch.run_knobs import KnobFile, KnobPlan, plan, read_knobs
from perfsearch.runners.deepspeed.command import LAUNCHERS
from perfsearch.surroundings import open_standard_streams, require_current_directory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: arguments without the program's name; ``None`` takes the command line's.

    """
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(own_parser().format_help(), end="")
        return ExitCode.DONE if arguments else ExitCode.BAD_INPUT
    if arguments[0] == "--version":
        print(f"perfsearch {version()}")
        return ExitCode.DONE
    try:
        require_current_directory()
        asked = split(arguments)
        check(asked)
        if asked.search or asked.profile:
            from perfsearch.run_search import search

            maps_of(asked)  # what is wrong with them is told before anything is composed
            return int(search(asked))
        return start(asked)
    except BadInputError as error:
        print(f"perfsearch-run: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT


def check(asked: RunArguments) -> None:
    """See that there is a script, and that what was asked for goes together.

    Raises:
        BadInputError: it does not.

    """
    doing = [n for n in ("search", "profile", "knobs") if getattr(asked, n)]
    doing += ["autotune"] if asked.autotune is not None else []
    trials = asked.search or asked.profile
    if trials and len(doing) > 1:
        first, other = doing[:2]
        pins = " In a search -o runner.knobs.NAME=VALUE pins a knob" if first == "search" else ""
        raise BadInputError(f"--{first} --{other}: one at a time.{pins}")
    if (asked.overrides or asked.preset) and not (trials or asked.knobs):
        option = "-o" if asked.overrides else "--preset"
        raise BadInputError(
            f"{option}: it belongs to --search and --profile (--preset also to --knobs)."
        )
    if (asked.maps or asked.map_files) and not (trials or asked.knobs):
        option = "--map" if asked.maps else "--map-file"
        raise BadInputError(f"{option}: it belongs to --search, --profile and --knobs.")
    if asked.parsed.no_python and doing:
        raise BadInputError(
            f"--no-python --{doing[0]}: only a Python script can be reached from outside. Give the "
            "script itself, without --no-python"
        )
    if asked.parsed.module or asked.parsed.no_python:
        return
    path = Path(asked.script)
    if path.suffix == ".ipynb":
        raise BadInputError(
            f"{path}: a notebook is no script. Convert it: jupyter nbconvert --to script {path}; "
            "or call perfsearch.search(...) in it"
        )
    if not path.is_file() and asked.script in LAUNCHERS:
        raise BadInputError(
            f"{asked.script}: a launcher, and perfsearch-run starts the ranks itself: "
            "perfsearch-run --nproc-per-node N SCRIPT ARGUMENTS. A DeepSpeed job may keep its "
            "launcher: perfsearch runner=deepspeed workload=script workload.command='deepspeed ...'"
        )
    if path.is_dir():
        raise BadInputError(
            f"{asked.script}: a directory, and a script is needed. A package is started by -m NAME"
        )
    if not path.is_file():
        near = f" There is {path}.py." if path.with_suffix(".py").is_file() else ""
        hint = "" if near else f" Looked from {Path.cwd()}. A module is started by -m {path}."
        raise BadInputError(f"{path}: no such script.{near}{hint}")


def maps_of(asked: RunArguments) -> list[Mapped]:
    """Where the script takes knobs from.

    Raises:
        BadInputError: a map is not of the right form, or two are for the same knob.

    """
    return gather(asked.maps, asked.map_files, asked.preset, asked.arguments)[0]


def start(asked: RunArguments) -> int:
    """Start the script as torchrun does; return the exit code of the launcher."""
    planned, arguments, told = _given(asked)
    told.update({name: f"environment ({k}={v})" for name, k, v in _variables(planned.environment)})
    for name, value in planned.unreachable.items():
        print(
            f"perfsearch: without effect: {name}={value} cannot be given to a script from outside"
            + (", unless it takes it as an argument: --map" if asked.knobs else ""),
            file=sys.stderr,
        )
    os.environ.update(planned.environment)
    if asked.autotune is not None:
        from perfsearch.online import AutotuneOptions, knobs

        knobs.check_knobs(AutotuneOptions.from_mapping(asked.autotune))  # not by every rank
    if asked.parsed.no_python:
        return _torchrun(asked.parsed, asked.script, arguments)
    orders = Orders(
        script=asked.script,
        module=asked.parsed.module,
        knobs=planned.objects,
        autotune=asked.autotune,
        report=not asked.quiet,
        mapped=told,
        given=planned.mapped,
    )
    os.environ.update(orders.to_environment())
    options = argparse.Namespace(**{**vars(asked.parsed), "module": True, "run_path": False})
    return _torchrun(options, ENTRY, [asked.script, *arguments])


def _given(asked: RunArguments) -> tuple[KnobPlan, list[str], dict[str, str]]:
    """How each knob reaches the script, the script's arguments, and what they give it."""
    found = read_knobs(asked.knobs) if asked.knobs else KnobFile()
    if found.runner == "deepspeed":
        from perfsearch.run_deepspeed import tuned

        directory = Path(tempfile.mkdtemp(prefix="perfsearch-run-"))
        arguments, told, given = tuned(found, asked, directory)
        return KnobPlan(mapped=given), arguments, told
    maps = maps_of(asked)
    named = {mapped.name for mapped in maps}
    maps += [m for m in _recorded_maps(found.workload, asked) if m.name not in named]
    planned = plan(found.knobs, maps)
    directory = Path(tempfile.mkdtemp(prefix="perfsearch-run-")) if maps else Path()
    arguments, told = apply(asked.arguments, maps, planned.mapped, directory)
    return planned, arguments, told


def _variables(environment: dict[str, str]) -> list[tuple[str, str, str]]:
    from perfsearch.parallel.nccl import VARIABLES

    names = {variable: knob for knob, variable in VARIABLES.items()}
    return [(names[k], k, v) for k, v in environment.items() if k in names]


def _recorded_maps(workload: dict[str, Any], asked: RunArguments) -> list[Mapped]:
    """Maps of the search that wrote the knobs, where it was one over a script."""
    if workload.get("name") != "script":
        return []
    recorded = (workload.get("map") or (), workload.get("map_file") or (), workload.get("preset"))
    return gather(*recorded, asked.arguments)[0]


def _torchrun(options: argparse.Namespace, script: str, arguments: Sequence[str]) -> int:
    """Run torch's own launcher, in this process; it ends with the exit code that torchrun has.

    It is handed what its parser made of its own options: some versions of ``argparse`` take an
    argument of the script for one of them where it is the beginning of one.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import record

    options.training_script, options.training_script_args = script, list(arguments)
    record(run.run)(options)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
