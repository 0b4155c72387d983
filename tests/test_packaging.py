"""The project as it is installed: a wheel outside the repository, hints, the image, setup lines."""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEST_LINE = './scripts/setup dev && .venv/bin/python -m pytest -n 2 --dist loadfile -m "not slow"'
TABLE = "bucket_cap_mb,status,samples_per_s,step_ms\n1,ok,10,9 9 9\n2,ok,12,5 5 5\n"
REPLAY = ["runner=replay", "runner.table=table.csv", "tracking.enabled=false"]


def run(*command, cwd="/", **variables):
    result = subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**os.environ, **variables},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from the source distribution of a copy; the repository stays as it is."""
    source = tmp_path_factory.mktemp("source")
    names = ["pyproject.toml", "README.md", "LICENSE", "conf", "perfsearch"]
    run("cp", "-r", *[ROOT / n for n in names], source)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    assert len(list(out.glob("perfsearch-*.tar.gz"))) == 1
    (built,) = out.glob("perfsearch-*.whl")
    return built


def environment(home, *options):
    """An environment with a view of this one's packages, all but perfsearch; its programs' place.

    Args:
        home: where it is made.
        options: that its ``pip`` always has.

    """
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    shared = [p for p in sys.path if Path(p).name == "site-packages"]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    pip = home / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {python} -m pip "$@" {" ".join(options)}\n')
    pip.chmod(0o755)
    return home / "bin"


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Programs of an environment with the wheel; nothing is fetched."""
    programs = environment(tmp_path_factory.mktemp("environment"))
    run(programs / "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed",
        wheel)  # fmt: skip
    return programs


def test_the_wheel_holds_every_module_and_every_option(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "perfsearch").rglob("*.py")}
    options = {
        f"perfsearch/conf/{p.relative_to(ROOT / 'conf')}" for p in (ROOT / "conf").rglob("*.yaml")
    }
    assert modules - held == set(), "list new packages in pyproject.toml"
    assert options - held == set()
    assert "perfsearch/py.typed" in held


def test_a_wheel_works_outside_the_repository(installed):
    where = run(installed / "python", "-c", "import perfsearch.conf; print(perfsearch.__file__)")
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert "Groups (GROUP=OPTION)" in run(installed / "perfsearch", "--help")
    shown = run(installed / "perfsearch", "--cfg", "job", "seed=11")
    assert "seed: 11\n" in shown


@pytest.mark.slow
def test_the_installed_commands_search_outside_the_repository(installed, tmp_path):
    (tmp_path / "table.csv").write_text(TABLE)
    words = [*REPLAY, "strategy=grid"]
    run(installed / "perfsearch", *words, "run_dir=run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").is_file()
    assert (tmp_path / "run" / "best" / "config.yaml").is_file()
    code = f"import perfsearch; print(perfsearch.search(*{words!r}, quiet=True))"
    assert "<SearchResult " in run(installed / "python", "-c", code, cwd=tmp_path)
    assert "--search" in run(installed / "perfsearch-run", "--help")
    assert "DIRECTORY" in run(installed / "perfsearch-sync", "--help").upper()


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(project()["optional-dependencies"]))
def test_the_wheel_installs_with_each_extra(wheel, extra, tmp_path):
    """As ``pip`` would do it: what is there stays, and the rest is found in the tested versions."""
    programs = environment(tmp_path / "environment")
    options = ["--dry-run", "--quiet", "--no-build-isolation"]
    asked = f"perfsearch[{extra}] @ {wheel.as_uri()}"
    install = [programs / "pip", "install", *options, "-c", ROOT / "constraints.txt", asked]
    done = subprocess.run(
        [*map(str, install)], cwd="/", capture_output=True, text=True, timeout=300
    )
    if done.returncode and "No matching distribution" not in done.stderr:
        pytest.fail(done.stderr)
    if done.returncode:
        pytest.skip(f"no index to take the rest from: {done.stderr.splitlines()[-1]}")


# -----------------------------------------------------------------------------
# Hints: perfsearch is in no index, and what it needs is.


def test_a_missing_package_is_asked_for_by_its_own_requirement(monkeypatch):
    from perfsearch.core import extras

    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda name: ["torch>=2", 'a>=1; extra == "x"', "b; python_version>'3' and extra == 'x'"],
    )
    assert extras.how_to_install("a", "x") == "pip install 'a>=1' 'b'"
    assert extras.how_to_install("c", "y") == "pip install 'c'"


