"""Whatever a model holds, a plan gives what one process gives, or the model is refused."""

import pytest
from support.soap_odd_models import ODD
from support.soap_ranks import launch_odd


@pytest.mark.slow
def test_models_with_unusual_functions_are_never_wrong(tmp_path):
    found = launch_odd(tmp_path, 3, sorted(ODD), count=3)
    assert {name: max(errors) for name, errors in found.items()} == pytest.approx(
        dict.fromkeys(ODD, 0.0), abs=1e-10
    )
