"""What a program or a function that proposes is told, may answer, and cannot do to a search."""

import gc
import json
import math
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.strategy_spaces import baseline_of, ended, endless_space, mixed_space

from perfsearch.config.options import ConfigError, build_options
from perfsearch.core.errors import BadInputError
from perfsearch.core.hints import Hints
from perfsearch.core.knob import Kind, Knob
from perfsearch.core.space import Constraint, Space
from perfsearch.core.trial import Measurement, Purpose, Status, Trial
from perfsearch.strategies.base import LOG, StrategyError, Surroundings
from perfsearch.strategies.external import External
from perfsearch.workers.processes import OtherPrograms

ANSWERS = """
import json, sys, time
for line in sys.stdin:
    question = json.loads(line)
    print(json.dumps({"configuration": question["candidates"][0]}))
"""


class Place:
    """Surroundings as a search has them, and programs to start there."""

    def __init__(self, directory):
        self.directory = directory
        self.left = {"trials": 5, "seconds": None}
        self.made = []

    def program(self, text):
        file = self.directory / "proposer.py"
        file.write_text(text)
        return (sys.executable, str(file))

    def strategy(self, text, space=None, **options):
        return self.opened(space, {"command": self.program(text), **options})

    def opened(self, space, options, function=None):
        space = space or mixed_space()
        chosen = External.Options(**options)
        strategy = External(space, Hints(baseline_of(space)), 0, chosen, function)
        programs = OtherPrograms(self.directory)
        strategy.open(Surroundings(self.directory, lambda: self.left, programs))
        self.made.append(strategy)
        return strategy

    def function(self, function, space=None, **options):
        return self.opened(space, {"command": "a:b", **options}, function)

    def processes(self):
        """Those that were started from here and are not gone."""
        mark = str(self.directory)
        return [p for p in psutil.process_iter() if any(mark in word for word in words(p))]


def words(process):
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    for strategy in made.made:
        strategy.close()
    assert made.processes() == []


def end_of(strategy):
    """The line by which a search ends; nothing of the program runs any more."""
    with pytest.raises(StrategyError) as caught:
        strategy.ask()
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("strategy.command=")
    return text


# -----------------------------------------------------------------------------
# Programs that misbehave.


def test_nonsense_is_refused_and_told_until_the_retries_are_spent(place):
    log = "import sys\nfor line in sys.stdin:\n    print('I think that...')\n"
    text = end_of(place.strategy(log, retries=2))
    assert "3 answers in a row that cannot be used (strategy.retries=2)" in text
    assert "'I think that...': it is no JSON" in text
    assert place.processes() == []


def test_a_program_that_hangs_is_ended_with_what_it_started(place):
    child = f"import time; time.sleep(600) # {place.directory}"
    hang = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    text = end_of(place.strategy(hang, answer_s=2.0))
    assert "no answer within strategy.answer_s=2 s" in text
    assert place.processes() == []


def test_a_program_that_never_reads_is_ended_too(place):
    place.left = {"trials": 5, "seconds": None, "padding": ["x" * 100] * 20_000}
    assert "no answer within" in end_of(place.strategy("import time; time.sleep(600)", answer_s=1))


@pytest.mark.parametrize("line", ["b'x' * 65536", "b'{}' + b'\\n' * 65535", "b'\\n' * 65536"])
def test_a_flood_is_ended_and_takes_no_memory(place, line):
    flood = f"import os\nwhile True:\n    os.write(1, {line})\n"
    before = psutil.Process().memory_info().rss
    text = end_of(place.strategy(flood, retries=1000))
    assert "it wrote more than 1 MiB" in text
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert place.processes() == []


def test_one_that_dies_is_quoted(place):
    text = end_of(place.strategy("import no_such_module"))
    assert "it ended with exit code 1: ModuleNotFoundError: No module named" in text
    assert str(place.directory / LOG) in text
    assert "no_such_module" in (place.directory / LOG).read_text()


def test_one_that_is_killed_between_two_answers_is_noticed(place):
    strategy = place.strategy(ANSWERS)
    assert strategy.ask() is not None
    (process,) = place.processes()
    process.kill()
    assert "it ended by signal 9" in end_of(strategy)


def test_one_whose_child_holds_its_pipes_is_noticed_too(place):
    child = f"import time; time.sleep(600) # {place.directory}"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert "it ended with exit code 0" in end_of(place.strategy(leave))
    assert place.processes() == []


