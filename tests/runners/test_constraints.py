"""``runner.constraints``: rules of the user's own between knobs, in every runner and strategy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.small_search import Search, make_settings
from support.small_search import search as search
from support.synthetic import KeptTracker, KeptView, SyntheticRunner

from perfsearch import runners, strategies
from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError
from perfsearch.core.hints import Hints
from perfsearch.core.journal import read
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.space import Space
from perfsearch.core.trial import Purpose, Status
from perfsearch.pipeline.search import build_runner, strategy_factory
from perfsearch.pipeline.search import search as run_search
from perfsearch.runners._script.runner import Script
from perfsearch.strategies._staged import Staged
from perfsearch.strategies.random import Random

ZERO = str(Path(__file__).parents[1] / "data" / "zero_gpt2large_4xh100.csv")


def replay(*rules, **more):
    options = {"name": "replay", "table": ZERO, "constraints": list(rules), "batch": "free"}
    return make_settings(runner={**options, **more}, batch="free", confirm={"finalists": 0})


def zero(*rules, **more):
    return make_settings(
        runner={"name": "zero", "device": "cpu", "constraints": list(rules), **more},
        workload={"name": "mlp", "global_batch": 32},
        nproc=2,
    )


def whole_search(settings, directory, strategy=None):
    runner, view = build_runner(settings), KeptView()
    result = run_search(
        settings,
        runner,
        strategy or strategy_factory(settings),
        view,
        lambda *_: KeptTracker(),
    )
    return result, view


def keeps(trial):
    product = trial.configuration["micro_batch"] * (
        trial.configuration["gradient_accumulation"] or 1
    )
    return 2 <= product <= 8


NAMES = sorted(set(strategies.names()) - {"external", "session", "compare"})


@pytest.mark.parametrize("name", NAMES)
def test_no_strategy_spends_a_trial_on_what_breaks_a_rule(name, tmp_path):
    """optuna/optuna#2775, optuna/optuna#2478: the baseline itself breaks it here."""
    if strategies.load(name).requires:
        pytest.importorskip(next(iter(strategies.load(name).requires)))
    settings = replay("2 <= micro_batch * gradient_accumulation <= 8")
    changed = {"strategy": {"name": name}, "run_dir": str(tmp_path / "run"), "sentinel_every": 0}
    plain = {"runner": {"name": "replay", **settings.runner.options}, "workload": {"name": "mlp"}}
    plain |= {"batch": "free", "confirm": {"finalists": 0}, "budget": {"trials": 5}}
    settings = validate({**plain, **changed, "tracking": {"enabled": False}})
    result, view = whole_search(settings, tmp_path)
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    assert searched, view.text
    assert all(keeps(trial) for trial in searched)
    assert not keeps(result.trials[0])
    assert "today's configuration breaks runner.constraints: '2 <= micro_batch" in view.text
    assert "(micro_batch=1, gradient_accumulation=1)" in view.text
    assert not [e for e in read(result.run_dir / "journal.jsonl")[1] if e.name == "screened"]


class Stubborn(Random):
    """Proposes what breaks the rule every other time."""

    def ask(self):
        asked = super().ask()
        self._odd = not getattr(self, "_odd", False)
        return {**asked, "bucket": 32, "view": True} if self._odd and asked else asked


def test_a_proposal_that_breaks_a_rule_is_free_and_counted(search: Search):
    runner = SyntheticRunner()
    settings = make_settings(runner={"name": "replay", "constraints": ["bucket < 32 or not view"]})
    runner.keep(settings)
    search.strategy = Stubborn
    result = search(runner, budget={"trials": 5}, sentinel_every=0)
    searched = [t for t in result.trials if t.purpose is Purpose.SEARCH]
    assert len(searched) == 5
    assert not [t for t in searched if t.configuration == {"bucket": 32, "view": True}]
    assert search.tracker.numbers["search/screened"] >= 4
    assert "screened: runner.constraints: 'bucket < 32 or not view' is broken" in search.view.text


def test_every_runner_has_the_key():
    for name in runners.names():
        assert "constraints" in runners.load(name).Options.__dataclass_fields__, name


def test_what_follows_from_other_knobs_can_be_named():
    free = build_runner(zero()).space.listed()
    runner = build_runner(zero("gradient_accumulation <= 2", "zero_stage != 1"))
    points = runner.space.listed()
    assert {p["micro_batch"] for p in points} == {8, 16}, "16 samples a rank"
    assert {p["zero_stage"] for p in points} == {p["zero_stage"] for p in free} - {1}


def test_pinned_knobs_count():
    knobs = {"bucket_cap_mb": [1, 8, 25], "prefetch_factor": 4, "dataloader_workers": [0, 1]}
    runner = {"name": "ddp", "device": "cpu", "knobs": knobs}
    rule = "dataloader_workers * prefetch_factor < 4 or bucket_cap_mb == 8"
    made = build_runner(make_settings(runner={**runner, "constraints": [rule]}, nproc=2))
    points = made.space.listed()
    assert len(points) == 4
    assert {p["bucket_cap_mb"] for p in points if p["dataloader_workers"] == 1} == {8}


