"""Tables of measurements from somebody else: the right result, or refused in one line."""

import csv
import io
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from support.hostile import any_text, at_most

from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError
from perfsearch.core.trial import Outcome, Purpose, Status, Trial
from perfsearch.pipeline.search import build_runner
from perfsearch.runners.base import Plan
from perfsearch.strategies import load

COLUMNS = ["step_ms", "samples_per_s", "status", "bucket_cap_mb", "zero_stage", "micro_batch", "x"]
COLUMNS += ["world_size", "first_losses", "purpose", "reason", "trial_seconds", "rewrap_ms"]
COLUMNS += ["peak_allocated_gib", "peak_reserved_gib", "gradient_accumulation", "prefetch_factor"]
NUMBERS = ["1", "2", "25", "64.0", "1e3", "0.5 0.5 0.6", "-1", "0", "nan", "inf", "-inf", "1e400"]
WORDS = ["", "null", "true", "ok", "oom", "pruned", "crash", "baseline", "search", "a b", "'=1"]
ODD = ["9" * 400, "9" * 5000, "1" + "0" * 308, "1e-320", "1_000", "\x1b[31m", "\u202e", "é", "\x00"]
ODD += [
    "=1+1",
    '"',
    ",",
    "\n",
    "0x10",
    "١٢",
    "1e",
    "--",
    "\udc80".encode("utf-8", "replace").decode(),
]
CELLS = some.one_of(
    *(some.sampled_from(kind) for kind in (NUMBERS, WORDS, ODD)), any_text(max_size=6)
)


def as_csv(columns, rows):
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    return text.getvalue().encode("utf-8", "replace")


ANY_TABLES = some.tuples(
    some.lists(some.one_of(some.sampled_from(COLUMNS), any_text(max_size=4)), max_size=7),
    some.lists(some.lists(CELLS, max_size=8), max_size=8),
).map(lambda both: as_csv(*both))
LIKELY = some.lists(
    some.tuples(
        some.sampled_from(["1", "1.0", "2", "25", "null", "9" * 400, "true", "nan", "a"]),
        some.sampled_from(["8", "8.5 8.4 8.6 8.5", "1e-320", "1e308", "", "inf", "0"]),
        some.sampled_from(["ok", "", "oom", "pruned", "odd"]),
        some.sampled_from(["64", "", "1e308", "1e-300", "nan"]),
        some.sampled_from(["2", "", "9" * 400, "1.5", "nan", "inf", "-3"]),
        some.sampled_from(["3.0 2.5", "nan nan", "", "inf", "x"]),
        some.sampled_from(["", "1", "nan", "inf", "-1", "1e308"]),
    ),
    min_size=2,
    max_size=8,
).map(
    lambda rows: as_csv(
        ["bucket_cap_mb", "step_ms", "status", "samples_per_s", "world_size", "first_losses",
         "trial_seconds"],
        rows,
    )
)  # fmt: skip
RAW = some.binary(max_size=200)


def served(path, **options):
    """Build the runner on a table, and have it serve some rows; the outcomes."""
    plain = {
        "runner": {"name": "replay", "table": str(path), **options},
        "strategy": {"name": "random"},
        "workload": {"name": "mlp"},
    }
    runner = build_runner(validate(plain))
    points = [runner.baseline, *(runner.space.listed() or [])[:6]]
    return runner, [
        runner.measure(p, Plan(number, log_directory=Path(path.parent)))
        for number, p in enumerate(points)
    ]


def require_sound(runner, outcomes):
    for outcome in outcomes:
        assert isinstance(outcome, Outcome)
        assert outcome.status in list(Status)
        measured = outcome.measurement
        if measured is not None:
            assert measured.step_seconds
            assert all(0 < s < math.inf for s in measured.step_seconds)
            assert measured.samples_per_step >= 1
            assert measured.world_size >= 1
    assert runner.devices >= 1
    assert runner.space.feasible(runner.baseline)


def require_told(message):
    assert message.startswith(("runner.", "batch", "objective"))
    assert "\n" not in message
    assert len(message) < 5000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.one_of(ANY_TABLES, LIKELY, RAW))
@example(b"")
@example(b"step_ms\n")
@example(b"step_ms,step_ms,x\n1,2,3\n4,5,6\n")
@example(b"x,step_ms\n1,5\n2\n3,7,8,9\n")
@example(b"\xef\xbb\xbfx,step_ms\n1,5\n2,6\n")
@example(b"x\0,step_ms\n1,5\n2,6\n")
@example(b'x,step_ms\n"1,5\n2,6\n')
@example(b"x,step_ms\n1," + b"9" * 200_000 + b"\n2,6\n")
@example(b"x,step_ms\n" + b"9" * 200_000 + b",1\n2,6\n")
@example(b"x,step_ms,world_size\n1,5," + b"9" * 400 + b"\n2,6,1\n")
@example(b"x,step_ms,world_size\n1,5,inf\n2,6,1\n")
@example(b"x,step_ms,samples_per_s\n1,1e300,1e300\n2,1e-300,1\n")
@example(b"x,step_ms,samples_per_s\n1,1e-320,\n2,1e-320,\n")
@example(b"x,samples_per_s\n1,1e-320\n2,1\n")
@example(b"x,step_ms,trial_seconds\n1,5,nan\n2,6,-inf\n")
def test_a_table_is_served_or_refused_in_one_line(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("t") / "table.csv"
    path.write_bytes(raw)
    try:
        runner, outcomes = served(path)
    except BadInputError as error:
        require_told(str(error))
    else:
        require_sound(runner, outcomes)


@pytest.mark.parametrize("size", [2**33, 2**40])
def test_a_huge_table_is_not_read(tmp_path, size):
    path = tmp_path / "table.csv"
    with path.open("wb") as file:
        file.truncate(size)  # a sparse one
    with at_most(8), pytest.raises(BadInputError, match="a table may have 256"):
        served(path)


def test_many_columns_and_long_cells_take_bounded_memory(tmp_path):
    path = tmp_path / "table.csv"
    columns = ["step_ms", *(f"c{i}" for i in range(2000))]
    rows = [["5", *(str(i % 3) for i in range(2000))], ["6", *("x" * 900 for _ in range(2000))]]
    path.write_bytes(as_csv(columns, rows))
    size = path.stat().st_size / 2**20
    with at_most(20 * size + 8):
        runner, outcomes = served(path)
    require_sound(runner, outcomes)


@pytest.mark.slow
def test_a_table_of_300_000_rows_is_searched(tmp_path):
    """Each of its configurations is its own: none may be compared with each other one."""
    path = tmp_path / "table.csv"
    with path.open("w") as file:
        file.write("bucket_cap_mb,chunk,status,step_ms\n")
        for number in range(300_000):
            bucket, chunk = number % 1000, number // 1000
            slow = 10 + abs(bucket - 700) / 100 + abs(chunk - 100) / 50
            file.write(f"{bucket},{chunk},ok,{slow:.4f} {slow * 1.01:.4f}\n")
    runner, outcomes = served(path, baseline={"bucket_cap_mb": 25, "chunk": 1})
    require_sound(runner, outcomes)
    assert runner.space.size == 300_000
    for name in ("random", "bayes"):
        strategy = load(name)(runner.space, runner.hints([]), 0)
        for number in range(1, 4):
            point = strategy.ask()
            outcome = runner.measure(point, Plan(number, log_directory=tmp_path))
            cost = statistics.fmean(outcome.measurement.step_seconds)
            told = Trial(number, point, Purpose.SEARCH, outcome.status, outcome.measurement)
            told.cost = cost
            strategy.tell(told)
