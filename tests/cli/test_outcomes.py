"""The header of each search of a sweep, and the closing table."""

from pathlib import Path

import pytest
from support.small_search import make_settings
from support.sweep_runs import searched as journalled

from perfsearch.cli.outcomes import Sweep
from perfsearch.config.schema import validate
from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.core.verdict import Interval
from perfsearch.pipeline.session import BASELINE, Result, Verdict

JOB = {"runner": {"name": "replay"}, "strategy": {"name": "grid"}, "workload": {"name": "mlp"}}
JOBS = [
    ["runner=replay", f"strategy={strategy}", f"seed={seed}"]
    for strategy in ("bayes", "random")
    for seed in (1, 2)
]


def of(strategy, **options):
    return validate({**JOB, "strategy": {"name": strategy, **options}})


def searched(costs, verdict, baselines=(1.0,)):
    trials = [
        Trial(0, {}, purpose, Status.OK, None, cost, objective=100 / cost)
        for purpose, cost in zip((Purpose.BASELINE, Purpose.SENTINEL), baselines, strict=False)
    ]
    for number, cost in enumerate(costs, start=1):
        status = Status.OK if cost else Status.OOM
        trials.append(Trial(number, {}, Purpose.SEARCH, status, None, cost, seconds=2.0))
    return Result(ExitCode.DONE, Path("run"), trials, verdict)


GAIN = Verdict({1: Interval(1.5, 1.4, 1.6, 3)}, winner=1)
WIDE = Verdict({1: Interval(1.1, 0.8, 1.5, 3)}, is_open=True)
TIGHT = Verdict({1: Interval(1.0, 0.99, 1.01, 3)})


def test_each_search_is_announced_with_what_it_differs_by(capsys):
    sweep = Sweep(JOBS)
    assert sweep.words(1) == JOBS[1]
    sweep.show_header(1)
    assert capsys.readouterr().out == "\n== search 2 of 4: strategy=bayes seed=2\n"
    side_by_side = [[*job, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"] for job in JOBS]
    assert Sweep(side_by_side).words(1) == JOBS[1]  # which is a command by itself
    assert Sweep(side_by_side).name(1) == "strategy=bayes seed=2"
    assert Sweep(JOBS[:1]).words(0) is None
    assert Sweep().name(2) == "search 3"  # of a sweeper that makes its jobs as it goes


def test_the_table_has_a_row_for_each_search(capsys):
    results = [
        searched([None, 0.7, 0.5], GAIN),
        searched([2.0, 0.505], GAIN, baselines=(2.0, 1.0)),  # as good, whatever its baseline read
        searched([0.9], WIDE),
        searched([0.99], TIGHT),
    ]
    done = list(zip([of("bayes")] * 2 + [of("random")] * 2, results, strict=True))
    rows, remarks = Sweep(JOBS).table(done)
    assert not remarks
    assert rows == [
        ["strategy", "seed", "gain (95% interval)", "trials", "seconds", "verdict"],
        ["bayes", "1", "+50.0% (+40.0% to +60.0%)", "3", "6.0", "faster"],
        ["bayes", "2", "+50.0% (+40.0% to +60.0%)", "2", "4.0", "faster"],
        ["random", "1", "+10.0% (-20.0% to +50.0%)", "-", "-", "inconclusive"],
        ["random", "2", "+0.0% (-1.0% to +1.0%)", "-", "-", "no gain"],
    ]
    Sweep(JOBS).show_outcomes(done)
    assert "== 4 searches\nstrategy" in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 1])
def test_one_search_alone_has_no_table(number, capsys):
    settings = validate(dict(JOB))
    Sweep(JOBS[:number]).show_outcomes([(settings, searched([0.5], GAIN))])
    assert capsys.readouterr().out == ""


def test_searches_of_other_jobs_have_a_best_of_their_own():
    jobs = [["nproc=1", "seed=1"], ["nproc=2", "seed=1"]]
    settings = validate(dict(JOB))
    results = [searched([0.5], GAIN), searched([0.8], GAIN)]
    rows, _ = Sweep(jobs).table([(settings, result) for result in results])
    assert [row[-3] for row in rows[1:]] == ["1", "1"]


def test_the_page_of_a_sweep_is_named_below_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = make_settings()
    done = []
    for words in JOBS:
        strategy, seed = (word.partition("=")[2] for word in words[1:])
        parameters = {"runner": "replay", "strategy": strategy, "seed": int(seed)}
        run_dir = journalled(tmp_path / "outputs" / f"{strategy}-{seed}", [1.0, 0.5], parameters)
        result = searched([0.5], GAIN)
        result.run_dir = run_dir
        done.append((settings, result))
    Sweep(JOBS).show_outcomes(done)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("page  outputs/sweep-")
    page = (tmp_path / last.removeprefix("page  ")).read_text()
    assert "bayes" in page and "random" in page and "seed=2" in page


def test_a_key_of_one_strategy_is_told_of_its_searches_alone(capsys):
    key = "++strategy.bayes.xi"
    sweep = Sweep(
        [[f"strategy={s}", f"{key}={xi}"] for s in ("bayes", "fast") for xi in (0.1, 0.2)]
    )
    assert sweep.words(0) == ["strategy=bayes", "strategy.bayes.xi=0.1"]
    assert sweep.words(2) == ["strategy=fast"]
    sweep.show_header(0)
    sweep.show_header(2)
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "== search 1 of 4: strategy=bayes strategy.bayes.xi=0.1"
    assert told[3] == "== search 3 of 4: strategy=fast"
    assert sweep.swept(2) == {"strategy": "fast", "strategy.bayes.xi": ""}


def test_the_table_names_strategies_and_single_readings_as_the_page_and_the_card_do(capsys):
    """Of searches under different load it says so, and does not rank their readings."""
    jobs = [["strategy=mcmc", "strategy.alpha=1"], ["strategy=random", "seed=1"]]
    one_each = Verdict(costs={BASELINE: [1.0], 1: [0.8]}, is_open=True)
    done = [
        (of("mcmc", alpha=1.0), searched([0.7], one_each, (1.0, 0.9))),
        (of("random"), searched([0.2], Verdict(is_open=True), (0.25, 0.25))),
    ]
    rows, remarks = Sweep(jobs).table(done)
    assert rows[0][0] == "strategy" and "strategy.alpha" not in rows[0]
    assert [row[0] for row in rows[1:]] == ["mcmc alpha=1", "random"]
    assert [row[-4:-1] for row in rows[1:]] == [
        ["+25.0% (one reading each)", "-", "-"],
        ["+25.0% (one reading)", "-", "-"],
    ]
    assert len(remarks) == 1 and remarks[0].startswith("these searches ran under different load")
    Sweep(jobs).show_outcomes(done)
    said = " ".join(capsys.readouterr().out.split())
    assert "their baselines read 100.0 to 111.1 and 400.0 samples/s" in said
