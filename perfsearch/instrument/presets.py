"""What scripts of well-known frameworks take by their arguments. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfsearch.core.errors import BadInputError
from perfsearch.instrument.mapping import FILE_KEYS, Mapped, parse_map, parse_map_file, read_file


@dataclass(frozen=True)
class Preset:
    """Arguments of a framework's scripts.

    Attributes:
        maps: knobs and the arguments that set them.
        silence: arguments for trials alone, so that they write no checkpoints and no logs.

    """

    maps: tuple[Mapped, ...] = ()
    silence: tuple[str, ...] = ()


_HF_BATCH = (
    Mapped("micro_batch", "--per_device_train_batch_size", default=8),
    Mapped("gradient_accumulation", "--gradient_accumulation_steps", default=1),
)

PRESETS = {
    "hf-trainer": Preset(
        maps=(
            *_HF_BATCH,
            Mapped("activation_checkpointing", "--gradient_checkpointing", default=False),
        ),
        silence=(
            "--save_strategy",
            "no",
            "--eval_strategy",
            "no",
            "--report_to",
            "none",
            "--load_best_model_at_end",
            "False",
            "--disable_tqdm",
            "True",
        ),
    ),
    "lightning": Preset(
        maps=(
            Mapped("micro_batch", "--data.batch_size"),
            Mapped("gradient_accumulation", "--trainer.accumulate_grad_batches", default=1),
        ),
        silence=(
            "--trainer.logger=false",
            "--trainer.enable_checkpointing=false",
            "--trainer.enable_progress_bar=false",
            "--trainer.num_sanity_val_steps=0",
            "--trainer.limit_val_batches=0",
        ),
    ),
    "accelerate": Preset(maps=_HF_BATCH),
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
            return Preset((*maps, Mapped("zero_stage", file=file, key="zero_optimization.stage")))
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
