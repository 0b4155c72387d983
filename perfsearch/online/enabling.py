"""Makes DistributedDataParallel's constructor hand over to tuning when it is done."""

from __future__ import annotations

import functools
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

    @functools.wraps(construct)
    def constructed(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        if type(self) is DistributedDataParallel and not _pauses:
            session.begin(self, _options[0])

    DistributedDataParallel.__init__ = constructed
