import json
import subprocess
import sys

from perfsearch.workers.failures import FailureFiles, ProcessEnd, launcher_report
from perfsearch.workers.messages import LAUNCHER_REPORT, rank_error_file, rank_log


def test_errors_of_an_earlier_attempt_do_not_count(tmp_path):
    left = FailureFiles(tmp_path, 2)
    record = {"rank": 1, "time": 2.0, "type": "ValueError", "message": "no"}
    rank_error_file(tmp_path, 1).write_text(json.dumps(record))
    assert [(e.rank, e.message) for e in left.errors()] == [(1, "no")]
    left.clear()
    assert left.errors() == []


def test_a_torn_error_is_passed_over(tmp_path):
    rank_error_file(tmp_path, 0).write_text('{"rank": 0, "ti')
    assert FailureFiles(tmp_path, 2).errors() == []


def test_tails_are_bounded_and_survive_any_bytes(tmp_path):
    rank_log(tmp_path, 0).write_bytes(b"\xff" * 100_000 + b"the end")
    tails = FailureFiles(tmp_path, 2).tails()
    assert set(tails) == {0}
    assert tails[0].endswith("the end")
    assert len(tails[0]) < 20_000


def test_a_directory_that_cannot_be_written_says_why(tmp_path):
    assert FailureFiles(tmp_path, 2).cannot_be_written() == ""
    assert FailureFiles(tmp_path / "gone", 2).cannot_be_written() == "No such file or directory"


def test_what_the_launcher_says(tmp_path):
    assert launcher_report(tmp_path, None) == ([], "")
    assert launcher_report(tmp_path, 0) == ([], "")
    assert launcher_report(tmp_path, -9) == ([], "it was ended by SIGKILL")
    ends = [{"rank": 1, "exit_code": 3, "time": 5}]
    (tmp_path / LAUNCHER_REPORT).write_text(json.dumps({"failures": ends, "error": None}))
    assert launcher_report(tmp_path, 1) == ([ProcessEnd(1, 3, 5)], "")
    error = {"type": "RendezvousConnectionError", "message": "refused"}
    (tmp_path / LAUNCHER_REPORT).write_text(json.dumps({"failures": [], "error": error}))
    assert launcher_report(tmp_path, 1) == ([], "RendezvousConnectionError: refused")


ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from perfsearch.workers.forkserver import leave_report

resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))  # bytes that a file may have
leave_report(Path(sys.argv[1]), [{"rank": 1, "exit_code": 3, "time": 5}])
"""


def test_a_launcher_that_cannot_write_its_report_leaves_none(tmp_path):
    subprocess.run([sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)], check=True)
    assert launcher_report(tmp_path, 1) == ([], "")
    assert list(tmp_path.iterdir()) == []
