"""What the launcher of a DeepSpeed job says of how a rank ended."""

import signal

import pytest

from perfsearch.runners.deepspeed.trial import own_code


@pytest.mark.parametrize(
    ("passed_on", "own"),
    [
        (2, 2),
        (128 + signal.SIGKILL, -signal.SIGKILL),  # by a shell
        (256 - signal.SIGTERM, -signal.SIGTERM),  # by sys.exit(-15)
        (255, 255),  # sys.exit(-1), as scripts do
        (-signal.SIGSEGV, -signal.SIGSEGV),
    ],
)
def test_a_signal_is_told_from_an_exit_code(passed_on, own):
    assert own_code(passed_on) == own
