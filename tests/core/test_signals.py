import errno
import os
import signal
import threading

import pytest

from perfsearch.core.signals import ExitCode, Interrupted, deferred, interruptible


@pytest.fixture(autouse=True)
def hang_ups_count():
    """Also where the tests themselves were started under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, ExitCode.SIGINT),
        (signal.SIGTERM, ExitCode.SIGTERM),
        (signal.SIGHUP, ExitCode.SIGHUP),
    ],
)
def test_the_first_signal_raises_and_the_second_is_answered(number, code, capfd):
    with interruptible():
        with pytest.raises(Interrupted) as raised:
            os.kill(os.getpid(), number)
        assert "Ending: processes are ended" in capfd.readouterr().err
        os.kill(os.getpid(), number)
    assert "Once more to end at once" in capfd.readouterr().err
    assert raised.value.exit_code == code
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_signal_after_a_hang_up_breaks_nothing_off(monkeypatch):
    """Nothing can be written to a terminal that is gone."""

    def gone(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with interruptible():
        with pytest.raises(Interrupted):
            os.kill(os.getpid(), signal.SIGHUP)
        monkeypatch.setattr(os, "write", gone)
        os.kill(os.getpid(), signal.SIGHUP)


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
