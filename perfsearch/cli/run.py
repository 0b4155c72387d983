"""The command ``perfsearch-run``: start a script as torchrun or python does, with knobs.

Its options are ours and torchrun's, then the script's own. ``--search`` and ``--profile`` are the
same as ``perfsearch workload=script``.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from perfsearch.cli.terminal import (
    open_standard_streams,
    require_current_directory,
    told,
)
from perfsearch.core import command
from perfsearch.core.command import Command, carried_out
from perfsearch.core.docstrings import attribute_help
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.knob import Value
from perfsearch.core.python import large_imports, let_warnings_be_warnings, module_command
from perfsearch.core.signals import ExitCode
from perfsearch.core.version import version
from perfsearch.instrument.launch import ENTRY, LaunchConfig, by_python, python_arguments
from perfsearch.knobs import by_name
from perfsearch.knobs.arguments import batch_arguments
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch
from perfsearch.knobs.transport import (
    FILE_KEYS,
    KnobFile,
    KnobPlan,
    Mapped,
    apply,
    as_value,
    gather,
    plan,
    read_knobs,
)
from perfsearch.online.options import AutotuneOptions
from perfsearch.runners.deepspeed.command import LAUNCHERS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        argv: arguments without the program's name; ``None`` takes the command line's.

    """
    open_standard_streams()
    let_warnings_be_warnings()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments or arguments[0] in ("--help", "-h"):
            print(own_parser().format_help(), end="", flush=True)
            return ExitCode.DONE if arguments else ExitCode.BAD_INPUT
        if arguments[0] == "--version":
            print(f"perfsearch {version()}")
            return ExitCode.DONE
        require_current_directory()
        asked = split(arguments)
        check(asked)
        if asked.search or asked.profile:
            maps_of(asked)  # what is wrong with them is told before anything is composed
            return int(search(asked))
        return start(asked)
    except Exception as error:
        code = told("perfsearch-run", error)
        if code is None:
            raise
        return code


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


# -----------------------------------------------------------------------------
# A start of the script, with knobs in force where they are given.


def start(asked: RunArguments) -> int:
    """Start the script; return the exit code of the launcher.

    With an option of torchrun it is started as torchrun does, else as ``python`` does.
    """
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
        from perfsearch.online.knobs import check_knobs

        check_knobs(AutotuneOptions.from_mapping(asked.autotune))  # not by every rank
    if asked.parsed.no_python:
        return _torchrun(asked.parsed, asked.script, arguments)
    orders = LaunchConfig(
        script=asked.script,
        module=asked.parsed.module,
        knobs=planned.objects,
        autotune=asked.autotune,
        report=not asked.quiet,
        mapped=told,
        given=planned.mapped,
        by_torchrun=[] if _asks_for_torchrun(asked) else _by_torchrun(asked),
    )
    os.environ.update(orders.to_environment())
    if orders.by_torchrun:
        sys.stdout.flush()
        command = [sys.executable, *python_arguments(), "-m", ENTRY, asked.script, *arguments]
        os.execv(sys.executable, command)
    options = by_python(asked.parsed, asked.script, *arguments)
    return _torchrun(options, options.training_script, options.training_script_args)


def _asks_for_torchrun(asked: RunArguments) -> bool:
    """Whether anything but the script's own failure says that torchrun is to start it."""
    options = set(asked.torchrun) - {"-m", "--module"}
    given = any(name.startswith("PET_") for name in os.environ)  # torchrun's own variables
    return bool(options) or given or _called_for(asked) == "deepspeed"


def _by_torchrun(asked: RunArguments) -> list[str]:
    """The same command, with one rank by torchrun."""
    module = ["--module"] if asked.parsed.module else []
    options = ["--standalone", "--nproc-per-node=1", *module, *asked.own]
    words = [*options, "--", asked.script, *asked.arguments]
    return module_command("perfsearch.cli.run", *words)


