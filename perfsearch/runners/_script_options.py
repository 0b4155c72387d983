"""The keys of ``workload=script``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perfsearch.config_options import ConfigError, option
from perfsearch.instrument.mapping import Mapped
from perfsearch.instrument.presets import gather


@dataclass(frozen=True)
class ScriptOptions:
    """The ``workload.*`` keys of ``workload=script``.

    Attributes:
        command: the script, or the module's name, and its arguments.
        module: whether the first word of ``command`` is a module, as with ``python -m``.
        map: ``NAME=ARGUMENT``: the script takes the knob by this argument.
        map_file: ``FILE:KEY`` or ``NAME=FILE:KEY``: it reads the knob from this file.
        preset: arguments of a framework: ``hf-trainer``, ``lightning``, ``accelerate``,
            ``deepspeed``.
        silence: further arguments in trials, so that they write no checkpoints and no logs.
        samples_per_step: samples of a step over all ranks; ``null``: counted in the loader's
            batches.
        draws_in_loader: whether loading a sample draws random numbers, so that the number of loader
            processes changes what is trained; ``null``: found out where it can be.

    """

    command: tuple[str | int | float | bool, ...]
    module: bool = False
    map: tuple[str, ...] = ()
    map_file: tuple[str, ...] = ()
    preset: Literal["hf-trainer", "lightning", "accelerate", "deepspeed"] | None = None
    silence: tuple[str, ...] = ()
    samples_per_step: int | None = option(None, low=1)
    draws_in_loader: bool | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(
                "workload.command",
                "workload.command=[]: give the script and its arguments, as in "
                "workload.command=[train.py,--epochs,'3']",
            )
        if not self.module and not Path(self.words[0]).is_file():
            raise ConfigError(
                "workload.command",
                f"workload.command=[{self.words[0]},...]: there is no such script. Looked from "
                f"{Path.cwd()}",
            )

    @property
    def words(self) -> list[str]:
        """The command as text."""
        return [str(w).lower() if isinstance(w, bool) else str(w) for w in self.command]

    @property
    def names_mapped(self) -> list[str]:
        """Knobs that the user maps, those of a preset apart."""
        return [mapped.name for mapped in gather(self.map, self.map_file, None, ())[0]]

    def maps(self) -> tuple[list[Mapped], list[str]]:
        """Where knobs go, and the arguments that silence the script in trials.

        Raises:
            BadInputError: a map has a wrong form, or its file cannot be read.

        """
        maps, silence = gather(self.map, self.map_file, self.preset, self.words[1:])
        return maps, [*self.silence, *silence]
