import signal
from dataclasses import replace

import pytest
import torch

from perfsearch.core.trial import Status
from perfsearch.workers.failures import (
    SHARED_MEMORY,
    Evidence,
    ProcessEnd,
    classify,
    first_error,
    is_oom,
    is_out_of_memory,
    one_line,
)
from perfsearch.workers.messages import AFTER_PEER, RankError


def error(message, type_="RuntimeError", rank=0, time=1.0, phase="train", nearly_full=None):
    kinds = {"OutOfMemoryError": torch.OutOfMemoryError, "MemoryError": MemoryError}
    raised = kinds.get(type_, RuntimeError)(message)
    ran_out = is_out_of_memory(raised, nearly_full)
    return RankError(rank, time, type_, message, phase=phase, out_of_memory=ran_out)


TOO_LONG = "OSError: AF_UNIX path too long"
OOM_TEXTS = [
    "CUDA out of memory. Tried to allocate 20.00 MiB",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    '!block->expandable_segment_ INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp"',
    "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried",
    "[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: not enough memory: you tried",
    "NCCL error in: ProcessGroupNCCL.cpp:2, unhandled cuda error. Cuda failure 'out of memory'",
    "NCCL WARN Cuda failure 2 'out of memory'",
    "[Errno 12] Cannot allocate memory",
    "std::bad_alloc",
]


@pytest.mark.parametrize("text", OOM_TEXTS)
def test_texts_of_exhausted_memory(text):
    """mberr/torch-max-mem#45: the table of texts."""
    assert classify(Evidence(errors=[error(text)])).status is Status.OOM


@pytest.mark.parametrize("type_", ["OutOfMemoryError", "MemoryError"])
def test_types_of_exhausted_memory(type_):
    assert classify(Evidence(errors=[error("", type_)])).status is Status.OOM


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: device-side assert triggered",
        "CUDA error: misaligned address",
        "NCCL error: unhandled system error",
        "CUDA driver version is insufficient for CUDA runtime version",
        "mat1 and mat2 shapes cannot be multiplied (4x3 and 5x6)",
    ],
)
def test_errors_that_only_mention_the_device(text):
    assert classify(Evidence(errors=[error(text)])).status is Status.CRASH


@pytest.mark.parametrize(
    ("nearly_full", "status"), [(True, Status.OOM), (False, Status.CRASH), (None, Status.CRASH)]
)
def test_handles_need_a_full_device(nearly_full, status):
    """awslabs/sockeye#897: a handle that cannot be made is out of memory only on a full device."""
    text = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED: Create cublas handle failed"
    assert classify(Evidence(errors=[error(text, nearly_full=nearly_full)])).status is status


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory. Please try to raise your shared memory",
        "unable to write to file </torch_12_3>: No space left on device (28)",
        "unable to allocate shared memory(shm) for file </torch_12_3>: No space left on device",
    ],
)
def test_shared_memory(text):
    """pytorch/pytorch#5040, #108861: the loader's shared memory, named as such."""
    failure = classify(Evidence(errors=[error(text, rank=1)]))
    assert failure.status is Status.OOM
    assert failure.reason == f"rank 1: {SHARED_MEMORY}"


def loader_died(signal):
    text = "DataLoader worker (pid(s) 12) exited unexpectedly"
    cause = f"RuntimeError: DataLoader worker (pid 12) is killed by signal: {signal}. "
    return replace(error(text), traceback=f"{cause}\nThe above exception was the direct cause")


def test_a_choice_that_nccl_has_no_way_for_is_invalid():
    """NVIDIA/nccl#653; the exception's first line tells only of an internal error."""
    said = "Error : no algorithm/protocol available"
    whole = f"NCCL error in: x.cpp:9, internal error, NCCL version 2.21.5\nLast error:\n{said}"
    for found in (
        Evidence(errors=[error(whole)]),
        Evidence(errors=[error("NCCL error in: x.cpp:9")], log_tails={0: f"NCCL WARN {said}\n"}),
    ):
        failure = classify(found)
        assert failure.status is Status.INVALID
        assert failure.reason == "rank 0: NCCL: no algorithm/protocol available"


