"""What somebody else's files and messages may hold, for hypothesis."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as some

CHARACTERS = some.characters(exclude_categories=["Cs"])
"""All that UTF-8 can encode: asked for by that name, hypothesis tries each, for many seconds."""


def any_text(max_size: int | None = None) -> some.SearchStrategy[str]:
    """Any text, of so many characters at most."""
    return some.text(CHARACTERS, max_size=max_size)


SCALARS = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.just(10**400),
    some.floats(),
    any_text(max_size=20),
    some.sampled_from(
        ["search", "auto", "null", "???", "${oc.env:HOME}", "=", "\x1b[2J", "_target_"]
    ),
)

PLAIN = some.recursive(
    SCALARS,
    lambda inner: some.one_of(
        some.lists(inner, max_size=4), some.dictionaries(any_text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)
"""Plain values, as of JSON."""

DEEP = b"[" * 100_000


@contextmanager
def at_most(mib: float) -> Iterator[None]:
    """Hold the block to so much memory of Python's at its peak."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= mib * 2**20
    finally:
        tracemalloc.stop()
