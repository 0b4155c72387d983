import os
import signal
import threading

import pytest

from perfsearch.exits import ExitCode, Interrupted, deferred, interruptible


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.SIGINT), (signal.SIGTERM, ExitCode.SIGTERM)]
)
def test_the_first_signal_raises_and_the_second_does_not(number, code):
    with interruptible():
        with pytest.raises(Interrupted) as raised:
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert raised.value.exit_code == code
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_in_a_deferred_block_raises_at_its_end():
    steps = []

    def blocks():
        with deferred():
            with deferred():
                os.kill(os.getpid(), signal.SIGTERM)
                steps.append("inner")
            steps.append("outer")
        steps.append("never")

    with interruptible(), pytest.raises(Interrupted):
        blocks()
    assert steps == ["inner", "outer"]
    with deferred():
        pass  # nothing is left pending


def test_other_threads_may_use_deferred_blocks():
    def block():
        with deferred():
            done.append(True)

    done = []
    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert done == [True]
