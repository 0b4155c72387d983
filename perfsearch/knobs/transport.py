"""How knobs reach a script: by its arguments, files, environment, or what it builds. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perfsearch import knobs
from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Value
from perfsearch.core.settings_file import read_settings
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.fsdp import STAGE
from perfsearch.knobs.zero import CHECKPOINTING

FILE_KEYS = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH.name,
    "gradient_accumulation_steps": ACCUMULATION.name,
    "zero_optimization.stage": STAGE.name,
    **{
        f"zero_optimization.{name}": name
        for name in (
            "reduce_bucket_size",
            "allgather_bucket_size",
            "overlap_comm",
            "reduce_scatter",
            "contiguous_gradients",
            "allgather_partitions",
            "round_robin_gradients",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "sub_group_size",
        )
    },
}
"""Keys of DeepSpeed's file whose knob need not be named."""


@dataclass(frozen=True)
class Mapped:
    """Where a script takes one knob from.

    Attributes:
        name: the knob.
        argument: ``--batch-size``, or ``data.batch_size`` of a script that takes ``KEY=VALUE``.
        file: path of a JSON or YAML file instead, as the script's argument names it.
        key: dotted key in that file.
        default: what the script uses where it is given nothing, if that is known.

    """

    name: str
    argument: str = ""
    file: str = ""
    key: str = ""
    default: Value = None

    def __str__(self) -> str:
        return self.argument or f"{self.file}:{self.key}"


def parse_map(text: str) -> Mapped:
    """``NAME=ARGUMENT`` of ``--map``.

    Raises:
        BadInputError: it is not of that form.

    """
    name, _, argument = text.partition("=")
    if not name.isidentifier() or not argument or argument == "-":
        raise BadInputError(
            f"--map {text}: give it as NAME=ARGUMENT, as in micro_batch=--batch-size"
        )
    return Mapped(name, argument=argument.removesuffix("="))


def parse_map_file(text: str) -> Mapped:
    """``FILE:KEY``, or ``NAME=FILE:KEY``, of ``--map-file``.

    Raises:
        BadInputError: it is not of that form, or the file cannot be read or lacks the key.

    """
    head, _, rest = text.partition("=")
    name, place = (head, rest) if rest else ("", text)
    file, _, key = place.rpartition(":")
    if not file or not key:
        raise BadInputError(
            f"--map-file {text}: give it as FILE:KEY, as in "
            "ds_config.json:train_micro_batch_size_per_gpu"
        )
    name = name or FILE_KEYS.get(key, "")
    if not name:
        raise BadInputError(
            f"--map-file {text}: no knob goes with the key {key} by itself. Name it: NAME={place}"
        )
    mapped = Mapped(name, file=file, key=key)
    get_key(read_file(file, f"--map-file {text}"), mapped)
    return mapped


def read_file(file: str, option: str) -> dict[str, Any]:
    """The content of a JSON or YAML file.

    Raises:
        BadInputError: it cannot be read, or holds no mapping.

    """
    try:
        return read_settings(Path(file))
    except ValueError as error:
        raise BadInputError(f"{option}: {file} {error}") from error


def get_key(content: Mapping[str, Any], mapped: Mapped) -> Any:
    """The value under the dotted key; ``None`` where there is none yet.

    Raises:
        BadInputError: a part of the key is there and is no group of keys.

    """
    node: Any = content
    for part in mapped.key.split("."):
        if not isinstance(node, Mapping):
            raise BadInputError(f"{mapped}: there is no such key, as {part} has nothing above it")
        node = node.get(part)
        if node is None:
            return None
    return node


def current(arguments: Sequence[str], mapped: Mapped) -> Value:
    """What the script is given today, as a number where it is one; else the known default."""
    if mapped.file:
        found = get_key(read_file(mapped.file, str(mapped)), mapped)
        return found if isinstance(found, bool | int | float) else mapped.default
    place = _find(arguments, mapped.argument)
    if place is None:
        return mapped.default
    token = arguments[place]
    if "=" in token:
        return as_value(token.partition("=")[2])
    return True if _is_bare(arguments, place) else as_value(arguments[place + 1])


def apply(
    arguments: Sequence[str], maps: Sequence[Mapped], values: Mapping[str, Value], directory: Path
) -> tuple[list[str], dict[str, str]]:
    """The script's arguments with knobs in their place.

    Args:
        arguments: the script's own; everything that no map names stays as it is, to the byte.
        maps: where knobs go.
        values: of knobs; those that are ``None`` or have no map are left alone.
        directory: for changed copies of files; made when needed.

    Returns:
        The arguments, and for each knob that was set how the script was given it.

    Raises:
        BadInputError: no argument names the file that a map is about.

    """
    given = list(arguments)
    told: dict[str, str] = {}
    copies: dict[str, dict[str, Any]] = {}
    for mapped in maps:
        value = values.get(mapped.name)
        if value is None:
            continue
        if mapped.file:
            content = copies.setdefault(mapped.file, read_file(mapped.file, str(mapped)))
            _set_key(content, mapped.key, value)
            told[mapped.name] = f"{mapped}={value}"
        else:
            given = _with_argument(given, mapped.argument, value)
            told[mapped.name] = f"{mapped.argument} {value}"
    for file, content in copies.items():
        directory.mkdir(parents=True, exist_ok=True)
        copy = directory / Path(file).name
        copy.write_text(_written(file, content))
        given = _naming(given, file, str(copy))
    return given, told