def test_one_that_closes_its_output_and_runs_on_is_ended(place):
    close = "import os, time; os.close(1); time.sleep(600)"
    assert "it closed its standard input or output" in end_of(place.strategy(close))


def test_the_same_answer_for_ever_is_an_end(place):
    same = ANSWERS.replace('question["candidates"][0]', '{"bucket": 64}')
    strategy = place.strategy(same)
    point = strategy.ask()
    strategy.tell(ended(3, point, 0.02))
    assert "it was tried as trial 3, which ended ok" in end_of(strategy)


def test_what_nobody_asked_for_is_thrown_away(place):
    said = place.directory / "said"
    chatty = ANSWERS + f'    print("and by the way:"); open({str(said)!r}, "w").close()\n'
    strategy = place.strategy(chatty, retries=0)
    first = strategy.ask()
    while not said.exists():
        time.sleep(0.01)
    assert strategy.ask() not in (None, first)


def test_it_is_ended_with_the_strategy_even_where_nobody_closes_it(place):
    strategy = External(
        mixed_space(), Hints({}), 0, External.Options(command=place.program(ANSWERS))
    )
    strategy.ask()
    assert len(place.processes()) == 1
    del strategy
    gc.collect()
    assert place.processes() == []


def test_a_program_that_is_not_there_is_refused_before_anything_starts(place):
    for command in ("no-such-program --at-all", [], ["./nor-this"]):
        with pytest.raises(ConfigError, match=r"strategy\.command=.*no such program"):
            build_options(External.Options, {"command": command}, "strategy")
    with pytest.raises(ConfigError, match="No closing quotation"):
        build_options(External.Options, {"command": "python 'x"}, "strategy")


# -----------------------------------------------------------------------------
# Answers, by the way of a function.


def replies(place, answers, **options):
    """A strategy whose function gives these answers in turn, and the errors that it was told."""
    errors, left = [], list(answers)

    def propose(question):
        errors.append(question["error"])
        return left.pop(0)

    return place.function(propose, **options), errors


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"configuration": {"buckets": 8}}, "configuration.buckets: no such knob. Did you mean 'b"),
        ({"configuration": {"bucket": 9}}, "configuration.bucket=9: allowed: 1, 8, 25, 64, 256"),
        ({"configuration": {"bucket": True}}, "configuration.bucket=true: allowed: 1, 8, 25"),
        ({"configuration": {"bucket": [8]}}, "configuration.bucket=[...]: allowed: 1, 8, 25"),
        ({"configuration": {"workers": 2}}, "configuration.workers=2: allowed: 0 to 1"),
        ({"configuration": {"workers": 0.5}}, "configuration.workers=0.5: allowed: 0 to 1"),
        ({"configuration": {"workers": "1"}}, 'configuration.workers="1": allowed: 0 to 1'),
        ({"configuration": {"workers": 10**400}}, "allowed: 0 to 1"),
        ({"configuration": {"workers": math.inf}}, "Infinity"),
        ({"configuration": {"workers": math.nan}}, "NaN"),
        ({"configuration": {"mode": "c"}}, 'configuration.mode="c": allowed: a, b, null'),
        ({"configuration": [1]}, "configuration=[...]: no knobs by name"),
        ({"configuration": {}}, "configuration: it was tried as trial 0, which ended ok"),
        ({"configuration": {"mode": "b"}}, "it was tried as trial 0"),
        ({"configuration": {"workers": 1}, "stop": "?"}, "no answer. Allowed: "),
        ({"stop": 1}, "no answer. Allowed: "),
        ({}, "no answer. Allowed: "),
        ("8", "no answer. Allowed: "),
        ({"configuration": {"workers": {1, 2}}}, "set is not JSON serializable"),
    ],
)
def test_a_wrong_answer_is_told_and_another_is_taken(place, answer, error):
    strategy, errors = replies(place, [answer, {"configuration": {"bucket": 8.0}}])
    strategy.tell(ended(0, strategy.hints.baseline, 0.02))
    point = strategy.ask()
    assert point == {"bucket": 8, "workers": 0, "pinned": False, "mode": "a"}
    assert isinstance(point["bucket"], int)
    assert errors[0] is None
    assert error in errors[1]
    assert "\n" not in errors[1]


