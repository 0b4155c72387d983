from __future__ import annotations

import itertools
import statistics
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from perfsearch.config.schema import Settings, validate
from perfsearch.core.errors import BadInputError
from perfsearch.core.hardware import Environment
from perfsearch.core.knob import Kind
from perfsearch.core.trial import Status
from perfsearch.pipeline.search import build_runner
from perfsearch.runners import load
from perfsearch.runners import replay as replay_module
from perfsearch.runners.base import Plan
from perfsearch.runners.replay import Replay

DATA = Path(__file__).parents[1] / "data"
ZERO = str(DATA / "zero_gpt2large_4xh100.csv")
TCP = str(DATA / "ddp_gpt2small_4xh100_tcp.csv")


def replay(table: str = ZERO, seed: int = 0, **options: object) -> Replay:
    return Replay(Replay.Options(table=table, **options), Environment(Path(), seed=seed))  # type: ignore[arg-type]


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "table.csv"
    path.write_text(text)
    return str(path)


def test_is_registered() -> None:
    assert load("replay") is Replay


def test_zero_table_becomes_knobs_and_points() -> None:
    runner = replay()
    kinds = {k.name: k.kind for k in runner.space.knobs}
    assert kinds == {
        "zero_stage": Kind.ORDINAL,
        "micro_batch": Kind.ORDINAL,
        "activation_checkpointing": Kind.BOOLEAN,
        "gradient_accumulation": Kind.CATEGORICAL,
    }
    assert runner.space.size == 94
    assert runner.devices == 4
    assert runner.baseline == {
        "zero_stage": 0,
        "micro_batch": 1,
        "activation_checkpointing": False,
        "gradient_accumulation": 1,
    }
    assert all(k.default == runner.baseline[k.name] for k in runner.space.knobs)


def test_tcp_baseline_is_torch_default_bucket_and_smallest_nccl_settings() -> None:
    assert replay(TCP).baseline == {
        "bucket_cap_mb": 25,
        "hierarchical_allreduce": False,
        "nccl_nsocks_perthread": 1,
        "nccl_socket_nthreads": 1,
    }


def test_hints_know_names_only() -> None:
    hints = replay().hints([])
    assert hints.monotonic == {"micro_batch": 1}
    assert hints.stage_knob == "zero_stage"
    assert hints.memory_limit_gib is None
    assert hints.predict(hints.baseline).peak_gib is None
    assert replay(TCP).hints([]).monotonic == {}


def test_noise_depends_on_seed_number_attempt_and_configuration_only() -> None:
    first, second = replay(), replay()
    point = first.space.listed()[5]  # type: ignore[index]
    second.measure(first.baseline, Plan(number=1))  # an unrelated draw changes nothing

    def steps(runner: Replay, **plan: int) -> list[float]:
        outcome = runner.measure(point, Plan(**plan))  # type: ignore[arg-type]
        assert outcome.measurement is not None
        return outcome.measurement.step_seconds

    assert steps(first, number=3) == steps(second, number=3)
    others = [
        steps(first, number=4),
        steps(first, number=3, attempt=1),
        steps(replay(seed=1), number=3),
    ]
    assert all(other != steps(first, number=3) for other in others)


def test_steps_are_drawn_from_the_row_and_cover_the_plan() -> None:
    runner = replay(TCP)
    recorded = {0.2744209, 0.2546555, 0.2653978, 0.2627068}
    point = {
        "bucket_cap_mb": 64,
        "hierarchical_allreduce": True,
        "nccl_nsocks_perthread": 1,
        "nccl_socket_nthreads": 1,
    }
    outcome = runner.measure(point, Plan(number=1, scored_steps=(3, 60), scored_seconds=2.0))
    assert outcome.status is Status.OK
    assert outcome.measurement is not None
    assert {round(s, 7) for s in outcome.measurement.step_seconds} <= recorded
    assert 2.0 <= sum(outcome.measurement.step_seconds) < 2.3
    assert outcome.measurement.samples_per_step == 32
    assert outcome.measurement.rewrap_seconds == pytest.approx(5.51232)


def test_noise_zero_serves_the_mean_and_process_noise_moves_whole_trials() -> None:
    runner = replay(TCP, noise=0)
    outcome = runner.measure(runner.baseline, Plan(number=1))
    truth = runner.true_step_seconds(runner.baseline)
    assert outcome.measurement is not None
    assert set(outcome.measurement.step_seconds) == {truth}
    shaky = replay(TCP, noise=0, process_noise=0.1)
    medians = []
    for number in range(40):
        measured = shaky.measure(shaky.baseline, Plan(number=number)).measurement
        assert measured is not None
        assert len(set(measured.step_seconds)) == 1
        medians.append(measured.step_time_s / (truth or 0))
    assert 0.05 < statistics.stdev(medians) < 0.2


