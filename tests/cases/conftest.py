"""The small search of ``tests/stages`` serves the cases too."""

from stages.conftest import search  # noqa: F401
