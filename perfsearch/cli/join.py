"""The command ``perfsearch join``: this node is lent to a search over several."""

from __future__ import annotations

from collections.abc import Sequence


def command(arguments: Sequence[str]) -> int:
    """Lend this node; return the exit code.

    Raises:
        Interrupted: a signal came.

    """
    from perfsearch.workers.join import main

    return main(arguments)
