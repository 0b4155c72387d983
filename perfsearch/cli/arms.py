"""What ``perfsearch compare`` is given to compare, from its words to what can be measured.

An arm is a command as it would be started by hand, a configuration of an earlier search over a
script, a commit of the script's repository, or another Python.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.core.errors import BadInputError
from perfsearch.core.narrow import SEARCH

if TYPE_CHECKING:
    from perfsearch.config.schema import Settings
    from perfsearch.core.hardware import Environment
    from perfsearch.instrument.user_files import UserFiles
    from perfsearch.runners._arms import Switched
    from perfsearch.runners._script.runner import Script

GIT, PYTHON = "git:", "python:"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_TRIAL = re.compile(r"(.+)#(\d+)$")


@dataclass(frozen=True)
class Job:
    """A script as it is started.

    Attributes:
        words: the script, or the module's name, and its arguments.
        module: whether it is a module.
        variables: of the environment, before the command.
        nproc: number of ranks, where torchrun is named.
        python: another interpreter; empty: this one.

    """

    words: Sequence[str]
    module: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    nproc: int | None = None
    python: str = ""


@dataclass(frozen=True)
class Arm:
    """One of what is compared.

    Attributes:
        name: as it was given.
        job: what is started; ``None``: what ``search`` says.
        revision: of the script's repository; empty: the files as they are.
        python: another interpreter; empty: the job's.
        search: settings of an earlier search with the knobs to put into force.

    """

    name: str
    job: Job | None = None
    revision: str = ""
    python: str = ""
    search: Settings | None = None


def parse_arms(texts: Sequence[str], command: str | None) -> list[Arm]:
    """What is to be compared, each under a name of its own.

    Args:
        texts: as they were given; the first is the reference.
        command: what is started at a commit or by another Python; by default what an arm that is a
            configuration was searched with.

    Raises:
        BadInputError: one is none of the forms, or something that it names is missing.

    """
    found = [_parse(text, command) for text in texts]
    recorded = next((arm.search for arm in found if arm.search is not None), None)
    names: dict[str, int] = {}
    arms = []
    for arm in found:
        if arm.job is None and arm.search is None:
            if recorded is None:
                raise BadInputError(
                    f"{arm.name}: what is to be started? Give it, as in --command 'train.py --lr 1'"
                )
            options = recorded.workload.options
            words = [str(word) for word in options["command"]]
            arm = replace(arm, job=Job(words, bool(options.get("module"))))
        names[arm.name] = names.get(arm.name, 0) + 1
        again = f" ({names[arm.name]})" if names[arm.name] > 1 else ""
        arms.append(replace(arm, name=arm.name + again))
    return arms


def _parse(text: str, command: str | None) -> Arm:
    job = None if command is None else parse_command(command)
    if text.startswith(GIT):
        return Arm(text, job, revision=text.removeprefix(GIT))
    if text.startswith(PYTHON):
        return Arm(text, job, python=_interpreter(text.removeprefix(PYTHON)))
    trial = _TRIAL.match(text)
    if trial is not None and Path(trial[1]).is_dir():
        return Arm(text, search=_of_trial(Path(trial[1]), int(trial[2])))
    if text.endswith((".yaml", ".yml")) and Path(text).is_file():
        return Arm(text, search=_of_file(Path(text)))
    return Arm(text, parse_command(text))


def _interpreter(path: str) -> str:
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise BadInputError(f"{path}: there is no such program. Give the path of a Python")
    return os.path.abspath(found)


def parse_command(text: str) -> Job:
    """A command as it would be typed: ``[NAME=VALUE ...] [python | torchrun ...] SCRIPT ...``.

    Raises:
        BadInputError: there is no script in it.

    """
    from perfsearch.cli import run

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInputError(f"{text}: {error}. Quote it as for a shell") from error
    variables: dict[str, str] = {}
    while words and _VARIABLE.match(words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    python, nproc = "", None
    launcher = Path(words[0]).name if words else ""
    if re.fullmatch(r"python[\d.]*", launcher):
        python = _interpreter(words[0]) if os.sep in words[0] else ""
        words.pop(0)
        if words[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            launcher, words = "torchrun", ["torchrun", *words[2:]]
    if launcher == "torchrun":
        asked = run.split(words[1:])
        if asked.parsed.nnodes not in ("1", "1:1"):
            raise BadInputError(f"{text}: --nnodes={asked.parsed.nnodes}: starts are on this node")
        per_node = str(asked.parsed.nproc_per_node)
        nproc = int(per_node) if per_node.isdigit() else None
        return Job([asked.script, *asked.arguments], asked.parsed.module, variables, nproc, python)
    module = words[:1] == ["-m"]
    words = words[1:] if module else words
    if not words or words[0].startswith("-"):
        raise BadInputError(
            f"{text or repr(text)}: there is no script in it. Give a command, as in "
            "'torchrun --nproc-per-node 2 train.py', or outputs/RUN/best/config.yaml, "
            "outputs/RUN#12, git:main, python:/path/to/python"
        )
    return Job(words, module, variables, None, python)


# -----------------------------------------------------------------------------
# A configuration of an earlier search.


def _of_file(path: Path) -> Settings:
    from perfsearch.config.schema import validate
    from perfsearch.core.settings_file import read_settings

    try:
        plain = read_settings(path)
    except ValueError as error:
        raise BadInputError(f"{path} {error}") from error
    settings = validate(plain)
    if settings.workload.name != "script":
        raise BadInputError(
            f"{path}: it is of workload={settings.workload.name}, and starts of scripts are "
            "compared (workload=script)"
        )
    return settings


def _of_trial(run_dir: Path, number: int) -> Settings:
    from perfsearch.core.journal import JOURNAL, read
    from perfsearch.core.knob import same_value

    settings = _of_file(run_dir / "config.yaml")
    _, events = read(run_dir / JOURNAL)
    pinned: dict[str, Any] = {}
    trials: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.name == "opened":
            pinned = dict(event.data["definition"]["pinned"])
        elif event.name == "finished":
            trials[int(event.data["trial"]["number"])] = event.data["trial"]
    if number not in trials:
        raise BadInputError(
            f"{run_dir}#{number}: there is no such trial, 0 to {max(trials or [0])}"
        )
    today = trials.get(0, {}).get("configuration", {})
    asked = settings.runner.options.get("knobs") or {}
    fixed = {name: value for name, value in pinned.items() if name in asked}
    changed = {
        name: value
        for name, value in trials[number]["configuration"].items()
        if name not in today or not same_value(today[name], value)
    }
    return _with_knobs(settings, {**fixed, **changed})


def _with_knobs(settings: Settings, knobs: Mapping[str, Any]) -> Settings:
    options = {**settings.runner.options, "knobs": dict(knobs)}
    return replace(settings, runner=replace(settings.runner, options=options))


def _knobs(settings: Settings | None) -> dict[str, Any]:
    return {} if settings is None else dict(settings.runner.options.get("knobs") or {})


def _is_of(settings: Settings, arm: Arm) -> bool:
    """Whether an arm is the script of these settings, knobs apart."""
    if arm.search is not None:
        other = arm.search
        runners = [replace(s.runner, options={}) for s in (settings, other)]
        return runners[0] == runners[1] and (other.workload, other.nproc) == (
            settings.workload,
            settings.nproc,
        )
    assert arm.job is not None
    options = settings.workload.options
    job = Job([str(word) for word in options["command"]], bool(options.get("module")))
    nproc = None if settings.nproc == "auto" else settings.nproc
    return not (arm.revision or arm.python) and arm.job == replace(job, nproc=nproc)


# -----------------------------------------------------------------------------
# Where arms that are not the files as they are have theirs, for as long as they are measured.


def check_out(revision: str, directory: Path) -> Path:
    """Check a commit of the current directory's repository out; the same directory in it.

    It is a clone that shares the repository's objects, so that nothing of the repository or the
    user's files is touched, and what is left of it is a directory to remove.

    Raises:
        BadInputError: there is no repository here, or no such commit.

    """
    name = f"{GIT}{revision}"
    top = Path(_git(name, Path.cwd(), "rev-parse", "--show-toplevel"))
    commit = _git(name, top, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    _git(name, top, "clone", "--quiet", "--shared", "--no-checkout", str(top), str(directory))
    _git(name, directory, "checkout", "--quiet", "--detach", commit)
    here = directory / Path.cwd().resolve().relative_to(top.resolve())
    if not here.is_dir():
        raise BadInputError(f"{name}: it has no directory {here.relative_to(directory)}")
    return here


def _git(name: str, directory: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=directory, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise BadInputError(f"{name}: git is not installed") from error
    if done.returncode:
        said = done.stderr.strip().partition("\n")[0] or "there is no such commit"
        raise BadInputError(f"{name}: git {words[0]}: {said}")
    return done.stdout.strip()


# -----------------------------------------------------------------------------
# From an arm to what measures it.


@dataclass
class Workshop:
    """Makes what measures the arms.

    Attributes:
        environment: where and within which limits to run.
        options: ``workload.*`` keys that hold for all arms.
        stores: files and directories that perfsearch writes to.
        files: keeps what starts in the user's own directory change.
        directory: a temporary one.
        links: paths below the current directory that a commit does not have, such as data.

    """

    environment: Environment
    options: Mapping[str, Any]
    stores: Sequence[Path]
    files: UserFiles
    directory: Path
    links: Sequence[str] = ()

    def make(self, arm: Arm) -> Script:
        """What measures it; nothing is started yet.

        Raises:
            BadInputError: its script is missing, or something in its configuration is wrong.

        """
        try:
            return self._of_search(arm.search) if arm.search is not None else self._of_job(arm)
        except ValueError as error:
            raise BadInputError(f"{arm.name}: {error}") from error

    def switched(self, arms: Sequence[Arm]) -> Switched | None:
        """One script inside one start of which all arms can be measured; ``None``: they cannot.

        They differ in knobs alone, all of which a running job can change.
        """
        from perfsearch.runners._arms import Switched

        settings = next((arm.search for arm in arms if arm.search is not None), None)
        if settings is None or not all(_is_of(settings, arm) for arm in arms):
            return None
        knobs = {arm.name: _knobs(arm.search) for arm in arms}
        names = {name for each in knobs.values() for name in each}
        apart = {n for n in names if len({str(each.get(n)) for each in knobs.values()}) > 1}
        one = next(iter(knobs.values()))
        same = {name: one[name] for name in names - apart}
        changed = _with_knobs(settings, {**same, **dict.fromkeys(apart, SEARCH)})
        script = self._of_search(changed, searches=True)
        if not apart or not script.takes_between_steps(apart):
            return None
        values = {
            name: {n: v for n, v in each.items() if n in apart} for name, each in knobs.items()
        }
        return Switched(script, values, self.environment)

    def _of_search(self, settings: Settings, searches: bool = False) -> Script:
        from perfsearch import runners
        from perfsearch.runners._script.runner import without_file
        from perfsearch.runners.base import TakesScripts

        runner = runners.load(settings.runner.name)
        if not issubclass(runner, TakesScripts):
            raise ValueError(f"runner={settings.runner.name} starts jobs in its own way")
        device, knobs = runner.for_script(settings)
        if settings.runner.name == "zero":
            knobs = without_file(knobs)
        nproc = None if settings.nproc == "auto" else settings.nproc
        environment = replace(
            self.environment, nproc=nproc or self.environment.nproc, numerics=settings.numerics
        )
        options = {**settings.workload.options, **self.options}
        return self._script(device, knobs, options, environment, self.files, searches)

    def _of_job(self, arm: Arm) -> Script:
        from perfsearch.instrument.user_files import UserFiles

        job = arm.job
        assert job is not None
        environment, files = self.environment, self.files
        variables = {**environment.variables, **job.variables}
        words = list(job.words)
        python = arm.python or job.python
        if python:
            variables["PYTHONPATH"] = self._path_of_ours()
        if arm.revision:
            place = self.directory / f"commit-{len(list(self.directory.iterdir()))}"
            here = check_out(arm.revision, place)
            self._link(here)
            if not job.module and not Path(words[0]).is_absolute():
                words[0] = str(here / words[0])
            environment, files = replace(environment, directory=here), UserFiles(directory=here)
        environment = replace(
            environment,
            variables=variables,
            python=python,
            nproc=job.nproc or environment.nproc,
        )
        options = {**self.options, "command": words, "module": job.module}
        return self._script("auto", {}, options, environment, files)

    def _script(
        self,
        device: str,
        knobs: Mapping[str, Any],
        options: Mapping[str, Any],
        environment: Environment,
        files: UserFiles,
        searches: bool = False,
    ) -> Script:
        from perfsearch.config.options import build_options
        from perfsearch.runners._script.runner import Script, TimingOptions

        built = build_options(Script.Options, options, "workload")
        timings = TimingOptions(searches=searches)
        return Script(device, knobs, built, environment, "fixed", timings, self.stores, files)

    def _path_of_ours(self) -> str:
        """Where another Python finds perfsearch, and nothing else that is installed here."""
        import perfsearch

        place = self.directory / "packages"
        place.mkdir(exist_ok=True)
        link = place / "perfsearch"
        if not link.exists():
            link.symlink_to(Path(perfsearch.__file__).resolve().parent, target_is_directory=True)
        before = os.environ.get("PYTHONPATH")
        return os.pathsep.join([str(place), *([before] if before else [])])

    def _link(self, here: Path) -> None:
        for link in self.links:
            source, target = Path(link).resolve(), here / link
            if not source.exists():
                raise BadInputError(f"--link {link}: there is no such file or directory")
            if not os.path.lexists(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(source)
