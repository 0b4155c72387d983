import errno
import io
import os
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from perfsearch.cli import view as view_module
from perfsearch.cli.bar import Progress
from perfsearch.cli.view import (
    LiveView,
    View,
    changes,
    open_view,
    result_cells,
)
from perfsearch.core.objective import Metric, Objective
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.core.verdict import Interval
from perfsearch.pipeline.cards import Card, Row

BASE = {"bucket_cap_mb": 25, "static_graph": False, "nccl_algo": None}


def trial(number, step_s=0.1, purpose=Purpose.SEARCH, status=Status.OK, reason="", **knobs):
    measurement = Measurement([step_s] * 3, samples_per_step=32) if status is Status.OK else None
    objective = None if measurement is None else measurement.samples_per_s
    cost = None if objective is None else 1 / objective
    return Trial(
        number, {**BASE, **knobs}, purpose, status, measurement, cost,
        objective=objective, reason=reason,
    )  # fmt: skip


BASELINE = trial(0, purpose=Purpose.BASELINE)
BETTER = trial(3, 0.08, bucket_cap_mb=64.123456, static_graph=True)
ROWS = [
    {"label": "baseline", "trial": BASELINE, "objective": 320.0, "step_ms": 100.0,
     "unit": "samples/s", "interval": None, "confirmed": True},
    {"label": "best", "trial": BETTER, "objective": 400.0, "step_ms": 80.0, "unit": "samples/s",
     "interval": Interval(1.25, 1.21, 1.29, 5), "confirmed": True},
]  # fmt: skip


def play(view):
    view.stage("baseline", "as it is today")
    view.trial_started(0, Purpose.BASELINE, BASE)
    view.trial_finished(BASELINE, BASELINE, BASELINE, 120.0)
    view.stage("search", "expected improvement")
    view.trial_started(3, Purpose.SEARCH, BETTER.configuration)
    view.trial_finished(BETTER, BETTER, BASELINE, 60.0)
    failed = trial(4, status=Status.OOM, reason="CUDA out of memory on rank 1", static_graph=True)
    view.trial_finished(failed, BETTER, BASELINE, 55.0, "told as bad")
    view.note("search ended: budget.trials=2 spent")
    view.warning("the baseline drifted by 4%")
    view.result(ROWS)
    view.card(Card("result", [Row("verdict", "a gain of 25%"), Row("report", "outputs/x/r.html")]))


def test_a_plain_log_has_a_line_for_each_event():
    stream = io.StringIO()
    with View(stream=stream) as view:
        play(view)
    assert stream.getvalue().splitlines() == [
        "-- baseline: as it is today",
        "trial    samples/s    ms/step      gain  differs from the baseline",
        "    0        320.0      100.0            the baseline",
        "-- search: expected improvement",
        "trial    samples/s    ms/step      gain  differs from the baseline",
        "    3        400.0       80.0    +25.0%  bucket_cap_mb=64.1 static_graph=true"
        "  (best so far)",
        "    4  oom: CUDA out of memory on rank 1 (static_graph=true)  (told as bad)",
        "search ended: budget.trials=2 spent",
        "warning: the baseline drifted by 4%",
        "",
        "          trial  samples/s  ms/step        gain (95% interval)  differs from the baseline",
        "baseline      0      320.0    100.0",
        "best          3      400.0     80.0  +25.0% (+21.0% to +29.0%)"
        "  bucket_cap_mb=64.1 static_graph=true",
        "",
        "-- result " + "-" * 90,
        "  verdict  a gain of 25%",
        "  report   outputs/x/r.html",
    ]


def test_a_search_goes_on_when_nobody_reads():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with View(stream=Closed()) as view:
        play(view)
    assert view.progress.searched == 2


