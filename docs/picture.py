r"""Takes the README's picture: ``python docs/picture.py FILE.svg KEY=VALUE ...`` runs a search.

Trials and closing table are drawn as in a terminal; the block that is redrawn is left out. The
README's was taken by::

    python docs/picture.py docs/terminal.svg runner=replay strategy=bayes seed=2 budget.trials=14 \
        runner.table=tests/data/ddp_gpt2small_4xh100_tcp.csv confirm.max_repeats=4 \
        tracking.enabled=false
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Self

from rich.console import Console

from perfsearch.cli import search as cli
from perfsearch.cli import view
from perfsearch.cli.bar import Progress
from perfsearch.cli.view import LiveView

_WIDTH = 150


class RecordedView(LiveView):
    """A terminal view that keeps what it prints, without the redrawn block."""

    def __enter__(self) -> Self:
        return self


def main() -> int:
    """Run the search and write the picture; the search's exit code."""
    file, *arguments = sys.argv[1:]
    console = Console(record=True, force_terminal=True, width=_WIDTH, highlight=False)
    console.print(f"$ perfsearch {' '.join(arguments)}", markup=False)
    view.open_view = lambda settings: RecordedView(
        settings.objective, Progress.of(settings), console=console
    )
    code = cli.main(arguments)
    drawn = console.export_svg(title="perfsearch")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # no font is fetched
    drawn = drawn.replace(f"{Path.cwd()}/", "")
    Path(file).write_text(re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE))
    return code


if __name__ == "__main__":
    sys.exit(main())