def _set_key(content: dict[str, Any], key: str, value: Value) -> None:
    *groups, last = key.split(".")
    for part in groups:
        content = content.setdefault(part, {})
    content[last] = value
    if key == "train_micro_batch_size_per_gpu":
        content.pop("train_batch_size", None)  # DeepSpeed refuses a product that does not fit


def _written(file: str, content: dict[str, Any]) -> str:
    if file.endswith((".yaml", ".yml")):
        import yaml  # type: ignore[import-untyped]

        text: str = yaml.safe_dump(content, sort_keys=False)
        return text
    return json.dumps(content, indent=2) + "\n"


def _naming(arguments: Sequence[str], file: str, copy: str) -> list[str]:
    """The arguments with the copy's path in place of the file's."""
    wanted = os.path.abspath(file)

    def same(path: str) -> bool:
        return bool(path) and os.path.abspath(path) == wanted

    changed = []
    for token in arguments:
        option, sign, path = token.partition("=")
        if same(token):
            changed.append(copy)
        elif sign and same(path):
            changed.append(f"{option}={copy}")
        else:
            changed.append(token)
    if changed == list(arguments):
        raise BadInputError(
            f"--map-file {file}: no argument of the script names this file, so that a changed copy "
            "could not reach it. Give the script the file's path as an argument"
        )
    return changed


def _find(arguments: Sequence[str], argument: str) -> int | None:
    """Place of the last token that is the argument; the last one is what parsers take."""
    joined = argument + "="
    places = [
        i
        for i, token in enumerate(arguments)
        if token.startswith(joined) or (token == argument and argument.startswith("-"))
    ]
    return places[-1] if places else None


def _is_bare(arguments: Sequence[str], place: int) -> bool:
    """Whether an option stands without a value."""
    if place + 1 == len(arguments):
        return True
    following = arguments[place + 1]
    return following.startswith("-") and not isinstance(as_value(following), int | float)


def _with_argument(arguments: Sequence[str], argument: str, value: Value) -> list[str]:
    given = list(arguments)
    place = _find(given, argument)
    if place is None:
        if not argument.startswith("-"):
            return [*given, f"{argument}={value}"]
        if isinstance(value, bool):
            return [*given, argument] if value else given
        return [*given, argument, str(value)]
    if "=" in given[place]:
        given[place] = f"{argument}={value}"
    elif _is_bare(given, place):
        if value is False:
            del given[place]
        elif value is not True:
            given.insert(place + 1, str(value))
    else:
        given[place + 1] = str(value)
    return given


