"""What a search hands over, started where perfsearch cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ENDLESS = "1000000"
"""Steps or epochs of a script that is searched, which never comes to its end by itself."""


def without_perfsearch(directory: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which ``python`` and ``torchrun`` are ours and perfsearch is not there.

    Args:
        directory: made where it is missing; its files come before all others.
        environment: what else holds.

    Raises:
        RuntimeError: perfsearch can be imported all the same.

    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "perfsearch.py").write_text("raise ImportError('perfsearch is not here')\n")
    for name, options in (("python", ""), ("torchrun", " -m torch.distributed.run")):
        launcher = directory / name
        launcher.write_text(f'#!/bin/sh\nexec {sys.executable}{options} "$@"\n')
        launcher.chmod(0o755)
    before = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
    alone = {
        **environment,
        "PYTHONPATH": os.pathsep.join([str(directory), *before]),
        "PATH": f"{directory}:{environment.get('PATH', os.defpath)}",
    }
    told = subprocess.run(
        [sys.executable, "-c", "import perfsearch"],
        env=alone, cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "perfsearch is not here" not in told.stderr:
        raise RuntimeError("perfsearch can be imported where it is to be done without")
    return alone


def shortened(run_dir: Path, steps: int | str) -> Path:
    """``run.sh`` as a search has handed it over, for so many steps or epochs.

    Raises:
        RuntimeError: it is not endless, so that nobody knows what to shorten.

    """
    script = run_dir / "best" / "apply" / "run.sh"
    text = script.read_text()
    if text.count(ENDLESS) != 1:
        raise RuntimeError(f"{script} does not train for {ENDLESS} steps or epochs")
    short = script.with_name("run-short.sh")
    short.write_text(text.replace(ENDLESS, str(steps)))
    return short
