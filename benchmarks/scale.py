"""Several trials at a time, and what many trials and many ranks cost the controller.

    python benchmarks/scale.py [beside] [trials] [memory] [ranks] [store] [mlflow] [bayes]

`beside`: the same 24 recorded trials, which really last as long as they say, one at a time and two
at a time, in turn. Wanted: at most 0.6 of the time. `trials`: searches of 10,000 trials: trial
10,000 against trial 100 (wanted: at most 1.5 times its cost), and a resume (wanted: seconds).
`memory`: what Python holds of each of 1,000 trials (wanted: below 5 KiB). `ranks`: reports of 1,000
ranks made into one trial. `store`: trials written in turn into a SQLite store of MLflow's that has
100 and into one that has 10,000. `mlflow`: a search of 10,000 trials of `SCALE_PACE_S` (0.15)
seconds each that MLflow shows in a SQLite store: what writing the last takes against the first, how
far it is behind, and what the process grows by. `bayes`: an ask after 1,000 trials (wanted: within
1 s). All of them where none is named. `SCALE_TRIALS` is another number than 10,000.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import sqlite3
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from _environment import set_environment
from _scale_runner import STEPS, Many, said
from verdict import Silent

from perfsearch.config.schema import Settings, validate
from perfsearch.core.hints import Hints
from perfsearch.core.journal import JOURNAL, Event
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.pipeline.search import build_runner, search, strategy_factory
from perfsearch.runners.base import Plan
from perfsearch.strategies import load
from perfsearch.workers.results import combine

MANY = int(os.environ.get("SCALE_TRIALS", "10000"))
PACE_S = float(os.environ.get("SCALE_PACE_S", "0.15"))
EARLY, WINDOW = 100, 100
PAIRS = 3
RANKS = 1_000
PAIRED = 30
"""Trials that are written into each of two stores."""


def main() -> int:
    """Run what is named, and print what came of it."""
    set_environment()
    parts: dict[str, Callable[[Path], None]] = {
        "beside": beside,
        "trials": trials,
        "memory": memory,
        "ranks": ranks,
        "store": store,
        "mlflow": mlflow,
        "bayes": bayes,
    }
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", help=", ".join(parts))
    for name in parser.parse_args().part or list(parts):
        with tempfile.TemporaryDirectory() as directory:
            print(f"== {name}", flush=True)
            parts[name](Path(directory))
    return 0


# -----------------------------------------------------------------------------
# Two trials at a time against one, on the same trials.


def beside(directory: Path) -> None:
    """One and two at a time in turn, first the one, then the other."""
    table = directory / "table.csv"
    generator = np.random.default_rng(0)
    rows = ["bucket_cap_mb,static_graph,status,samples_per_s,step_ms,trial_seconds"]
    for bucket in (1, 2, 4, 8, 16, 25, 32, 64, 96, 128, 192, 256):
        for static in ("false", "true"):
            seconds = 2.0 * math.exp(float(generator.normal(0, 0.4)))
            rows.append(f"{bucket},{static},ok,32,10 10.1 9.9,{seconds:.3f}")
    table.write_text("\n".join(rows) + "\n")
    ratios = []
    for pair in range(PAIRS):
        taken = {}
        for lanes in (1, 2) if pair % 2 == 0 else (2, 1):
            settings = validate(
                {
                    "runner": {"name": "replay", "table": str(table), "real_time": 1.0},
                    "strategy": {"name": "grid"},
                    "workload": {"name": "mlp"},
                    "budget": {"trials": None, "seconds": None},
                    "confirm": {"finalists": 0},
                    "sentinel_every": 0,
                    "parallel_trials": lanes,
                    "run_dir": str(directory / f"{pair}-{lanes}"),
                    "tracking": {"enabled": False},
                }
            )
            ended = search(settings, build_runner(settings), strategy_factory(settings), Silent())
            events = _journal(ended.run_dir)
            told = [e for e in events if e["event"] == "told"]
            taken[lanes] = float(told[-1]["search_seconds"])
            assert sum(t.purpose is Purpose.SEARCH for t in ended.trials) == len(rows) - 2
        ratios.append(taken[2] / taken[1])
        print(f"one at a time {taken[1]:.2f} s, two {taken[2]:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def _journal(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / JOURNAL).read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


# -----------------------------------------------------------------------------
# Many trials.


class Clock(Silent):
    """Notes when each trial ended, and what memory Python has allocated, where that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[float, float]] = []
        self.allocated: list[int] = []

    def trial_finished(self, trial: Trial, *args: Any, **more: Any) -> None:
        """Take note."""
        self.ends.append((time.perf_counter(), time.process_time()))
        if tracemalloc.is_tracing() and len(self.ends) % WINDOW == 0:
            gc.collect()
            self.allocated.append(tracemalloc.get_traced_memory()[0])

    def costs(self, last: int) -> tuple[float, float]:
        """Median milliseconds of the trials up to ``last``: by the clock, of the processor."""
        chosen = self.ends[last - WINDOW : last]
        pairs = list(itertools.pairwise(chosen))
        by_clock = statistics.median(after[0] - before[0] for before, after in pairs)
        return 1e3 * by_clock, 1e3 * statistics.median(b[1] - a[1] for a, b in pairs)


