"""How Python is started for our own processes, and how large libraries are imported in them."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

OPTIONS = ("-P",)
"""Nothing is imported from the current directory: a file there may have any module's name."""


def module_command(module: str, *arguments: str, python: str = "") -> list[str]:
    """The words that start a module.

    Args:
        module: which.
        arguments: its own.
        python: the interpreter; empty: this one.

    """
    return [python or sys.executable, *OPTIONS, "-m", module, *arguments]


def let_warnings_be_warnings() -> None:
    """Where Python raises warnings (``PYTHONWARNINGS=error``), show them as usual in this process.

    That is meant for the user's code. torch and MLflow warn, some of it while they are imported,
    and would end our own processes.
    """
    if not _raises_warnings():
        return
    warnings.resetwarnings()
    for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", hidden)  # as Python begins


def _raises_warnings() -> bool:
    return any(action == "error" for action, *_ in warnings.filters)


@contextmanager
def large_imports() -> Iterator[None]:
    """Collect no garbage, and raise no warning, while large libraries are imported.

    They make some hundred thousand objects that stay, among which Python would look for garbage
    again and again: that is a quarter of the time that importing MLflow or torch's compiler takes.
    Afterwards they count as old, as they would then. Blocks may overlap, also of several threads.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings() if _raises_warnings() else nullcontext():
            let_warnings_be_warnings()
            yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
