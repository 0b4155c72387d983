"""The pages say what the code does."""

import dataclasses
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from perfsearch import runners, strategies
from perfsearch.cli import run
from perfsearch.cli.help import settings_keys
from perfsearch.config.compose import compose
from perfsearch.config.schema import validate
from perfsearch.core.knob import Kind, Knob
from perfsearch.online import AutotuneOptions
from perfsearch.runners import why_no_knobs
from perfsearch.runners._script.runner import Script
from perfsearch.runners.deepspeed.autotuning import Autotuning

ROOT = Path(__file__).parent.parent


@pytest.fixture
def generate(monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_every_runner_and_strategy_has_a_page_with_its_keys(generate):
    for kind, names in (
        ("runners", [*runners.names(), "script"]),
        ("strategies", strategies.names()),
    ):
        folder = ROOT / "docs" / kind
        assert {path.stem for path in folder.glob("*.md")} == set(names)
        index = (ROOT / "docs" / f"{kind}.md").read_text()
        for name in names:
            text = (folder / f"{name}.md").read_text()
            assert "| key | allowed |" in text or "It has no options." in text
            assert f"({kind}/{name}.md)" in index


PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
GROUPS = "budget|confirm|limits|objective|metrics|tracking|runner|strategy|workload|launcher"
NOT_COMPOSED = {"compare", "space", "session", "try", "mcp", "join", "-m", "--help"}
NOT_COMPOSED |= {"strategy=local", "runner=sleep", "workload=linear"}  # what CONTRIBUTING adds
NOT_KEYS = {"strategy.yaml", "tracking.jsonl", "runner.knobs.precision"}  # files, a script's own


def known_keys(generate):
    """Every key that can be set, and every knob."""
    found = {key for key, *_ in settings_keys()} | {"runner.name", "strategy.name"}
    for name in strategies.names():
        options = fields(strategies.load(name))
        found |= {f"strategy.{key}" for own in options for key in (own, f"{name}.{own}")}
    found |= {f"runner.{f}" for n in runners.names() for f in fields(runners.load(n))}
    for file in (ROOT / "conf").rglob("*.yaml"):
        found |= {f"{file.parent.name}.{key}" for key in yaml.safe_load(file.read_text()) or {}}
    found |= {f"workload.{field}" for field in fields(Script)}
    knobs = {k.name for n in runners.names() for k in generate.declared_knobs(n)}
    knobs |= {k.name for k in generate._script_knobs()}
    return found | {f"runner.knobs.{name}" for name in knobs}


def fields(cls):
    return [field.name for field in dataclasses.fields(cls.Options)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_a_page_names_exist(generate, page):
    told = re.findall(rf"(?<![\w/.-])((?:{GROUPS})\.[a-z_]+(?:\.[a-z_0-9]+)*)", page.read_text())
    known = known_keys(generate)
    unknown = set(told) - known - NOT_KEYS
    files = {key for key in unknown if key.endswith((".md", ".py", ".json"))}
    groups = {key for key in unknown if any(k.startswith(f"{key}.") for k in known)}
    assert unknown - files - groups == set()


def commands_of(page):
    """The words of every command in the blocks of a page, without variables before it."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:sh|text)[^\n]*\n(.*?)^```|((?:^    [^\n]*\n)+)", text, re.M | re.S)
    for fenced, indented in blocks:
        for line in (fenced or indented).replace("\\\n", " ").splitlines():
            command = re.sub(r"^([A-Z_0-9]+=\S+ )+", "", line.strip())
            if command.startswith("perfsearch"):
                yield shlex.split(command, comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_are_accepted(page):
    """Searches as far as their settings, scripts as far as the command line; nothing is run."""
    for program, *words in commands_of(page):
        if program == "perfsearch-run" and "--help" not in words:
            asked = run.split([word for word in words if word != "..."])
            assert asked.script, words
        elif program == "perfsearch" and not NOT_COMPOSED & set(words):
            validate(compose(words, {}, why_no_knobs))


def test_every_key_of_deepspeeds_tuner_has_its_row():
    page = (ROOT / "docs" / "coming_from" / "deepspeed.md").read_text()
    rows = {name for row in re.findall(r"^\| (.*?) \|", page, re.M) for name in row.split("`")}
    keys = {field.name for field in dataclasses.fields(Autotuning)}
    assert keys - rows == {"given", "num_params"}  # which keys there are; a part of model_info


def test_options_of_tuning_that_a_page_names_exist():
    told = {o for page in PAGES for o in re.findall(r"--autotune-([a-z-]+)", page.read_text())}
    own = {field.name.replace("_", "-") for field in dataclasses.fields(AutotuneOptions)}
    assert told - own == {"bayes-opt-max-samples"}  # Horovod's


@pytest.mark.slow
def test_the_picture_of_the_readme_can_be_taken(tmp_path):
    table = ROOT / "tests" / "data" / "ddp_gpt2small_4xh100_tcp.csv"
    keys = [f"runner.table={table}", "budget.trials=2", "confirm.max_repeats=2"]
    command = [sys.executable, ROOT / "docs" / "picture.py", "picture.svg", "runner=replay", *keys]
    done = subprocess.run(
        [*command, "strategy=random", "tracking.enabled=false"], cwd=tmp_path, capture_output=True,
        text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    drawn = (tmp_path / "picture.svg").read_text()
    assert "bucket_cap_mb" in drawn
    assert "url(http" not in drawn.replace(" ", "")
    assert not re.search(r"(?:href|src)=.http", drawn)


@pytest.mark.slow
def test_the_site_is_whole_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir"]
    done = subprocess.run(
        [*command, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 60
    for page in pages:
        loaded = re.findall(
            r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"([^\"]+)", page.read_text()
        )
        assert [url for url in loaded if url.startswith(("http", "//"))] == [], page
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert any("bucket_cap_mb" in entry["text"] for entry in index["docs"])


def test_a_stale_page_is_named_and_left_alone(generate, monkeypatch, tmp_path, capsys):
    page = tmp_path / "keys.md"
    page.write_text("old")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda: {page: "new"})
    assert generate.main(["--check"]) == 1
    assert "keys.md" in capsys.readouterr().err
    assert page.read_text() == "old"
    assert generate.main([]) == 0
    assert page.read_text() == "new"


def test_comments_stand_beside_the_knobs_of_an_option_file(generate):
    knobs = [
        Knob("bucket_cap_mb", Kind.REAL, 25, low=1, high=512, unit="MiB", help="bucket size"),
        Knob("algo", Kind.CATEGORICAL, "a", ("a",), help="how"),
    ]
    text = "name: x  # kept\nknobs:\n  bucket_cap_mb: search\n  algo: [a]  # old\n  other: 1  # o\n"
    wanted = (
        "name: x  # kept\nknobs:\n  bucket_cap_mb: search  # bucket size (MiB)\n"
        "  algo: [a]  # how\n  other: 1  # o\n"
    )
    assert generate.with_comments(text, knobs) == wanted
    assert generate.with_comments(wanted, knobs) == wanted


@pytest.mark.parametrize(
    "page", [*(ROOT / "benchmarks" / "results").glob("*.md")], ids=lambda p: p.stem
)
def test_a_result_says_first_what_was_asked_and_how_to_repeat_it(page):
    text = page.read_text()
    assert text.split("\n\n")[1].startswith("**Question**: ")
    assert "python benchmarks/" in text
    assert "**Answer**: " in text or "|---|" in text or "| --- |" in text


def test_gains_are_told_in_percent():
    """As the command line tells them; pages that quote other systems' figures keep those."""
    results = [*(ROOT / "benchmarks").rglob("*.md")]
    pages = [page for page in (*PAGES, *results) if page.name != "advice.md"]
    told = {page: re.findall(r"(?<![\w.])\d+(?:\.\d+)?x(?!\w)", page.read_text()) for page in pages}
    assert {page: found for page, found in told.items() if found} == {}


def test_every_benchmark_and_every_result_is_listed():
    directory = ROOT / "benchmarks"
    text = (directory / "README.md").read_text()
    scripts = {p.name for p in directory.glob("*.py") if not p.name.startswith("_")}
    assert set(re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE)) == scripts
    assert set(re.findall(r"\(results/(\w+\.md)\)", text)) == {
        p.name for p in (directory / "results").glob("*.md")
    }
