"""A configuration that a search wrote, given back by ``--config-path``."""

from __future__ import annotations

import argparse
import os

from perfsearch.core.errors import BadInputError

_HYDRA_SETTINGS = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.sweep.dir=outputs/sweeps/${now:%Y%m%d-%H%M%S-%f}",
    "hydra.sweep.subdir=.",
    "hydra.job.name=perfsearch",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
"""What ``conf/config.yaml`` says of Hydra, for a configuration file that does not."""


def take_recorded_configuration(arguments: list[str], flags: argparse.Namespace) -> None:
    """``--config-path RUN/best`` runs exactly what ``RUN/best/config.yaml`` says."""
    directory = os.path.abspath(flags.config_path)
    file = os.path.join(directory, f"{flags.config_name or 'config'}.yaml")
    if not os.path.isfile(file):
        raise BadInputError(
            f"--config-path {flags.config_path}: there is no {file}. Give the directory of a "
            "config.yaml that a search wrote; options of your own come by --config-dir."
        )
    arguments[:0] = _HYDRA_SETTINGS
    arguments += ["--config-path", directory]
    flags.overrides[:0] = _HYDRA_SETTINGS
    flags.config_path = directory