def trials(directory: Path) -> None:
    """Searches of many trials, whose strategy costs little."""
    for full in (False, True):
        name = "full" if full else "small"
        clock, changes = Clock(), {"budget": {"trials": MANY, "seconds": None}}
        _many(directory / name, Many(full), clock, changes)
        early, late = clock.costs(EARLY + WINDOW // 2), clock.costs(MANY)
        for kind, before, after in zip(("clock", "processor"), early, late, strict=True):
            print(
                f"{name}: a trial around {EARLY}: {before:.2f} ms, around {MANY}: {after:.2f} ms "
                f"by the {kind}: {after / before:.2f} times"
            )
        _resume(directory / name, Many(full), name)


def memory(directory: Path) -> None:
    """What is allocated between one multiple of a hundred trials and the next."""
    for full in (False, True):
        name, clock = "full" if full else "small", Clock()
        tracemalloc.start()
        _many(directory / name, Many(full), clock, {"budget": {"trials": 1000, "seconds": None}})
        tracemalloc.stop()
        grown = [(b - a) / WINDOW / 1024 for a, b in itertools.pairwise(clock.allocated)]
        size = (directory / name / JOURNAL).stat().st_size / 1000 / 1024
        print(
            f"{name}: {statistics.median(grown):.2f} KiB a trial (from {min(grown):.2f} to "
            f"{max(grown):.2f}), {size:.2f} KiB in the journal",
            flush=True,
        )


def _many(
    run_dir: Path, runner: Many, view: Silent, changes: Mapping[str, Any], **more: Any
) -> None:
    settings = validate(
        {
            "runner": {"name": "replay"},
            "strategy": {"name": "random"},
            "workload": {"name": "mlp"},
            "confirm": {"finalists": 0},
            "run_dir": str(run_dir),
            "tracking": {"enabled": False},
            **changes,
        }
    )
    search(settings, runner, strategy_factory(settings), view, **more)


def _resume(run_dir: Path, runner: Many, name: str) -> None:
    """Cut the end off, as a kill does, and see how long it takes until the next trial has ended."""
    journal = run_dir / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    kept = max(i for i, line in enumerate(lines) if b'"event":"told"' in line)
    journal.write_bytes(b"".join(lines[: kept + 1]))
    clock, begin = Clock(), (time.perf_counter(), time.process_time())
    _many(run_dir, runner, clock, {"budget": {"trials": MANY + 1, "seconds": None}})
    until, used = (clock.ends[0][i] - begin[i] for i in (0, 1))
    print(
        f"{name}: {until:.1f} s from the start of a resume to the end of its first trial, "
        f"{used:.1f} s of the processor",
        flush=True,
    )


# -----------------------------------------------------------------------------
# Many ranks.


def ranks(directory: Path) -> None:
    """What the leading rank makes of all ranks' reports, and what the journal has of it."""
    generator = np.random.default_rng(0)
    for count in (8, RANKS):
        results = [_report(generator, rank) for rank in range(count)]
        begin = time.perf_counter()
        found = combine(results)
        seconds = time.perf_counter() - begin
        size = len(json.dumps(found)) / 1024
        print(f"{count} ranks: {1e3 * seconds:.1f} ms, {size:.0f} KiB", flush=True)


def _report(generator: np.random.Generator, rank: int) -> dict[str, Any]:
    told = said(generator, {"bucket_cap_mb": 25})
    steps = (0.02 * np.exp(generator.normal(0, 0.01, STEPS))).tolist()
    return {
        "status": "ok",
        "reason": "",
        "agreed": {"step_seconds": steps, "samples_per_step": 32, "first_losses": [3.0]},
        "phases_ms": told["phases_ms"],
        "evidence": {**told["bottleneck_evidence"], "phases_step_ms": 20.0},
        "peaks": {"peak_allocated_gib": 1.0},
        "in_force": told["in_force"],
        "environment": {"host": f"node-{rank // 8}", "device": f"cuda:{rank % 8}"},
    }


# -----------------------------------------------------------------------------
# MLflow.


def store(directory: Path) -> None:
    """Trials written in turn into a store that has few and into one that has many.

    The rows of the few, which are written as ever, are copied by SQL until they are many.
    """
    few = _Written(directory / "few")
    for _ in range(EARLY):
        few.write()
    many = few.copied(directory / "many", MANY // EARLY - 1)
    pairs = [(few.write(), many.write()) for _ in range(PAIRED)]
    for at, kind in enumerate(("by the clock", "of the processor")):
        early, late = (1e3 * statistics.median(pair[n][at] for pair in pairs) for n in (0, 1))
        ratio = statistics.median(pair[1][at] / pair[0][at] for pair in pairs)
        print(
            f"writing a trial after {EARLY}: {early:.1f} ms, after {many.trials}: {late:.1f} ms "
            f"{kind}: {ratio:.2f} times (load {os.getloadavg()[0]:.0f})",
            flush=True,
        )


class _Written:
    """A store in SQLite, and how many trials it has."""

    def __init__(self, directory: Path, trials: int = 0) -> None:
        from perfsearch.tracking.mlflow import Tracker

        directory.mkdir(exist_ok=True)
        self._file, self._generator = directory / "mlflow.db", np.random.default_rng(trials)
        self._store = Tracker(f"sqlite:///{self._file}", "scale", directory / "run", "s1")._store
        opened = {"unix_s": time.time(), "definition": {}, "parameters": {}}
        self._store.show(Event(1, "opened", opened))
        self.trials = trials

    def write(self) -> tuple[float, float]:
        """One more trial; seconds by the clock and of the processor."""
        runner, self.trials = Many(full=True), self.trials + 1
        point = runner.space.sample(self._generator)
        told = runner.measure(point, Plan(self.trials, log_directory=Path())).measurement
        trial = Trial(self.trials, point, Purpose.SEARCH, Status.OK, told, cost=0.02)
        data = {"unix_s": time.time(), "trial": trial.to_json()}
        event = Event(self.trials + 1, "finished", data)
        begin = time.perf_counter(), time.process_time()
        self._store.show(event)
        return time.perf_counter() - begin[0], time.process_time() - begin[1]

    def copied(self, directory: Path, times: int) -> _Written:
        """Another store, in which each trial's rows are so many times more, under other ids."""
        directory.mkdir()
        with closing(sqlite3.connect(directory / "mlflow.db")) as database:
            with closing(sqlite3.connect(self._file)) as source:
                source.backup(database)
            for table in ("runs", "metrics", "latest_metrics", "params", "tags"):
                database.execute(f"CREATE TEMP TABLE kept AS SELECT * FROM {table}")
                names = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
                taken = ["? || substr(run_uuid, 5)" if n == "run_uuid" else n for n in names]
                for number in range(times):
                    database.execute(
                        f"INSERT INTO {table} ({', '.join(names)}) "
                        f"SELECT {', '.join(taken)} FROM kept",
                        [f"x{number:03d}"],
                    )
                database.execute("DROP TABLE kept")
            # that of the search was copied, too, and a view finds its search by this
            database.execute(
                "UPDATE tags SET value = 'others' WHERE key = 'perfsearch.search_id' "
                "AND run_uuid LIKE 'x%'"
            )
            database.commit()
            (count,) = database.execute("SELECT count(*) FROM runs").fetchone()
        return _Written(directory, int(count))


def mlflow(directory: Path) -> None:
    """A search whose trials last ``SCALE_PACE_S``, shown in a SQLite store beside it."""
    import psutil

    from perfsearch.tracking.mlflow import Tracker

    # behind the search in seconds, and milliseconds of the writer's thread: by the clock, of the
    # processor
    written: list[tuple[float, float, float]] = []
    ends_s: list[float] = []

    def timed(settings: Settings, run_dir: Path, search_id: str) -> Tracker:
        uri = f"sqlite:///{directory / 'mlflow.db'}"
        tracker = Tracker(uri, "scale", run_dir, search_id)
        show, close = tracker._store.show, tracker.close

        def shown(event: Event) -> None:
            begin = time.perf_counter(), time.thread_time()
            show(event)
            if event.name == "finished":
                taken = time.perf_counter() - begin[0], time.thread_time() - begin[1]
                behind = time.time() - event.data["unix_s"]
                written.append((behind, 1e3 * taken[0], 1e3 * taken[1]))

        def closed(status: str) -> None:
            begin = time.perf_counter()
            close(status, timeout_s=3600.0)  # by itself a search waits for a minute
            ends_s.append(time.perf_counter() - begin)

        tracker._store.show = shown  # type: ignore[method-assign]
        tracker.close = closed  # type: ignore[assignment]
        return tracker

    process, sizes = psutil.Process(), dict[int, int]()

    class Watch(Clock):
        """Notes how large the process is, and says how far it has come."""

        def trial_finished(self, trial: Trial, *args: Any, **more: Any) -> None:
            super().trial_finished(trial, *args, **more)
            number = len(self.ends)
            if number % (MANY // 10) == 0 or number == 10 * EARLY:
                sizes[number] = process.memory_info().rss
                behind, clock, used = (
                    statistics.median(one[at] for one in written[-WINDOW:] or [(math.inf,) * 3])
                    for at in range(3)
                )
                print(
                    f"{number} trials: {behind:.1f} s behind, {number - len(written)} to write, "
                    f"{clock:.0f} ms ({used:.0f} of the processor) each, "
                    f"{sizes[number] / 2**20:.0f} MiB, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )

    clock = Watch()
    _many(
        directory / "run",
        Many(full=True, pace_s=PACE_S),
        clock,
        {"budget": {"trials": MANY, "seconds": None}, "tracking": {"enabled": True}},
        tracker_factory=timed,
    )
    for at, kind in ((1, "by the clock"), (2, "of the processor")):
        each = [one[at] for one in written]
        early = statistics.median(each[EARLY - WINDOW // 2 : EARLY + WINDOW // 2])
        late = statistics.median(each[-WINDOW:])
        print(
            f"writing a trial around {EARLY}: {early:.1f} ms, around {MANY}: {late:.1f} ms {kind}: "
            f"{late / early:.2f} times"
        )
    behind = sorted(one[0] for one in written)
    first, last = min(sizes), max(sizes)
    grown = (sizes[last] - sizes[first]) / (last - first) / 1024
    print(
        f"trials of {PACE_S:g} s: behind by {statistics.median(behind):.2f} s (most "
        f"{behind[-1]:.1f}); {ends_s[0]:.1f} s until the rest was written; the process grew by "
        f"{grown:.1f} KiB a trial from {first} to {last}"
    )


# -----------------------------------------------------------------------------
# A strategy with a model.


def bayes(directory: Path) -> None:
    """Asks after 100 and after 1,000 trials, of which one in 20 failed, two of them outstanding."""
    space = Space(
        [
            Knob("bucket_cap_mb", Kind.INTEGER, 25, low=1, high=512, log=True),
            Knob("gradient_as_bucket_view", Kind.BOOLEAN, False),
            Knob("static_graph", Kind.BOOLEAN, False),
            Knob("algorithm", Kind.CATEGORICAL, None, values=(None, "Ring", "Tree")),
            Knob("workers", Kind.ORDINAL, 0, (0, 1, 2, 4, 8)),
            Knob("prefetch", Kind.ORDINAL, 2, (1, 2, 4, 8)),
            Knob("sockets", Kind.ORDINAL, 1, (1, 2, 4, 8)),
            Knob("threads", Kind.ORDINAL, 1, (1, 2, 4)),
        ]
    )
    chosen = load("bayes")
    for count in (100, 1000):
        generator = np.random.default_rng(0)
        base = {knob.name: knob.default for knob in space.knobs}
        strategy = chosen(space, Hints(baseline=base), 0, chosen.Options(min_gain=0.0))
        for number in range(count):
            point = base if number == 0 else space.sample(generator)
            away = abs(math.log2(float(point["bucket_cap_mb"] or 1) / 60))
            cost = 0.1 * math.exp(0.05 * away - 0.03 * bool(point["static_graph"]))
            cost *= math.exp(float(generator.normal(0, 0.005)))
            failed = number % 20 == 19
            status = Status.OOM if failed else Status.OK
            trial = Trial(number, point, Purpose.SEARCH, status, cost=None if failed else cost)
            trial.cost_error, trial.seconds = 0.005, 2.0
            strategy.tell(trial)
        strategy.ask()  # imports what it needs
        taken = []
        for number in range(10):
            begin = time.perf_counter(), time.process_time()
            point = strategy.ask()
            taken.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            assert point is not None
            strategy.tell(Trial(count + number, point, Purpose.SEARCH, Status.OK, cost=0.09))
        clock, processor = (sorted(t[i] for t in taken) for i in (0, 1))
        print(
            f"{count} trials: {statistics.median(clock):.2f} s by the clock (most "
            f"{clock[-1]:.2f}), {statistics.median(processor):.2f} s of the processor (most "
            f"{processor[-1]:.2f})",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