def _given(asked: RunArguments) -> tuple[KnobPlan, list[str], dict[str, str]]:
    """How each knob reaches the script, the script's arguments, and what they give it."""
    found = read_knobs(asked.knobs) if asked.knobs else KnobFile()
    own, known = _in_their_place(asked), [*found.knobs, *by_name]
    follows = {} if found.runner == "deepspeed" else _at_the_same_batch(found.knobs, own)
    found = replace(found, knobs={**found.knobs, **follows, **own})
    if found.runner == "deepspeed":
        directory = Path(tempfile.mkdtemp(prefix="perfsearch-run-"))
        arguments, told, given = tuned(found, asked, directory)
        return KnobPlan(mapped=given), arguments, told
    maps = maps_of(asked)
    named = {mapped.name for mapped in maps}
    maps += [m for m in _recorded_maps(found.workload, asked) if m.name not in named]
    if MICRO_BATCH.name in found.knobs and not (asked.preset or asked.parsed.module):
        batch = {MICRO_BATCH.name, ACCUMULATION.name}
        if not batch & {mapped.name for mapped in maps}:  # the search found them itself
            maps += batch_arguments(asked.script, asked.arguments).maps
    for name in own.keys() - {*known} - named:
        raise BadInputError(f"-o runner.knobs.{name}: no such knob. {nearest(name, known)}")
    planned = plan(found.knobs, maps)
    for name, value in found.knobs.items():
        if name in by_name and name not in planned.mapped:
            key = f"-o runner.knobs.{name}" if name in own else f"--knobs {asked.knobs}: {name}"
            by_name[name].require(value, key)
    directory = Path(tempfile.mkdtemp(prefix="perfsearch-run-")) if maps else Path()
    arguments, told = apply(asked.arguments, maps, planned.mapped, directory)
    return planned, arguments, told


