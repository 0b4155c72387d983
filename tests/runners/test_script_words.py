"""Failures of scripts in words, exports, and which runner a script calls for."""

import os
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from perfsearch.config_schema import MetricsSettings
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.mapping import Mapped
from perfsearch.instrument.orders import Orders
from perfsearch.run_arguments import split
from perfsearch.run_search import runner_for, search, workload
from perfsearch.runners import _script_export
from perfsearch.runners._script_failures import outcome, require_ranks_together
from perfsearch.runners._script_group import ScriptGone, ScriptGroup
from perfsearch.runners._script_options import ScriptOptions
from perfsearch.runners._script_runs import Runs
from perfsearch.runners._script_window import (
    EndedError,
    Start,
    receive_steps,
    score,
    validation_lines,
)
from perfsearch.runners._script_wishes import Wishes
from perfsearch.runners.base import Plan
from perfsearch.search.errors import BadInputError
from perfsearch.search.trial import Purpose, Status, Trial
from perfsearch.workers.environment import Environment, Hardware, Limits
from perfsearch.workers.failures import Failure
from perfsearch.workers.preload import Preloaded

MAPS = [Mapped("micro_batch", "--bs"), Mapped("gradient_accumulation", "--acc", default=1)]


class Group:
    """What a start of a script looked like when it ended."""

    def __init__(self, failure=None, steps=(0, 0), ended=(), tail="", messages=()):
        self.nproc, self.logs, self.log = 2, Path("logs"), Path("logs/rank0.log")
        self.launcher_log = Path("logs/launcher.log")
        self.steps, self.ended = list(steps), list(ended)
        self._failure, self._tail, self._messages = failure, tail, list(messages)

    def tails(self):
        return {0: self._tail}

    def why_gone(self, gone):
        return self._failure

    def send(self, order):
        self.told = order

    def receive(self, event, limit_s):
        return self._messages


def test_a_refused_argument_names_the_map_that_is_to_blame():
    failure = Failure(Status.CRASH, "rank 0: ScriptExitError: exit code 2", 0)
    tail = "usage: train.py\ntrain.py: error: unrecognized arguments: --bs 4\n"
    found = outcome(Group(failure, tail=tail), ScriptGone(), {}, MAPS)
    assert found.status is Status.INVALID
    assert "unrecognized arguments: --bs 4 (from --map micro_batch=--bs)" in found.reason


@pytest.mark.parametrize(
    ("status", "reason", "says"),
    [
        (Status.INVALID, "launcher: UsageError: argument --x: invalid value",
         "torchrun refused its options: argument --x: invalid value (it takes options from the "
         "environment, too: PET_X)"),
        (Status.INFRASTRUCTURE, "launcher: OSError: [Errno 28]", "launcher: OSError: [Errno 28]"),
    ],
)  # fmt: skip
def test_what_the_launcher_says_is_the_cause(monkeypatch, status, reason, says):
    monkeypatch.setenv("PET_X", "1")
    found = outcome(Group(Failure(status, reason)), ScriptGone(), {}, [])
    assert (found.status, found.reason) == (status, says)
    assert found.log_path == str(Path("logs/launcher.log"))


