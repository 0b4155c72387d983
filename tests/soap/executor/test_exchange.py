import torch
from support import soap_models

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.executor.exchange import Connection, grouped
from perfsearch.soap.plan import OperatorConfiguration, data_parallel, placements, redistributions

DEVICES = 3


def groups_of(plan, graph):
    places = {operator.name: i for i, operator in enumerate(graph.operators)}
    moves = redistributions(graph, placements(graph, plan, DEVICES))
    connections = []
    for move in moves:
        first = min(places[name] for name, _ in move.consumers)
        begins = places[move.producer]
        connections.append(Connection(move, torch.float64, begins, first, True))
    return grouped(connections), places


def test_tables_on_devices_of_their_own_move_in_one_exchange():
    model, loss, _, batches = soap_models.make("dlrm", 1)
    graph = capture(model, loss, batches[0]).graph
    plan = data_parallel(graph, range(DEVICES))
    for number in range(3):
        plan[f"tables.{number}"] = OperatorConfiguration((1, 1), (number,))
    found, places = groups_of(plan, graph)
    moving = [g for g in found if g.devices]
    tables = [g for g in moving if g.connections[0].redistribution.producer.startswith("tables")]
    assert len(tables) == 1 and tables[0].merged and len(tables[0].connections) == 3
    assert tables[0].begins == places["tables.2"]  # when the last one is done
    assert tables[0].ends == places["stack"] > tables[0].begins
    assert tables[0].devices == (0, 1, 2)


def test_data_parallelism_moves_nothing():
    model, loss, _, batches = soap_models.make("mlp", 1)
    graph = capture(model, loss, batches[0]).graph
    found, _ = groups_of(data_parallel(graph, range(DEVICES)), graph)
    assert found and not any(g.devices for g in found)
