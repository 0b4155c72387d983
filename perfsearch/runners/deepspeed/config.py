"""What a DeepSpeed configuration can be told, as knobs, and configurations written from them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.files import write_text
from perfsearch.core.knob import Kind, Knob, Numerics, Scope, Value
from perfsearch.core.narrow import SEARCH
from perfsearch.core.trial import Measurement
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH, Batch
from perfsearch.knobs.fsdp import STAGE
from perfsearch.runners.deepspeed.autotuning import SECTION, Autotuning
from perfsearch.runners.deepspeed.command import Command

ZERO = "zero_optimization"
CONFIGURED = "configured"
"""The value of a knob that stays as the user's file has it."""

_STAGES = (0, 1, 2, 3)
_OFFLOADED = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Key:
    """A key of ``zero_optimization`` that may be searched.

    Attributes:
        values: what is tried beside the user's own value; ``None`` leaves the key out.
        stages: in which it matters.
        numerics: what it does to the computation.
        help: one line.
        by_default: whether ``autotuning.fast=false`` searches it, as DeepSpeed does.
        unit: of its values.

    """

    values: tuple[Value, ...]
    stages: tuple[int, ...]
    numerics: Numerics
    help: str
    by_default: bool = True
    unit: str = ""


_BUCKETS = (50_000_000, 500_000_000, 1_000_000_000)
_SWITCH = (False, True)

KEYS: dict[str, Key] = {
    "reduce_bucket_size": Key(
        _BUCKETS, (1, 2, 3), Numerics.REORDERED, "gradients are reduced in buckets of so many "
        "elements", unit="elements"),
    "allgather_bucket_size": Key(
        _BUCKETS, (1, 2), Numerics.EXACT, "parameters are gathered in buckets of so many elements",
        unit="elements"),
    "overlap_comm": Key(
        _SWITCH, (1, 2, 3), Numerics.REORDERED, "reduce gradients while the backward pass runs"),
    "reduce_scatter": Key(
        _SWITCH, (2,), Numerics.REORDERED, "reduce-scatter gradients rather than all-reduce them"),
    "contiguous_gradients": Key(
        _SWITCH, (2, 3), Numerics.EXACT, "copy gradients to one buffer as they are made"),
    "allgather_partitions": Key(
        _SWITCH, (1, 2), Numerics.EXACT, "gather parameters at once rather than by broadcasts"),
    "round_robin_gradients": Key(
        _SWITCH, (1, 2), Numerics.EXACT, "spread the copying of gradients over ranks", False),
    "stage3_prefetch_bucket_size": Key(
        (5_000_000, 50_000_000, 500_000_000), (3,), Numerics.EXACT,
        "parameters gathered ahead, at most", False, "elements"),
    "stage3_param_persistence_threshold": Key(
        (10_000, 100_000, 1_000_000), (3,), Numerics.EXACT,
        "smaller parameters are not spread over ranks", False, "elements"),
    "stage3_max_live_parameters": Key(
        (100_000_000, 1_000_000_000), (3,), Numerics.EXACT,
        "parameters that a rank holds gathered, at most", False, "elements"),
    "stage3_max_reuse_distance": Key(
        (100_000_000, 1_000_000_000), (3,), Numerics.EXACT,
        "a parameter that is needed again so soon stays gathered", False, "elements"),
    "sub_group_size": Key(
        (100_000_000, 1_000_000_000), (3,), Numerics.EXACT,
        "parameters that the optimizer updates at a time", False, "elements"),
    "offload_optimizer": Key(
        ("none", "cpu"), (1, 2, 3), Numerics.REORDERED,
        "optimizer state rests in the host's memory", False),
    "offload_param": Key(
        ("none", "cpu"), (3,), Numerics.EXACT, "parameters rest in the host's memory", False),
}  # fmt: skip
"""Every key that is known to keep the computation; the one with the largest effect first."""

EFFECT_ORDER = (MICRO_BATCH.name, STAGE.name, ACCUMULATION.name, *KEYS)


def stages_of(configuration: Mapping[str, Any]) -> tuple[int, tuple[int, ...]]:
    """The stage today, and those that the file asks to be tuned.

    Raises:
        BadInputError: it names a stage that there is not.

    """
    zero = configuration.get(ZERO) or {}
    stage = zero.get("stage", 0)
    if stage == "all":
        return 0, _STAGES
    named = stage if isinstance(stage, list) else [stage]
    for value in named:
        if isinstance(value, bool) or value not in _STAGES:
            raise BadInputError(f'{ZERO}.stage={value}: allowed are 0, 1, 2, 3, a list, or "all"')
    if not named:
        raise BadInputError(f"{ZERO}.stage=[]: a list needs at least one choice")
    return int(named[0]), tuple(named) if isinstance(stage, list) else _STAGES