def test_a_launcher_that_ends_without_a_report_leaves_its_last_words(tmp_path):
    """One that cannot even be imported, say: there is no rank, so no rank's log either."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.12: no')")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "launcher.log").write_text("of an earlier start\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    group = ScriptGroup(
        Orders("train.py"), [], {}, 1, Environment(tmp_path, limits=Limits(60, 60, 5)), (), logs,
        lambda log: Preloaded(environ, tmp_path, log, ("perfsearch.instrument.launch", "--serve")),
    )  # fmt: skip
    with pytest.raises(ScriptGone) as gone:
        group.join()
    found = outcome(group, gone.value, {}, [])
    assert found.reason == "launcher: ImportError: libcudart.so.12: no"
    assert found.log_path == str(logs / "launcher.log")


def test_a_script_that_makes_no_step_is_told_what_a_step_is():
    failure = Failure(Status.TIMEOUT, "the trial took longer than 5 s")
    found = outcome(Group(failure), ScriptGone(5.0), {}, [])
    assert found.status is Status.TIMEOUT
    assert "rank 0 made 0 steps, rank 1 made 0 steps" in found.reason
    assert "limits.trial_s" in found.reason
    stands = "rank 0 stands at train.py:8 in step"
    told = Failure(Status.TIMEOUT, f"the trial took longer than 5 s; {stands}", standing=stands)
    found = outcome(Group(told, steps=(3, 3)), ScriptGone(5.0), {}, [])
    assert found.reason == f"no answer in 5 s: rank 0 made 3 steps, rank 1 made 3 steps; {stands}"
    found = outcome(Group(told), ScriptGone(5.0), {}, [])
    assert f"; {stands}. A step is counted when" in found.reason


def test_ranks_that_part_are_counted():
    failure = Failure(Status.TIMEOUT, "no answer")
    found = outcome(Group(failure, steps=(12, 10), ended=[1]), ScriptGone(5.0), {}, [])
    assert found.status is Status.INVALID
    assert "rank 0 made 12, rank 1 made 10, and rank 1 has ended" in found.reason


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"event": "ended", "step": 4}] * 2, "made 4 steps and ended"),
        ([{"event": "ended", "step": 0}] * 2, "made no step of a torch optimizer"),
        ([{"event": "step", "step": 9}, {"event": "ended", "step": 8}], "rank 0 made 9, rank 1"),
    ],
)
def test_a_script_that_ends_too_early_says_so(messages, says):
    with pytest.raises(EndedError, match=says):
        receive_steps(Group(messages=messages), Plan(1), 1.0)


def test_a_script_that_ends_too_early_says_how_much_would_do():
    group = Group(messages=[{"event": "ended", "step": 64}] * 2)
    with pytest.raises(EndedError, match=r"after 3 to 8 steps and covers 8 to 60.* 1 s: 68 steps"):
        receive_steps(group, Plan(1), 1.0)
    start = Start(Facts(), seconds=[0.5, 0.005, 0.005])
    with pytest.raises(
        EndedError,
        match=r"made 64 steps.*settled and 60 of 5 ms.* 63 steps and .* s here; 68 steps",
    ):
        score(group, Plan(1), start, time.monotonic() + 1.0, lambda facts: {})


def of_a_window(step_seconds, aside):
    """What a rank says of its window."""
    return {
        "event": "window", "step": 9, "step_seconds": step_seconds, "aside": aside,
        "phase_seconds": [{"forward": s / 2, "other": s / 2} for s in step_seconds],
        "timing": {}, "sync_points": {}, "bounds": False, "waits_ms": [float("nan")] * 4,
        "losses": [1.0] * 4, "samples": 64, "tokens": 0, "peaks": {}, "why_not_again": "",
        "place": {"host": "a", "device": "cpu"}, "facts": Facts().to_json(),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("first", "later", "none"), [(0, 0, True), (5, 0, False), (0, 1, False), (0, None, False)]
)
def test_a_script_without_batches_is_known_before_trial_0(first, later, none):
    assert Start(Facts(), first_pulls=first, pulls_per_step=later).took_no_batch is none


@pytest.mark.parametrize(
    ("aside", "seconds", "discarded"),
    [(([1], []), [0.1, 0.1, 0.2], (4, 1.3)), (([0, 1], [1, 2, 3]), [0.1, 0.9, 0.1, 0.2], (3, 0.4))],
)
def test_steps_with_a_round_of_validation_on_any_rank_are_not_scored(aside, seconds, discarded):
    ranks = [[0.1, 0.9, 0.1, 0.1], [0.1, 0.1, 0.1, 0.2]]
    group = Group(messages=[of_a_window(*rank) for rank in zip(ranks, aside, strict=True)])
    start = Start(Facts(), seconds=[0.1, 0.1, 0.2])
    plan = Plan(1, scored_seconds=0.8, scored_steps=(4, 4))
    found = score(group, plan, start, time.monotonic() + 1.0, lambda facts: {})
    assert found.step_seconds == seconds
    assert found.samples_per_step == 32
    assert (found.discarded_steps, found.discarded_seconds) == (
        discarded[0],
        pytest.approx(discarded[1]),
    )
    slowest = sum(sum(rank) / 4 for rank in ranks) / 2 if len(seconds) == 4 else (0.1 + 0.4 / 3) / 2
    assert sum(found.phases_ms.values()) == pytest.approx(1e3 * slowest)
    trial = Trial(0, {}, Purpose.BASELINE, Status.OK, found)
    (line,) = validation_lines([trial])
    if len(seconds) == 4:
        assert line.startswith("a round of validation ran beside every step")
    else:
        assert "beside 1 of 4 steps of the baseline" in line
        assert "900 ms with it, 100 ms without" in line
    found.environment.pop("validation")
    assert validation_lines([trial]) == validation_lines([]) == []


def test_a_round_of_validation_in_the_last_step_does_not_shorten_the_window():
    group = Group(messages=[{"event": "ended", "step": 5}] * 2)
    start = Start(Facts(), seconds=[0.2, 0.01, 0.01, 0.9])
    with pytest.raises(EndedError):
        score(group, Plan(1, scored_seconds=0.3), start, time.monotonic() + 1.0, lambda facts: {})
    assert group.told == {"op": "score", "count": 30}


def test_ranks_that_train_apart_are_refused():
    apart = [{"joined": 1, "facts": {"wrappers": []}}]
    with pytest.raises(EndedError, match="train apart"):
        require_ranks_together(apart, 2)
    require_ranks_together(apart, 1)


def test_the_hand_over_is_a_command_and_the_lines_to_change(tmp_path):
    changed = {
        "bucket_cap_mb": 100.0, "dataloader_workers": 2, "optimizer_implementation": "fused",
        "micro_batch": 4, "gradient_accumulation": 2, "nccl_algo": "Ring", "zero_stage": 2,
        "fsdp_backward_prefetch": "post",
    }  # fmt: skip
    files = _script_export.write(
        changed, MAPS, Hardware("cuda", 4, 1, (), 8), 1, ["train.py", "--bs", "8", "it's"], False,
        ["ddp"],
        tmp_path,
    )  # fmt: skip
    assert {f.name for f in files} == {"run.sh", "changes.py", "start.py"}
    script = (tmp_path / "run.sh").read_text()
    assert "export NCCL_ALGO=Ring" in script
    command = 'torchrun --standalone --nproc-per-node=4 "$(dirname "$0")/start.py" train.py --bs 4'
    assert f"{command} 'it'\"'\"'s' --acc 2" in script
    lines = (tmp_path / "changes.py").read_text()
    for piece in ("bucket_cap_mb=100.0", "num_workers=2", "fused=True", "BACKWARD_POST",
                  "reshard_after_forward=False"):  # fmt: skip
        assert piece in lines
    for name in ("changes.py", "start.py"):
        compile((tmp_path / name).read_text(), name, "exec")


def test_without_anything_to_build_differently_the_command_is_the_hand_over(tmp_path):
    hardware = Hardware("cpu", 2, 1, (), 8)
    changed = {"micro_batch": 2}
    files = _script_export.write(changed, MAPS, hardware, 3, ["pkg.t"], True, [], tmp_path)
    assert [f.name for f in files] == ["run.sh"]
    assert (tmp_path / "run.sh").read_text() == (
        "#!/bin/sh\nexport OMP_NUM_THREADS=3\n"
        "torchrun --standalone --nproc-per-node=2 -m pkg.t --bs 2\n"
    )


@pytest.mark.parametrize(
    ("source", "arguments", "runner"),
    [
        ("from torch.distributed.fsdp import fully_shard", [], "zero"),
        ("from torch.nn.parallel import DistributedDataParallel", [], "ddp"),
        ("from transformers import Trainer", ["--fsdp", "full_shard"], "zero"),
        ("print()", [], "ddp"),
    ],
)
def test_the_runner_is_what_the_script_calls_for(tmp_path, source, arguments, runner):
    script = tmp_path / "train.py"
    script.write_text(source)
    assert runner_for(split(["--search", str(script), *arguments])) == runner


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nnodes=2"], "trials start on this node alone"),
        (["--rdzv-endpoint=a:1"], "--rdzv-endpoint --search"),
        (["-o", "workload.command=[x]"], "stand after it"),
    ],
)
def test_what_a_search_cannot_honour_is_refused(tmp_path, options, says):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(BadInputError, match=says):
        search(split(["--search", *options, str(tmp_path / "train.py")]))


def test_a_profile_is_a_search_in_its_mode(tmp_path, monkeypatch):
    from perfsearch import cli

    script = tmp_path / "train.py"
    script.write_text("")
    asked = []
    monkeypatch.setattr(cli, "main", lambda overrides, groups: asked.append(overrides) or 0)
    assert search(split(["--profile", "-o", "seed=3", "--nproc-per-node=2", str(script)])) == 0
    assert {"workload=script", "mode=profile", "runner=ddp", "seed=3", "nproc=2"} <= set(asked[0])
    with pytest.raises(BadInputError, match="--profile is -o mode=profile"):
        search(split(["--profile", "-o", "mode=search", str(script)]))
    with pytest.raises(BadInputError, match="--nnodes=2 --profile"):
        search(split(["--profile", "--nnodes=2", str(script)]))


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"event": "traced", "reason": ""}] * 2, "^$"),
        ([{"event": "traced", "reason": ""}, {"event": "traced", "reason": "no CUPTI"}], "CUPTI"),
        ([{"event": "traced", "reason": ""}, {"event": "ended"}], "ended before 3 more steps"),
        (ScriptGone(2.0), "the time for them was over"),
        (ScriptGone(), "and it failed"),
    ],
)
def test_what_kept_a_trace_from_being_made_is_told(messages, says):
    group = Group(messages=[] if isinstance(messages, ScriptGone) else messages)
    if isinstance(messages, ScriptGone):
        group.receive = Mock(side_effect=messages)
    assert re.search(says, Runs._trace(group, Plan(number=4), deadline=0.0))
    assert group.told["count"] == 3 and Path(group.told["directory"]).is_absolute()


FACTS = {"values": {"dataloader_workers": 0}}


@pytest.mark.parametrize(
    ("wishes", "on_gpu", "facts", "says"),
    [
        ({"min_gain": 0.9, "by_bound": True}, False, Facts(**FACTS), []),
        ({"min_gain": 0.03}, True, Facts(**FACTS), []),
        ({"min_gain": 0.9, "searches": False}, True, Facts(**FACTS), []),
        ({"min_gain": 0.9}, True, Facts(**FACTS), ["objective.min_gain=0.9 .*ahead of the GPU"]),
        ({"by_bound": True}, False, Facts(["ddp"], **FACTS), ["runner.knobs=auto .*amid the back"]),
        (
            {"by_bound": True, "min_gain": 0.1},
            False,
            Facts(values={"dataloader_workers": 2}),
            ["runner.knobs=auto .*processes of its", "objective.min_gain=0.1 .*processes of its"],
        ),
        (
            {"metrics": MetricsSettings(detail="full", begin_step=5, end_step=9)},
            False,
            None,
            ["metrics.detail=full ", "metrics.begin_step=5 ", "metrics.end_step=9 "],
        ),
    ],
)
def test_keys_without_effect_are_named_once(wishes, on_gpu, facts, says):
    told = Wishes(**wishes).remarks(on_gpu, facts)
    assert len(told) == len(says)
    for line, pattern in zip(told, says, strict=True):
        assert re.match(f"warning: .*{pattern}", line), line


def test_arguments_come_back_from_the_written_configuration(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    odd = ["--lr=1e-3", "1e-3", "a,b", "{}", "true", "it's", "", "0x1f", "null"]
    given = workload(split(["--search", "--map", "micro_batch=--bs", str(script), *odd]))
    back = yaml.safe_load(yaml.safe_dump(given))
    options = ScriptOptions(tuple(back["command"]), map=tuple(back["map"]))
    assert options.words == [str(script), *odd]
    assert options.maps() == ([Mapped("micro_batch", "--bs")], [])


def test_a_missing_script_is_bad_input(tmp_path):
    with pytest.raises(BadInputError, match="there is no such script"):
        ScriptOptions((str(tmp_path / "missing.py"),))
    with pytest.raises(BadInputError, match="give the script"):
        ScriptOptions(())


def test_offloading_is_handed_over_with_a_group_for_both_memories(tmp_path):
    changed = {"cpu_offload": True, "forward_prefetch": 1, "zero_stage": 3}
    _script_export.write(
        changed, [], Hardware("cuda", 4, 1, (), 8), 1, ["train.py"], False, ["fully_shard"],
        tmp_path,
    )  # fmt: skip
    lines = (tmp_path / "changes.py").read_text()
    for piece in ("CPUOffloadPolicy", "cpu:gloo,cuda:nccl", "[the next 1]",
                  '"reshard_after_forward": true, "cpu_offload": true'):  # fmt: skip
        assert piece in lines
    program = (tmp_path / "start.py").read_text()
    compile(program, "start.py", "exec")
    assert "cpu:gloo,cuda:nccl" in program and "CPUOffloadPolicy" in program
