"""The CSV that one run writes and the next one reads."""

import csv

import pytest
from support.online_fakes import BASELINE

from perfsearch.core.errors import BadInputError
from perfsearch.core.trial import Purpose, Status
from perfsearch.online.log import FINAL, Entry, LogWriter, read

TUNED = {**BASELINE, "bucket_cap_mb": 8.0, "gradient_as_bucket_view": True}


def write(path, entries, job="4 x GPU"):
    writer = LogWriter(path, job, list(BASELINE))
    for entry in entries:
        writer.write(entry)
    writer.close()


ENTRIES = [
    Entry(0, Purpose.BASELINE, Status.OK, 10, BASELINE, [0.1, 0.1], 0.1),
    Entry(1, Purpose.SEARCH, Status.OK, 21, TUNED, [0.08, 0.09], 0.085),
    Entry(2, Purpose.SEARCH, Status.OOM, 24, {**TUNED, "bucket_cap_mb": 512.0}, reason="memory, "),
]
LAST = Entry(1, FINAL, Status.OK, 24, TUNED, (), 0.085, "converged")


def test_columns_carry_units_and_the_last_row_says_what_was_kept(tmp_path):
    path = tmp_path / "deep" / "log.csv"
    write(path, [*ENTRIES, LAST])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["step_ms"] == "100.0000"
    assert rows[0]["score_steps_per_s"] == "10"
    assert [r["train_iter"] for r in rows] == ["10", "21", "24", "24"]
    assert rows[2]["step_ms"] == ""
    assert (rows[-1]["purpose"], rows[-1]["bucket_cap_mb"]) == ("final", "8.0")


def test_what_was_written_is_read(tmp_path):
    write(tmp_path / "log.csv", [*ENTRIES, LAST])
    log = read(tmp_path / "log.csv")
    assert log.finished and log.kept == TUNED and log.job == "4 x GPU"
    assert [t.status for t in log.trials] == ["ok", "ok", "oom"]
    assert log.trials[0].configuration == BASELINE
    assert log.trials[1].cost == pytest.approx(0.085)


def test_without_a_last_row_the_best_so_far_counts(tmp_path):
    write(tmp_path / "log.csv", ENTRIES)
    log = read(tmp_path / "log.csv")
    assert not log.finished
    assert log.kept == TUNED


def test_an_older_log_is_kept_beside_the_new_one(tmp_path):
    """horovod/horovod truncates it, so that a restart destroys what was learned."""
    for number in range(3):
        write(tmp_path / "log.csv", ENTRIES, job=str(number))
    names = {p.name: read(p).job for p in tmp_path.iterdir()}
    assert names == {"log.csv": "2", "log.csv.1": "0", "log.csv.2": "1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no log of tuning"),
        ("a,b\n1,2\n", "no log of tuning"),
        ("\x00\xff", "log"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / "log.csv").write_text(text, encoding="latin-1")
    with pytest.raises(BadInputError, match=message):
        read(tmp_path / "log.csv")


def test_a_damaged_line_is_named(tmp_path):
    write(tmp_path / "log.csv", ENTRIES)
    text = (tmp_path / "log.csv").read_text().replace("1,search,ok", "1,search,fine")
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(BadInputError, match="line 3 is damaged"):
        read(tmp_path / "log.csv")


def test_a_log_of_failures_only_gives_nothing_to_start_from(tmp_path):
    write(tmp_path / "log.csv", ENTRIES[2:])
    with pytest.raises(BadInputError, match="no successful sample"):
        read(tmp_path / "log.csv")
