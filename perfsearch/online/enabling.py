"""Makes DistributedDataParallel's constructor hand over to tuning when it is done."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from perfsearch.online import session
from perfsearch.online.options import AutotuneOptions

_options: list[AutotuneOptions] = []


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
        if type(self) is DistributedDataParallel:
            session.begin(self, _options[0])

    DistributedDataParallel.__init__ = constructed