def test_a_latency_is_better_when_smaller():
    stream = io.StringIO()
    view = View(Objective(Metric.LATENCY), stream=stream)
    slow, fast = trial(0), trial(1, 0.05)
    slow.cost, slow.objective, fast.cost, fast.objective = 100.0, 100.0, 50.0, 50.0
    view.trial_finished(slow, slow, slow, None)
    view.trial_finished(fast, fast, slow, None)
    assert "    1         50.0       50.0   +100.0%" in stream.getvalue()


def test_a_confirmation_is_not_compared_with_the_one_reading_of_the_baseline():
    stream = io.StringIO()
    view = View(stream=stream)
    view.trial_finished(BASELINE, None, BASELINE, None)
    view.trial_finished(trial(5, 0.05, Purpose.CONFIRM), None, BASELINE, None)
    view.trial_finished(trial(6, 0.05, Purpose.CONFIRM, static_graph=True), None, BASELINE, None)
    *_, repeat, finalist = stream.getvalue().splitlines()
    assert repeat == "    5        640.0       50.0            the baseline"
    assert finalist == "    6        640.0       50.0            static_graph=true"


def test_a_best_that_is_worse_than_the_baseline_is_not_called_best(console):
    worse = trial(1, 0.2, static_graph=True)
    view = LiveView(console=console)
    view.stage("search")
    view.trial_finished(BASELINE, None, BASELINE, None)
    view.trial_finished(worse, worse, BASELINE, None)
    assert "best so far" not in console.file.getvalue()
    assert "best     the baseline, 320.0 samples/s" in block(view)


def test_a_terminal_that_is_gone_ends_nothing():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    view = LiveView(console=Console(file=Gone(), force_terminal=True))
    view.stage("search")
    assert view.unread
    view.result(ROWS)


def test_the_closing_table_of_a_search_without_confirmation():
    rows = [ROWS[0], {**ROWS[1], "label": "best so far", "interval": None, "confirmed": False}]
    cells = result_cells(rows)
    assert cells[2][4] == "+25.0% (one reading)"
    slower = {**rows[1], "objective": 288.0, "confirmed": True}  # of a single pair
    assert result_cells([ROWS[0], slower])[2][4] == "-10.0% (one reading each)"
    latency = [{**row, "unit": "ms/step"} for row in (ROWS[0], slower)]
    assert result_cells(latency)[2][4] == "+11.1% (one reading each)"
    failed = trial(0, status=Status.CRASH, purpose=Purpose.BASELINE)
    cells = result_cells([{**ROWS[0], "trial": failed, "objective": None, "step_ms": None}])
    assert cells[1][:4] == ["baseline", "0", "", ""]
    assert result_cells([])[0][0] == ""


def test_knobs_that_differ_tell_true_from_one():
    one = trial(1, static_graph=0)
    assert changes(one, BASELINE) == ["static_graph=0"]
    assert changes(trial(1, nccl_algo="Ring"), BASELINE) == ["nccl_algo=Ring"]
    assert changes(trial(1, bucket_cap_mb=None), BASELINE) == ["bucket_cap_mb=null"]


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=90, force_terminal=True, color_system=None)


def block(view):
    with view.console.capture() as capture:
        view.console.print(view)
    return capture.get()