def test_killed_loader_process():
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        died = loader_died(signal.strsignal(number))
        assert classify(Evidence(errors=[died])).status is Status.KILLED
    assert classify(Evidence(errors=[loader_died("Killed")], oom_kills=1)).status is Status.OOM
    assert classify(Evidence(errors=[loader_died("Bus error")])).reason.endswith(SHARED_MEMORY)
    assert classify(Evidence(errors=[loader_died("Segmentation fault")])).status is Status.CRASH


def aborted(what):
    """What a rank logs that an exception of C++ ends; so benchmarks/soak.py met it (ddp 799609893,
    in the destructor of torch's ``FileStore``).
    """
    return (
        'Traceback (most recent call last):\n  File "rank.py", line 181, in _serve_trial\n'
        "OSError: [Errno 24] Too many open files: '/tmp/errors.pickle'\n"
        "terminate called after throwing an instance of 'c10::DistStoreError'\n"
        f"  what():  {what}\nException raised from File at FileStore.cpp:174\n"
        "frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d\n\n"
        "Fatal Python error: Aborted\n\nExtension modules: psutil._psutil_linux (total: 1)\n"
    )


@pytest.mark.parametrize(
    ("evidence", "status", "reason"),
    [
        (Evidence(ends=[ProcessEnd(1, -9, 5.0)]), Status.KILLED, "rank 1 was ended by SIGKILL"),
        (
            Evidence(ends=[ProcessEnd(1, -9, 5.0)], oom_kills=2),
            Status.OOM,
            "rank 1 was ended by the host's OOM killer",
        ),
        (
            Evidence(ends=[ProcessEnd(1, 137, 5.0)], oom_kills=1, memory="peak 3.99 GiB"),
            Status.OOM,
            "rank 1 was ended by the host's OOM killer (peak 3.99 GiB)",
        ),
        (
            Evidence(launcher_error="it was ended by SIGKILL", oom_kills=1),
            Status.OOM,
            "launcher: it was ended by the host's OOM killer",
        ),
        (Evidence(ends=[ProcessEnd(0, -11, 5.0)]), Status.CRASH, "rank 0 died of SIGSEGV"),
        (Evidence(ends=[ProcessEnd(0, 3, 5.0)]), Status.CRASH, "rank 0 ended with exit code 3"),
        (Evidence(ends=[ProcessEnd(0, -15, 5.0)]), Status.KILLED, "rank 0 was ended by SIGTERM"),
        (
            Evidence(
                ends=[ProcessEnd(0, 1, 5.0)], log_tails={0: "a\nCUDA out of memory. Tried\nb"}
            ),
            Status.OOM,
            "rank 0: CUDA out of memory. Tried",
        ),
        (
            Evidence(ends=[ProcessEnd(0, -15, 5.0), ProcessEnd(1, 7, 5.0)]),
            Status.CRASH,
            "rank 1 ended with exit code 7",
        ),
        (Evidence(timed_out=9.0), Status.TIMEOUT, "the trial took longer than 9 s"),
        (
            Evidence(timed_out=9.0, places={0: "a.py:1 in wait", 1: "b.py:2 in step"}),
            Status.TIMEOUT,
            "the trial took longer than 9 s; rank 0 stands at a.py:1 in wait, rank 1 at "
            "b.py:2 in step",
        ),
        (
            Evidence(
                timed_out=9.0,
                log_tails={0: "step 3", 1: f"Traceback (most recent call last):\n{TOO_LONG}\nmore"},
                places={0: "a.py:1 in wait"},
            ),
            Status.TIMEOUT,
            f"the trial took longer than 9 s; rank 1's log says: {TOO_LONG}; rank 0 stands at "
            "a.py:1 in wait",
        ),
        (
            Evidence(timed_out=9.0, starting=True, places={1: "b.py:2 in build"}),
            Status.INFRASTRUCTURE,
            "start-up took longer than 9 s; rank 1 stands at b.py:2 in build",
        ),
        (
            Evidence(timed_out=9.0, starting=True),
            Status.INFRASTRUCTURE,
            "start-up took longer than 9 s",
        ),
        (
            Evidence(launcher_error="it was ended by SIGKILL"),
            Status.KILLED,
            "launcher: it was ended by SIGKILL",
        ),
        (
            Evidence(launcher_error="RendezvousConnectionError: refused", starting=True),
            Status.INFRASTRUCTURE,
            "launcher: RendezvousConnectionError: refused",
        ),
        (
            Evidence(launcher_error="UsageError: unrecognized arguments: --x", starting=True),
            Status.INVALID,
            "launcher: UsageError: unrecognized arguments: --x",
        ),
        (
            Evidence(ends=[ProcessEnd(1, -6, 1.0)], log_tails={1: aborted("Too many open files")}),
            Status.INFRASTRUCTURE,
            "rank 1 died of SIGABRT: Too many open files",
        ),
        (
            Evidence(ends=[ProcessEnd(0, 134, 1.0)], log_tails={0: aborted("bad index")}),
            Status.CRASH,
            "rank 0 died of SIGABRT: bad index",
        ),
        (
            Evidence(ends=[ProcessEnd(0, -6, 1.0)], log_tails={0: aborted("std::bad_alloc")}),
            Status.OOM,
            "rank 0 died of SIGABRT: std::bad_alloc",
        ),
        (Evidence(), Status.CRASH, "the ranks ended without a word"),
        (
            Evidence(log_tails={1: "step 4\nOSError: [Errno 28] No space left on device\n"}),
            Status.INFRASTRUCTURE,
            'rank 1 ended; its last line: "OSError: [Errno 28] No space left on device"',
        ),
        (
            Evidence(log_tails={1: "step 4\nValueError: 5\n"}),
            Status.CRASH,
            "the ranks ended without a word",
        ),
    ],
)
def test_ends_without_an_exception(evidence, status, reason):
    failure = classify(evidence)
    assert (failure.status, failure.reason) == (status, reason)


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        (
            "The server socket has failed to listen on any local network address. port: 29500, "
            "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
            "DistNetworkError",
        ),
        ("[Errno 98] Address already in use", "OSError"),
        ("The client socket has timed out after 60000ms", "DistNetworkError"),
        ("[Errno 28] No space left on device", "OSError"),
        ("[Errno 122] Disk quota exceeded", "OSError"),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534", "RuntimeError"),
        ("PytorchStreamWriter failed writing file data/0: file write failed", "RuntimeError"),
    ],
)
def test_infrastructure(text, type_):
    """pytorch/pytorch#91940: a taken port says nothing of the configuration."""
    evidence = Evidence(errors=[error(text, type_, phase="start")], starting=True)
    assert classify(evidence).status is Status.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("text", "type_", "phase"),
    [
        ("Expected to have finished reduction in the prior iteration", "RuntimeError", "train"),
        (
            "optimizer_implementation=fused: Rprop has no fused implementation",
            "ValueError",
            "build",
        ),
        (
            "prefetch_factor option could only be specified in multiprocessing",
            "ValueError",
            "build",
        ),
        ("`fused=True` requires all the params to be floating point", "RuntimeError", "build"),
    ],
)
def test_refusals_of_the_library(text, type_, phase):
    evidence = Evidence(errors=[error(text, type_, phase=phase)])
    assert classify(evidence).status is Status.INVALID