@pytest.mark.slow
def test_the_hint_that_a_search_prints_works_as_it_is_printed(wheel, tmp_path):
    if importlib.util.find_spec("optuna") is not None:
        pytest.skip("optuna is there already")
    programs = environment(tmp_path / "environment")
    run(programs / "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed",
        wheel)  # fmt: skip
    (tmp_path / "table.csv").write_text(TABLE)
    command = [str(programs / "perfsearch"), *REPLAY, "strategy=optuna"]
    refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    (hint,) = re.findall("Run: (pip install .*)", refused.stderr)
    variables = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", hint], cwd="/", env=variables, capture_output=True, text=True, timeout=300
    )
    if "No matching distribution" in done.stderr:
        pytest.skip("no index to install from")
    assert done.returncode == 0, done.stderr
    run(*command, cwd=tmp_path)


HIDES = """\
import os, sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.partition(".")[0] in os.environ.get("HIDDEN", "").split() else
    found(name, path, target)
)
"""
"""Has packages be as if they were not installed."""

ASKS = {
    "numba": ["runner=soap"],
    "optuna": [*REPLAY, "strategy=optuna"],
    "deepspeed": ["runner=deepspeed", "workload=script",
                  "workload.command=[deepspeed,train.py,--deepspeed_config,ds.json]"],
    "mcp": ["mcp"],
}  # fmt: skip
"""What needs a package that an extra brings."""


@pytest.mark.slow
def test_every_hint_to_install_something_works_as_it_is_printed(wheel, tmp_path):
    programs = environment(tmp_path / "environment")
    run(programs / "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed",
        wheel)  # fmt: skip
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    (packages / "hides.py").write_text(HIDES)
    (packages / "hides.pth").write_text("import hides\n")
    (tmp_path / "table.csv").write_text(TABLE)
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    asked = set()
    for package, words in ASKS.items():
        command = [str(programs / "perfsearch"), *words]
        variables = {
            **os.environ,
            "HIDDEN": package,
            "PATH": f"{programs}{os.pathsep}/usr/bin:/bin",
        }
        refused = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300
        )
        assert refused.returncode == 2, refused.stdout + refused.stderr
        (hint,) = re.findall("Run: (pip install .*)", refused.stderr)
        asked |= {*shlex.split(hint)[2:]}
    extras = project()["optional-dependencies"]
    assert asked == {r for name in ("soap", "optuna", "deepspeed", "mcp") for r in extras[name]}
    install = [str(programs / "pip"), "install", "--dry-run", "--quiet", *sorted(asked)]
    done = subprocess.run(install, cwd="/", capture_output=True, text=True, timeout=300)
    if "No matching distribution" in done.stderr:
        pytest.skip("no index to take them from")
    assert done.returncode == 0, done.stderr


def test_every_command_to_install_something_names_what_there_is():
    """Not ``perfsearch`` or ``perfsearch[extra]`` by name: no index has it."""
    listed = [r for group in project()["optional-dependencies"].values() for r in group]
    places = ["README.md", "docs/*.md", "conf/**/*.yaml", "examples/**/*", "perfsearch/**/*.py"]
    for path in (p for place in places for p in ROOT.glob(place) if p.is_file()):
        text = path.read_text()
        assert not re.search(r"pip install[^\n`#]* ['\"]?perfsearch\b(?! @)", text), path
        for words in re.findall(r"pip install ((?:'[^'\n]+'[ ]?)+)", text):
            for requirement in re.findall(r"'([^']+)'", words):
                own = requirement.startswith((".", "/", "{")) or " @ " in requirement
                assert own or requirement in listed, f"{path}: {requirement}"


# -----------------------------------------------------------------------------
# The image: there is no daemon to build it with here, so its lines are followed.


