"""What the README and the quickstarts tell their readers to type works as it stands."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from support.doc_blocks import blocks_of, run_block, run_page, wrappers

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INSTALL = "pip install .\n"
STAND_IN = ROOT / "tests" / "data" / "deepspeed_stand_in"
FRAMEWORKS = next(iter(ROOT.glob("build/frameworks/lib/python*/site-packages")), ROOT / "none")
"""What ``scripts/setup frameworks`` has installed."""


# page, the example that stands for the reader's train.py (none: the page has it), what it needs
QUICKSTARTS = {
    "script": ("ddp_train.py", []),
    "trainer": ("hf_trainer.py", ["transformers", "accelerate"]),
    "lightning": ("lightning_train.py", ["lightning"]),
    "accelerate": ("accelerate_fsdp.py", ["accelerate"]),
    "fsdp": (None, []),
    "deepspeed": (None, []),
}


def test_every_quickstart_is_run():
    assert {path.stem for path in (ROOT / "docs" / "start").glob("*.md")} == set(QUICKSTARTS)


def run_in(directory, text, script, known=(), whole=False):
    if script is not None:
        written = (ROOT / "examples" / "scripts" / script).read_text()
        # a model that trains in less time, with the same lines
        (directory / "train.py").write_text(re.sub(r"(--width.*default)=\d+", r"\1=32", written))
    return run_page(text, directory, wrappers(directory / "tools", whole), known)


@pytest.mark.slow
def test_the_readme_and_the_quickstart_of_scripts_work_as_they_stand(tmp_path):
    known = {INSTALL}  # which has a test of its own
    said = run_in(tmp_path, README, "ddp_train.py", known, whole=True)
    done = {block.text for block in blocks_of(README)}
    said += run_in(tmp_path, quickstart("script"), "ddp_train.py", done)
    report = (tmp_path / "found" / "report.html").read_text()
    assert "<span>--nproc-per-node</span> <span>2</span>" in report  # the whole command is there
    assert (tmp_path / "found" / "best" / "apply" / "run.sh").is_file()
    assert (tmp_path / "mlflow.db").is_file()
    assert "loss" in "".join(said)


def quickstart(page):
    return (ROOT / "docs" / "start" / f"{page}.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in QUICKSTARTS if page != "script"])
def test_a_quickstart_works_as_it_stands(page, tmp_path, monkeypatch):
    script, needs = QUICKSTARTS[page]
    missing = [package for package in needs if importlib.util.find_spec(package) is None]
    for package in missing:
        if not (FRAMEWORKS / package).is_dir():
            pytest.skip(f"needs {package}, which ./scripts/setup frameworks brings")
    places = [str(FRAMEWORKS)] if missing else []
    if page == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        places = [str(STAND_IN)]
    if places:
        places += filter(None, [os.environ.get("PYTHONPATH")])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    said = run_in(tmp_path, quickstart(page), script)
    assert (tmp_path / "found" / "best" / "config.yaml").is_file()
    assert script is None or re.search(r"loss\W+\d", said[-1])


@pytest.mark.slow
def test_the_line_that_installs_works_in_a_clone(tmp_path):
    """In an environment that has the other packages; nothing is fetched."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in ("conf", "perfsearch"):
        shutil.copytree(ROOT / name, clone / name)
    venv.create(tmp_path / "own", with_pip=False)
    (packages,) = (tmp_path / "own").glob("lib/python*/site-packages")
    shared = [p for p in sys.path if Path(p).name == "site-packages"]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    python = tmp_path / "own" / "bin" / "python"
    pip.write_text(
        f'#!/bin/sh\nset -e; first="$1"; shift\nexec {sys.executable} -m pip --python {python} '
        '"$first" --no-deps --no-index --no-build-isolation "$@"\n'
    )
    pip.chmod(0o755)
    (block,) = [b for b in blocks_of(README) if b.text == INSTALL]
    run_block(block, clone, {"PATH": f"{pip.parent}:/usr/bin:/bin"})
    command = [tmp_path / "own" / "bin" / "perfsearch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("perfsearch ")


def test_a_block_that_fails_is_found(tmp_path):
    page = '```python title="job.py"\nprint("ran")\n```\n\n```sh\npython job.py\n```\n'
    environment = wrappers(tmp_path / "bin")
    assert run_page(page, tmp_path, environment) == ["ran\n"]
    with pytest.raises(AssertionError, match="line 5"):
        run_page(page.replace("python job.py", "python other.py"), tmp_path, environment)
    with pytest.raises(AssertionError, match="nobody can run"):
        run_page("```perl\nprint 1\n```\n", tmp_path, environment)
    with pytest.raises(AssertionError, match="not closed"):
        run_page("```sh\ntrue\n", tmp_path, environment)


def test_figures_of_the_readme_stand_in_the_result_that_the_row_links_to():
    rows = re.findall(r"^\| \[.*?\]\((benchmarks/results/\w+\.md)\)(.*)$", README, re.MULTILINE)
    assert len(rows) >= 5
    for page, cells in rows:
        result = (ROOT / page).read_text()
        for figure in re.findall(r"\d[\d,.]*\d|\d", cells):
            shown = re.search(rf"(?<![\d.]){re.escape(figure)}", result)
            assert shown, f"{figure} does not stand in {page}"