def test_the_users_own_value_error_is_a_crash():
    evidence = Evidence(errors=[error("not enough values to unpack", "ValueError")])
    assert classify(evidence).status is Status.CRASH


def test_the_first_failing_rank_is_named():
    errors = [
        error("Connection closed by peer [127.0.0.1]:59057", rank=0, time=1.0),
        error("boom, a consequence", rank=3, time=5.0),
        error("boom", rank=2, time=4.0),
        error("Default process group has not been initialized", rank=1, time=3.0, phase=AFTER_PEER),
    ]
    assert first_error(errors).rank == 2
    assert classify(Evidence(errors=errors)).reason == "rank 2: RuntimeError: boom"


def test_an_echo_yields_to_the_death_that_caused_it():
    echo = error("Connection closed by peer [127.0.0.1]:1", rank=0, time=1.0)
    failure = classify(Evidence(errors=[echo], ends=[ProcessEnd(1, -9, 1.0)]))
    assert (failure.status, failure.rank) == (Status.KILLED, 1)


def test_a_rank_that_left_with_code_0_is_named_before_one_that_only_lost_it():
    echo = error("Connection reset by peer [127.0.0.1]:1", rank=0, time=1.0)
    ends = [ProcessEnd(0, 1, 1.0), ProcessEnd(1, 0, 2.0)]  # its launcher cuts seconds off
    failure = classify(Evidence(errors=[echo], ends=ends, log_tails={1: "enough of this"}))
    assert (failure.status, failure.rank) == (Status.CRASH, 1)
    assert failure.reason == 'rank 1 ended with exit code 0; its last line: "enough of this"'
    alone = classify(Evidence(errors=[echo], ends=ends[:1]))
    assert (alone.status, alone.rank) == (Status.CRASH, 0)


