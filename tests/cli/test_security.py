"""What a file from somebody else cannot do, and who can reach the control channels."""

import os
import re
from pathlib import Path

import pytest
from support import front_fakes

import perfsearch
from perfsearch.cli import sync
from perfsearch.cli.security import (
    CODE_KEYS,
    PATH_KEYS,
    check_hydra,
    check_hydra_keys,
    check_swept,
    check_values,
)
from perfsearch.config.options import ConfigError
from perfsearch.core.secrets import Redactor
from perfsearch.pipeline.resume import LockError, device_lock

PACKAGE = Path(perfsearch.__file__).parent


def experiment(tmp_path, text):
    """A file of somebody else's, chosen by ``experiment=theirs``."""
    directory = tmp_path / "given" / "experiment"
    directory.mkdir(parents=True)
    (directory / "theirs.yaml").write_text(f"# @package _global_\n{text}\n")
    return ["hydra.searchpath=[file://given]", "experiment=theirs"]


PWN = '{version: 1, handlers: {h: {"()": os.mkdir, path: pwned}}, root: {handlers: [h]}}'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("workload: {_target_: os.system}", "workload._target_"),
        ("runner: {knobs: {bucket_cap_mb: {_target_: os.getcwd}}}", "runner.knobs"),
        ("hydra: {callbacks: {x: {_target_: os.getcwd}}}", "hydra.callbacks"),
        (f"hydra: {{job_logging: {PWN}}}", "hydra.job_logging"),
        ("hydra: {run: {dir: ../outside}}", "hydra.run.dir=../outside"),
        ("hydra: {sweeper: {_target_: os.getcwd}}", "hydra.sweeper._target_"),
        ("run_dir: ../outside", "run_dir=../outside"),
        ("tracking: {uri: 'sqlite:////tmp/outside.db'}", "tracking.uri=sqlite"),
        ("tracking: {uri: 'http://host/x'}", "tracking.uri=http://host/x"),
        ("tracking: {uri: 'http://host/${oc.env:HOME}'}", "tracking.uri=http://host/${oc.env"),
        ("tracking: {experiment: '${oc.env:HOME}'}", "tracking.experiment=${oc.env:HOME}"),
        ("tracking: {experiment: '${oc.${strategy.name}:HOME}'}", "tracking.experiment=${oc."),
        ("run_dir: '${runner.name}/../../x'", "run_dir=fake/../../x"),
        ("seed: '${oc.decode:1}'", "seed=${oc.decode:1}"),
        ("workload: {command: [evil.py]}", "workload.command=[evil.py]"),
        ("workload: {module: true}", "workload.module=true"),
        ("workload: {silence: [--hook=evil]}", "workload.silence=[--hook=evil]"),
        (
            "hydra: {sweeper: {params: {seed: '1,${oc.env:HOME}'}}, mode: MULTIRUN}",
            "hydra.sweeper.params.seed=1,${oc.env",
        ),
        (
            "hydra: {sweeper: {params: {run_dir: '/tmp/a,/tmp/b'}}, mode: MULTIRUN}",
            "run_dir=/tmp/a",
        ),
    ],
)
def test_a_file_cannot_name_code_or_places_outside(command, tmp_path, text, key):
    code, _, errors = command(*experiment(tmp_path, text))
    assert code == 2
    assert errors.startswith(f"perfsearch: {key}")
    assert errors.count("\n") == 1
    assert front_fakes.calls == []
    assert [p.name for p in tmp_path.iterdir()] == ["given"]


@pytest.mark.parametrize("text", [r'seed: "\e]0;owned\a"', r'"\e]0;owned\a": 1'])
def test_a_message_about_a_file_steers_no_terminal(command, tmp_path, text):
    code, _, errors = command(*experiment(tmp_path, text))
    assert code == 2
    assert "\x1b" not in errors and r"\x1b]0;owned\x07" in errors


@pytest.mark.parametrize("by", ["--config-dir=given", "hydra.searchpath=[file://given]"])
@pytest.mark.parametrize("kind", ["launcher", "sweeper"])
def test_a_directory_of_options_cannot_take_the_place_of_hydras_own(command, tmp_path, by, kind):
    directory = tmp_path / "given" / "hydra" / kind
    directory.mkdir(parents=True)
    (directory / "basic.yaml").write_text("_target_: os.getcwd\n")
    code, _, errors = command(by, prefix=False)
    assert code == 2
    assert errors.startswith(f"perfsearch: hydra.{kind}._target_=os.getcwd: ")
    assert front_fakes.calls == []


