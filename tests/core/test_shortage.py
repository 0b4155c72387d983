"""What is told where a machine has no more of something."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from perfsearch.core import shortage
from perfsearch.core.errors import BadInputError, NodesGoneError, NoStartError
from perfsearch.core.journal import JournalWriteError


def of(number):
    return OSError(number, os.strerror(number), "file")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (of(errno.EMFILE), "ulimit -n"),
        (of(errno.ENFILE), "ulimit -n"),
        (of(errno.ENOSPC), "Free some space"),
        (of(errno.EDQUOT), "Free some space"),
        (of(errno.EAGAIN), "ulimit -u"),
        (of(errno.ENOMEM), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (ImportError("libx.so: cannot open shared object file: Too many open files"), "ulimit -n"),
        (RuntimeError("database or disk: No space left on device"), "Free some space"),
        (JournalWriteError(errno.ENOENT, "gone"), "Put the directory back"),
        (NodesGoneError("node1 is gone"), "Have every node there"),
        (NoStartError("run: infrastructure"), "Mend that"),
    ],
)
def test_what_is_lacking_comes_with_what_to_do(error, remedy):
    assert remedy in shortage.remedy(error)
    assert shortage.told(error).endswith(shortage.remedy(error))


@pytest.mark.parametrize(
    "error",
    [
        of(errno.ENOENT),
        of(errno.EACCES),
        ValueError("a bug"),
        BadInputError("run_dir=x: No space left on device. Set run_dir=DIRECTORY to one that can."),
    ],
)
def test_other_errors_are_left_alone(error):
    assert shortage.remedy(error) == ""


def raised(outer, inner):
    with pytest.raises(type(outer)) as caught:
        raise outer from inner
    return caught.value


def test_what_an_error_was_raised_from_tells_what_is_lacking():
    lock = raised(BadInputError("run/.lock: cannot be opened"), of(errno.EMFILE))
    error = raised(BadInputError("a search is running there"), lock)
    assert shortage.told(error) == (
        "[Errno 24] Too many open files: 'file'. Raise the limit of open files (ulimit -n)"
    )


def test_a_refusal_for_a_file_system_that_is_read_only_stays_one():
    assert shortage.remedy(raised(BadInputError("choose another"), of(errno.EROFS))) == ""


def test_memory_that_a_limit_does_not_give_is_told_as_such():
    """With what Python itself raises."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))"
    script = f"""{limit}
from perfsearch.core import shortage
try:
    bytearray(2**31)
except MemoryError as error:
    print(shortage.told(error))
"""
    assert resource.getrlimit(resource.RLIMIT_AS)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("MemoryError. There is no memory left"), done.stderr


WITHOUT_DESCRIPTORS = """
import os, resource, tempfile
from perfsearch.core import shortage
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
try:
    tempfile.gettempdir()
except OSError as error:
    print(shortage.told(error))
"""


def test_no_directory_for_temporary_files_is_told_with_those_that_were_tried():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, check=True
    )
    assert "/tmp" in done.stdout and "ulimit -n" in done.stdout