def test_the_live_block_shows_trial_best_and_what_is_left(console, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    view = LiveView(progress=Progress(25, pairs=4), console=console)
    assert block(view).strip() == ""
    view.stage("search")
    assert "no baseline yet" in block(view)
    baseline = replace(BASELINE, seconds=10.0)
    view.trial_finished(baseline, baseline, baseline, 120.0)
    assert "the baseline, 320.0 samples/s" in block(view)
    now[0] += 3
    view.trial_finished(BETTER, BETTER, baseline, 90.0)
    view.trial_started(4, Purpose.SEARCH, {**BASE, "bucket_cap_mb": 8})
    now[0] += 7
    shown = block(view)
    assert "trial 4 search  0:07  bucket_cap_mb=8" in shown
    assert "400.0 samples/s  +25.0%  trial 3, one reading; baseline 320.0 samples/s" in shown
    # 83 s of the budget for the search, and 8 starts of 10 s
    assert re.search(r" 6% .* search 1 of 25, about 2:43 left", shown)
    assert max(map(len, shown.splitlines())) <= 90


@pytest.mark.parametrize("stage", ["baseline", "confirm"])
def test_a_stage_that_proposes_nothing_has_no_budget_and_chooses_nothing(stage, console):
    view = LiveView(progress=Progress(25), console=console)
    view.stage(stage, "as it is today")
    assert "choosing" not in block(view)
    assert "of 25" not in block(view)


def test_a_live_view_leaves_the_same_facts_behind(console):
    with LiveView(progress=Progress(25), console=console) as view:
        play(view)
    text = console.file.getvalue()
    for words in ("    3        400.0       80.0", "warning: the baseline", "a gain of 25%"):
        assert words in text
    assert "+25.0% (+21.0% to +29.0%)" in text


def test_text_that_looks_like_markup_is_shown_as_it_is(console):
    with LiveView(console=console) as view:
        view.stage("search", "[red]x[/red]")
        view.note("[bold]y")
        view.trial_finished(trial(1, status=Status.CRASH, reason="[/x] failed"), None, None, None)
    text = console.file.getvalue()
    assert "[red]x[/red]" in text
    assert "[bold]y" in text
    assert "[/x] failed" in text


@pytest.mark.parametrize(
    ("terminal", "term", "kind"),
    [(True, "xterm", LiveView), (True, "dumb", View), (False, "xterm", View)],
)
def test_the_view_suits_the_output(monkeypatch, terminal, term, kind):
    settings = SimpleNamespace(
        objective=SimpleNamespace(metric=Metric.LATENCY),
        budget=SimpleNamespace(trials=7),
        confirm=SimpleNamespace(max_repeats=4, finalists=2, seconds=None),
        strategy=SimpleNamespace(name="grid"),
    )
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(view_module.sys, "stdout", SimpleNamespace(isatty=lambda: terminal))
    view = open_view(settings)
    assert type(view) is kind
    assert (view.progress.trials, view.progress.arms) == (7, 3)
    assert view.objective.metric is Metric.LATENCY


STEERING = "a\x1b[31mb\u202ec\td"


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "show",
    [
        lambda view: view.line(STEERING),
        lambda view: view.note(STEERING),
        lambda view: view.warning(STEERING),
        lambda view: view.stage(STEERING, STEERING),
        lambda view: view.print(STEERING),
        lambda view: view.table([["name", "value"], [STEERING, STEERING]]),
        lambda view: view.card(Card(STEERING, [Row(STEERING, STEERING)])),
        lambda view: view.trial_finished(
            trial(1, nccl_algo=STEERING), None, BASELINE, None, STEERING
        ),
        lambda view: view.trial_finished(
            trial(1, status=Status.CRASH, reason=STEERING), None, None, None, STEERING
        ),
    ],
)
def test_escape_sequences_do_not_reach_the_terminal(show, live):
    stream = io.StringIO()
    view = LiveView(console=Console(file=stream, width=200)) if live else View(stream=stream)
    show(view)
    shown = stream.getvalue()
    assert "\x1b" not in shown and "\u202e" not in shown
    assert "\\x1b[31m" in shown


def test_of_very_many_knobs_it_is_said_how_often_they_have_which_value():
    before = dict.fromkeys((f"op_{i}" for i in range(50)), "2x1@0,1")
    after = {name: f"1x{1 + i % 6}@0" if i else "2x1@0,1" for i, name in enumerate(before)}
    baseline = Trial(0, before, Purpose.BASELINE, Status.OK)
    (told,) = changes(Trial(1, after, Purpose.SEARCH, Status.OK), baseline)
    assert told.startswith("49 of 50 knobs differ: 1x2@0 9 times, ")
    assert told.endswith(" and 2 more values")
    assert len(told) < 120