def test_a_directory_and_a_search_path_both_hold_options(command, tmp_path):
    for place in ("one", "two"):
        (tmp_path / place / "experiment").mkdir(parents=True)
        text = f"# @package _global_\ntracking: {{experiment: {place}}}\n"
        (tmp_path / place / "experiment" / f"{place}.yaml").write_text(text)
    directories = ["--config-dir", "one", "hydra.searchpath=[file://two]"]
    for place in ("one", "two"):
        replay = ["runner=replay", "runner.table=t.csv", f"experiment={place}", "--cfg=job"]
        code, out, errors = command(*directories, *replay, prefix=False)
        assert code == 0, errors
        assert f"experiment: {place}\n" in out


def test_a_file_may_name_places_inside_and_the_command_line_any(command, tmp_path):
    text = "run_dir: ../other\ntracking: {uri: ../x}\nhydra: {sweeper: {params: {seed: 1}}}"
    theirs = experiment(tmp_path, text)
    code, _, errors = command(*theirs, "run_dir=../mine", "tracking.uri=b", "hydra.verbose=true")
    assert code == 0, errors
    assert len(front_fakes.calls) == 1


@pytest.mark.parametrize(
    "uri",
    ["/tmp/x", "../x", "file:///tmp/x", "file:/tmp/x", "file://localhost/tmp/x",
     "sqlite:////tmp/x.db", "sqlite:///../x.db", "sqlite+pysqlite:////tmp/x.db?a=b"],
)  # fmt: skip
def test_local_stores_outside_are_recognised(monkeypatch, tmp_path, uri):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"tracking\.uri"):
        check_values({"tracking": {"uri": uri}}, ["run_dir"])
    check_values({"tracking": {"uri": uri}}, ["tracking"])


@pytest.mark.parametrize("uri", ["http://h:5000", "postgresql://u@h/db", "databricks"])
def test_only_the_command_line_names_servers(monkeypatch, tmp_path, uri):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"tracking.uri={uri}: .* may not name a server"):
        check_values({"tracking": {"uri": uri}}, ["run_dir"])
    check_values({"tracking": {"uri": uri}}, ["tracking.uri"])


@pytest.mark.parametrize("uri", ["sqlite:///x.db", "mlruns", "file:mlruns", "sqlite:///sub/x.db"])
def test_places_inside_are_taken(monkeypatch, tmp_path, uri):
    monkeypatch.chdir(tmp_path)
    check_values({"run_dir": "outputs/mine", "tracking": {"uri": uri}}, [])


def test_a_symbolic_link_does_not_lead_out(monkeypatch, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "in")
    with pytest.raises(ConfigError, match="below the current directory"):
        check_values({"run_dir": "link/x"}, [])
    check_values({"run_dir": "link/x"}, ["run_dir"])
    check_values({"run_dir": None, "tracking": {"uri": None}}, [])


def test_the_command_line_may_name_code_servers_and_the_environment(command, tmp_path, monkeypatch):
    monkeypatch.setenv("NAMED", "by_me")
    text = "tracking: {uri: 'http://theirs'}\nworkload: {command: [theirs.py]}\nseed: ${nnodes}"
    theirs = experiment(tmp_path, text)
    mine = ["tracking.uri=http://mine", "workload.command=[mine.py]"]
    code, _, errors = command(*theirs, *mine, "workload=script", "run_dir='${oc.env:NAMED}'")
    assert code == 0, errors
    found, *_ = front_fakes.calls[0]
    assert (found.workload.options["command"], found.seed) == (["mine.py"], 1)
    assert (str(found.run_dir), found.tracking.uri) == ("by_me", "http://mine")


def test_a_group_of_their_own_is_no_leave_to_run_its_command(command, tmp_path):
    directory = tmp_path / "given" / "workload"
    directory.mkdir(parents=True)
    (directory / "theirs.yaml").write_text("name: script\ncommand: [timeit]\nmodule: true\n")
    code, _, errors = command("hydra.searchpath=[file://given]", "workload=theirs")
    assert code == 2
    assert errors.startswith("perfsearch: workload.command=[timeit]: ")
    assert front_fakes.calls == []


def test_what_is_swept_by_others_than_hydras_own_sweeper_names_no_code():
    check_swept({"runner.knobs.bucket_cap_mb": "1,2"}, [])
    check_swept({"+workload.command": "[a.py],[b.py]"}, ["workload.command"])
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.params\.workload\.command"):
        check_swept({"+workload.command": "[a.py],[b.py]"}, [])


def test_hydras_own_settings_are_compared_leaf_by_leaf():
    alone = {"run": {"dir": "."}, "job_logging": {"root": None}}
    check_hydra({**alone, "overrides": {"task": ["a=1"]}, "mode": "RUN"}, alone)
    with pytest.raises(ConfigError, match=r"hydra\.run\.dir=/x"):
        check_hydra({**alone, "run": {"dir": "/x"}}, alone)


