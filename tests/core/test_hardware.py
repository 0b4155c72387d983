import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from perfsearch.core import hardware
from perfsearch.core.hardware import Environment, Gpu, detect_hardware, shared_out


class FakeNvml:
    """As ``pynvml``, for three cards; memory in use is read off ``used_gib``, call by call."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = range(3)
    NVML_DEVICE_MIG_ENABLE = 1
    partitioned = ()

    class NVMLError(Exception):
        pass

    def __init__(self, used_gib=(0.5,), pids=()):
        self.used = list(used_gib)
        self.pids = pids

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetMigMode(self, handle):
        if handle == 2:
            raise self.NVMLError  # it knows no partitions
        return [int(handle in self.partitioned), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, slot):
        if slot < 2:
            raise self.NVMLError
        return f"MIG-{handle}-{slot}"

    def nvmlDeviceGetUUID(self, handle):
        return handle if isinstance(handle, str) else f"GPU-{handle}abc"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid if uuid.startswith("MIG") else int(uuid[4])

    def nvmlDeviceGetName(self, handle):
        return b"Fake 9000"

    def nvmlDeviceGetMemoryInfo(self, handle):
        used = self.used.pop(0) if len(self.used) > 1 else self.used[0]
        return SimpleNamespace(total=80 * 2**30, used=int(used * 2**30))

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 4

    def nvmlDeviceGetTemperature(self, handle, kind):
        raise self.NVMLError

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0abc", "GPU-1abc", "GPU-2abc"]),
        ("2,0", ["GPU-2abc", "GPU-0abc"]),
        ("GPU-1", ["GPU-1abc"]),
        ("MIG-7", ["MIG-7"]),
        ("1,-1,2", ["GPU-1abc"]),
        ("", []),
    ],
)
def test_visible_devices_are_respected(monkeypatch, visible, uuids):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in hardware.visible_gpus(FakeNvml())] == uuids


def test_an_index_of_a_partitioned_card_is_its_first_instance(monkeypatch):
    nvml = FakeNvml()
    nvml.partitioned = (1,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert [gpu.uuid for gpu in hardware.visible_gpus(nvml)] == ["MIG-1-2", "GPU-0abc"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [g.uuid for g in hardware.visible_gpus(nvml)] == ["GPU-0abc", "MIG-1-2", "GPU-2abc"]


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ValueError, match=r"CUDA_VISIBLE_DEVICES=7: there is no GPU 7; .* knows 3"):
        hardware.visible_gpus(FakeNvml())


CARD = Gpu("GPU-0abc", "Fake 9000", 80.0)


def test_conditions_leave_out_what_is_not_supported():
    found = hardware.conditions([CARD], frozenset({5}), FakeNvml(pids=(5, 6)))
    assert found == {
        "gpu_0": {
            "sm_clock_mhz": 1980,
            "memory_clock_mhz": 1980,
            "throttle_reasons": 4,
            "foreign_processes": [6],
        }
    }


def test_waiting_for_memory_reads_the_driver_anew():
    """ray-project/ray#32725, #18299, #13486: the poll never refreshed, and mixed up its units."""
    nvml = FakeNvml(used_gib=(40.0, 20.0, 0.6))
    assert hardware.wait_until_free([CARD], [0.5], timeout_s=10, nvml=nvml)
    assert nvml.used == [0.6]
    assert not hardware.wait_until_free([CARD], [0.5], timeout_s=0.2, nvml=FakeNvml((1.0,)))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("perfsearch.core.hardware.torch_version", lambda: "2.13.0")
    monkeypatch.setattr("perfsearch.core.hardware.visible_gpus", list)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr("perfsearch.core.hardware.torch_version", lambda: "2.13.0")
    cards = [Gpu(f"GPU-{i}", "Fake 9000", 80.0 - i) for i in range(2)]
    monkeypatch.setattr("perfsearch.core.hardware.visible_gpus", lambda: cards)


def test_without_a_gpu_two_ranks_run_on_the_cpu(no_gpu, tmp_path):
    found = detect_hardware("auto", Environment(tmp_path))
    assert (found.device, found.world_size, found.memory_gib) == ("cpu", 2, None)