def test_an_echo_alone_is_a_crash_or_a_failed_connection():
    text = "Gloo connectFullMesh failed: Connection refused"
    assert classify(Evidence(errors=[error(text)])).status is Status.CRASH
    connecting = error(text, phase="connect")
    assert classify(Evidence(errors=[connecting])).status is Status.INFRASTRUCTURE


def test_a_failure_that_hung_is_recorded_as_what_it_was():
    evidence = Evidence(errors=[error("CUDA out of memory", rank=1)], timed_out=5.0)
    evidence = replace(evidence, places={0: "a.py:1 in wait"})
    failure = classify(evidence)
    assert (failure.status, failure.stack_dump) == (Status.OOM, "")
    assert failure.reason == "rank 1: RuntimeError: CUDA out of memory"


def test_on_a_full_disk_nobody_is_blamed_but_who_could_say_why():
    noise = {1: "CUDA out of memory. retrying"}
    full = Evidence(
        ends=[ProcessEnd(0, 1, 1.0)], log_tails=noise, disk_full="No space left on device"
    )
    failure = classify(full)
    assert failure.status is Status.INFRASTRUCTURE
    assert failure.reason == "the ranks' logs cannot be written: No space left on device"
    said = Evidence(errors=[error("boom", rank=1)], disk_full="No space left on device")
    assert classify(said).status is Status.CRASH


def test_one_line():
    assert one_line("\n first \nsecond") == "first"
    assert one_line("cause:\n  the thing") == "cause: the thing"
    assert len(one_line("x" * 1000)) == 300
    assert not is_oom("out of patience")


def test_unused_parameters_come_with_what_to_do():
    text = "Expected to have finished reduction in the prior iteration before starting a new one."
    failure = classify(Evidence(errors=[error(text, rank=1)]))
    assert failure.status is Status.INVALID
    assert failure.reason.startswith("rank 1: ") and "requires_grad_(False)" in failure.reason


@pytest.mark.parametrize(
    "text",
    [
        "[Errno 24] Too many open files: 'log.txt'",
        "Too many open files. Communication with the workers is no longer possible. Please "
        "increase the limit using `ulimit -n` in the shell",
        "unable to open shared memory object </torch_1_2> in read-write mode: Too many open files",
        "received 0 items of ancdata",
        "can't start new thread",
        "[Errno 11] Resource temporarily unavailable",
    ],
)
def test_used_up_descriptors_and_processes_are_no_fault_of_a_configuration(text):
    failure = classify(Evidence(errors=[error(text, rank=1)]))
    assert failure.status is Status.INFRASTRUCTURE
    assert failure.reason.startswith(f"rank 1: RuntimeError: {text[:20]}")
    # a rank that cannot open the file for its error leaves its last words alone
    evidence = Evidence(
        ends=[ProcessEnd(1, 1, 1.0)], log_tails={1: f"Traceback\nOSError: {text}\n"}
    )
    assert classify(evidence).status is Status.INFRASTRUCTURE
    aborted = replace(evidence, ends=[ProcessEnd(1, -6, 1.0)])
    assert classify(aborted).status is Status.INFRASTRUCTURE
    earlier = {1: f"warning: {text}\nValueError: boom\n"}
    assert classify(replace(evidence, log_tails=earlier)).status is Status.CRASH


def test_an_interrupt_of_one_rank_is_no_fault_of_its_configuration():
    failure = classify(Evidence(errors=[error("", "KeyboardInterrupt", rank=1)]))
    assert (failure.status, failure.reason) == (Status.KILLED, "rank 1 was ended by SIGINT")