def test_keys_that_hydra_would_never_read_are_refused():
    composed = {"launcher": {"_target_": "x.Launcher"}, "job": {"name": "a"}}
    check_hydra_keys(composed, ["job.env_set.FOO", "launcher.anything", "run.dir"])
    for key in ("foo", "job.foo", "job.config.foo"):
        with pytest.raises(ConfigError, match=f"hydra.{key}: no such key"):
            check_hydra_keys(composed, [key])


def test_nothing_reads_a_pickle_or_runs_text():
    """What lies on a disk, or comes over a channel, is JSON, CSV or plain YAML."""
    unsafe = re.compile(
        r"\bimport pickle|pickle\.loads?\(|torch\.load\(|joblib\.load|\beval\(|"
        r"yaml\.(load|unsafe_load|full_load)\(|"
        r"\bexec\(|shelve|marshal|hydra\.utils\.instantiate|allow_pickle"
    )
    runs = "exec(code, main.__dict__)"
    the_users_own_script = {("instrument/entry.py", runs), ("runners/_script/export.py", runs)}
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if unsafe.search(line.partition("#")[0])
        and (str(path.relative_to(PACKAGE)), line.strip()) not in the_users_own_script
    ]
    assert found == []


def test_one_node_has_no_store_that_others_could_reach(tmp_path):
    """torch's TCP store listens on every interface, and its rendezvous unpickles what it reads."""
    from perfsearch.core.hardware import GroupSpec
    from perfsearch.workers.forkserver import torchrun_arguments
    from perfsearch.workers.messages import Place, Startup

    spec = GroupSpec(workload={}, device="cpu", nproc=2, nnodes=1)
    startup = Startup(spec, str(tmp_path))
    Place("group", "token", 1, 1.0).write(tmp_path)
    arguments = torchrun_arguments(startup, tmp_path)
    assert "--rdzv-conf=store_type=file" in arguments
    assert f"--rdzv-endpoint={tmp_path}/rendezvous" in arguments


def test_torchs_launcher_leaves_its_logs_where_they_are_removed(tmp_path):
    """Without ``--log-dir`` it makes a new ``torchelastic_*`` at every start, for good."""
    from torch.distributed import run

    from perfsearch.workers import forkserver
    from perfsearch.workers.messages import Place

    Place("group", "token", 1, 1.0).write(tmp_path)
    arguments = [*forkserver.agent_arguments(tmp_path, 2), "-m", "script"]
    config, _, _ = run.config_from_args(run.parse_args(arguments))
    assert config.logs_specs.root_log_dir == str(tmp_path / "torch")


def test_locks_are_not_laid_behind_another_users_link(monkeypatch, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "locks").symlink_to(tmp_path / "theirs")
    with device_lock("cpu", print, tmp_path / "locks"):
        pass  # one of our own
    (tmp_path / "file").touch()
    for lock in (tmp_path / "theirs").iterdir():
        lock.unlink()
        lock.symlink_to(tmp_path / "file")
    with (
        pytest.raises(LockError, match="cannot be opened"),
        device_lock("cpu", print, tmp_path / "theirs"),
    ):
        pass
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    link = os.lstat(tmp_path / "locks").st_uid
    if link:  # root's are trusted
        with (
            pytest.raises(LockError, match="another user"),
            device_lock("cpu", print, tmp_path / "locks"),
        ):
            pass


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_typo_below_hydra_is_told_with_hydras_nearest(command, plus):
    code, _, errors = command(f"{plus}hydra.verbos=true")
    assert code == 2
    start = "perfsearch: hydra.verbos: no such key. Did you mean 'hydra.verbose'? Allowed: hydra."
    assert errors.startswith(start)
    assert front_fakes.calls == []


PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def rows(title):
    """Cells of the tables below a title of the page on trust."""
    part = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_on_trust_lists_what_only_the_command_line_sets():
    keys = {row[0].strip("` |") for row in rows("A configuration file from somebody else")}
    assert keys == {*CODE_KEYS, *PATH_KEYS}
    for key in keys:
        group, _, name = key.rpartition(".")
        tree = {group: {name: "../x"}} if group else {name: "../x"}
        with pytest.raises(ConfigError, match=f"^{re.escape(key)}="):
            check_values(tree, [])
        check_values(tree, [key])


@pytest.mark.parametrize(("written", "kept"), rows("What is masked"))
def test_the_page_on_trust_lists_what_is_masked(written, kept):
    assert Redactor({}).text(written.strip("` |")) == kept.strip("` |")


def test_a_journal_sends_nobody_to_a_server(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for uri in (None, "sqlite:////x/mlflow.db", "http://127.0.0.1:5000"):
        assert sync._usable(uri) == uri
    with pytest.raises(sync.SyncError, match="give --uri http://theirs:5000"):
        sync._usable("http://theirs:5000")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mine:5000")
    assert sync._usable("http://mine:5000") == "http://mine:5000"
