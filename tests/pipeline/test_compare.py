import json

import pytest
from support.compared import FakeArms
from support.small_search import make_settings
from support.synthetic import KeptView

from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Measurement, Outcome, Purpose, Status
from perfsearch.pipeline.compare import Question, compare
from perfsearch.runners._arms import other_work


class Comparing:
    """Compares in a directory of its own, and keeps what was shown."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.view = KeptView()

    def __call__(self, arms, **question):
        settings = make_settings(run_dir=str(self.run_dir), resume="never")
        self.view = KeptView()
        return compare(settings, arms, Question(**question), self.view)

    @property
    def found(self):
        return json.loads((self.run_dir / "comparison.json").read_text())


@pytest.fixture
def comparing(tmp_path):
    return Comparing(tmp_path / "run")


@pytest.mark.parametrize(
    ("step_s", "code", "said"),
    [
        (0.09, ExitCode.DONE, "b: at least "),
        (0.13, ExitCode.SLOWER, "slower than a (about "),
        (0.1, ExitCode.NO_DIFFERENCE, "b: no difference shown (95% interval "),
    ],
)
def test_the_exit_code_says_which_is_faster(comparing, step_s, code, said):
    result = comparing(FakeArms({"a": 0.1, "b": step_s}, seed=4))
    assert result.exit_code is code
    assert said in result.verdict.reason
    assert comparing.found["answer"] == code.name.lower()
    assert comparing.found["reason"] == result.verdict.reason
    assert (result.run_dir / "report.html").exists()
    assert not (result.run_dir / "best").exists()


def test_equal_arms_are_told_apart_in_few_of_many_comparisons(tmp_path):
    codes = [
        Comparing(tmp_path / str(seed))(FakeArms({"a": 0.1, "b": 0.1}, seed=seed)).exit_code
        for seed in range(30)
    ]
    assert codes.count(ExitCode.NO_DIFFERENCE) >= 27


def test_the_table_and_the_file_have_all_arms(comparing, tmp_path):
    file = tmp_path / "out.json"
    arms = FakeArms({"a": 0.1, "b": 0.08, "c": 0.12})
    result = comparing(arms, json_file=file)
    assert result.exit_code is ExitCode.DONE, "the best decides"
    assert json.loads(file.read_text()) == comparing.found
    rows = {row["name"]: row for row in comparing.found["arms"]}
    assert list(rows) == ["a", "b", "c"]
    assert rows["a"]["rate"] == pytest.approx(320, rel=0.05)
    assert rows["b"]["answer"] == "faster" and rows["c"]["answer"] == "slower"
    assert rows["b"]["interval"]["low"] > 1 > rows["c"]["interval"]["high"]
    assert {len(row["rates"]) for row in rows.values()} == {rows["b"]["interval"]["pairs"]}
    assert rows["c"]["losses_apart"] == 0.0
    (header,) = [line for line in comparing.view.lines if line.startswith("arm ")]
    assert "samples/s" in header and "gain (95% interval)" in header and "losses apart" in header


def test_starts_are_interleaved_and_each_block_has_every_arm(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.1}, noise=0.03)
    result = comparing(arms)
    first, *blocks = arms.starts
    assert first == "a", "the first look is at the reference"
    pairs = [frozenset(blocks[i : i + 2]) for i in range(0, len(blocks), 2)]
    assert set(pairs) == {frozenset("ab")}
    assert result.trials[0].purpose is Purpose.BASELINE


def test_other_losses_are_another_computation(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.05}, losses={"b": [3.0, 9.0]})
    result = comparing(arms)
    assert result.exit_code is ExitCode.OTHER_COMPUTATION
    assert "b: not the same computation: loss of step 1 is 9" in result.verdict.reason
    assert arms.starts.count("b") == 1, "nothing is measured in vain"


def test_losses_that_differ_from_start_to_start_are_allowed_for(comparing):
    class Drawing(FakeArms):
        def measure(self, configuration, plan):
            self.losses = {n: [3.0 + 0.05 * (len(self.starts) % 3), 2.5] for n in self.arms}
            return super().measure(configuration, plan)

    assert comparing(Drawing({"a": 0.1, "b": 0.08})).exit_code is ExitCode.DONE


def test_of_several_arms_another_computation_is_left_out(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.05, "c": 0.08}, losses={"b": [3.0, 9.0]})
    assert comparing(arms).exit_code is ExitCode.DONE
    rows = {row["name"]: row["status"] for row in comparing.found["arms"]}
    assert rows == {"a": "ok", "b": "diverged", "c": "ok"}


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_arm_that_does_not_run_is_said_to(comparing, name):
    def fail(arm, start):
        return Outcome(Status.CRASH, reason="no module named x") if arm == name else None

    result = comparing(FakeArms({"a": 0.1, "b": 0.1}, fail=fail))
    assert result.exit_code is ExitCode.NO_TRIAL_SUCCEEDED
    assert "no module named x" in result.verdict.reason
    assert comparing.found["exit_code"] == 1


def test_a_reference_that_fails_later_leaves_nothing_to_say(comparing):
    def fail(arm, start):
        return Outcome(Status.OOM, reason="oom") if arm == "a" and start == 3 else None

    result = comparing(FakeArms({"a": 0.1, "b": 0.1}, fail=fail))
    assert result.exit_code is ExitCode.NO_TRIAL_SUCCEEDED
    assert "a ran at first and failed then" in result.verdict.reason


@pytest.mark.parametrize(
    ("allowed", "code"), [(0.0, ExitCode.SLOWER), (0.1, ExitCode.NO_DIFFERENCE)]
)
def test_a_slowdown_may_be_allowed(comparing, allowed, code):
    arms = FakeArms({"a": 0.1, "b": 0.105}, noise=0.002)
    assert comparing(arms, allowed_slowdown=allowed).exit_code is code


def test_it_ends_once_a_difference_is_known_to_be_small(comparing):
    arms = FakeArms({"a": 0.1, "b": 0.1}, noise=0.001, seed=1)
    result = comparing(arms, min_gain=0.1)
    assert result.exit_code is ExitCode.NO_DIFFERENCE
    assert "no difference of 10.0% or more" in result.verdict.reason
    assert len(arms.starts) == 7


def test_time_that_is_over_ends_it(comparing):
    result = comparing(FakeArms({"a": 0.1, "b": 0.1}), seconds=1e-9)
    assert result.exit_code is ExitCode.NO_DIFFERENCE
    assert "too few starts" in result.verdict.reason


def test_an_interrupt_shows_what_is_known(comparing):
    def fail(arm, start):
        if start == 5:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        comparing(FakeArms({"a": 0.1, "b": 0.1}, noise=0.05, fail=fail))
    text = comparing.view.text
    assert "b: no difference shown" in text and ", so far" in text and "no verdict" in text


def measured(samples=32, tokens=None, parameters=10):
    environment = {} if parameters is None else {"trained_parameters": parameters}
    return Measurement([0.1], samples, tokens_per_step=tokens, environment=environment)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (measured(), ""),
        (measured(samples=33), "samples a step: 33, and 32 in a"),
        (measured(samples=None), "samples a step: not counted, and 32 in a"),
        (measured(tokens=7), "tokens a step: 7, and not counted in a"),
        (measured(parameters=11), "trained parameters: 11, and 10 in a"),
    ],
)
def test_work_is_compared(other, said):
    assert other_work(measured(), other, "a") == said


def test_windows_of_one_job_may_have_other_last_batches():
    assert other_work(measured(samples=1000), measured(samples=990), "a") == ""
