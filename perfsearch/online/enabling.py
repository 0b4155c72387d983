"""Makes DistributedDataParallel's constructor hand over to tuning when it is done."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from perfsearch.online import session
from perfsearch.online.options import AutotuneOptions

_options: list[AutotuneOptions] = []
_pauses: list[None] = []


@contextmanager
def paused() -> Iterator[None]:
    """Construct a wrapper inside without tuning it."""
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()


def patch(options: AutotuneOptions) -> None:
    """Begin tuning with ``options`` wherever a wrapper is constructed from now on."""
    first = not _options
    _options[:] = [options]
    if not first:
        return
    construct = DistributedDataParallel.__init__
    made: list[bool] = []

    @functools.wraps(construct)
    def constructed(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        made.append(True)
        if type(self) is DistributedDataParallel and not _pauses:
            session.begin(self, _options[0])

    DistributedDataParallel.__init__ = constructed
    if os.environ.get("RANK", "0") == "0":
        atexit.register(_say_nothing_was_wrapped, made)


def _say_nothing_was_wrapped(made: list[bool]) -> None:
    if not made:
        print(
            "perfsearch autotune: nothing was tuned: the script has wrapped no model with "
            "DistributedDataParallel. perfsearch-run --search tunes others over several starts.",
            file=sys.stderr,
            flush=True,
        )
