"""A script in real processes over gloo: as it is, changed while it runs, and started again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import PERTURBED, Purpose, Status
from perfsearch.knobs.transport import Mapped
from perfsearch.runners._script import export
from perfsearch.runners._script.runner import Script
from perfsearch.runners._script.ways import Way
from perfsearch.runners.base import Plan
from perfsearch.workers import processes

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parents[2] / "support" / "script_cases.py")
MAPS = ("micro_batch=--bs", "gradient_accumulation=--accumulate")


class Bench:
    """A search over the script, trial by trial.

    Each rank imports torch, so that there is one where another would show nothing more.
    """

    def __init__(self, directory, *arguments, map=MAPS, knobs=None, nproc=2):
        self.directory, self.trials = directory, 0
        options = Script.Options((SCRIPT, *arguments), map=map)
        environment = Environment(directory, nproc=nproc, limits=Limits(120, 90, 5))
        self.runner = Script("cpu", knobs or {"bucket_cap_mb": "search"}, options, environment)
        self.runner.open(directory)

    def measure(
        self, fresh=False, purpose=Purpose.SEARCH, time_limit_s=90.0, perturbed=False, **changes
    ):
        plan = Plan(
            number=self.trials,
            purpose=purpose if self.trials else Purpose.BASELINE,
            fresh=fresh,
            log_directory=self.directory / "logs" / str(self.trials),
            scored_seconds=0.05,
            time_limit_s=time_limit_s,
            perturbed=perturbed,
        )
        self.trials += 1
        return self.runner.measure({**self.runner.baseline, **changes}, plan)


@pytest.fixture
def bench(tmp_path):
    made = []

    def start(*arguments, **more):
        made.append(Bench(tmp_path, *arguments, **more))
        return made[-1]

    yield start
    for one in made:
        one.runner.close()
    assert processes.reap_groups(tmp_path) == 0


def test_configurations_are_tried_inside_one_start_and_across_starts(bench):
    one = bench("--bs", "8", "--accumulate", "1")
    runner = one.runner
    assert runner.baseline["bucket_cap_mb"] == 25.0 and runner.baseline["micro_batch"] == 8
    first = one.measure()
    assert (first.status, first.fresh_process) == (Status.OK, True)
    assert first.started_s > 0, "of the start that it went on in"
    assert first.measurement.samples_per_step == 16
    assert len(first.measurement.first_losses) == 5
    assert first.measurement.world_size == 2
    phases = first.measurement.phases_ms
    assert set(phases) >= {
        "dataloader_next", "forward", "backward", "comm_exposed", "rank_wait", "optimizer"
    }  # fmt: skip
    evidence = first.measurement.bottleneck_evidence
    assert sum(phases.values()) == pytest.approx(evidence["phases_step_ms"], rel=0.03)
    assert phases["comm_exposed"] <= evidence["comm_least_ms"] + 1e-9
    assert "forward_error_ms" in evidence
    start = runner._runs.group
    for changes in (
        {"bucket_cap_mb": 1.0, "gradient_as_bucket_view": True},
        {"optimizer_implementation": "foreach", "static_graph": True},
        {},
    ):
        inside = one.measure(**changes)
        assert (inside.status, inside.reason) == (Status.OK, "")
        assert inside.fresh_process is False and runner._runs.group is start
        assert inside.started_s == 0
        for name, value in changes.items():
            assert inside.measurement.in_force[name] == value
        assert inside.measurement.first_losses == pytest.approx(
            first.measurement.first_losses, rel=1e-5
        )
    again = one.measure(micro_batch=4, bucket_cap_mb=1.0)
    assert (again.status, again.fresh_process) == (Status.OK, True)
    assert again.measurement.samples_per_step == 16
    assert again.measurement.in_force["gradient_accumulation"] == 2
    best = {**runner.baseline, "micro_batch": 4}
    assert runner.settings_of(best) == {"knobs": {"micro_batch": 4, "gradient_accumulation": 2}}
    assert again.measurement.first_losses == pytest.approx(first.measurement.first_losses, rel=1e-4)
    assert "Traceback" not in (one.directory / "logs" / "0000" / "rank0.log").read_text()
    confirmed = one.measure(fresh=True, purpose=Purpose.CONFIRM)
    assert (confirmed.status, confirmed.fresh_process) == (Status.OK, True)
    assert not runner._runs.can_go_back  # nothing was kept for that


def test_what_a_script_does_before_its_first_batch_is_no_step(bench):
    first = bench("--fault", "builds long", map=(), nproc=1).measure()
    assert first.status is Status.OK
    assert first.measurement.discarded_seconds < 6


def test_it_does_not_matter_where_an_epoch_ends(bench):
    """Epochs of seven steps, a batch taken in advance, and dropout, which tells every draw."""
    one = bench("--dropout", "0.3", "--size", "56", "--ahead", map=())
    first = one.measure()
    for number in range(14):
        again = one.measure(bucket_cap_mb=(1.0, 25.0)[number % 2])
        assert (again.status, again.fresh_process) == (Status.OK, False)
        assert again.measurement.first_losses == pytest.approx(first.measurement.first_losses)


def test_a_search_that_is_taken_up_again_sees_the_batches_of_the_first(bench):
    """Its first trial finds a start in which nothing but two steps has been made."""
    one = bench("--bs", "8", "--accumulate", "2")
    one.trials = 1
    taken_up = one.measure(bucket_cap_mb=1.0)
    assert (taken_up.status, taken_up.fresh_process) == (Status.OK, False)
    as_it_is = one.measure(fresh=True)
    assert len(as_it_is.measurement.first_losses) == 5
    assert taken_up.measurement.first_losses == pytest.approx(as_it_is.measurement.first_losses)


def test_a_script_that_runs_out_of_steps_is_started_again(bench):
    one = bench("--steps", "100", map=())
    for number in range(9):  # of at least twelve steps each
        outcome = one.measure(bucket_cap_mb=(25.0, 1.0)[number % 2])
        assert (outcome.status, outcome.reason) == (Status.OK, "")
        if number and outcome.fresh_process:
            break
    assert number >= 1 and outcome.fresh_process
    assert outcome.measurement.in_force["bucket_cap_mb"] == (25.0, 1.0)[number % 2]
    assert one.runner._runs.sound is True


def test_a_script_that_cannot_be_taken_back_is_started_again(bench):
    one = bench("--fault", "remembers", map=())
    first = one.measure()
    other = one.measure(bucket_cap_mb=1.0)
    assert one.runner._runs.sound is False
    assert (other.status, other.fresh_process) == (Status.OK, True)
    assert other.measurement.first_losses == pytest.approx(first.measurement.first_losses)


def test_a_script_whose_kernels_add_in_any_order_is_taken_back_all_the_same(bench):
    one = bench("--fault", "any order", map=())
    first = one.measure().measurement.first_losses
    other = one.measure(bucket_cap_mb=1.0)
    assert one.runner._runs.sound is True
    assert (other.status, other.fresh_process) == (Status.OK, False)
    losses = other.measurement.first_losses
    assert losses != first and losses == pytest.approx(first, rel=1e-3)


def test_what_rounding_makes_of_the_losses_is_seen_in_the_running_start(bench):
    one = bench(map=())
    first = one.measure().measurement.first_losses
    perturbed = one.measure(perturbed=True)
    assert (perturbed.status, perturbed.fresh_process) == (Status.OK, False)
    assert perturbed.measurement.environment[PERTURBED]
    assert perturbed.measurement.first_losses != first
    assert one.measure().measurement.first_losses == pytest.approx(first)


@pytest.mark.parametrize(("wrap", "starts_again"), [("fully_shard", False), ("fsdp1", True)])
def test_sharded_scripts_change_their_stage(bench, wrap, starts_again):
    one = bench("--wrap", wrap, map=(), knobs={"zero_stage": "search", "bucket_cap_mb": "search"})
    assert one.runner.baseline["zero_stage"] == 3
    assert "no DistributedDataParallel" in one.runner.left_out["bucket_cap_mb"]
    first, second = one.measure(), one.measure(zero_stage=2)
    assert (second.status, second.fresh_process) == (Status.OK, starts_again), second.reason
    assert second.measurement.in_force["zero_stage"] == 2
    assert second.measurement.first_losses == pytest.approx(first.measurement.first_losses)
    third = one.measure()
    assert (third.status, third.measurement.in_force["zero_stage"]) == (Status.OK, 3)


def test_a_start_has_in_force_what_takes_the_whole_model(bench):
    one = bench("--wrap", "fully_shard", map=(), knobs={"forward_prefetch": "search"})
    assert one.measure().measurement.in_force["forward_prefetch"] == 0
    alone = one.measure(fresh=True, forward_prefetch=1)
    assert (alone.status, alone.fresh_process) == (Status.OK, True), alone.reason
    assert alone.measurement.in_force["forward_prefetch"] == 1


@pytest.mark.parametrize(
    ("nproc", "arguments", "status", "says"),
    [
        (1, "--fault raises", Status.CRASH, "FileNotFoundError: no such data"),
        (2, "--fault exits", Status.CRASH, 'code 3; its last line: "the licence server said no"'),
        (2, "--fault leaves", Status.CRASH, 'rank 1 ended with exit code 0; its last line: "en'),
        (1, "--fault spawns", Status.CRASH, "starts ranks of its own"),
        (2, "--fault apart", Status.INVALID, "train apart from each other"),
        (1, "--steps 4", Status.INVALID, "made 4 steps and ended"),
        (1, "--nosuch 1", Status.INVALID, "unrecognized arguments: --nosuch 1"),
        (2, "--fault uneven --steps 5", Status.INVALID, "disagree on the number of steps"),
    ],
)
def test_what_stops_trial_0_is_told_with_the_log(bench, nproc, arguments, status, says):
    one = bench(*arguments.split(), map=(), nproc=nproc)
    outcome = one.measure()
    assert (outcome.status, says in outcome.reason) == (status, True), outcome.reason
    assert Path(outcome.log_path).exists() and outcome.measurement is None


def test_a_hang_says_at_which_line_each_rank_stands(bench):
    outcome = bench("--fault", "hangs", map=()).measure(time_limit_s=20.0)
    assert outcome.status is Status.TIMEOUT
    lines = Path(SCRIPT).read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "made == 3:" in line) + 1
    assert f", rank 1 at script_cases.py:{number} in main" in outcome.reason
    assert "; rank 0 stands at script_cases.py:" in outcome.reason


def test_a_launcher_that_refuses_its_options_says_so_at_once(bench, monkeypatch):
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "abc")  # where torchrun takes its defaults from
    outcome = bench(map=()).measure()
    assert outcome.status is Status.INVALID  # so that it is not started again
    assert "torchrun refused its options" in outcome.reason and "'abc'" in outcome.reason
    assert "PET_MONITOR_INTERVAL" in outcome.reason
    assert "'abc'" in Path(outcome.log_path).read_text()


def test_a_map_that_the_script_refuses_is_named(bench):
    one = bench(map=("depth=--depth",), knobs={"depth": [2, 4]}, nproc=1)
    assert one.measure().status is Status.OK
    refused = one.measure(depth=4)
    assert refused.status is Status.INVALID
    assert "--depth" in refused.reason and "--map depth=--depth" in refused.reason


def test_a_script_that_does_not_fit_is_rescued_by_a_smaller_batch(bench):
    one = bench("--fault", "hungry", "--bs", "8", "--accumulate", "1")
    assert one.measure().status is Status.OOM
    assert set(one.runner.baseline) >= {"micro_batch", "bucket_cap_mb"}
    assert "fsdp_forward_prefetch" not in one.runner.baseline
    rescued = one.measure(micro_batch=4)
    assert (rescued.status, rescued.measurement.samples_per_step) == (Status.OK, 16)


def run(directory, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "perfsearch.cli.run", "--nproc-per-node", "2", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_plain_start_changes_nothing_and_knobs_from_a_file_do(tmp_path):
    text = "a=b, {c}: \"d\" 'e'"
    plain = run(tmp_path, SCRIPT, "--steps", "5", "--text", text)
    assert plain.returncode == 0, plain.stderr
    assert "trained 5 steps to" in plain.stdout and repr(text) in plain.stdout
    assert "nothing was changed" in plain.stderr and "bucket_cap_mb=25.0" in plain.stderr
    (tmp_path / "best.yaml").write_text(
        "runner: {name: ddp, knobs: {bucket_cap_mb: 1.0, dataloader_workers: 1, zero_stage: 3}}\n"
    )
    knobs = ["--knobs", "best.yaml", "--map", "micro_batch=--bs"]
    changed = run(tmp_path, *knobs, SCRIPT, "--steps", "5", "--text", text)
    assert changed.returncode == 0, changed.stderr
    assert changed.stdout.split(" with ")[0] == plain.stdout.split(" with ")[0]  # the same training
    assert "bucket_cap_mb=1.0 (DistributedDataParallel)" in changed.stderr
    assert "zero_stage=3: the script makes nothing that takes it" in changed.stderr


def test_a_failing_script_fails_as_under_torchrun(tmp_path):
    failed = run(tmp_path, SCRIPT, "--fault", "raises")
    assert failed.returncode == 1
    assert "FileNotFoundError: no such data" in failed.stderr
    traceback = failed.stderr[failed.stderr.index("Traceback") :].split("FileNotFound")[0]
    assert "perfsearch/instrument" not in traceback


def test_the_hand_over_runs_where_there_is_no_perfsearch(tmp_path):
    apply = tmp_path / "apply"
    changed = {
        "bucket_cap_mb": 2.0, "gradient_as_bucket_view": True, "dataloader_workers": 1,
        "optimizer_implementation": "foreach", "micro_batch": 4, "gradient_accumulation": 2,
    }  # fmt: skip
    maps = [Mapped("micro_batch", "--bs"), Mapped("gradient_accumulation", "--accumulate")]
    command = [SCRIPT, "--show", "--steps", "5", "--text", "a 'b'"]
    way = Way(2, by_torchrun=True)
    export.export_files(changed, maps, way, 1, command, False, ["ddp"], apply)
    (tmp_path / "perfsearch.py").write_text("raise ImportError('perfsearch is not here')")
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        [apply / "run.sh"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cap=2.0 view=True workers=1 foreach=True 4x2" in done.stdout
    plain = run(tmp_path, "--quiet", SCRIPT, "--steps", "5")
    assert "perfsearch: " not in plain.stderr
