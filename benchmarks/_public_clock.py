"""Start a script as python does, and note when its first torch optimizer steps.

    python _public_clock.py times.json train.py ARGUMENTS

A clock that has nothing of perfsearch: torch's own hook after each step of an optimizer.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    file, script = Path(sys.argv[1]).absolute(), sys.argv[2]
    times: list[float] = []
    first: list[int] = []

    def note(optimizer: object, *_: object) -> None:
        first[:] = first or [id(optimizer)]
        if id(optimizer) == first[0]:
            times.append(time.perf_counter())

    register_optimizer_step_post_hook(note)
    parent = os.getpid()

    def write() -> None:
        if os.getpid() == parent and os.environ.get("RANK", "0") == "0":
            file.write_text(json.dumps(times))

    atexit.register(write)
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
