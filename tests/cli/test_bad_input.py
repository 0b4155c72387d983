"""Bad input on the command line and in files: one message, exit code 2, nothing started."""

import pytest
from support.front_fakes import refused

BAD = {
    "typo of a group": ("straategy=bayes", "straategy", "Did you mean 'strategy'?"),
    "unknown option": ("strategy=fakke", "strategy=fakke", "Did you mean 'fake'?", "random"),
    "unknown key": ("budget.trails=3", "budget.trails", "Did you mean 'budget.trials'?"),
    "added key": ("+budgett=3", "budgett", "Did you mean 'budget'?"),
    "added budget key": ("+budget.trails=3", "'budget.trials'? Allowed: budget.gpu_hours, "),
    "added nested key": ("+limits.trial=3", "limits.trial", "'limits.trial_s'"),
    "added runner key": ("+runner.tabel=3", "runner.tabel", "Allowed: runner.devices, runner.k"),
    "added strategy key": ("+strategy.jiter=1", "strategy.jiter", "mean 'strategy.jitter'?"),
    "unknown knob": ("runner.knobs.bucket_cap=3", "Did you mean 'runner.knobs.bucket_cap_mb'?"),
    "added knob": ("+runner.knobs.bucket_cap=3", "Did you mean 'bucket_cap_mb'?"),
    "knob without its group": ("bucket_cap_mb=3", "Did you mean 'runner.knobs.bucket_cap_mb'?"),
    "drops an unknown knob": ("~runner.knobs.bucket", "'runner.knobs.bucket_cap_mb'"),
    "knob out of range": ("runner.knobs.bucket_cap_mb=4000", "=4000", "1 to 512"),
    "knob of a wrong type": ("runner.knobs.static_graph=maybe", "=maybe", "true"),
    "knob range key": ("runner.knobs.bucket_cap_mb={mni: 2}", "bucket_cap_mb.mni", "'min'"),
    "wrong type": ("budget.trials=many", "budget.trials=many", "whole number >= 0 or null"),
    "wrong range": ("confirm.sharpness=-1", "confirm.sharpness=-1", "> 0"),
    "wrong choice": ("numerics=exakt", "numerics=exakt", "Did you mean 'exact'?", "altering"),
    "strategy out of range": ("strategy.jitter=2", "strategy.jitter=2", "<= 1"),
    "plus before a known key": ("+seed=3", "+seed", "without the plus"),
    "list for a group": ("strategy=[fake,fake]", "-m strategy=A,B"),
    "sweep without -m": ("strategy=fake,random", "strategy=fake,random", "-m"),
    "interval": ("seed=interval(1,2)", "seed=interval(1,2)", "seed=A,B"),
    "unreadable": ("seed==3", "seed==3", "KEY=VALUE"),
    "no value": ("seed", "seed", "KEY=VALUE"),
    "unset environment": ("tracking.uri=${oc.env:PERFSEARCH_NOT_SET}", "tracking.uri"),
    "missing value": ("seed=???", "seed", "with --help says what it may be"),
    "instantiation": ("+workload._target_=os.system", "workload._target_", "workload.factory"),
    "hidden instantiation": ("+runner.knobs.bucket_cap_mb={_target_: a}", "_target_"),
    "callback": ("+hydra.callbacks.x._target_=os.system", "hydra.callbacks"),
    "unknown flag": ("--multirn", "--multirn", "Did you mean '--multirun'?"),
    "missing devices": ("nproc=8", "nproc=8", "only 2 GPUs"),
    "a mode that the runner lacks": ("mode=estimate", "mode=estimate", "mode=search"),
    "several nodes": ("nnodes=2", "nnodes=2", "Allowed: 1"),
    "no recorded configuration": ("--config-path=/tmp", "/tmp/config.yaml", "--config-dir"),
    "two actions": ("--cfg=job --info", "--cfg --info", "only one"),
    "resolve alone": ("--resolve", "--cfg"),
    "pickled rerun": ("--experimental-rerun=x.pickle", "KEY=VALUE"),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_one_message_and_starts_nothing(command, case):
    """hydra-ecosystem/hydra#1912"""
    argument, *words = BAD[case]
    refused(command(*(argument.split() if argument[0] == "-" else [argument])), *words)


def test_a_users_own_option_file_is_checked_after_composition(command, tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("name: fake\njittr: 0.2\n")
    searchpath = f"hydra.searchpath=[file://{tmp_path}]"
    refused(command(searchpath, "strategy=mine"), "strategy.jittr", "'strategy.jitter'")


def test_the_same_in_a_file_names_the_whole_key(command, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbudget: {trails: 3}\n")
    searchpath = f"hydra.searchpath=[file://{tmp_path}]"
    refused(command(searchpath, "experiment=mine"), "Did you mean 'budget.trials'?")


@pytest.mark.parametrize("sign", ["", "+"])
def test_a_replay_has_no_knobs_to_pin(command, sign):
    asked = ["runner=replay", "runner.table=t", f"{sign}runner.knobs.x=1"]
    refused(command(*asked, prefix=False), "takes its knobs from the table", "leave rows out")


def test_a_broken_yaml_file_is_the_users(command, tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("name: [fake\n")
    refused(command(f"hydra.searchpath=[file://{tmp_path}]", "strategy=mine"), "mine.yaml")


def test_a_missing_config_directory(command):
    refused(command("--config-dir", "nowhere", prefix=False), "--config-dir nowhere")


@pytest.mark.parametrize("place", ["/proc/perfsearch", "file"])
def test_a_run_directory_that_cannot_be_written(command, place, tmp_path):
    (tmp_path / "file").write_text("")
    where = place if place.startswith("/") else str(tmp_path / "file" / "run")
    refused(command(f"run_dir={where}"), f"run_dir={where}")


def test_a_bug_shows_its_traceback(command):
    code, _, err = command("tracking.experiment=bug")
    assert code == 1
    assert "Traceback" in err
    assert "a bug of ours" in err


def test_what_the_pipeline_refuses_is_one_message(command):
    code, _, err = command("tracking.experiment=refused")
    assert code == 2
    assert err == "perfsearch: resume=auto: the recorded search ran on another model.\n"
