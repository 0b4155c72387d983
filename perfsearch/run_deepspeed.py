"""What a DeepSpeed search has found, put into the configuration that a script is started with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.knob import Value
from perfsearch.instrument.mapping import FILE_KEYS
from perfsearch.run_arguments import RunArguments
from perfsearch.run_knobs import KnobFile
from perfsearch.runners._zero_batch import Batch
from perfsearch.runners.deepspeed import config
from perfsearch.runners.deepspeed.autotuning import Autotuning
from perfsearch.runners.deepspeed.job import command_of, mappings


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
    option = f"--knobs {asked.knobs}"
    ranks = _local_ranks(asked)
    options = _options(found, asked, ranks)
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
        "micro_batch": now.micro_batch,
        "gradient_accumulation": batch.accumulation,
        "zero_stage": config.stages_of(file)[0],
        **found.knobs,
    }
    micro = int(whole["micro_batch"] or 1)
    if found.batch == "fixed" and batch.share % micro:
        raise BadInputError(
            f"{option}: micro_batch={micro} does not divide the {batch.share} samples that each of "
            f"{apart} ranks trains a step. Search for this number of ranks"
        )
    whole["gradient_accumulation"] = batch.accumulation_of(whole)
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


def _options(found: KnobFile, asked: RunArguments, ranks: int) -> dict[str, Any]:
    """``workload.*`` of this start: what the search was given, and what the command line says."""
    recorded: Mapping[str, Any] = found.workload
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
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
    from torch.distributed.run import parse_min_max_nnodes

    return int(parse_min_max_nnodes(str(asked.parsed.nnodes))[1])
