"""The command ``perfsearch-run``: start a script as torchrun does, with knobs from outside."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsearch import __version__
from perfsearch.exits import ExitCode
from perfsearch.instrument.mapping import Mapped, apply
from perfsearch.instrument.orders import ENTRY, Orders
from perfsearch.instrument.presets import gather
from perfsearch.run_arguments import RunArguments, own_parser, split
from perfsearch.run_knobs import plan, read_knobs
from perfsearch.search.errors import BadInputError
from perfsearch.search.knob import Value
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
        print(f"perfsearch {__version__}")
        return ExitCode.DONE
    try:
        require_current_directory()
        asked = split(arguments)
        check(asked)
        if asked.search:
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
    doing = [n for n in ("search", "knobs") if getattr(asked, n)]
    doing += ["autotune"] if asked.autotune is not None else []
    if "search" in doing and len(doing) > 1:
        other = next(n for n in doing if n != "search")
        raise BadInputError(
            f"--search --{other}: one at a time. In a search -o runner.knobs.NAME=VALUE pins a knob"
        )
    if (asked.overrides or asked.preset) and not (asked.search or asked.knobs):
        option = "-o" if asked.overrides else "--preset"
        raise BadInputError(f"{option}: it belongs to --search (--preset also to --knobs).")
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
    knobs: dict[str, Value] = {}
    workload: dict[str, Any] = {}
    if asked.knobs:
        knobs, workload = read_knobs(asked.knobs)
    maps = maps_of(asked)
    named = {mapped.name for mapped in maps}
    maps += [mapped for mapped in _recorded_maps(workload, asked) if mapped.name not in named]
    planned = plan(knobs, maps)
    directory = Path(tempfile.mkdtemp(prefix="perfsearch-run-")) if maps else Path()
    arguments, told = apply(asked.arguments, maps, planned.mapped, directory)
    told.update({name: f"environment ({k}={v})" for name, k, v in _variables(planned.environment)})
    for name, value in planned.unreachable.items():
        print(
            f"perfsearch: without effect: {name}={value} cannot be given to a script from outside"
            + (", unless it takes it as an argument: --map" if asked.knobs else ""),
            file=sys.stderr,
        )
    os.environ.update(planned.environment)
    if asked.autotune is not None:
        from perfsearch.online.options import AutotuneOptions

        AutotuneOptions.from_mapping(asked.autotune)  # told here, not by every rank
    if asked.parsed.no_python:
        return _torchrun([*asked.torchrun, asked.script, *arguments])
    orders = Orders(
        script=asked.script,
        module=asked.parsed.module,
        knobs=planned.objects,
        autotune=asked.autotune,
        report=not asked.quiet,
        mapped=told,
    )
    os.environ.update(orders.to_environment())
    own = [option for option in asked.torchrun if not _is_module_flag(option)]
    return _torchrun([*own, "-m", ENTRY, asked.script, *arguments])


def _is_module_flag(option: str) -> bool:
    return option in ("-m", "--module", "--run-path", "--run_path")


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


def _torchrun(arguments: list[str]) -> int:
    """Run torch's own launcher, in this process; it ends with the exit code that torchrun has."""
    from torch.distributed import run

    run.main(arguments)
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
