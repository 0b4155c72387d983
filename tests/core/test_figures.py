"""Values, rates and durations as a person would write them."""

from pathlib import Path

import pytest

from perfsearch.core.figures import (
    decimals,
    show_changes,
    show_number,
    show_path,
    show_seconds,
    show_value,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (64.0, "64"),
        (85.0823, "85.1"),
        (1.7156475350125309, "1.72"),
        (1234.56, "1235"),
        (0.00012345, "0.000123"),
        (3e12, "3e+12"),
        ("fused", "fused"),
        (7, "7"),
    ],
)
def test_values_have_no_more_digits_than_a_person_writes(value, shown):
    assert show_value(value) == shown


@pytest.mark.parametrize(
    ("first", "value", "shown"),
    [
        (135.7, 206.0, "206.0"),
        (20789.0, 31234.6, "31,235"),
        (2.5, 10.25, "10.250"),
        (4.2e12, 5.1e12, "5.1e+12"),
    ],
)
def test_a_column_has_the_decimals_of_its_first_number(first, value, shown):
    assert show_number(value, decimals(first)) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (3723, "1:02:03")])
def test_durations(seconds, shown):
    assert show_seconds(seconds) == shown


def test_many_changes_are_counted():
    names = [f"k{n}=1" for n in range(20)]
    assert show_changes(names, 2) == "k0=1 k1=1 and 18 more of 20"
    assert show_changes(names[:3], 2) == "k0=1 k1=1 k2=1"


def test_paths_are_from_here_where_they_are_below(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert show_path(tmp_path / "outputs" / "x") == "outputs/x"
    assert show_path(Path("/elsewhere/x")) == "/elsewhere/x"


def test_a_path_is_shown_where_the_current_directory_was_removed(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert show_path(tmp_path / "run") == str(tmp_path / "run")
    assert show_path(Path("run")) == "run"
