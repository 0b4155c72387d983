"""What a rank has started is held still while others are measured."""

import multiprocessing
import time

import psutil

from perfsearch.instrument.rank import Children


def test_workers_stand_still_until_it_goes_on():
    worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    worker.start()
    seen, children = psutil.Process(worker.pid), Children()
    try:
        children.stop()
        deadline = time.monotonic() + 30
        while seen.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen.status() == psutil.STATUS_STOPPED
        children.go_on()
        while seen.status() == psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen.status() != psutil.STATUS_STOPPED
    finally:
        worker.kill()
        worker.join()
    children.stop()  # of which it is none any more
    children.go_on()