def test_a_constraint_is_told_in_its_own_words(place):
    space = Space(
        [Knob("x", Kind.INTEGER, 1, low=1, high=9)],
        [Constraint("odd", lambda c: c["x"] % 2 == 1, "x must be odd")],
    )
    errors = []

    def propose(question):
        errors.append(question["error"])
        assert question["space"]["constraints"] == ["x must be odd"]
        return {"configuration": {"x": 2 + len(errors)}}

    strategy = place.function(propose, space)
    assert strategy.ask() == {"x": 3}
    assert strategy.ask() == {"x": 5}
    assert errors[2] == "configuration: x must be odd"


def test_a_range_without_steps_takes_any_number_in_it(place):
    strategy = place.function(
        lambda question: {"configuration": {"rate": 2, "size": 7.0}}, endless_space()
    )
    point = strategy.ask()
    assert (point["rate"], point["size"]) == (2.0, 7)
    assert (type(point["rate"]), type(point["size"])) == (float, int)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"stop": "it will not get\nbetter"}, "the proposer stopped: it will not get better"),
        ({"stop": ""}, "the proposer stopped"),
        (None, "the proposer stopped"),
    ],
)
def test_it_may_stop_with_a_reason(place, answer, reason):
    strategy = place.function(lambda question: answer)
    assert strategy.ask() is None
    assert strategy.stop_reason == reason


def test_an_exception_of_a_function_is_an_end_with_its_traceback_in_the_log(place):
    strategy = place.function(lambda question: question["no such key"])
    text = end_of(strategy)
    assert "it raised KeyError: 'no such key'" in text
    assert "Traceback" in (place.directory / LOG).read_text()


def test_a_function_has_a_limit_to_its_time_too(place):
    strategy = place.function(lambda question: time.sleep(30), answer_s=0.3)
    assert "no answer within strategy.answer_s=0.3 s" in end_of(strategy)


def test_a_budget_that_ends_first_is_no_fault_of_the_proposer(place):
    place.left = {"trials": 3, "seconds": 0.3}
    strategy = place.function(lambda question: time.sleep(30))
    assert strategy.ask() is None
    assert strategy.stop_reason == "the budget's time was over before the proposer answered"


def test_a_function_of_a_module_is_found_by_its_name(place, monkeypatch):
    (place.directory / "mine_to_propose.py").write_text(
        "def propose(question):\n    return {'configuration': question['candidates'][0]}\n"
    )
    monkeypatch.chdir(place.directory)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert place.opened(None, {"command": "mine_to_propose:propose"}).ask() is not None
    for wrong in ("mine_to_propose:other", "no_such_module_at_all:propose"):
        with pytest.raises(BadInputError, match=rf"strategy\.command={wrong}: it cannot be imp"):
            place.opened(None, {"command": wrong})


# -----------------------------------------------------------------------------
# Questions.


def test_a_question_tells_what_a_knob_is_and_what_came_of_every_trial(place):
    knobs = [
        Knob("cap", Kind.INTEGER, 25, low=1, high=256, log=True, unit="MiB", help="size of it"),
        Knob("on", Kind.BOOLEAN, False),
        Knob("way", Kind.CATEGORICAL, "a", ("a", "b"), when={"on": (True,)}),
    ]
    questions = []

    def propose(question):
        questions.append(question)
        return {"configuration": {"cap": 32}}

    strategy = place.function(propose, Space(knobs))
    base = strategy.hints.baseline
    measured = Measurement([0.02] * 4, 1, phases_ms={"forward": 5.0}, peak_allocated_gib=1.5)
    measured.environment.update(bottleneck="comm", findings=["comm (high): 40%. Do this"])
    baseline = Trial(0, dict(base), Purpose.BASELINE, Status.OK, measured, cost=0.02)
    strategy.tell(baseline)
    strategy.tell(ended(1, {**base, "cap": 64}, 0.016))
    failed = ended(2, {**base, "on": True, "way": "b"}, None, Status.OOM)
    failed.reason, failed.log_path = "out of memory on rank 1", "logs/0002/rank1.log"
    strategy.tell(failed)
    strategy.tell(ended(-1, {**base, "cap": 256}, None, Status.INVALID))
    assert strategy.ask() == {"cap": 32, "on": False, "way": "a"}
    (question,) = questions
    assert question["space"]["knobs"][0] == {
        "name": "cap", "kind": "integer", "low": 1, "high": 256, "log": True, "step": None,
        "unit": "MiB", "help": "size of it", "scope": "step", "numerics": "exact",
        "shortens": [], "when": {},
    }  # fmt: skip
    assert question["space"]["knobs"][2]["values"] == ["a", "b"]
    assert question["space"]["knobs"][2]["when"] == {"on": [True]}
    told = question["history"]
    assert [t["status"] for t in told] == ["ok", "ok", "oom", "invalid"]
    assert [t["trial"] for t in told] == [0, 1, 2, None]
    assert told[1]["gain"] == pytest.approx(0.25)
    assert (told[2]["reason"], told[2]["cost"]) == ("out of memory on rank 1", None)
    assert told[0]["phases_ms"] == {"forward": 5.0}
    findings = {"bottleneck": "comm", "findings": ["comm (high): 40%. Do this"]}
    assert question["diagnosis"] == findings
    assert question["budget"] == {"trials": 5, "seconds": None}
    assert question["baseline"] == base
    assert len(question["candidates"]) == 10
    strategy.ask_again({**base, "cap": 3})
    with pytest.raises(StrategyError):
        strategy.ask()
    assert [p["cap"] for p in questions[1]["pending"]] == [32, 3]


