"""The DeepSpeed job that is to be tuned: its command, its configuration, its ranks, its batch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perfsearch.core import secrets
from perfsearch.core.errors import BadInputError, nearest
from perfsearch.core.extras import how_to_install
from perfsearch.core.hardware import Environment, Hardware, detect_hardware
from perfsearch.core.narrow import SEARCH
from perfsearch.core.python import module_command
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch
from perfsearch.knobs.fsdp import STAGE
from perfsearch.knobs.transport import FILE_KEYS, PRESETS, Mapped, parse_map, parse_map_file, preset
from perfsearch.runners.deepspeed import config
from perfsearch.runners.deepspeed.autotuning import Autotuning
from perfsearch.runners.deepspeed.command import LAUNCHERS, Command
from perfsearch.runners.deepspeed.config import CONFIGURED, Today

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings

_WORKLOAD = "script"


def command_and_file(settings: Settings) -> tuple[Command, Path]:
    """The command, and the path of the configuration.

    Raises:
        BadInputError: another workload, a wrong command, or no configuration.

    """
    workload = settings.workload
    if workload.name != _WORKLOAD:
        raise BadInputError(
            f"workload={workload.name}: runner=deepspeed trains your own script. Set "
            "workload=script workload.command='deepspeed train.py --deepspeed_config ds.json'"
        )
    ds_config = settings.runner.options.get("ds_config")
    nproc = None if settings.nproc == "auto" else settings.nproc
    command, path = command_of(
        workload.options, None if ds_config is None else str(ds_config), nproc
    )
    _require(command)
    if path is None:
        raise BadInputError(
            f"workload.command={shlex.join(command.words)}: names no DeepSpeed configuration "
            "(--deepspeed_config FILE.json). Set runner.ds_config=FILE.json where the script "
            "itself names it"
        )
    return command, path


def _require(command: Command) -> None:
    """Refuse a launcher that is not there.

    Raises:
        BadInputError: it is not installed.

    """
    own = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if shutil.which(command.words[0], path=own) is None:
        install = ""
        if command.launcher == "deepspeed":
            install = f" Run: {how_to_install('deepspeed', 'deepspeed')}"
        raise BadInputError(f"workload.command: {command.words[0]} is not installed.{install}")


def hardware(command: Command, environment: Environment) -> Hardware:
    """Ranks as the command starts them, and the GPUs that they use."""
    ranks = command.ranks()
    if ranks is not None and environment.nproc not in (None, ranks):
        raise BadInputError(
            f"nproc={environment.nproc}: the command starts {ranks} ranks. Change the command"
        )
    device = device_today()
    chosen = command.devices()
    if chosen is None:
        ranks = ranks or environment.nproc
        if ranks is None and not detect_hardware(device, environment).gpus:
            raise BadInputError(
                "workload.command: without a GPU it must say how many ranks it starts, as in "
                "--num_gpus 2"
            )
        return detect_hardware(device, replace(environment, nproc=ranks))
    every = detect_hardware(device, replace(environment, nproc=None))
    if every.gpus and max(chosen) >= len(every.gpus):
        raise BadInputError(f"--include {chosen}: only {len(every.gpus)} GPUs are visible")
    gpus = tuple(every.gpus[i] for i in chosen) if every.gpus else ()
    return replace(every, nproc=len(chosen), gpus=gpus)


def device_today() -> str:
    """``runner.device`` of a DeepSpeed job, which reads its own variable."""
    return "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "auto"


def data_parallel(ranks: int, autotuning: Autotuning) -> int:
    """Ranks that train different samples."""
    if ranks % autotuning.mp_size:
        raise BadInputError(f"autotuning.mp_size={autotuning.mp_size}: does not divide {ranks}")
    return ranks // autotuning.mp_size


def batch_within(
    now: Today, ranks: int, rule: Literal["fixed", "free"], asked: Autotuning
) -> Batch:
    """The arithmetic of batches, within the bounds of the section.

    Raises:
        BadInputError: bounds that exclude everything, or the batch of today where it may change.

    """
    low, high = asked.min_train_batch_size, asked.max_train_batch_size
    least = asked.min_train_micro_batch_size_per_gpu
    if asked.max_train_micro_batch_size_per_gpu < least:
        raise BadInputError(
            "autotuning.max_train_micro_batch_size_per_gpu="
            f"{asked.max_train_micro_batch_size_per_gpu}: below "
            f"min_train_micro_batch_size_per_gpu={least}"
        )
    if high is not None and high < low:
        raise BadInputError(
            f"autotuning.max_train_batch_size={high}: below min_train_batch_size={low}"
        )
    if high is not None and high < ranks:
        raise BadInputError(
            f"autotuning.max_train_batch_size={high}: {ranks} ranks train at least {ranks}"
        )
    if rule == "free" and not low <= now.global_batch <= (high or now.global_batch):
        name, bound = ("min", low) if now.global_batch < low else ("max", high)
        raise BadInputError(
            f"autotuning.{name}_train_batch_size={bound}: the configuration itself trains the "
            f"global batch {now.global_batch}. Let the bounds include it, or change its batch"
        )
    return Batch(rule, now.global_batch, ranks, now.micro_batch, low, high)


def samples_per_step(settings: Settings) -> int | None:
    """``workload.samples_per_step``, where the user says what a step of today counts for."""
    value = settings.workload.options.get("samples_per_step")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInputError(f"workload.samples_per_step={value}: a whole number from 1 is needed")
    return value


def remarks(autotuning: Autotuning, batch: Batch) -> list[str]:
    """What of the section has no effect as things are, for people."""
    bounds = [k for k in ("max_train_batch_size", "min_train_batch_size") if k in autotuning.given]
    if batch.rule == "free" or not bounds:
        return []
    return [
        f"autotuning.{bounds[0]}: batch=fixed trains the global batch {batch.global_batch} in "
        "every configuration, so it bounds nothing; batch=free lets it change, as DeepSpeed does"
    ]


def version() -> str:
    """Of DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        return "of the command's own environment"
    try:
        return importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"


