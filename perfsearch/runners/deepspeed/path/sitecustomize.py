"""Read by every Python process of a DeepSpeed job that is being measured."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_the_users_own() -> None:
    """Read the ``sitecustomize`` that this one stands before, if there is one."""
    elsewhere = [entry for entry in sys.path if entry and Path(entry).resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _take_part() -> None:
    if "PERFSEARCH_DEEPSPEED" not in os.environ:
        return  # a process that the job started with an environment of its own
    if importlib.util.find_spec("perfsearch") is None:
        root = next(above.parent for above in _HERE.parents if above.name == "perfsearch")
        sys.path.append(str(root))
    from perfsearch.runners.deepspeed.rank import enter_trial, keep_store_here

    keep_store_here()  # also in a launcher: torch's has the store that its ranks meet at
    if "RANK" in os.environ:
        enter_trial(os.environ["PERFSEARCH_DEEPSPEED"], int(os.environ["RANK"]))


# the script is to have the path that it has without this; what it starts has the variable
sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != _HERE]
_run_the_users_own()
_take_part()