def test_a_trial_sees_one_of_several_visits(tmp_path: Path) -> None:
    rows = ["1,10.0 11.0,400", "1,20.0 21.0,200", "1,30.0 31.0,133", "2,50.0 51.0,80"]
    header = "micro_batch,step_ms,samples_per_s"
    runner = replay(write(tmp_path, "\n".join([header, *rows, ""])))
    assert runner.true_step_seconds({"micro_batch": 1}) == pytest.approx(0.0205)
    seen = set()
    for number in range(30):
        measured = runner.measure({"micro_batch": 1}, Plan(number=number)).measurement
        assert measured is not None
        tens = {round(s * 1e3) // 10 for s in measured.step_seconds}
        assert len(tens) == 1
        seen |= tens
    assert seen == {1, 2, 3}


def test_failures_are_served_as_recorded() -> None:
    runner = replay()
    outcome = runner.measure({**runner.baseline, "micro_batch": 48}, Plan(number=2))
    assert outcome.status is Status.OOM
    assert outcome.measurement is None
    assert "oom" in outcome.reason
    assert runner.true_step_seconds({**runner.baseline, "micro_batch": 48}) is None


def test_a_losing_trial_is_cut_short() -> None:
    runner = replay(noise=0)
    truth = runner.true_step_seconds(runner.baseline)
    outcome = runner.measure(runner.baseline, Plan(number=1, stop_above_cost_s=0.5 * (truth or 0)))
    assert outcome.status is Status.PRUNED
    assert outcome.measurement is not None
    assert len(outcome.measurement.step_seconds) == 4


def test_fixed_batch_keeps_the_global_batch_failures_included() -> None:
    start = {
        "zero_stage": 2,
        "micro_batch": 16,
        "activation_checkpointing": False,
        "gradient_accumulation": 1,
    }
    runner = replay(batch="fixed", baseline=start)
    points = runner.space.listed()
    assert points
    assert {int(p["micro_batch"]) * int(p["gradient_accumulation"]) for p in points} == {16}  # type: ignore[arg-type]
    assert 4 < len(points) < 94


def test_reads_trials_of_a_search(tmp_path: Path) -> None:
    table = write(
        tmp_path,
        "trial,purpose,status,lr,mode,workers,objective,samples_per_s,step_ms,reason\n"
        "0,baseline,ok,1,fast,2,4,4,1000 1000,\n"
        "1,search,ok,1,none,0,8,8,500 500,\n"
        "2,search,crash,1,slow,2,,,,exit code 1\n"
        "3,confirm,ok,1,fast,2,4,4,990 1010,\n"
        "4,search,infrastructure,1,other,9,,,,node lost\n",
    )
    runner = replay(table)
    assert {k.name: k.values for k in runner.space.knobs} == {
        "mode": ("fast", None, "slow"),
        "workers": (0, 2),
    }
    assert runner.space.size == 3
    assert runner.baseline == {"mode": "fast", "workers": 2}
    assert runner.true_step_seconds(runner.baseline) == 1.0
    failed = runner.measure({"mode": "slow", "workers": 2}, Plan(number=1))
    assert (failed.status, failed.reason) == (Status.CRASH, "exit code 1")
    gone = runner.measure({"mode": "slow", "workers": 0}, Plan(number=1))
    assert gone.status is Status.INVALID


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": "missing.csv"}, ["runner.table", "missing.csv"]),
        ({"table": ""}, ["runner.table"]),
        ({"noise": -1.0}, ["runner.noise", "-1"]),
        ({"process_noise": float("nan")}, ["runner.process_noise", "nan"]),
        ({"batch": "other"}, ["runner.batch", "other", "fixed"]),
        ({"baseline": {"zero_stag": 1}}, ["runner.baseline.zero_stag", "zero_stage"]),
        ({"baseline": {"zero_stage": 1}}, ["runner.baseline", "micro_batch"]),
    ],
)
def test_bad_options_name_the_key(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        Replay(Replay.Options(**{"table": ZERO, **options}), Environment(Path()))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)


def test_operations_are_not_counted_by_a_table() -> None:
    plain = {
        "runner": {"name": "replay", "table": ZERO},
        "strategy": {"name": "random"},
        "workload": {"name": "gpt"},
        "objective": {"metric": "flops"},
    }
    with pytest.raises(BadInputError, match="Allowed with runner=replay: throughput, latency"):
        Replay.from_settings(validate(plain))