# -----------------------------------------------------------------------------
# Its command and mappings, from the keys of ``workload=script``.

_DEEPSPEED = "deepspeed"

_ARGUMENT_KEYS = {
    MICRO_BATCH.name: config.MICRO,
    ACCUMULATION.name: config.TIMES,
    STAGE.name: "stage",
}
"""Knobs that a script may take by an argument, and the key of the configuration beside it."""


def command_of(
    options: Mapping[str, Any], ds_config: str | None, nproc: int | None
) -> tuple[Command, Path | None]:
    """The command, under torch's launcher where it has none, and its DeepSpeed configuration.

    Args:
        options: ``workload.*``.
        ds_config: path of the configuration, where the user gives it beside the command.
        nproc: ranks of a command without a launcher; ``None``: one for every device.

    Returns:
        The command, and the path of the configuration; ``None`` where nothing names one.

    Raises:
        BadInputError: a wrong command, or two configurations.

    """
    given, module = options.get("command"), bool(options.get("module"))
    words = secrets.filled(_words(given), os.environ, "workload.command")
    given = words or given
    secrets.learn(words)
    if module and words and Path(words[0]).name in LAUNCHERS:
        raise BadInputError(
            f"workload.module=true: {words[0]} is a launcher, which has its own --module. Leave "
            "workload.module out"
        )
    if module or (bool(words) and words[0].endswith(".py")):
        ranks = (
            detect_hardware(device_today(), Environment(Path())).nproc if nproc is None else nproc
        )
        launch = module_command("torch.distributed.run", f"--nproc-per-node={ranks}")
        given = [*launch, *(["-m"] if module else []), *words]
    command = Command.parse(given)
    named = command.config_path
    if named is not None and ds_config is not None and Path(named) != Path(ds_config):
        raise BadInputError(
            f"runner.ds_config={ds_config}: the command names {named}. Leave one of them out"
        )
    path = named or ds_config or _named_beside(options, command.arguments)
    if named is None and path is not None:
        command = replace(command, config=path)
    return command, None if path is None else Path(path)


def names_configuration(options: Mapping[str, Any]) -> bool:
    """Whether the command, a preset or a map of it says which DeepSpeed configuration is used."""
    try:
        return command_of(options, None, 1)[1] is not None
    except BadInputError:
        return False


def _words(given: Any) -> list[str]:
    """The command's words; none where it is not to be read, which ``Command.parse`` will tell."""
    if not isinstance(given, str):
        return [str(word) for word in given or ()]
    try:
        return shlex.split(given)
    except ValueError:
        return []


def _named_beside(options: Mapping[str, Any], arguments: Sequence[str]) -> str | None:
    """The configuration that a map of its keys names, or that the preset finds."""
    for text in options.get("map_file") or ():
        mapped = parse_map_file(str(text))
        if mapped.key in FILE_KEYS:
            return mapped.file
    if options.get("preset") == _DEEPSPEED:
        return preset(_DEEPSPEED, arguments).maps[0].file
    return None


def mappings(options: Mapping[str, Any]) -> dict[str, str]:
    """``workload.map`` as ``autotuning.arg_mappings`` has it: the argument by the key.

    Raises:
        BadInputError: an argument that is none of DeepSpeed's.

    """
    found = {}
    for text in options.get("map") or ():
        mapped = parse_map(str(text))
        if mapped.name not in _ARGUMENT_KEYS:
            raise BadInputError(
                f"workload.map={text}: runner=deepspeed gives a script "
                f"{', '.join(_ARGUMENT_KEYS)} by its arguments. Search others with runner=ddp, or "
                "give them a fixed value in the command"
            )
        found[_ARGUMENT_KEYS[mapped.name]] = mapped.argument
    return found


def with_mapped_keys(
    knobs: Mapping[str, Any], options: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """``runner.knobs``, with the keys that ``workload.map_file`` asks to be searched.

    Raises:
        BadInputError: another file than the configuration, or a key of it that is not searched.

    """
    mapped = [_knob(str(text), path) for text in options.get("map_file") or ()]
    wanted = {name: SEARCH for name in mapped if knobs.get(name, CONFIGURED) == CONFIGURED}
    return {**knobs, **wanted}


def _knob(text: str, path: Path) -> str:
    mapped: Mapped = parse_map_file(text)
    if os.path.abspath(mapped.file) != os.path.abspath(path):
        raise BadInputError(
            f"workload.map_file={text}: runner=deepspeed writes {path} alone. Map another file "
            "with runner=ddp"
        )
    known = FILE_KEYS.get(mapped.key)
    if known is None or mapped.name != known:
        raise BadInputError(
            f"workload.map_file={text}: runner=deepspeed knows {mapped.key} under "
            f"{'no name' if known is None else f'the name {known}'}. Keys that are searched: "
            f"{', '.join(FILE_KEYS)}"
        )
    return known


def silence(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments that keep a trial from writing checkpoints and logs, those of a preset too.

    Raises:
        BadInputError: no such preset.

    """
    given = tuple(str(word) for word in options.get("silence") or ())
    name = options.get("preset")
    if name in (None, _DEEPSPEED):
        return given
    if name not in PRESETS:
        known = {*PRESETS, _DEEPSPEED}
        raise BadInputError(f"workload.preset={name}: no such preset. {nearest(str(name), known)}")
    return (*given, *PRESETS[str(name)].silence)