def _at_the_same_batch(file: Mapping[str, Value], own: Mapping[str, Value]) -> dict[str, Value]:
    """The accumulation that goes with another micro-batch than the file's.

    Raises:
        BadInputError: the file's samples of a step do not divide by it.

    """
    both = [MICRO_BATCH.of(file), ACCUMULATION.of(file)]
    micro = MICRO_BATCH.of(own)
    if None in both or micro is None or ACCUMULATION.name in own:
        return {}
    samples = math.prod(int(value) for value in both if value is not None)
    if samples % int(micro):
        raise BadInputError(
            f"-o runner.knobs.micro_batch={micro}: allowed: what divides the {samples} samples "
            "that a rank trains a step with these knobs. Another number of them needs "
            "-o runner.knobs.gradient_accumulation=VALUE too"
        )
    return {ACCUMULATION.name: samples // int(micro)}


_KNOB = re.compile(r"(?:\+{0,2}runner\.knobs\.(\w+)=(.*)|~runner\.knobs\.(\w+))", re.DOTALL)


def _in_their_place(asked: RunArguments) -> dict[str, Value]:
    """Values that ``-o`` gives knobs in the place of the file's; ``None``: as the script has it.

    Raises:
        BadInputError: the key is no knob's, or it has no single value.

    """
    values: dict[str, Value] = {}
    for override in asked.overrides:
        found = _KNOB.fullmatch(override)
        if found is None:
            raise BadInputError(
                f"-o {override} --knobs: nothing is searched, so that the file's knobs alone can "
                "be changed: -o runner.knobs.NAME=VALUE, or -o ~runner.knobs.NAME to leave one out"
            )
        name, text, dropped = found.groups()
        if text == "search" or (text or "").startswith(("[", "{")):
            raise BadInputError(
                f"-o {override} --knobs: nothing is searched, so that a single value is needed"
            )
        values[dropped or name] = None if dropped or text == "null" else as_value(text)
    return values


def _recorded_maps(workload: dict[str, Any], asked: RunArguments) -> list[Mapped]:
    """Maps of the search that wrote the knobs, where it was one over a script."""
    if workload.get("name") != "script":
        return []
    recorded = (workload.get("map") or (), workload.get("map_file") or (), workload.get("preset"))
    return gather(*recorded, asked.arguments)[0]


def _variables(environment: dict[str, str]) -> list[tuple[str, str, str]]:
    from perfsearch.knobs.nccl import VARIABLES

    names = {variable: knob for knob, variable in VARIABLES.items()}
    return [(names[k], k, v) for k, v in environment.items() if k in names]


def tuned(
    found: KnobFile, asked: RunArguments, directory: Path
) -> tuple[list[str], dict[str, str], dict[str, Value]]:
    """The script's arguments with a changed copy of its DeepSpeed configuration in their place.

    Args:
        found: the knobs, from a search with ``runner=deepspeed``.
        asked: the command line.
        directory: where the copy is written.

    Returns:
        The arguments; for each knob where it was written; and the values that the engine can be
        asked for.

    Raises:
        BadInputError: no argument names the configuration, or the batch does not divide.

    """
    from perfsearch.knobs.fsdp import STAGE
    from perfsearch.runners.deepspeed import config
    from perfsearch.runners.deepspeed.autotuning import Autotuning
    from perfsearch.runners.deepspeed.job import command_of, mappings

    option = f"--knobs {asked.knobs}"
    ranks = _local_ranks(asked)
    options = _deepspeed_workload(found, asked, ranks)
    command, path = command_of(options, found.ds_config, None)
    if path is None or command.config_path is None:
        raise BadInputError(
            f"{option}: it is of a DeepSpeed search, and no argument of the script names a "
            "DeepSpeed configuration, so that a changed copy could not reach it. Have the script "
            "read best/apply/ds_config.json, and leave --knobs out"
        )
    file = config.read_json(path)
    section = Autotuning.parse(file)
    apart = max(1, ranks * _nodes(asked) // section.mp_size)
    arguments = {**section.arg_mappings, **mappings(options)}
    now = config.batch_today(file, command, apart, arguments)
    batch = Batch(found.batch, now.global_batch, apart, now.micro_batch)
    whole = {
        MICRO_BATCH.name: now.micro_batch,
        ACCUMULATION.name: batch.accumulation,
        STAGE.name: config.stages_of(file)[0],
        **found.knobs,
    }
    micro = int(whole[MICRO_BATCH.name] or 1)
    if found.batch == "fixed" and batch.share % micro:
        raise BadInputError(
            f"{option}: micro_batch={micro} does not divide the {batch.share} samples that each of "
            f"{apart} ranks trains a step. Search for this number of ranks"
        )
    whole[ACCUMULATION.name] = batch.accumulation_of(whole)
    made, given = config.write(file, whole, batch, now.mappings)
    copy = directory / "ds_config.json"
    config.write_json(copy, made)
    words = command.for_trial(copy, given, port=None)
    names = {name: key for key, name in FILE_KEYS.items()}
    shown = {name: value for name, value in whole.items() if config.applies(name, whole)}
    told = {
        name: f"{path}:{names.get(name, f'{config.ZERO}.{name}')}={value}"
        for name, value in shown.items()
    }
    return words[command.script_at + 1 :], told, shown


def _deepspeed_workload(found: KnobFile, asked: RunArguments, ranks: int) -> dict[str, Any]:
    """``workload.*`` of this start: what the search was given, and what the command line says."""
    recorded: Mapping[str, Any] = found.workload
    launch = module_command("torch.distributed.run", f"--nproc-per-node={ranks}")
    module = ["-m"] if asked.parsed.module else []
    return {
        "command": [*launch, *module, asked.script, *asked.arguments],
        "map": asked.maps or recorded.get("map"),
        "map_file": asked.map_files or recorded.get("map_file"),
        "preset": asked.preset or recorded.get("preset"),
    }


def _local_ranks(asked: RunArguments) -> int:
    from torch.distributed.run import determine_local_world_size

    return int(determine_local_world_size(str(asked.parsed.nproc_per_node)))


def _nodes(asked: RunArguments) -> int:
    return _node_range(asked)[1]


def _node_range(asked: RunArguments) -> tuple[int, int]:
    from torch.distributed.run import parse_min_max_nnodes

    try:
        least, most = parse_min_max_nnodes(str(asked.parsed.nnodes))
    except (ValueError, RuntimeError) as error:
        raise BadInputError(f"--nnodes={asked.parsed.nnodes}: {error}") from error
    return int(least), int(most)


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


# -----------------------------------------------------------------------------
# A search over starts of the script, or a profile of one.


def search(asked: RunArguments) -> int:
    """Search over starts of the script, or profile one; return the command's exit code.

    Raises:
        BadInputError: an option that a search cannot honour.

    """
    from perfsearch.cli.search import main as perfsearch

    with carried_out(command_line(asked)):
        return perfsearch(*as_search(asked))


def as_search(asked: RunArguments) -> tuple[list[str], dict[str, Any]]:
    """The words by which ``perfsearch`` searches over the script, and the keys taken as they are.

    Raises:
        BadInputError: an option that a search cannot honour.

    """
    _require_usual_options(asked)
    overrides = list(asked.overrides)
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    taken = sorted(key for key in keys if key == "workload" or key.startswith("workload.command"))
    if taken:
        raise BadInputError(f"-o {taken[0]}=...: the script and its arguments stand after it.")
    if "runner" not in keys:
        runner = runner_for(asked)
        if runner != _USUAL:
            told = f"{command.given().name}: runner={runner}, as the script calls for it"
            print(told, file=sys.stderr)
        overrides.insert(0, f"runner={runner}")
    if asked.profile:
        if "mode" in keys:
            raise BadInputError("-o mode=...: --profile is -o mode=profile. Leave one of them out.")
        overrides.append("mode=profile")
    nproc = _nproc(asked)
    if nproc is not None and "nproc" not in keys:
        overrides.append(f"nproc={nproc}")
    overrides += _of_nodes(asked, keys)
    words = ["workload=script", "workload.command=[SCRIPT]", *overrides]
    return words, {"workload": workload(asked)}


def command_line(asked: RunArguments) -> Command:
    """The command line as hints are made of it."""
    rest: list[str] = []
    ranks: list[str] = []
    words = iter(asked.torchrun)
    for word in words:
        if not _names(word, "nproc_per_node"):
            rest.append(word)
        else:
            ranks += [word] if "=" in word else [word, next(words)]
    script = [asked.script, *asked.arguments]
    return Command("perfsearch-run", [*asked.own, *rest], script, ranks)


def workload(asked: RunArguments) -> dict[str, Any]:
    """The ``workload.*`` keys that the command line stands for."""
    given: dict[str, Any] = {
        "command": [asked.script, *asked.arguments],
        "module": bool(asked.parsed.module),
    }
    if asked.maps:
        given["map"] = list(asked.maps)
    if asked.map_files:
        given["map_file"] = list(asked.map_files)
    if asked.preset:
        given["preset"] = asked.preset
    return given


_SIGNS = {
    "deepspeed": re.compile(r"^\s*(?:import|from)\s+deepspeed\b", re.MULTILINE),
    "zero": re.compile(r"\bfully_shard\b|\bFullyShardedDataParallel\b|\bFSDPStrategy\b"),
}

_ARGUMENT_SIGNS = {
    "deepspeed": ("--deepspeed", "--deepspeed_config", "--deepspeed-config"),
    "zero": ("--fsdp", "--use_fsdp"),
}

_USUAL = "ddp"
"""The runner whose knobs fit a script that nothing else calls for."""


def runner_for(asked: RunArguments) -> str:
    """Which runner's knobs fit the script: by its arguments, else by what its source names.

    DeepSpeed's need its configuration; where none is named, what is around DeepSpeed is searched.
    """
    runner = _called_for(asked)
    if runner == "deepspeed" and not _is_configured(asked):
        print(
            f"{command.given().name}: no argument names the script's DeepSpeed configuration, so "
            "only what is around DeepSpeed is searched. To search its settings: "
            f"{_keys('runner=deepspeed', 'runner.ds_config=FILE.json')}",
            file=sys.stderr,
        )
        return _USUAL
    return runner


def _keys(*keys: str) -> str:
    return " ".join(map(command.given().key, keys))


def _called_for(asked: RunArguments) -> str:
    if asked.preset == "deepspeed":
        return asked.preset
    for runner, words in _ARGUMENT_SIGNS.items():
        if any(argument.partition("=")[0] in words for argument in asked.arguments):
            return runner
    source = "" if asked.parsed.module else Path(asked.script).read_text(errors="replace")
    return next((runner for runner, sign in _SIGNS.items() if sign.search(source)), _USUAL)


def _is_configured(asked: RunArguments) -> bool:
    from perfsearch.runners.deepspeed.job import names_configuration

    given = any(o.lstrip("+~").startswith("runner.ds_config=") for o in asked.overrides)
    return given or names_configuration(workload(asked))


_ALLOWED = ("nproc_per_node", "standalone", "module", "nnodes", "max_restarts", "run_path")
"""torchrun's options that mean something to a search."""

_OF_NODES = ("rdzv_endpoint", "rdzv_backend", "rdzv_id")
"""Those that mean something to one over several nodes."""


def _of_nodes(asked: RunArguments, keys: Collection[str]) -> list[str]:
    """The keys that torchrun's options on several nodes stand for.

    Args:
        asked: the command line.
        keys: that are given by ``-o``, and stay as they are.

    """
    least, nnodes = _node_range(asked)
    if nnodes == 1:
        return []
    if least != nnodes:
        raise BadInputError(
            f"--nnodes={asked.parsed.nnodes}: a search is of one number of nodes. Give "
            f"--nnodes={nnodes}"
        )
    endpoint = asked.parsed.rdzv_endpoint
    words = [] if "nnodes" in keys else [f"nnodes={nnodes}"]
    if "launcher" not in keys:
        slurm = "SLURM_JOB_NODELIST" in os.environ and not endpoint
        words.append(f"launcher={'slurm' if slurm else 'torchrun'}")
    if endpoint and "launcher.endpoint" not in keys:
        words.append(f"launcher.endpoint='{endpoint}'")
    return words


def _require_usual_options(asked: RunArguments) -> None:
    doing = "--profile" if asked.profile else "--search"
    several = _node_range(asked)[1] > 1
    refused = _unusual(asked.torchrun, (*_ALLOWED, *(_OF_NODES if several else ())))
    if refused:
        raise BadInputError(
            f"{refused} {doing}: the ranks are started in perfsearch's own way. Leave it out; "
            "--nproc-per-node, --nnodes, --rdzv-endpoint, --standalone and -m are kept"
        )


def _unusual(torchrun: Sequence[str], allowed: Sequence[str]) -> str:
    """The first option of torchrun that a search would have to ignore."""
    for option in torchrun:
        if option.startswith("--") and not any(_names(option, name) for name in allowed):
            return option.partition("=")[0]
        if option.startswith("-") and not option.startswith("--") and option != "-m":
            return option
    return ""


def _nproc(asked: RunArguments) -> int | str | None:
    if not any(_names(option, "nproc_per_node") for option in asked.torchrun):
        return None
    text = str(asked.parsed.nproc_per_node)
    return int(text) if text.isdigit() else "auto"


def _names(option: str, destination: str) -> bool:
    """Whether a token is that option, abbreviations included."""
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    return option.startswith("--") and bool(name) and destination.startswith(name)


# -----------------------------------------------------------------------------
# The command line: the own options, those of torchrun, the script and its arguments.


@dataclass(frozen=True)
class RunArguments:
    """What ``perfsearch-run`` was asked to do.

    Attributes:
        script: path of the script, or a module's name.
        arguments: the script's own, exactly as given.
        own: our options, exactly as given.
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
    own: list[str] = field(default_factory=list)
    knobs: str | None = None
    search: bool = False
    profile: bool = False
    autotune: dict[str, Any] | None = None
    overrides: list[str] = field(default_factory=list)
    maps: list[str] = field(default_factory=list)
    map_files: list[str] = field(default_factory=list)
    preset: str | None = None
    quiet: bool = False


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
    ours_given = {k: v for k, v in vars(options).items() if not k.startswith("autotune")}
    return RunArguments(
        script=script,
        arguments=arguments,
        torchrun=torchrun,
        parsed=parsed,
        own=own,
        autotune=tuning if tuning or options.autotune else None,
        **ours_given,
    )


def _fixed(text: str) -> tuple[str, Any]:
    """``NAME=VALUE`` with the value as a list, number or truth value where it is one."""
    import yaml  # type: ignore[import-untyped]

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


def own_parser() -> argparse.ArgumentParser:
    """The parser of our own options; torchrun's stand beside them."""
    parser = _Parser(
        prog="perfsearch-run",
        usage="perfsearch-run [torchrun's options] [these options] SCRIPT ARGUMENTS...",
        description="Starts a script as torchrun does where one of its options is given, else as "
        "python does, with knobs that a search has found, tuned while it trains, profiled, or "
        "searched. Without any of these it changes nothing, and says what it could change. "
        "Everything after SCRIPT reaches it untouched.",
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
        help="a key of perfsearch, as in -o budget.trials=40; with --knobs "
        "runner.knobs.NAME=VALUE, in the place of the file's value",
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
        help="arguments of a framework: which knobs it takes, and how its loggers are silenced in "
        "trials; none is chosen by itself",
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
    with large_imports():
        from torch.distributed import run

    parser: argparse.ArgumentParser = run.get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign, assignment]
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message}. See perfsearch-run --help.")


def _refuse(message: str) -> NoReturn:
    raise BadInputError(f"{message}. See perfsearch-run --help and torchrun --help.")


if __name__ == "__main__":
    sys.exit(main())
