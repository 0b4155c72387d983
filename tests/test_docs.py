"""The pages say what the code does."""

import importlib.util
import re
from pathlib import Path

import pytest

from perfsearch.core.knob import Kind, Knob

ROOT = Path(__file__).parent.parent


@pytest.fixture
def generate(monkeypatch):
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generate, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_every_runner_has_its_keys_in_the_page(generate):
    _, *sections = generate.runners_page().split("\n## ")
    without = [text.partition("`\n")[0] for text in sections if "| key | allowed |" not in text]
    assert without == []


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


def test_every_benchmark_and_every_result_is_listed():
    directory = ROOT / "benchmarks"
    text = (directory / "README.md").read_text()
    scripts = {p.name for p in directory.glob("*.py") if not p.name.startswith("_")}
    assert set(re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE)) == scripts
    assert set(re.findall(r"\(results/(\w+\.md)\)", text)) == {
        p.name for p in (directory / "results").glob("*.md")
    }
