"""A small job of ``runner=soap`` on saved tables: no process is started, trials are simulated."""

from support import soap_graphs as synthetic

from perfsearch.config.schema import validate
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.pipeline.search import strategy_factory
from perfsearch.runners.soap.job import InputTables, JobKey
from perfsearch.soap.graph import Graph
from perfsearch.soap.simulator.machine import CostTable, shards_of

DEVICES = 2


def write_tables(directory):
    """A small DLRM: two tables, a layer, their concatenation, a layer."""
    x = synthetic.batch_input("x", (8, 4))
    ids = synthetic.batch_input("ids", (8, 1), "int64")
    bottom = synthetic.linear("bottom", x, 8)
    first, second = (synthetic.table(f"table_{i}", ids, 500, 8) for i in (0, 1))
    joined = synthetic.cat("joined", [bottom, first, second])
    top = synthetic.linear("top", joined, 4)
    operators = (x, ids, bottom, first, second, joined, top)
    graph = Graph(operators, frozenset({"x", "ids"}), "top", 8)
    costs = CostTable("a card", "2.13")
    for shard in shards_of(graph, DEVICES):
        costs.add(shard, synthetic.cost_of(shard.operator, shard.part, shard.gradients))
    job = JobKey("dlrm", 8, "tiny", options={})
    InputTables(graph, synthetic.machine(devices=DEVICES), costs, job).write(directory)


def settings(tmp_path, tables, strategy=None, mode="search", **runner):
    of_tables = {} if tables is None else {"tables": str(tables)}
    return validate(
        {
            "mode": mode,
            "runner": {"name": "soap", "device": "cpu", **of_tables, **runner},
            "strategy": strategy or {"name": "mcmc", "proposals": 300},
            "workload": {"name": "dlrm", "size": "tiny", "global_batch": 8},
            "nproc": DEVICES,
            "run_dir": str(tmp_path / "run"),
        }
    )


def told(runner, configuration, number, purpose=Purpose.SEARCH):
    seconds = runner.simulator.estimate(runner.plan(configuration)).seconds
    measured = Measurement([seconds] * 3, samples_per_step=8, peak_allocated_gib=0.1)
    return Trial(number, dict(configuration), purpose, Status.OK, measured, seconds / 8)


def begun(runner, chosen, **measured):
    """The chosen strategy, told a baseline measured with these values; and its trials."""
    trials = []
    strategy = strategy_factory(chosen)(runner.space, runner.hints(trials))
    trials.append(told(runner, runner.baseline, 0, Purpose.BASELINE))
    for name, value in measured.items():
        setattr(trials[0].measurement, name, value)
    strategy.tell(trials[0])
    return strategy, trials
