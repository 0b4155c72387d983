import sys

import pytest

from perfsearch.metrics.gpu import EVERY_S, Device, NvlinkReader, totals_kib
from perfsearch.metrics.reading import Guard

TEXT = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa-01)
\t Link 0: Data Tx: {sent} KiB
\t Link 0: Data Rx: 50 KiB
\t Link 1: Data Tx: 1000 KiB
\t Link 1: Data Rx: 70 KiB
GPU 3: NVIDIA H100 80GB HBM3 (UUID: GPU-bb-02)
\t Link 0: Data Tx: 7 KiB
\t Link 0: Data Rx: 9 KiB
"""


def test_links_add_up_by_card():
    found = totals_kib(TEXT.format(sent=500))
    assert found == {"GPU-aa-01": (1500.0, 120.0), "GPU-bb-02": (7.0, 9.0)}
    assert totals_kib("Unable to determine the device handle") == {}


class Process:
    def __init__(self, text, code=0, runs_for=1):
        self.text, self.returncode, self.left, self.killed = text, code, runs_for, False

    def poll(self):
        self.left -= 1
        return None if self.left > 0 else self.returncode

    def communicate(self):
        return self.text, None

    def kill(self):
        self.killed = True


class Bench:
    def __init__(self, *processes, uuids=("GPU-aa-01", "GPU-bb-02")):
        self.now, self.guard, self.commands = 0.0, Guard(), []
        self.waiting = list(processes)
        devices = [Device(None, uuid, index) for index, uuid in zip((0, 3), uuids, strict=False)]
        self.reader = NvlinkReader(devices, self.guard, lambda: self.now, self.start)

    def start(self, command):
        self.commands.append((self.now, command))
        return self.waiting.pop(0)

    def until(self, seconds):
        found = {}
        while self.now < seconds:
            found = self.reader.rates()
            self.now += 1.0
        return found


def test_rates_come_from_two_readings_without_waiting_for_either():
    bench = Bench(Process(TEXT.format(sent=0), runs_for=3), Process(TEXT.format(sent=1_000_000)))
    assert bench.until(EVERY_S) == {}
    found = bench.until(EVERY_S + 3)
    assert [at for at, _ in bench.commands] == [0.0, EVERY_S]
    assert found["gpu_0_nvlink_transmit_megabytes_per_s"] == pytest.approx(1024 / EVERY_S)
    assert found["gpu_0_nvlink_receive_megabytes_per_s"] == 0
    assert "gpu_3_nvlink_receive_megabytes_per_s" in found
    assert bench.commands[0][1][-1] == "GPU-aa-01,GPU-bb-02"


@pytest.mark.parametrize(
    ("process", "why"),
    [(Process("no such option", 2), "no such option"), (Process(""), "it shows no links")],
)
def test_what_cannot_be_read_is_named_once_and_not_tried_again(process, why):
    bench = Bench(process)
    assert bench.until(60.0) == {}
    assert why in bench.guard.unsupported["nvlink"]
    assert len(bench.commands) == 1


def test_a_reading_that_hangs_is_ended():
    process = Process("", runs_for=100)
    bench = Bench(process)
    bench.until(30.0)
    assert process.killed
    assert "took more than" in bench.guard.unsupported["nvlink"]


def test_one_card_has_nobody_to_talk_to():
    bench = Bench(uuids=("GPU-aa-01",))
    assert bench.until(5.0) == {}
    assert not bench.commands
    assert not bench.guard.unsupported


def test_a_missing_nvidia_smi_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    guard = Guard()
    devices = [Device(None, "GPU-a", 0), Device(None, "GPU-b", 1)]
    assert NvlinkReader(devices, guard).rates() == {}
    assert "nvidia-smi is not installed" in guard.unsupported["nvlink"]


def test_a_real_process_is_ended_with_the_reader():
    import subprocess

    started = []

    def start(command):
        code = [sys.executable, "-c", "import time; time.sleep(60)"]
        started.append(subprocess.Popen(code, stdout=subprocess.PIPE, text=True))
        return started[0]

    devices = [Device(None, "GPU-a", 0), Device(None, "GPU-b", 1)]
    reader = NvlinkReader(devices, Guard(), start=start)
    reader.rates()
    reader.close()
    assert started[0].returncode is not None
