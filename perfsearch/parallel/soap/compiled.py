"""Compilation of the simulator's inner loops."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MODULES = (
    "tables",
    "overlaps",
    "routes",
    "transfers",
    "steps",
    "proposals",
    "delta",
    "chain",
)
"""All that is compiled. What is kept of one holds code of the others."""


def compiled(function: _Function) -> _Function:
    """Compile with numba at the first call, kept on disk for the next start."""
    dispatcher = numba.njit(cache=True, nogil=True)(function)
    file = getattr(dispatcher._cache, "_cache_file", None)
    if file is not None:
        # Numba looks at the time of the function's own file only, not at those of its callees.
        file._source_stamp = (file._source_stamp, _digest())
    return cast("_Function", dispatcher)


@cache
def _digest() -> str:
    here = Path(__file__).parent
    content = b"".join((here / f"{name}.py").read_bytes() for name in _MODULES)
    return hashlib.blake2b(content, digest_size=8).hexdigest()
