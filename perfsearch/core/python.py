"""How Python is started for our own processes."""

from __future__ import annotations

import sys

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
