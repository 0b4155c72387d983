"""The command as a process: readers that go away, and signals."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import front_fakes

TESTS = Path(__file__).parents[1]
FAKES = str(TESTS / "support" / "front_fakes.py")


def start(tmp_path, *arguments):
    return subprocess.Popen(
        [
            sys.executable,
            FAKES,
            *front_fakes.PREFIX,
            *arguments,
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process, word):
    for line in process.stdout:
        if word in line:
            return
    raise AssertionError(f"no {word!r}: {process.communicate(timeout=20)}")


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"]], ids=" ".join)
def test_a_reader_that_goes_away_is_no_error(tmp_path, arguments):
    process = start(tmp_path, *arguments)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=20) == 141
    assert error == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_lets_the_search_clean_up(tmp_path, number, code):
    process = start(tmp_path, "tracking.experiment=wait")
    try:
        read_until(process, "waiting")
        process.send_signal(number)
        read_until(process, "cleaning")
        process.send_signal(number)  # ignored: cleaning up is under way
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == code
    assert "cleaned" in out
    assert "Once more" in err
    assert "Traceback" not in err


def test_a_third_signal_ends_at_once(tmp_path):
    process = start(tmp_path, "tracking.experiment=wait-forever")
    try:
        read_until(process, "waiting")
        process.send_signal(signal.SIGINT)
        read_until(process, "cleaning")
        process.send_signal(signal.SIGINT)
        assert any("Once more" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "cleaned" not in out
