"""The project as it is installed: a wheel outside the repository, and the setup lines."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEST_LINE = './scripts/setup dev && .venv/bin/python -m pytest -n 2 --dist loadfile -m "not slow"'
MAIN_LINE = "./scripts/setup && .venv/bin/perfsearch runner=ddp strategy=bayes"


def run(*command, cwd="/"):
    result = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=180
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that the repository stays as it is."""
    source = tmp_path_factory.mktemp("source")
    names = ["pyproject.toml", "README.md", "LICENSE", "conf", "perfsearch"]
    run("cp", "-r", *[ROOT / n for n in names], source)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", out, source)  # fmt: skip
    (built,) = out.glob("perfsearch-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel and a view of this one's packages; nothing is fetched."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps",
        "--no-index", wheel)  # fmt: skip
    (packages,) = home.glob("lib/python*/site-packages")
    shared = [p for p in sys.path if Path(p).name == "site-packages"]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return home / "bin"


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


def test_the_readme_has_one_line_to_run_and_one_to_test():
    readme = (ROOT / "README.md").read_text()
    assert f"\n{MAIN_LINE}\n" in readme
    assert f"\n{TEST_LINE}\n" in readme
    assert f"\n{TEST_LINE}\n" in (ROOT / ".ci" / "run").read_text()


def test_every_dependency_is_pinned_inside_its_range():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    extras = [r for group in project["optional-dependencies"].values() for r in group]
    for text in [*project["dependencies"], *extras]:
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

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "dev"}
    texts = [*project["dependencies"], *(r for group in extras.values() for r in group)]
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

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == perfsearch.__version__
    assert re.search(rf"^## {re.escape(project['version'])}\b", changelog(), re.MULTILINE)


def changelog():
    return (ROOT / "CHANGELOG.md").read_text()


def test_setup_refuses_what_it_does_not_know():
    command = ["bash", str(ROOT / "scripts" / "setup"), "prod"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert "prod" in result.stderr