def declare(
    configuration: Mapping[str, Any], batch: Batch, autotuning: Autotuning
) -> tuple[list[Knob], dict[str, str]]:
    """Every knob that exists here, and why each other one does not."""
    stage, stages = stages_of(configuration)
    low = autotuning.min_train_micro_batch_size_per_gpu
    high = autotuning.max_train_micro_batch_size_per_gpu
    listed = configuration.get(MICRO)
    asked = listed if isinstance(listed, list) else batch.micro_batches()
    micro = sorted({m for m in asked if low <= m <= high} | {batch.micro_batch})
    knobs = [
        replace(MICRO_BATCH.knob, default=batch.micro_batch, values=tuple(micro),
                scope=Scope.PROCESS, numerics=batch.numerics),
        replace(STAGE.knob, default=stage, values=tuple(sorted({*stages, stage})),
                scope=Scope.PROCESS,
                help="what ranks share out: nothing, optimizer state, + gradients, + parameters"),
    ]  # fmt: skip
    absent: dict[str, str] = {}
    if batch.rule == "free":
        knobs.append(
            replace(ACCUMULATION.knob, default=batch.accumulation, values=batch.accumulations(),
                    scope=Scope.PROCESS, numerics=batch.numerics)
        )  # fmt: skip
    else:
        absent[ACCUMULATION.name] = f"with batch=fixed it follows from {MICRO_BATCH.name}"
    zero = configuration.get(ZERO) or {}
    return knobs + [_of_key(name, key, zero) for name, key in KEYS.items()], absent


def _of_key(name: str, key: Key, zero: Mapping[str, Any]) -> Knob:
    """A key of the file as a knob; its default is what the file says, or to leave it out."""
    own = zero.get(name)
    choices: Sequence[Value] = key.values
    if isinstance(own, list):
        choices, own = own, own[0] if own else None
    if isinstance(own, Mapping):
        own = str(own.get("device", "none"))
    elif name.startswith("offload"):
        own = "none"
    elif isinstance(own, Number):
        own = int(own)
    values = list(dict.fromkeys([own, *(int(c) if isinstance(c, Number) else c for c in choices)]))
    numbers = [v for v in values if isinstance(v, int) and not isinstance(v, bool)]
    kind = Kind.ORDINAL if len(numbers) == len(values) else Kind.CATEGORICAL
    return Knob(
        name,
        kind,
        own,
        tuple(sorted(numbers)) if kind is Kind.ORDINAL else tuple(values),
        unit=key.unit,
        scope=Scope.PROCESS,
        numerics=key.numerics,
        when={STAGE.name: key.stages},
        help=key.help,
    )


def settings_of(
    knobs: Mapping[str, Any], configuration: Mapping[str, Any], autotuning: Autotuning
) -> dict[str, Any]:
    """``runner.knobs`` with what the file itself asks to be tuned.

    A list in the file is a choice to search. Without ``autotuning.fast`` the keys that DeepSpeed
    searches are searched, unless the file gives them a value.
    """
    zero = configuration.get(ZERO) or {}
    settings = dict(knobs)
    for name, key in KEYS.items():
        if settings.get(name, CONFIGURED) != CONFIGURED:
            continue
        settings.pop(name, None)
        unset = name not in zero
        if isinstance(zero.get(name), list) or (not autotuning.fast and key.by_default and unset):
            settings[name] = SEARCH
    return {name: value for name, value in settings.items() if value != CONFIGURED}


