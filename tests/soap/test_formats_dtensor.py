import pytest
import torch
from support.soap_dtensor_ranks import launch, loss, make
from torch import nn

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.formats import NotRegular, dump_dtensor, module_shardings
from perfsearch.soap.plan import OperatorConfiguration, data_parallel


@pytest.fixture(scope="module")
def graph():
    return capture(*make()).graph


def mixed(graph):
    """Two layers by their outputs, the rest over samples."""
    return {
        **data_parallel(graph, range(2)),
        "2": OperatorConfiguration((1, 2), (0, 1)),
        "5": OperatorConfiguration((1, 2), (0, 1)),
    }


def paired(graph):
    """The same, the second layer with shared sums, as the first one leaves what it reads."""
    return {**mixed(graph), "5": OperatorConfiguration((2, 1), (0, 1), 2)}


def test_shared_sums_are_split_by_what_is_summed(graph):
    found = module_shardings(graph, paired(graph), 2)
    assert (found["5"].input, found["5"].output) == (1, 0)
    assert dict(found["5"].parameters) == {"weight": 1, "bias": None}


def test_shardings_follow_the_rules(graph):
    found = module_shardings(graph, mixed(graph), 2)
    assert (found["2"].input, found["2"].output) == (None, 1)
    assert dict(found["2"].parameters) == {"weight": 0, "bias": 0}
    assert (found["7"].input, found["7"].output) == (0, 0)
    assert dict(found["7"].parameters) == {"weight": None, "bias": None}


def test_rows_that_no_window_reads_are_no_split():
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, stride=2)

        def forward(self, x):
            return self.second(self.first(x)).flatten(1)

    batch = (torch.randn(4, 3, 6, 6), torch.randn(4, 36))
    graph = capture(Strided(), loss, batch).graph
    found = module_shardings(graph, data_parallel(graph, range(2)), 2)
    assert (found["second"].input, found["second"].output) == (0, 0)


@pytest.mark.parametrize(
    "configuration",
    [
        OperatorConfiguration((1, 1), (0,)),
        OperatorConfiguration((2, 1), (1, 0)),
    ],
)
def test_what_dtensor_would_get_wrong_is_refused(graph, configuration):
    with pytest.raises(NotRegular, match=r"operator 5: .*one mesh"):
        dump_dtensor(graph, {**mixed(graph), "5": configuration}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [mixed, paired])
def test_the_exported_module_trains_the_same(graph, plan, tmp_path):
    errors, placements, refused = launch(tmp_path, 2, dump_dtensor(graph, plan(graph), 2))
    assert max(errors) < 1e-10
    assert "the model reduces over shards" in refused
    assert placements["2.weight"] == "S(0)" and placements["7.weight"] == "R"