def as_value(text: str) -> Value:
    """A word of a command line as the truth value or number that it is, else as it stands."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Preset:
    """Arguments of a framework's scripts.

    Attributes:
        maps: knobs and the arguments that set them.
        silence: arguments for trials alone, so that they send nothing to loggers. Checkpoints and
            validation stay: files are put back, and a script may need them, as with
            ``load_best_model_at_end``, ``ckpt_path="best"`` or an early stop.

    """

    maps: tuple[Mapped, ...] = ()
    silence: tuple[str, ...] = ()


HF_BATCH = (
    Mapped(MICRO_BATCH.name, "--per_device_train_batch_size", default=8),
    Mapped(ACCUMULATION.name, "--gradient_accumulation_steps", default=1),
)

PRESETS = {
    "hf-trainer": Preset(
        maps=(
            *HF_BATCH,
            Mapped(CHECKPOINTING.name, "--gradient_checkpointing", default=False),
        ),
        silence=(
            "--report_to",
            "none",
            "--disable_tqdm",
            "True",
        ),
    ),
    "lightning": Preset(
        maps=(
            Mapped(MICRO_BATCH.name, "--data.batch_size"),
            Mapped(ACCUMULATION.name, "--trainer.accumulate_grad_batches", default=1),
        ),
        silence=(
            "--trainer.logger=false",
            "--trainer.enable_progress_bar=false",
            "--trainer.num_sanity_val_steps=0",
        ),
    ),
    "accelerate": Preset(maps=HF_BATCH),
}


def preset(name: str, arguments: Sequence[str]) -> Preset:
    """The preset of that name, for a script with these arguments.

    Raises:
        BadInputError: DeepSpeed's, and no argument names its configuration file.

    """
    if name != "deepspeed":
        return PRESETS[name]
    for token in arguments:
        file = token.rpartition("=")[2]
        if file.endswith(".json") and Path(file).is_file():
            content = read_file(file, "--preset deepspeed")
            if not {"zero_optimization", "train_micro_batch_size_per_gpu"} & content.keys():
                continue
            keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
            maps = [Mapped(FILE_KEYS[key], file=file, key=key, default=1) for key in keys]
            return Preset((*maps, Mapped(STAGE.name, file=file, key="zero_optimization.stage")))
    raise BadInputError(
        "--preset deepspeed: no argument of the script names DeepSpeed's configuration (a .json "
        "file with zero_optimization). Name the file by an argument, or use --map-file"
    )


def gather(
    maps: Sequence[str], map_files: Sequence[str], name: str | None, arguments: Sequence[str]
) -> tuple[list[Mapped], list[str]]:
    """Where a script takes knobs from, and the arguments that silence it in trials.

    Args:
        maps: ``NAME=ARGUMENT``.
        map_files: ``FILE:KEY`` or ``NAME=FILE:KEY``.
        name: of a preset, which gives way to what is named expressly.
        arguments: the script's.

    Raises:
        BadInputError: one is not of that form, or two are for the same knob.

    """
    found = [parse_map(text) for text in maps]
    found += [parse_map_file(text) for text in map_files]
    names = [mapped.name for mapped in found]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise BadInputError(f"--map {twice}=...: mapped twice. Keep one.")
    if name is None:
        return found, []
    known = preset(name, arguments)
    return [*found, *(m for m in known.maps if m.name not in names)], list(known.silence)


_OFF = (None, False, 0, "none", "default", "policy")


@dataclass
class KnobPlan:
    """How knobs reach a script.

    Attributes:
        objects: through the constructors that the script calls, and torch's switches.
        environment: variables to set before its processes start.
        mapped: through the script's own arguments and files.
        unreachable: knobs that nothing here can set, with their values.

    """

    objects: dict[str, Value] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    mapped: dict[str, Value] = field(default_factory=dict)
    unreachable: dict[str, Value] = field(default_factory=dict)


def plan(values: Mapping[str, Value], maps: Sequence[Mapped]) -> KnobPlan:
    """Sort knobs by how they reach a script; those that are ``None`` are left out."""
    names = {mapped.name for mapped in maps}
    made = KnobPlan()
    for name, value in values.items():
        if value is None:
            continue
        if name in names:
            made.mapped[name] = value
        elif name in knobs.by_name and knobs.by_name[name].reaches_scripts:
            record = knobs.by_name[name]
            made.environment.update(record.variables(value))
            if record.takers:
                made.objects[name] = value
        elif not any(value is off or value == off for off in _OFF):
            made.unreachable[name] = value
    return made


@dataclass(frozen=True)
class KnobFile:
    """What a search has written, as far as a script is started with it.

    Attributes:
        knobs: values by name.
        workload: the ``workload`` group, empty where there is none.
        runner: which one has found them; empty where it is not said.
        batch: ``fixed`` or ``free``, as it was searched.
        ds_config: the DeepSpeed configuration that was given beside the command, if any.

    """

    knobs: dict[str, Value] = field(default_factory=dict)
    workload: dict[str, Any] = field(default_factory=dict)
    runner: str = ""
    batch: Literal["fixed", "free"] = "fixed"
    ds_config: str | None = None


def read_knobs(file: str) -> KnobFile:
    """Knobs of ``best/config.yaml``, or of a plain file of names and values.

    Raises:
        BadInputError: there is no such file, or a knob in it has no single value.

    """
    option = f"--knobs {file}"
    if Path(file).is_dir():
        raise BadInputError(f"{option}: this is a directory. Give the file: {file}/config.yaml")
    content = read_file(file if file.endswith(".json") else _named_yaml(file, option), option)
    runner = content.get("runner")
    if isinstance(runner, Mapping) and runner.get("name") == "soap":
        apply = Path(file).parent / "apply"
        raise BadInputError(
            f"{option}: runner=soap splits and places single operators, which no script takes as a "
            f"knob. Its plan is in {apply}: strategy.yaml, and dtensor_plan.py for a script, where "
            "it is one mesh"
        )
    knobs = content if not isinstance(runner, Mapping) else runner.get("knobs") or {}
    if not isinstance(knobs, Mapping):
        raise BadInputError(f"{option}: runner.knobs={knobs!r} is no group of names and values")
    for name, value in knobs.items():
        if isinstance(value, list | Mapping) or value == "search":
            raise BadInputError(
                f"{option}: {name}={value} is what a search was to try, no single value. Give the "
                "best/config.yaml that a search has written"
            )
    workload = content.get("workload")
    of_runner = runner if isinstance(runner, Mapping) else {}
    return KnobFile(
        knobs=dict(knobs),
        workload=dict(workload) if isinstance(workload, Mapping) else {},
        runner=str(of_runner.get("name", "")),
        batch="free" if content.get("batch") == "free" else "fixed",
        ds_config=of_runner.get("ds_config"),
    )


def _named_yaml(file: str, option: str) -> str:
    if not file.endswith((".yaml", ".yml")):
        raise BadInputError(f"{option}: a .yaml or .json file is needed")
    return file