def test_every_gpu_gets_a_rank(two_gpus, tmp_path):
    found = detect_hardware("auto", Environment(tmp_path))
    assert (found.device, found.nproc, found.memory_gib) == ("cuda", 2, 79.0)
    assert detect_hardware("cpu", Environment(tmp_path, nproc=3)).world_size == 3
    assert len(detect_hardware("cuda", Environment(tmp_path, nproc=1)).gpus) == 1


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        ("cuda", {}, "runner.device=cuda: no GPU is visible"),
        ("gpu", {}, "runner.device=gpu: allowed are auto, cpu, cuda"),
        ("cpu", {"nproc": 0}, "nproc=0: must be at least 1"),
        ("cpu", {"nnodes": 0}, "nnodes=0: must be at least 1"),
    ],
)
def test_impossible_places(no_gpu, tmp_path, device, changes, message):
    with pytest.raises(ValueError, match=message):
        detect_hardware(device, Environment(tmp_path, **changes))


def test_more_ranks_than_gpus(two_gpus, tmp_path):
    with pytest.raises(ValueError, match="nproc=4: only 2 GPUs are visible"):
        detect_hardware("cuda", Environment(tmp_path, nproc=4))


def test_a_torch_without_cuda_runs_on_the_cpu(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr("perfsearch.core.hardware.torch_version", lambda: "2.13.0+cpu")
    assert detect_hardware("auto", Environment(tmp_path)).device == "cpu"
    with pytest.raises(ValueError, match=r"torch 2.13.0\+cpu is built for CPUs only"):
        detect_hardware("cuda", Environment(tmp_path))


def test_who_else_uses_a_gpu_is_told(monkeypatch):
    monkeypatch.setattr(hardware.os, "getpid", lambda: 5)
    told = hardware.occupants([CARD], FakeNvml(pids=(5, 6, 7)))
    assert told == f"{CARD.uuid} ({CARD.name}) is used by process 6, 7"
    assert hardware.occupants([CARD], FakeNvml(pids=(5,))) == ""


def siblings(tmp_path, *pairs):
    for pair in pairs:
        for core in pair:
            directory = tmp_path / f"cpu{core}" / "topology"
            directory.mkdir(parents=True)
            (directory / "thread_siblings_list").write_text(",".join(map(str, pair)))
    return tmp_path


def test_threads_of_one_core_go_to_the_same_share(tmp_path):
    """As Linux numbers them where each core has two: the second threads after all first ones."""
    topology = siblings(tmp_path, (0, 4), (1, 5), (2, 6), (3, 7))
    assert shared_out(range(8), 2, topology) == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert shared_out(range(8), 3, topology) == [(0, 4), (1, 5), (2, 6)]  # one core is left over


def test_threads_of_one_core_are_parted_where_there_are_no_others(tmp_path):
    assert shared_out([0, 1], 2, siblings(tmp_path, (0, 1))) == [(0,), (1,)]
    assert shared_out([3, 5], 2, tmp_path / "no such files") == [(3,), (5,)]


def test_gpus_are_dealt_out_to_trials_at_a_time(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "usable_cores", lambda: list(range(8)))
    found = detect_hardware("auto", Environment(tmp_path, parallel_trials=2))
    assert (found.nproc, found.world_size, found.cores) == (1, 1, 4)
    assert [len(lane.gpus) for lane in found.lanes] == [1, 1]
    assert found.gpus == found.lanes[0].gpus != found.lanes[1].gpus
    assert found.device_set == ",".join(sorted(gpu.uuid for gpu in found.all_gpus))
    assert found.lanes[1].variables == {"CUDA_VISIBLE_DEVICES": found.lanes[1].gpus[0].uuid}
    assert found.identity()["cores"] == "1/2"
    assert "cores" not in detect_hardware("auto", Environment(tmp_path)).identity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_trials": 2, "nproc": 5}, "parallel_trials=2: nproc=5 for each needs 10 CPU"),
        ({"parallel_trials": 9}, "9 CPU cores; there are 8 CPU cores and 8 CPU cores"),
        ({"parallel_trials": 2, "nnodes": 2}, "nnodes=2. Set one of them"),
    ],
)
def test_more_trials_at_a_time_than_there_is_room_for(
    no_gpu, monkeypatch, tmp_path, changes, message
):
    monkeypatch.setattr(hardware, "usable_cores", lambda: list(range(8)))
    with pytest.raises(ValueError, match=re.escape(message)):
        detect_hardware("cpu", Environment(tmp_path, **changes))


def test_processes_that_are_started_on_some_cores_stay_there():
    mine = hardware.usable_cores()
    with hardware.on_cores(mine[:1]):
        words = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
        assert subprocess.check_output(words, text=True).strip() == str({mine[0]})
    assert hardware.usable_cores() == mine
