"""What speaks against having starts of several jobs alive at once."""

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.trial import Measurement
from perfsearch.instrument.user_files import UserFiles
from perfsearch.metrics.system import available_bytes
from perfsearch.runners._arms import Arms, Footprint
from perfsearch.runners._script.runner import Script


@pytest.fixture
def arms(tmp_path, monkeypatch):
    """Two jobs in the same directory, and one in another."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    here, there = UserFiles(), UserFiles(directory=tmp_path / "other")
    scripts = {
        name: Script("cpu", {}, Script.Options(("train.py", name)), Environment(None), files=files)
        for name, files in (("a", here), ("b", here), ("c", there))
    }
    made = Arms(scripts, Environment(None))
    for name in scripts:
        measured = Measurement([0.1], 8, environment={"ranks": [{"host": "h", "device": "cpu"}]})
        made._note(name, measured)
    return made


def test_nothing_does_where_all_fit(arms):
    assert arms.in_turns and arms.why_not_in_turns() == ""


def test_files_that_one_changes_where_another_works_do(arms, tmp_path):
    arms.arms["c"].files.changed.add(str(tmp_path / "state.txt"))
    assert arms.why_not_in_turns() == "", "nobody else works there"
    arms.arms["a"].files.changed.add(str(tmp_path / "last.pt"))
    assert "changes files that another would meet (last.pt)" in arms.why_not_in_turns()


def test_the_same_file_changed_from_two_directories_does(arms, tmp_path):
    del arms.arms["b"]
    for name in "ac":
        arms.arms[name].files.changed.add(str(tmp_path / name))
    assert arms.why_not_in_turns() == ""
    for name in "ac":
        arms.arms[name].files.changed.add(str(tmp_path / "both"))
    assert "(both)" in arms.why_not_in_turns()


def test_memory_that_is_too_small_for_all_does(arms):
    half_gib = available_bytes() / 2**30 / 2
    arms._taken["a"] = Footprint(0.0, half_gib, frozenset({"h cpu"}))
    assert arms.why_not_in_turns() == ""
    arms._taken["b"] = arms._taken["a"]
    assert "GiB together, and " in arms.why_not_in_turns()


def test_different_devices_do(arms):
    arms._taken["b"] = Footprint(0.0, 0.0, frozenset({"h GPU-1"}))
    assert arms.why_not_in_turns() == "they use different devices"
