"""Every strategy, for the conformance suite."""

import pytest

from perfsearch.strategies import names


@pytest.fixture(params=names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)
