"""The batch keys of a DeepSpeed configuration: what they are today, and other values written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.trial import Measurement
from perfsearch.runners._deepspeed_command import Command

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


def today(
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


def written(
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