@pytest.mark.parametrize("make", [replay, zero])
@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("micro_bach <= 4", "micro_bach: no such knob. Did you mean 'micro_batch'?"),
        ("micro_batch <= ", "cannot be read"),
        ("micro_batch > 4096", "nothing is left to search"),
        ("micro_batch < 'a'", "is no number"),
        ("__import__('os').abort()", "is not allowed in a rule"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused_before_anything_starts(make, rule, why):
    with pytest.raises(BadInputError) as refusal:
        build_runner(make(rule))
    assert why in str(refusal.value)
    assert str(refusal.value).startswith("runner.constraints: ")


@pytest.mark.parametrize("given", ["micro_batch < 4", [4], {"a": 1}])
def test_anything_but_a_list_of_texts_is_refused(given):
    with pytest.raises(BadInputError, match=r"runner\.constraints"):
        build_runner(make_settings(runner={"name": "zero", "device": "cpu", "constraints": given}))


def test_a_knob_that_this_job_lacks_is_said_and_the_rule_left_out():
    runner = {"name": "ddp", "device": "cpu", "constraints": ["nccl_min_ctas <= 4"]}
    made = build_runner(make_settings(runner=runner, nproc=2))
    (line,) = made.rule_lines()
    assert line.startswith("warning: runner.constraints: 'nccl_min_ctas <= 4' has no effect")
    assert "NCCL is not used on a CPU" in line
    assert made.space.feasible(made.baseline)


def test_a_scripts_rules_hold_before_and_after_it_is_seen(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    settings = make_settings(
        runner={
            "name": "ddp",
            "device": "cpu",
            "constraints": ["micro_batch * gradient_accumulation <= 64", "micro_batch <= 8"],
        },
        workload={
            "name": "script",
            "command": [str(script), "--bs", "16", "--acc", "2"],
            "map": ["micro_batch=--bs", "gradient_accumulation=--acc"],
        },
    )
    made = build_runner(settings)
    assert isinstance(made, Script)
    batches = {made.space.canonical(p)["micro_batch"] for p in _drawn(made.space)}
    assert batches <= {1, 2, 4, 8}
    made._settle(None)
    assert not made.space.feasible({**made.baseline, "micro_batch": 16})
    (line,) = made.rule_lines()
    assert "today's configuration breaks" in line
    assert "micro_batch=16" in line


def _drawn(space):
    import numpy as np

    generator = np.random.default_rng(0)
    return [space.sample(generator) for _ in range(30)]


def test_groups_stand_on_something_that_keeps_the_rules():
    knobs = [Knob("bucket_cap_mb", Kind.ORDINAL, 1, (1, 2, 4)), Knob("b", Kind.ORDINAL, 1, (1, 2))]
    space = Space(knobs)
    runner = SyntheticRunner()
    runner.space, runner.baseline = space, {"bucket_cap_mb": 1, "b": 1}
    runner.keep(make_settings(runner={"name": "replay", "constraints": ["b == 2"]}))
    hints = Hints(baseline=runner.baseline)
    staged = Staged(runner.space, hints, 0, lambda space, hints: Random(space, hints, 0))
    first = staged.ask()
    assert first is not None
    assert first["b"] == 2


def test_the_rules_are_part_of_what_defines_a_search(tmp_path):
    """An edited rule goes on with the trials that still fit, and proposes anew."""
    from perfsearch.pipeline.resume import search_definition

    plain, ruled = replay(), replay("micro_batch <= 8")
    assert search_definition(plain, build_runner(plain)) != search_definition(
        ruled, build_runner(ruled)
    )
    assert "constraints" not in search_definition(plain, build_runner(plain))


def test_a_rule_from_the_command_line(tmp_path):
    rule = "micro_batch * gradient_accumulation <= 4"
    words = ["runner=replay", f"runner.table={ZERO}", "strategy=random", "budget.trials=3"]
    words += [f"run_dir={tmp_path / 'run'}", "tracking.enabled=false", "confirm.finalists=0"]
    words.append(f'runner.constraints=["{rule}"]')
    done = subprocess.run(
        [sys.executable, "-m", "perfsearch", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    events = read(tmp_path / "run" / "journal.jsonl")[1]
    trials = [e.data["trial"] for e in events if e.name == "finished"]
    values = [t["configuration"] for t in trials]
    assert len(values) >= 4
    assert all(v["micro_batch"] * (v["gradient_accumulation"] or 1) <= 4 for v in values)
    assert all(t["status"] in list(Status) for t in trials)
    assert os.path.exists(tmp_path / "run" / "best" / "config.yaml")
