"""What is handed over: the tuned configuration where DeepSpeed's own tuner leaves its."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.trial import Trial
from perfsearch.runners import _deepspeed_json, _zero_export
from perfsearch.runners._deepspeed_autotuning import Autotuning
from perfsearch.runners._deepspeed_command import Command
from perfsearch.runners._zero_batch import Batch

TUNED, COMMAND, SUMMARY = "ds_config_optimal.json", "cmd_optimal.txt", "summary.txt"

_NOTES = (
    "The script was run unchanged, so its longest batch is whatever its own loader gave in the "
    "measured steps; a finalist has also saved a checkpoint.\n"
)


def tuned_command(command: Command, tuned: Path, options: Mapping[str, str]) -> list[str]:
    """The user's command with the tuned file in the place of the user's, and no tuning."""
    return command.for_trial(tuned, options, port=None)


def write(
    command: Command,
    configuration: Mapping[str, Any],
    options: Mapping[str, str],
    autotuning: Autotuning,
    batch: Batch,
    trials: Sequence[Trial],
    pinned: Mapping[str, Any],
    directory: Path,
) -> list[Path]:
    """Write tuned file, command and summary, both here and in ``autotuning.results_dir``.

    Args:
        command: of the user.
        configuration: the tuned one.
        options: of the script, that get another value.
        autotuning: where results go.
        batch: the arithmetic of batches.
        trials: of the search, for the summary.
        pinned: knobs that every configuration shares.
        directory: of the search's own result.

    """
    results = autotuning.results_dir.absolute()
    tuned = results / TUNED
    words = shlex.join(tuned_command(command, tuned, options)) + "\n"
    summary = _zero_export.summary(trials, batch, pinned)
    written: list[Path] = []
    for place in (results, directory):
        place.mkdir(parents=True, exist_ok=True)
        keeps = place == results and not autotuning.overwrite
        name = TUNED if place == results else "ds_config.json"
        if keeps:
            _set_aside(place / name)
        _deepspeed_json.write(place / name, configuration)
        (place / COMMAND).write_text(words)
        (place / SUMMARY).write_text(summary)
        written += [place / name, place / COMMAND, place / SUMMARY]
    (directory / "notes.txt").write_text(_NOTES)
    return [*written, directory / "notes.txt"]


def _set_aside(file: Path) -> None:
    """Keep an older result under the next free number."""
    if not file.exists():
        return
    number = 1
    while (aside := file.with_name(f"{file.name}.{number}")).exists():
        number += 1
    file.rename(aside)
