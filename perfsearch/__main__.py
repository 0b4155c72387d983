"""``python -m perfsearch``: the command ``perfsearch``."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run the command, which imports nothing of the current directory, as when it is installed."""
    ours = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    first = os.path.realpath(sys.path[0])
    if not sys.flags.safe_path and first == os.getcwd() != ours:
        del sys.path[0]
    from perfsearch.cli.search import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
