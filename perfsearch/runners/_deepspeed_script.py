"""A DeepSpeed script as ``perfsearch-run`` is given it: no launcher, presets and maps beside it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.narrow import SEARCH
from perfsearch.core.suggest import nearest
from perfsearch.instrument.mapping import FILE_KEYS, Mapped, parse_map, parse_map_file
from perfsearch.instrument.presets import PRESETS, preset
from perfsearch.runners import _deepspeed_batch
from perfsearch.runners._deepspeed_command import Command
from perfsearch.runners._deepspeed_knobs import CONFIGURED
from perfsearch.runners._deepspeed_launchers import LAUNCHERS
from perfsearch.workers.environment import Environment, detect

_DEEPSPEED = "deepspeed"

_ARGUMENT_KEYS = {
    "micro_batch": _deepspeed_batch.MICRO,
    "gradient_accumulation": _deepspeed_batch.TIMES,
    "zero_stage": "stage",
}
"""Knobs that a script may take by an argument, and the key of the configuration beside it."""


def device_today() -> str:
    """``runner.device`` of a DeepSpeed job, which reads its own variable."""
    return "cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else "auto"


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
    words = _words(given)
    if module and words and Path(words[0]).name in LAUNCHERS:
        raise BadInputError(
            f"workload.module=true: {words[0]} is a launcher, which has its own --module. Leave "
            "workload.module out"
        )
    if module or (bool(words) and words[0].endswith(".py")):
        ranks = detect(device_today(), Environment(Path())).nproc if nproc is None else nproc
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
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
