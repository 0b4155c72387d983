"""The small search of ``tests/stages`` serves the cases too."""

from pipeline.conftest import search  # noqa: F401