def test_a_failed_row_cannot_be_the_baseline() -> None:
    with pytest.raises(ValueError, match="status oom"):
        replay(baseline={**replay().baseline, "micro_batch": 48})


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a,b\n1,2\n", "step_ms"),
        ("a,step_ms,status\n1,5,okay\n2,5,ok\n", "okay"),
        ("a,step_ms\n1,5\n1,6\n", "nothing to search"),
        ("a,step_ms\n1,5\n2,-6\n", "not positive"),
        ("a,step_ms,status\n1,,oom\n2,,oom\n", "table.csv: no row has status ok.*statuses are oom"),
    ],
)
def test_bad_tables_say_what_is_wrong(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        replay(write(tmp_path, text))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1,5,,ok\n2,x,,ok\n", ["row 3", "column step_ms", "'x'", "A number is needed"]),
        ("1,5,,ok\n2,5 inf,,ok\n", ["row 3", "column step_ms", "'5 inf'", "not finite"]),
        ("1,,0,ok\n2,5,,ok\n", ["row 2", "column samples_per_s", "'0'", "not positive"]),
        ("1,5,,ok\n2,,,ok\n", ["row 3", "column step_ms", "''", "status ok needs it"]),
        ("1,5,,ok\n\n2,5,,okay\n", ["row 4", "column status", "'okay'", "Did you mean 'ok'?"]),
    ],
)
def test_a_bad_cell_is_named_by_file_row_and_column(
    tmp_path: Path, rows: str, words: list[str]
) -> None:
    path = write(tmp_path, f"a,step_ms,samples_per_s,status\n{rows}")
    with pytest.raises(ValueError, match=f"runner.table={path}, row") as caught:
        replay(path)
    assert all(word in str(caught.value) for word in words)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b"\x80\x81")
    with pytest.raises(ValueError, match=r"runner.table=.*table.csv: it is no text in UTF-8"):
        replay(str(tmp_path / "table.csv"))


def test_yaml_lists_the_options_with_their_defaults() -> None:
    yaml = pytest.importorskip("yaml")
    path = Path(__file__).parents[2] / "conf" / "runner" / "replay.yaml"
    written = yaml.safe_load(path.read_text())
    assert written.pop("name") == "replay"
    assert written.pop("table") == "???"
    assert tuple(written.pop("constraints")) == Replay.Options(table=ZERO).constraints
    assert written == {
        f.name: getattr(Replay.Options(table=ZERO), f.name)
        for f in fields(Replay.Options)
        if f.name not in ("table", "constraints")
    }


def test_uneven_steps_are_served_in_their_order(tmp_path: Path) -> None:
    """Seven of 80 ms and one of 420: their mean is 22% above the other's 100, their median below.

    The largest step of a window counts as the second, so that it must come more than once.
    """
    rows = ["1,100 101 99 100 100 100 100 100,10", "2,80 80 80 420 80 80 80 80,12.5"]
    runner = replay(write(tmp_path, "\n".join(["workers,step_ms,samples_per_s", *rows, ""])))
    assert runner.true_step_seconds({"workers": 2}) == pytest.approx(0.1225)
    begins = set()
    for number in range(12):
        measured = runner.measure({"workers": 2}, Plan(number=number)).measurement
        assert measured is not None and measured.samples_per_step == 1
        steps = measured.step_seconds
        slow = [place for place, s in enumerate(steps) if s > 0.4]
        assert len(slow) >= 3
        assert {b - a for a, b in itertools.pairwise(slow)} == {8}
        assert measured.step_time_s == pytest.approx(0.1225)
        begins.add(slow[0])
    assert len(begins) > 3


def test_a_period_is_not_torn_where_a_record_begins_again(tmp_path: Path) -> None:
    recorded = [300 if place % 8 == 3 else 20 for place in range(30)]  # 3, 11, 19, 27
    rows = ["1,100 100 100,10", f"2,{' '.join(map(str, recorded))},18"]
    runner = replay(write(tmp_path, "\n".join(["workers,step_ms,samples_per_s", *rows, ""])))
    assert runner.true_step_seconds({"workers": 2}) == pytest.approx((7 * 0.02 + 0.3) / 8)
    measured = runner.measure({"workers": 2}, Plan(number=1, look_steps=100)).measurement
    assert measured is not None
    slow = [place for place, s in enumerate(measured.step_seconds) if s > 0.2]
    assert {b - a for a, b in itertools.pairwise(slow)} == {8}


@pytest.mark.parametrize("rate_of", [statistics.median, statistics.fmean])
def test_the_batch_is_found_whatever_step_a_tables_rate_is_of(tmp_path: Path, rate_of: Any) -> None:
    steps = [300 if place % 8 == 3 else 41 + place % 3 for place in range(30)]
    rate = 16 / rate_of(steps) * 1e3
    rows = [f"1,100 100 100,{160}", f"2,{' '.join(map(str, steps))},{rate:.4f}"]
    runner = replay(write(tmp_path, "\n".join(["workers,step_ms,samples_per_s", *rows, ""])))
    measured = runner.measure({"workers": 2}, Plan(number=1)).measurement
    assert measured is not None and measured.samples_per_step == 16


