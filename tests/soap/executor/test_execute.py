"""Plans, really run by four gloo ranks in float64, give what one process gives."""

import pytest
from support.soap_ranks import launch

TOLERANCE = 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "dlrm", "tables", "conv", "transformer"])
def test_random_plans_give_what_one_process_gives(name, tmp_path):
    errors, controls, tables_by_rows = launch(tmp_path, 4, name, count=15)
    # data parallelism, random plans, and the last one tensor parallel; nine of these also timed
    assert len(errors) == 17 + 9
    assert max(errors) < TOLERANCE, errors
    assert (tables_by_rows > 0) == (name == "tables")
    for what, error in controls.items():
        assert not error < 1e-6, what  # nan is a failure too
