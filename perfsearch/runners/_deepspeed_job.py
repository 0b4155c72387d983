"""The job that is to be tuned: its command, its configuration, its ranks and its batch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from perfsearch.core.errors import BadInputError
from perfsearch.runners._deepspeed_autotuning import Autotuning
from perfsearch.runners._deepspeed_batch import Today
from perfsearch.runners._deepspeed_command import Command
from perfsearch.runners._deepspeed_script import command_of, device_today
from perfsearch.runners._zero_batch import Batch
from perfsearch.workers.environment import Environment, Hardware, detect

if TYPE_CHECKING:
    from perfsearch.config import Settings

_WORKLOAD = "script"


def asked(settings: Settings) -> tuple[Command, Path]:
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


def counted(settings: Settings) -> int | None:
    """``workload.samples_per_step``, where the user says what a step of today counts for."""
    value = settings.workload.options.get("samples_per_step")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadInputError(f"workload.samples_per_step={value}: a whole number from 1 is needed")
    return value


def _require(command: Command) -> None:
    """Refuse a launcher that is not there.

    Raises:
        BadInputError: it is not installed.

    """
    own = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    if shutil.which(command.words[0], path=own) is None:
        install = " pip install perfsearch[deepspeed]" if command.launcher == "deepspeed" else ""
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
        if ranks is None and not detect(device, environment).gpus:
            raise BadInputError(
                "workload.command: without a GPU it must say how many ranks it starts, as in "
                "--num_gpus 2"
            )
        return detect(device, replace(environment, nproc=ranks))
    every = detect(device, replace(environment, nproc=None))
    if every.gpus and max(chosen) >= len(every.gpus):
        raise BadInputError(f"--include {chosen}: only {len(every.gpus)} GPUs are visible")
    gpus = tuple(every.gpus[i] for i in chosen) if every.gpus else ()
    return replace(every, nproc=len(chosen), gpus=gpus)


def data_parallel(ranks: int, autotuning: Autotuning) -> int:
    """Ranks that train different samples."""
    if ranks % autotuning.mp_size:
        raise BadInputError(f"autotuning.mp_size={autotuning.mp_size}: does not divide {ranks}")
    return ranks // autotuning.mp_size


def batch(now: Today, ranks: int, rule: Literal["fixed", "free"], asked: Autotuning) -> Batch:
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