BATCHES = """a,samples_per_s,step_ms,first_losses,purpose
1,8000,1.0,2.5 2.4,baseline
2,8000,1.0,2.5 2.4,
3,16000,1.0,2.1 2.0,
64,8000,1.0,2.5 2.4,
"""


def settings_of_a_table(tmp_path: Path, **changes: Any) -> Settings:
    (tmp_path / "t.csv").write_text(BATCHES)
    runner = {"name": "replay", "table": str(tmp_path / "t.csv"), **changes.pop("runner", {})}
    base = {"strategy": {"name": "random"}, "workload": {"name": "gpt"}}
    return validate({**base, "runner": runner, **changes})


def test_rows_of_one_batch_are_compared_unless_others_are_asked_for(tmp_path: Path) -> None:
    kept = Replay.from_settings(settings_of_a_table(tmp_path))
    assert [p["a"] for p in kept.space.listed() or []] == [1, 2, 64]
    free = Replay.from_settings(settings_of_a_table(tmp_path, batch="free"))
    assert free.space.size == 4
    with pytest.raises(BadInputError, match="Set batch=free too"):
        Replay.from_settings(settings_of_a_table(tmp_path, runner={"batch": "free"}))


def test_a_latency_over_several_batches_is_refused_with_the_metric_to_use(tmp_path: Path) -> None:
    """facebookresearch/spdl#1457: less work in a step is no gain."""
    latency = {"metric": "latency"}
    with pytest.raises(BadInputError, match=r"objective\.metric=throughput"):
        build_runner(settings_of_a_table(tmp_path, batch="free", objective=latency))
    several = settings_of_a_table(tmp_path, runner={"batch": "free"}, objective=latency)
    with pytest.raises(BadInputError, match=r"objective\.metric=throughput"):
        Replay.from_settings(several)
    Replay.from_settings(settings_of_a_table(tmp_path, objective=latency))


def test_a_table_is_a_file_of_a_bounded_size(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="no regular file"):
        replay(table="/dev/zero")
    monkeypatch.setattr(replay_module, "_LARGEST_TABLE", 10)
    with pytest.raises(ValueError, match="MiB, and a table may have"):
        replay(table=ZERO)


def test_each_knobs_default_is_looked_up_once_however_many_rows(monkeypatch: Any) -> None:
    calls = []
    found = replay_module._library_default
    monkeypatch.setattr(
        replay_module, "_library_default", lambda knob: calls.append(knob.name) or found(knob)
    )
    made = replay(table=ZERO)
    assert len(calls) == len(set(calls)) == len(made.space.knobs)


def test_escape_sequences_in_a_table_are_spelled_out(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a,step_ms\n\x1b]0;owned\x07,1.0\n'=1+1,2.0\n")
    values = [p["a"] for p in replay(table=str(table)).space.listed() or []]
    assert values == ["\\x1b]0;owned\\x07", "=1+1"]


def test_a_trial_takes_as_long_as_it_did_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(
        tmp_path, "x,status,samples_per_s,step_ms,trial_seconds\n1,ok,10,9 9 9,4\n2,oom,,,6\n"
    )
    runner = replay(table, real_time=0.5)
    waited: list[float] = []
    monkeypatch.setattr(runner._ended, "wait", waited.append)
    assert runner.measure({"x": 1}, Plan(0)).status is Status.OK
    assert runner.measure({"x": 2}, Plan(1)).status is Status.OOM
    assert waited == [2.0, 3.0]
    at_once = replay(table)
    monkeypatch.setattr(at_once._ended, "wait", waited.append)
    at_once.measure({"x": 1}, Plan(0))
    assert waited == [2.0, 3.0]


def test_steps_say_how_long_a_trial_takes_where_the_table_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path, "x,status,samples_per_s,step_ms\n1,ok,10,100\n2,ok,10,100\n")
    runner = replay(table, real_time=1.0)
    waited: list[float] = []
    monkeypatch.setattr(runner._ended, "wait", waited.append)
    outcome = runner.measure({"x": 1}, Plan(0))
    assert outcome.measurement is not None
    assert waited == [pytest.approx(sum(outcome.measurement.step_seconds))]


def test_what_is_waited_for_can_be_broken_off(tmp_path: Path) -> None:
    table = write(
        tmp_path, "x,status,samples_per_s,step_ms,trial_seconds\n1,ok,10,9,1e9\n2,ok,9,9,1\n"
    )
    runner = replay(table, real_time=1.0)
    thread = threading.Thread(target=runner.measure, args=({"x": 1}, Plan(0)), daemon=True)
    thread.start()
    runner.break_off()
    thread.join(20)
    assert not thread.is_alive()