def instructions():
    """The Dockerfile's instructions, each with the rest of its line."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def test_the_image_copies_what_is_there_and_what_the_context_has():
    """``.dockerignore`` leaves out all but what is named in it."""
    names = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENTRYPOINT"}
    assert {name for name, _ in instructions()} == names
    first = next(i for i, (name, _) in enumerate(instructions()) if name == "FROM")
    assert instructions()[first] == ("FROM", "${BASE}")
    assert [name for name, _ in instructions()[:first]] == ["ARG"]
    copied = {w for name, rest in instructions() if name == "COPY" for w in rest.split()[:-1]}
    assert all((ROOT / word).exists() for word in copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_the_pages_tell_the_image_as_it_is():
    page = (ROOT / "docs" / "install.md").read_text().partition("## A container")
    dockerfile = (ROOT / "Dockerfile").read_text()
    commands = re.findall("^docker .*", page[2], re.MULTILINE)
    assert len(commands) == 3
    assert all(f"#   {command}\n" in dockerfile for command in commands)
    arguments = dict(rest.partition("=")[::2] for name, rest in instructions() if name == "ARG")
    assert set(re.findall(r"`([A-Z_]+)`", page[2])) == set(arguments)
    assert set(re.findall(r"--build-arg (\w+)=", dockerfile)) <= set(arguments)
    assert f"`{arguments['EXTRAS']}` by default" in page[2]
    assert arguments["EXTRAS"] in project()["optional-dependencies"]
    # what the pages say of a source tree, in the tested versions but for the base's own torch
    assert "`pip install -c constraints.txt .`" in page[0]
    made = [rest for name, rest in instructions() if name == "RUN"]
    assert "grep -v '^torch==' constraints.txt > tested.txt" in made
    assert 'pip install --no-cache-dir -c tested.txt ".[$EXTRAS]"' in made


@pytest.mark.slow
def test_the_images_lines_install_what_its_entry_point_starts(tmp_path):
    """In an environment that has the packages, as a base image with torch does; nothing fetched."""
    programs = environment(tmp_path / "environment", "--no-index", "--no-build-isolation")
    root = tmp_path / "root"
    (programs / "apt-get").write_text("#!/bin/sh\n")  # the base's own, which is no base here
    (programs / "apt-get").chmod(0o755)
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    here, entry = root, []
    for name, rest in instructions():
        if name == "ARG" and "=" in rest:
            variables.update([rest.split("=", 1)])
        elif name == "WORKDIR":
            here = root / rest.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                to = here / target if target != "./" else here / source
                run("cp", "-r", ROOT / source, to)
        elif name == "RUN" and "/var/lib/apt" not in rest:
            run("sh", "-c", rest, cwd=here, **variables)
        elif name == "ENTRYPOINT":
            entry = json.loads(rest)
    shown = run(programs / entry[0], "--help", cwd=here)
    assert "Groups (GROUP=OPTION)" in shown
    module = run(programs / "python", "-c", "import perfsearch; print(perfsearch.__file__)")
    assert Path(module.strip()).is_relative_to(programs.parent)


def test_the_line_that_tests_is_told_and_run():
    assert f"\n{TEST_LINE}\n" in (ROOT / "CONTRIBUTING.md").read_text()
    assert f"\n{TEST_LINE}\n" in (ROOT / ".ci" / "run").read_text()


def test_every_dependency_is_pinned_inside_its_range():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    extras = [r for group in project()["optional-dependencies"].values() for r in group]
    for text in [*project()["dependencies"], *extras]:
        requirement = Requirement(text)
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(pin), f"{text}, but {pin} is pinned"


def imported_packages():
    """What the modules of perfsearch import from outside, with one of them that does."""
    found = {}
    for path in (ROOT / "perfsearch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            found.update({name.partition(".")[0]: path.relative_to(ROOT) for name in names})
    return {n: p for n, p in found.items() if n not in {*sys.stdlib_module_names, "perfsearch"}}


def test_every_package_that_is_imported_is_declared():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    extras = {k: v for k, v in project()["optional-dependencies"].items() if k != "dev"}
    texts = [*project()["dependencies"], *(r for group in extras.values() for r in group)]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    provided = importlib.metadata.packages_distributions()
    undeclared = {
        name: str(path)
        for name, path in imported_packages().items()
        if not declared & {canonicalize_name(d) for d in provided.get(name, [name])}
    }
    assert undeclared == {}


def test_the_version_is_said_once():
    import perfsearch

    assert project()["version"] == perfsearch.__version__
    assert re.search(rf"^## {re.escape(project()['version'])}\b", changelog(), re.MULTILINE)


def changelog():
    return (ROOT / "CHANGELOG.md").read_text()


def test_setup_refuses_what_it_does_not_know():
    command = ["bash", str(ROOT / "scripts" / "setup"), "prod"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert "prod" in result.stderr