def write(
    configuration: Mapping[str, Any],
    values: Mapping[str, Value],
    batch: Batch,
    mappings: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The user's configuration with the knobs' values in it, and nothing else changed.

    Args:
        configuration: of the user.
        values: of every knob.
        batch: the arithmetic of batches.
        mappings: option of the script by the key whose value it takes.

    Returns:
        The configuration without its ``autotuning`` section, and the options of the script that
        get another value.

    """
    made: dict[str, Any] = copy.deepcopy({k: v for k, v in configuration.items() if k != SECTION})
    times = batch.accumulation_of(values)
    options = write_batch(
        made, mappings, int(values[MICRO_BATCH.name] or 1), times, batch.world_size
    )
    stage = STAGE.number(values)
    zero = made.get(ZERO)
    if zero is None:
        zero = {}
    if stage or "stage" in zero:
        zero["stage"] = stage
    for name in KEYS:
        if name in values and stage in KEYS[name].stages:
            _put(zero, name, values[name])
        if isinstance(zero.get(name), list):
            zero[name] = zero[name][0]  # another stage's, which does not look at it
    if zero or ZERO in made:
        made[ZERO] = zero
    for key, flag in mappings.items():
        found = {**made, **zero}.get(key)
        if flag not in options and found is not None and found != AUTO:
            options[flag] = str(found)
    return made, options


def _put(zero: dict[str, Any], name: str, value: Value) -> None:
    own = zero.get(name)
    if name.startswith("offload"):
        device = own.get("device", "none") if isinstance(own, Mapping) else "none"
        if value == device or value is None:
            return
        if value == "none":
            zero.pop(name, None)
        else:
            zero[name] = dict(_OFFLOADED)
        return
    if value is None:
        zero.pop(name, None)
    elif not isinstance(own, list) and own == value:
        return  # as it was typed
    elif isinstance(own, list):
        zero[name] = next(c for c in own if c == value)
    else:
        zero[name] = value


def applies(name: str, values: Mapping[str, Value]) -> bool:
    """Whether a knob is written for the stage that it is set with."""
    return name not in KEYS or STAGE.number(values) in KEYS[name].stages


def experiment(values: Mapping[str, Value], batch: Batch, number: int) -> str:
    """A name in the manner of DeepSpeed's tuner."""
    times = batch.accumulation_of(values)
    return f"z{values[STAGE.name]}_gas{times}_tmbspg{values[MICRO_BATCH.name]}_trial{number}"


# -----------------------------------------------------------------------------
# ``ds_config.json`` read and written so that what is not changed stays as it was typed.

_SECTIONS = (
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "bf16",
    "bfloat16",
    "checkpoint",
    "comms_logger",
    "compile",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "eigenvalue",
    "elasticity",
    "flops_profiler",
    "fp16",
    "hybrid_engine",
    "nebula",
    "optimizer",
    "pipeline",
    "progressive_layer_drop",
    "scheduler",
    "sparse_attention",
    "tensor_parallel",
    "tensorboard",
    "wandb",
    "zero_optimization",
)
"""Keys that hold an object, or ``null`` as if they were absent."""

_EXAMPLES = {"autotuning": '{"fast": true}', "zero_optimization": '{"stage": "all"}'}


class Number(float):
    """A number that remembers how it was typed: ``5e8`` is not written back as ``500000000.0``."""

    def __new__(cls, text: str) -> Number:
        """Parse it."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def read_json(path: Path) -> dict[str, Any]:
    """The configuration, its keys in order.

    Raises:
        BadInputError: no such file, no JSON, no object, a key that stands there twice, or a
            section that is no object.

    """
    try:
        text = path.read_text()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        found = json.loads(text, parse_float=Number, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise BadInputError(
            f"{path}: line {error.lineno} is no JSON: {error.msg}. DeepSpeed reads plain JSON"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{path}: holds no object. A DeepSpeed configuration is {{...}}")
    for name in _SECTIONS:
        if not isinstance(found.get(name), dict | None):
            raise BadInputError(
                f"{path}: {name}={json.dumps(found[name])}: an object is needed, as in "
                f"{_EXAMPLES.get(name, '{...}')}; or remove it"
            )
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands there twice, which DeepSpeed refuses. Remove one")
    return found


def dump_json(value: Any, indent: str = "") -> str:
    """JSON text, numbers as they were typed."""
    inner = indent + "    "
    if isinstance(value, Number):
        return value.text
    if isinstance(value, Mapping):
        items = [f"{inner}{json.dumps(str(k))}: {dump_json(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}" if items else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(dump_json(item, inner) for item in value) + "]"
    return json.dumps(value)


def write_json(path: Path, configuration: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    write_text(path, dump_json(configuration) + "\n")


# -----------------------------------------------------------------------------
# The batch keys of a DeepSpeed configuration: what they are today, and other values written.

GLOBAL, MICRO, TIMES = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
AUTO = "auto"

_TRAINER_FLAGS = {
    MICRO: ("--per_device_train_batch_size", "--train_batch_size_per_device"),
    TIMES: ("--gradient_accumulation_steps",),
}
"""Options from which HF Trainer fills in ``auto``; taken where the command has them."""


@dataclass(frozen=True)
class Today:
    """The batch that the job trains now.

    Attributes:
        global_batch: samples of a step over all ranks.
        micro_batch: samples of a forward pass of a rank.
        mappings: option of the script by the key whose value it takes.

    """

    global_batch: int
    micro_batch: int
    mappings: Mapping[str, str]


def batch_today(
    configuration: Mapping[str, Any], command: Command, ranks: int, mappings: Mapping[str, str]
) -> Today:
    """Work out the batch as DeepSpeed does: any two of the three keys give the third.

    Args:
        configuration: of the user.
        command: which may hold what is ``auto``.
        ranks: data-parallel ones.
        mappings: ``autotuning.arg_mappings``.

    Raises:
        BadInputError: too little is said, or the keys contradict each other.

    """
    known = {**_seen_flags(configuration, command), **mappings}
    values = {key: _number(configuration, command, known, key) for key in (GLOBAL, MICRO, TIMES)}
    whole, micro, times = values[GLOBAL], values[MICRO], values[TIMES]
    if micro is None and whole is not None:
        micro = _divided(whole, ranks * (times or 1), ranks, times or 1)
    if micro is None:
        flag = f" (with {AUTO} its option in autotuning.arg_mappings)"
        raise BadInputError(f"{MICRO}: the configuration does not say it{flag}, nor {GLOBAL}")
    if times is None:
        times = 1 if whole is None else _divided(whole, ranks * micro, ranks, micro)
    if whole is not None and whole != micro * times * ranks:
        raise BadInputError(
            f"{GLOBAL}={whole}: not {MICRO} x {TIMES} x ranks = {micro} x {times} x {ranks} = "
            f"{micro * times * ranks}. Remove one of them"
        )
    return Today(micro * times * ranks, micro, known)


def _seen_flags(configuration: Mapping[str, Any], command: Command) -> dict[str, str]:
    found = {}
    for key, flags in _TRAINER_FLAGS.items():
        for flag in flags:
            if configuration.get(key) == AUTO and command.argument(flag) is not None:
                found[key] = flag
    if MICRO in found and configuration.get(TIMES) == AUTO:
        found.setdefault(TIMES, _TRAINER_FLAGS[TIMES][0])
    return found


def _number(
    configuration: Mapping[str, Any], command: Command, mappings: Mapping[str, str], key: str
) -> int | None:
    """Its value today; of a list of choices the first."""
    value = configuration.get(key)
    if isinstance(value, list) and value:
        value = value[0]
    if value == AUTO:
        text = command.argument(mappings[key]) if key in mappings else None
        if text is None:
            return None
        if not text.isdigit():
            raise BadInputError(f"{mappings[key]} {text}: a whole number is needed for {key}")
        value = int(text)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInputError(f"{key}={value}: a whole number from 1 is needed")
    return value


def _divided(whole: int, by: int, ranks: int, other: int) -> int:
    if whole % by:
        below, above = whole // by * by, (whole // by + 1) * by
        raise BadInputError(
            f"{GLOBAL}={whole}: {ranks} ranks x {other} do not divide it. Nearest possible: "
            f"{' or '.join(str(v) for v in (below, above) if v)}"
        )
    return whole // by


def write_batch(
    configuration: dict[str, Any], mappings: Mapping[str, str], micro: int, times: int, ranks: int
) -> dict[str, str]:
    """Write a batch into the configuration, in place, changing as few keys as will do.

    A key that is ``auto`` stays so where an option of the script gives its value.

    Returns:
        Options of the script that get another value.

    """
    values = {MICRO: micro, TIMES: times, GLOBAL: micro * times * ranks}
    options: dict[str, str] = {}
    for key, value in values.items():
        present = configuration.get(key)
        if key in mappings:
            options[mappings[key]] = str(value)
        if present == AUTO and (key in mappings or key == GLOBAL or value == 1):
            continue
        implied = key == GLOBAL or times == 1 or configuration.get(GLOBAL) is not None
        follows = key != MICRO and present is None and implied
        if not follows:
            configuration[key] = value
    return options


def why_not_fed(first: Measurement | None, now: Measurement, micro: int, today: int) -> str:
    """Why the script does not load the batches that it was asked for; empty where it does.

    Args:
        first: of the baseline.
        now: of the configuration.
        micro: the micro-batch that was asked for.
        today: the baseline's.

    """
    fed = now.bottleneck_evidence.get("fed_samples")
    before = first.bottleneck_evidence.get("fed_samples") if first else None
    if fed is None or before is None or micro == today or fed != before:
        return ""
    return (
        f"micro_batch={micro} was asked for, and the script still loads {fed:g} samples as "
        f"with {today}. Name its option in autotuning.arg_mappings, as "
        f'{{"{MICRO}": "--batch-size"}} (perfsearch-run: --map micro_batch=--batch-size), or pin '
        "runner.knobs.micro_batch"
    )
