"""The same random numbers in each start of a script that seeds nothing itself. No torch here.

What a script seeds itself is as it was: its seeds come after these.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from types import ModuleType

from perfsearch.instrument.patching import after_import

_MOST = 2**32
"""numpy takes no larger seed."""

_HASHES = "PYTHONHASHSEED"


def hash_seed(seed: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks' environment must have for sets to be gone through in one order.

    Args:
        seed: of the search.
        environ: the user's, whose own value stays.

    """
    return {} if _HASHES in environ else {_HASHES: str(seed % _MOST)}


def seed_process(seed: int, rank: int) -> None:
    """Seed the global generators of this process: Python's now, the others once imported.

    Args:
        seed: of the search.
        rank: of this process; each rank draws numbers of its own.

    """
    own, owner = (seed + rank) % _MOST, os.getpid()

    def seed_numpy(module: ModuleType) -> None:
        if os.getpid() == owner:  # and not in what it has forked
            module.seed(own)

    def seed_torch(module: ModuleType) -> None:
        if os.getpid() == owner:
            module.manual_seed(own)  # of every device

    random.seed(own)
    after_import("numpy.random", seed_numpy)
    after_import("torch", seed_torch)
