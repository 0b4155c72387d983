"""What ``perfsearch compare`` understands of the words that it is given."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.compared import SCRIPT, git

from perfsearch.cli.arms import (
    Job,
    Workshop,
    check_out,
    parse_arms,
    parse_command,
)
from perfsearch.core.errors import BadInputError
from perfsearch.core.files import temporary_directory
from perfsearch.core.hardware import Environment
from perfsearch.instrument.user_files import UserFiles


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("train.py --lr 1", Job(["train.py", "--lr", "1"])),
        ("python train.py", Job(["train.py"])),
        ("python3.11 train.py 'a b'", Job(["train.py", "a b"])),
        ("-m pkg.train -v", Job(["pkg.train", "-v"], module=True)),
        ("python -m pkg.train -v", Job(["pkg.train", "-v"], module=True)),
        ("A=1 B=2 train.py", Job(["train.py"], False, {"A": "1", "B": "2"})),
        ("torchrun --nproc-per-node 2 train.py --x=1", Job(["train.py", "--x=1"], nproc=2)),
        ("torchrun --standalone --nproc_per_node=4 -m pkg a", Job(["pkg", "a"], True, nproc=4)),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", Job(["train.py"], nproc=2)),
        (f"{sys.executable} train.py", Job(["train.py"], python=sys.executable)),
    ],
)  # fmt: skip
def test_a_command_is_read_as_it_would_be_typed(text, job):
    assert parse_command(text) == job


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no script in it"),
        ("python", "there is no script in it"),
        ("--lr 1", "there is no script in it"),
        ("train.py 'a", "No closing quotation"),
        ("/no/such/python train.py", "/no/such/python: there is no such program"),
        ("torchrun --nnodes=2 train.py", "--nnodes=2"),
        ("torchrun --nproc-per-node 2", "no script was given"),
    ],
)
def test_what_is_no_command_is_refused_with_what_is(text, said):
    with pytest.raises(BadInputError, match=said):
        parse_command(text)


def test_arms_have_names_of_their_own():
    names = [arm.name for arm in parse_arms(["train.py", "train.py", "b.py", "train.py"], None)]
    assert names == ["train.py", "train.py (2)", "b.py", "train.py (3)"]


@pytest.mark.parametrize("text", ["git:HEAD", "python:python3"])
def test_a_commit_or_a_python_needs_a_command(text):
    with pytest.raises(BadInputError, match=f"{text}: what is to be started"):
        parse_arms([text, "train.py"], None)
    first, second = parse_arms([text, "train.py"], "train.py --lr 2")
    assert first.job == Job(["train.py", "--lr", "2"])
    assert (first.revision, bool(first.python)) == ("HEAD" * text.startswith("git"), "py" in text)
    assert second.job == Job(["train.py"])


def searched(directory: Path, knobs) -> Path:
    """What a search over ``train.py`` has left."""
    (directory / "best").mkdir(parents=True)
    plain = {
        "runner": {"name": "ddp", "device": "cpu", "knobs": knobs},
        "strategy": {"name": "random"},
        "workload": {"name": "script", "command": ["train.py", "--batch", 4]},
    }
    for file in ("config.yaml", "best/config.yaml"):
        (directory / file).write_text(json.dumps(plain))  # JSON is YAML
    return directory


def test_a_configuration_is_taken_with_its_command(here):
    run = searched(here / "run", {"dataloader_workers": 2})
    first, second = parse_arms(["git:HEAD", "run/best/config.yaml"], None)
    assert first.job == Job(["train.py", "--batch", "4"])
    assert second.search.runner.options["knobs"] == {"dataloader_workers": 2}
    script = Workshop(Environment(run), {}, [], UserFiles(), here).make(second)
    assert script.options.words == ["train.py", "--batch", "4"]
    assert script.pinned["dataloader_workers"] == 2 and not script.space.knobs


def workshop(here):
    return Workshop(Environment(here / "run"), {}, [], UserFiles(), here)


def test_arms_that_a_running_job_can_be_switched_between_need_one_start(here):
    searched(here / "one", {"optimizer_implementation": "foreach"})
    searched(here / "two", {"optimizer_implementation": "fused", "gradient_as_bucket_view": True})
    texts = ["train.py --batch 4", "one/best/config.yaml", "two/best/config.yaml"]
    switched = workshop(here).switched(parse_arms(texts, None))
    assert list(switched.arms) == texts and switched.in_one_start
    searched_there = {knob.name for knob in switched._script.space.knobs}
    assert {"optimizer_implementation", "gradient_as_bucket_view"} <= searched_there


@pytest.mark.parametrize(
    ("other", "knobs"),
    [
        ("train.py --batch 8", {"optimizer_implementation": "foreach"}),
        ("OMP_NUM_THREADS=2 train.py --batch 4", {"optimizer_implementation": "foreach"}),
        ("torchrun --nproc-per-node 2 train.py --batch 4", {"optimizer_implementation": "foreach"}),
        ("train.py --batch 4", {"dataloader_workers": 2}),
        ("train.py --batch 4", {}),
    ],
)
def test_other_arms_need_starts_of_their_own(here, other, knobs):
    searched(here / "one", knobs)
    assert workshop(here).switched(parse_arms([other, "one/best/config.yaml"], None)) is None


def test_a_trial_of_a_search_has_the_knobs_that_it_changed(here):
    run = searched(here / "run", {"dataloader_workers": "search", "omp_threads": 1})
    trials = [{"omp_threads": 2, "dataloader_workers": n} for n in (0, 2)]
    events = [("opened", {"definition": {"pinned": {"omp_threads": 1, "other": 3}}})]
    events += [
        ("finished", {"trial": {"number": n, "status": "ok", "configuration": trial}})
        for n, trial in enumerate(trials)
    ]
    lines = [{"schema": 1, "search_id": "x"}]
    lines += [{"n": n, "event": name, **data} for n, (name, data) in enumerate(events, 1)]
    (run / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (arm,) = parse_arms(["run#1"], None)
    assert arm.search.runner.options["knobs"] == {"omp_threads": 1, "dataloader_workers": 2}
    with pytest.raises(BadInputError, match="there is no such trial, 0 to 1"):
        parse_arms(["run#7"], None)


def test_a_configuration_of_another_workload_is_refused(here):
    run = searched(here / "run", {})
    text = (run / "config.yaml").read_text()
    (here / "other.yaml").write_text(text.replace('"script"', '"mlp"'))
    with pytest.raises(BadInputError, match="it is of workload=mlp"):
        parse_arms(["other.yaml"], None)


def test_a_script_that_is_not_there_is_named(here):
    (arm,) = parse_arms(["nowhere.py"], None)
    with pytest.raises(BadInputError, match=r"nowhere\.py"):
        Workshop(Environment(here), {}, [], UserFiles(), here).make(arm)


# -----------------------------------------------------------------------------
# Checkouts.


@pytest.fixture
def repository(here):
    """A repository with two commits and a change that is in none."""
    (here / "sub").mkdir()
    (here / "sub" / "train.py").write_text("first")
    git(here, "init", "-q")
    git(here, "add", ".")
    git(here, "commit", "-qm", "first")
    (here / "sub" / "train.py").write_text("second")
    git(here, "commit", "-qam", "second")
    (here / "sub" / "train.py").write_text("mine")
    (here / "sub" / "data").mkdir()
    return here


def state(repository):
    files = {p: p.read_bytes() for p in repository.rglob("*") if p.is_file()}
    return {p: b for p, b in files.items() if p.name != "index"}


def test_a_commit_is_checked_out_elsewhere_and_nothing_is_touched(
    repository, monkeypatch, tmp_path
):
    monkeypatch.chdir(repository / "sub")
    before = state(repository)
    with temporary_directory() as directory:
        for revision, text in (("HEAD", "second"), ("HEAD~1", "first")):
            place = check_out(revision, directory / revision)
            assert (place / "train.py").read_text() == text
            assert place.name == "sub"
        (arm,) = parse_arms(["git:HEAD~1"], "train.py")
        files = UserFiles()
        workshop = Workshop(Environment(tmp_path / "run"), {}, [], files, directory, ["data"])
        script = workshop.make(arm)
        assert Path(script.options.words[0]).read_text() == "first"
        where = script.environment.directory
        assert (where / "data").is_symlink() and script.files is not files
    assert not directory.exists()
    assert state(repository) == before
    listed = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1


@pytest.mark.parametrize("revision", ["nowhere", "-x", "--help"])
def test_a_revision_that_is_not_there_is_named(repository, revision):
    with pytest.raises(BadInputError, match=f"git:{revision}: git rev-parse"):
        check_out(revision, repository / "out")


def test_without_a_repository_there_are_no_commits(here):
    with pytest.raises(BadInputError, match="git:HEAD: git rev-parse: fatal: not a git repository"):
        check_out("HEAD", here / "out")
