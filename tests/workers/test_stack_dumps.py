"""Where ranks stand when their time is over: what they write, and how it is put."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest

from perfsearch.workers import processes, stack_dumps
from perfsearch.workers.messages import stack_note_file

PYTHON = "/usr/lib/python3.11"
LIBRARIES = "/venv/lib/python3.11/site-packages"
HEADER = "Stack (most recent call first):\n"


def frame(path, line, function):
    return f'  File "{path}", line {line} in {function}\n'


WAITING = frame(f"{PYTHON}/threading.py", 331, "wait")
RUN = frame("<frozen runpy>", 88, "_run_code")


@pytest.mark.parametrize(
    ("frames", "where"),
    [
        ([("/home/me/train.py", 12, "step")], "train.py:12 in step"),
        (
            [
                (f"{LIBRARIES}/torch/distributed/distributed_c10d.py", 3001, "all_reduce"),
                (f"{LIBRARIES}/perfsearch/parallel/piece_exchange.py", 152, "wait"),
                ("/home/me/train.py", 12, "step"),
            ],
            "piece_exchange.py:152 in wait",
        ),
        (
            [
                (f"{LIBRARIES}/torch/optim/adamw.py", 7, "step"),
                (f"{LIBRARIES}/perfsearch/instrument/patching.py", 41, "wrapper"),
                ("/home/me/a \"b\"/train.py", 88, "<module>"),
            ],
            "train.py:88 in <module>",
        ),
        ([(f"{LIBRARIES}/torchvision/io/image.py", 5, "read_file")], "image.py:5 in read_file"),
        ([("/home/me/lib/python/train.py", "???", "step")], "train.py:??? in step"),
    ],
)  # fmt: skip
def test_the_innermost_line_that_is_neither_pythons_nor_torchs(frames, where):
    text = HEADER + WAITING + "".join(frame(*one) for one in frames) + RUN
    assert stack_dumps.innermost_line(text) == where


def test_the_innermost_line_where_none_is_the_users():
    assert stack_dumps.innermost_line(HEADER + WAITING + RUN) == "threading.py:331 in wait"


def test_what_else_is_in_the_log_does_not_matter():
    bar = "Epoch 1:  40%|####      |"  # without an end of its line
    before = HEADER + frame("/old.py", 1, "old")
    last = frame("/home/me/train.py", 88, "step")
    text = f"{before}{bar}{HEADER}{WAITING}loss 0.5\n{last}loss 0.4\n"
    assert stack_dumps.innermost_line(text) == "train.py:88 in step"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "loss 0.5\n",
        HEADER,
        HEADER + '  File "/home/me/tra',
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in step\n',
    ],
)
def test_nothing_is_made_up(text):
    assert stack_dumps.innermost_line(text) == ""


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({}, ""),
        ({1: "a"}, "rank 1 stands at a"),
        ({1: "a", 0: "a"}, "ranks 0 and 1 stand at a"),
        ({0: "b", 1: "a", 2: "a"}, "rank 0 stands at b, ranks 1 and 2 at a"),
        ({0: "a", 1: "a", 2: "a", 3: "b"}, "ranks 0 to 2 stand at a, rank 3 at b"),
        ({0: "a", 2: "a", 4: "a", 1: "b"}, "ranks 0, 2 and 4 stand at a, rank 1 at b"),
        (
            {rank: f"line {rank}" for rank in range(6)},
            "rank 0 stands at line 0, rank 1 at line 1, rank 2 at line 2, rank 3 at line 3, "
            "others at 2 more places",
        ),
    ],
)
def test_ranks_at_the_same_place_are_put_together(places, words):
    assert stack_dumps.in_words(places) == words


@pytest.fixture
def start(tmp_path):
    """Start a rank that runs the lines, and wait until it says so."""
    started = []

    def begin(lines, rank=0, before=""):
        script = tmp_path / f"job{rank}.py"
        script.write_text(
            "import signal, sys\n"
            "from perfsearch.workers.stack_dumps import answer_stack_requests\n"
            f"{before}\n"
            f"answer_stack_requests({str(tmp_path)!r}, {rank})\n"
            f"def work():\n{textwrap.indent(lines, '    ')}\n"
            "    print('there', flush=True)\n"
            "    sys.stdin.read()\n"
            "work()\n"
        )
        with (tmp_path / f"rank{rank}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        started.append(process)
        assert process.stdout.readline() == b"there\n"
        return process

    yield begin
    for process in started:
        process.communicate(b"", timeout=60)


def handler():
    return "signal.signal(signal.SIGUSR2, lambda *_: print('saves', file=sys.stderr, flush=True))"


def test_a_rank_tells_and_goes_on(start, tmp_path):
    process = start("pass")
    assert stack_dumps.catches_stack_request(process.pid)
    for _ in range(2):
        told = stack_dumps.ask_for_stacks(tmp_path, tmp_path, 2)
        assert list(told) == [0]
        assert re.fullmatch(r"job0\.py:[78] in work", told[0])
    assert process.poll() is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_script_is_not_called(start, tmp_path, when):
    """It may save, or have the job queued again."""
    process = start(handler()) if when == "after" else start("pass", before=handler())
    assert stack_dumps.catches_stack_request(process.pid)
    assert stack_dumps.ask_for_stacks(tmp_path, tmp_path, 1) == {}
    process.communicate(b"", timeout=60)
    assert (tmp_path / "rank0.log").read_text() == ""


def test_a_rank_that_keeps_the_signal_back_is_not_asked(start, tmp_path):
    process = start("signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})")
    assert not stack_dumps.catches_stack_request(process.pid)
    assert stack_dumps.ask_for_stacks(tmp_path, tmp_path, 1) == {}


def test_a_rank_that_is_stopped_is_named(start, tmp_path):
    process = start("pass")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        words = stack_dumps.in_words(stack_dumps.ask_for_stacks(tmp_path, tmp_path, 1))
        assert words == "rank 0 stands at no line (its process is stopped)"
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_process_that_would_end_by_it_is_not_asked(tmp_path):
    """As one is that took the rank's place, or its number."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not stack_dumps.catches_stack_request(child.pid)
    (tmp_path / "rank0.log").write_text("")
    note = stack_note_file(tmp_path, 0)
    note.write_text(json.dumps({"pid": child.pid, "started": processes.started_at(child.pid)}))
    assert stack_dumps.ask_for_stacks(tmp_path, tmp_path, 1) == {}
    child.communicate(b"\n", timeout=60)
    assert child.returncode == 0


def test_this_process_was_left_alone():
    assert signal.getsignal(stack_dumps.ASKING) is signal.SIG_DFL
    assert not stack_dumps.catches_stack_request(os.getpid())
