import copy
import json
import sys

import pytest

from perfsearch.core.objective import Metric, Objective, log_cost_error
from perfsearch.core.trial import Measurement, Purpose, Status, Trial


def measured(**more) -> Measurement:
    return Measurement([0.1, 0.12, 0.11], samples_per_step=22, tokens_per_step=220, **more)


def test_a_trial_survives_json() -> None:
    trial = Trial(3, {"a": True, "b": None}, Purpose.SEARCH, Status.OK, measured(), 0.005)
    again = Trial.from_json(json.loads(json.dumps(trial.to_json())))
    assert again == trial


def test_unknown_fields_of_newer_versions_are_left_out() -> None:
    record = Trial(3, {}, Purpose.SEARCH, Status.OOM).to_json()
    assert Trial.from_json({**record, "later": 1}).status is Status.OOM


def test_throughput_is_the_global_batch_over_the_step_time() -> None:
    """ludwig-ai/ludwig#2843: samples/s = global batch x steps / seconds."""
    assert Measurement([30.0] * 30, samples_per_step=30).samples_per_s == pytest.approx(1.0)
    median = measured(statistic="median")
    assert median.samples_per_s == pytest.approx(200)
    assert median.tokens_per_s == pytest.approx(2000)
    uneven = [0.01, 0.01, 0.07] * 8
    assert Measurement(uneven, samples_per_step=3).samples_per_s == pytest.approx(100)
    assert Measurement(uneven, samples_per_step=3, statistic="median").samples_per_s == 300


def test_what_was_measured_before_there_was_a_statistic_was_the_median() -> None:
    record = Trial(3, {}, Purpose.SEARCH, Status.OK, measured()).to_json()
    assert Trial.from_json(record).measurement.statistic == "rate"
    del record["measurement"]["statistic"]
    assert Trial.from_json(record).measurement.statistic == "median"


def test_units_agree_with_a_known_step_time() -> None:
    """deepspeedai/DeepSpeed#2711: a step of 0.1 s reads 100 ms."""
    steady = Measurement([0.1] * 5, samples_per_step=10, flops_per_step=1e9)
    assert Objective(Metric.LATENCY).value(steady) == pytest.approx(100)
    assert Objective(Metric.THROUGHPUT).value(steady) == pytest.approx(100)
    assert Objective(Metric.FLOPS).value(steady) == pytest.approx(1e10)


@pytest.mark.parametrize("metric", list(Metric))
def test_a_faster_step_has_a_lower_cost(metric: Metric) -> None:
    fast = Measurement([0.1] * 3, samples_per_step=10, flops_per_step=1e9)
    slow = Measurement([0.2] * 3, samples_per_step=10, flops_per_step=1e9)
    objective = Objective(metric)
    assert objective.cost(fast) < objective.cost(slow)
    assert objective.from_cost(objective.cost(fast)) == pytest.approx(objective.value(fast))


def test_an_objective_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not a positive number"):
        Objective().value(Measurement([float("inf")] * 3, samples_per_step=0))
    with pytest.raises(ValueError, match=r"objective\.metric=flops"):
        Objective(Metric.FLOPS).value(measured())


def test_log_cost_error_needs_three_steps() -> None:
    assert log_cost_error(Measurement([0.1, 0.1], samples_per_step=1)) is None
    assert log_cost_error(Measurement([0.1] * 4, samples_per_step=1)) == 0


def test_a_reason_holds_nothing_that_a_terminal_or_a_file_cannot_take() -> None:
    text = "h\u00e9llo \udce9 \x00 \x1b[31m"
    trial = Trial(1, {}, Purpose.SEARCH, Status.CRASH, reason=text)
    assert trial.reason == "h\u00e9llo \\udce9 \\x00 \\x1b[31m"
    trial.reason.encode()
    assert Trial.from_json(trial.to_json()) == trial


def test_what_is_packed_reads_as_before_and_shares_its_words() -> None:
    def measured() -> Trial:
        name = "node_0/" + "disk"[:4].lower()
        told = {"findings": [f"{name} is slow", "x" * 200], "ranks": [{"host": name, "rank": 1}]}
        numbers = {"phases_ms": {"forward": 1.5, "backward": 3.0}, "system": {name: 1.0}}
        numbers["bottleneck_evidence"] = {"steps": 3, "share": 0.5}  # not all of one type
        found = Measurement([0.1, 0.2], 32, environment=told, in_force={"a": None}, **numbers)
        return Trial(1, {"a": 1}, Purpose.SEARCH, Status.OK, found)

    first, second = measured(), measured()
    before = first.to_json()
    first.pack()
    second.pack()
    assert first.to_json() == before == second.to_json()
    names = [next(iter(t.measurement.system)) for t in (first, second) if t.measurement]
    assert names[0] is names[1]
    packed, plain = first.measurement, measured().measurement
    assert packed is not None and plain is not None
    assert packed == plain == packed
    assert packed.not_finite() == [] and packed.step_time_s == plain.step_time_s
    assert packed.phases_ms.get("forward") == 1.5 and packed.phases_ms.get("other") is None
    assert {**packed.phases_ms} == plain.phases_ms and list(packed.step_seconds) == [0.1, 0.2]
    assert Trial.from_json(first.to_json()) == first
    first.pack()  # once more
    assert first.to_json() == before


def test_what_a_thousand_ranks_say_takes_little_and_reads_as_before() -> None:
    ranks = [{"host": f"node-{n // 8}", "rank": n, "slow": False} for n in range(1000)]
    told = {"ranks": ranks, "dtype": "bfloat16", "foreign_processes": [], "without_loader": True}
    trial = Trial(1, {}, Purpose.SEARCH, Status.OK, measured(environment=copy.deepcopy(told)))
    trial.pack()
    packed = trial.measurement.environment
    assert packed == told == copy.deepcopy(packed) == {**packed}
    assert packed["ranks"][999]["host"] == "node-124" and packed.get("other") is None
    assert "ranks" in packed and "other" not in packed
    assert sum(map(sys.getsizeof, packed._values)) < len(json.dumps(told)) / 3
    assert Trial.from_json(json.loads(json.dumps(trial.to_json()))) == trial