def test_the_most_that_can_be_gained_is_told_by_part_of_the_step(place):
    questions = []
    strategy = place.function(lambda question: questions.append(question))
    evidence = {"with_everything_ms": 20.0, "detailed_step_ms": 20.0}
    measured = Measurement([0.02] * 4, 1, phases_ms={"optimizer": 5.0, "forward": 10.0})
    measured.bottleneck_evidence.update(evidence)
    base = strategy.hints.baseline
    strategy.tell(Trial(0, dict(base), Purpose.BASELINE, Status.OK, measured, cost=0.02))
    strategy.ask()
    bounds = {bound["part"]: bound for bound in questions[0]["upper_bounds"]}
    assert bounds["optimizer"]["share"] == pytest.approx(0.25)
    assert bounds["optimizer"]["gain"] == pytest.approx(1 / 3)
    assert bounds["optimizer"]["knobs"] == ["bucket", "workers", "pinned", "mode"]


def test_what_is_advised_on_the_baseline_is_told_with_the_value_that_it_means_here(place):
    knobs = [
        Knob("dataloader_workers", Kind.ORDINAL, 0, (0, 1, 2, 4)),
        Knob("other", Kind.INTEGER, 0, low=0, high=500),
    ]
    questions = []
    strategy = place.function(lambda question: questions.append(question), Space(knobs))
    measured = Measurement([0.02] * 4, 1)
    measured.environment["causes"] = {"input_bound": ["unknown"]}
    base = dict(strategy.hints.baseline)
    strategy.tell(Trial(0, base, Purpose.BASELINE, Status.OK, measured, cost=0.02))
    strategy.ask()
    (question,) = questions
    told = {one["knob"]: one for one in question["advice"]}
    assert told["dataloader_workers"]["value"] == 2
    assert told["prefetch_factor"]["value"] is None, "which is not searched"
    assert question["candidates"][0] == {"dataloader_workers": 2, "other": 0}


def test_a_program_reads_the_same_question_as_a_function(place):
    questions = []
    place.function(lambda question: questions.append(question)).ask()
    keep = (
        "import sys\nline = sys.stdin.readline()\n"
        f"open({str(place.directory / 'kept')!r}, 'w').write(line)\n"
        'print(\'{"stop": ""}\')\n'
    )
    place.strategy(keep).ask()
    kept = json.loads((place.directory / "kept").read_text())
    assert [kept] == questions


def test_the_page_has_every_key_of_a_question(place):
    questions = []
    strategy = place.function(lambda question: questions.append(question))
    strategy.tell(ended(0, strategy.hints.baseline, 0.02))
    strategy.ask()
    question = questions[0]
    page = (Path(__file__).parents[2] / "docs" / "external.md").read_text()
    documented = set(re.findall(r"`([a-z_.]+)`", page))
    told = {*question, *question["history"][0], *question["hints"], *question["budget"]}
    told |= {key for knob in question["space"]["knobs"] for key in knob}
    told |= {f"space.{key}" for key in question["space"]} | set(question["diagnosis"])
    assert told - {"space"} - documented == set()


def test_asking_again_after_a_kill_starts_no_program(place):
    strategy = place.strategy(ANSWERS)
    point = {"bucket": 8, "workers": 0, "pinned": False, "mode": "a"}
    assert strategy.ask_again(point) == point
    assert place.processes() == []
    assert strategy.ask() != point


def test_a_program_is_in_this_processs_group_so_that_it_may_use_the_terminal(place):
    strategy = place.strategy(ANSWERS)
    strategy.ask()
    (process,) = place.processes()
    assert os.getpgid(process.pid) == os.getpgid(0)
