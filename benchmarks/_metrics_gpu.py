"""What the metrics say of a GPU, against torch's profiler, nvidia-smi, and being switched off."""

from __future__ import annotations

import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _metrics_store import ROOT, Store
from _paired import compare

from perfsearch.core.hardware import GroupSpec
from perfsearch.core.trial import Measurement
from perfsearch.metrics.bounds import headroom_of, profiled_measurement, upper_bounds
from perfsearch.metrics.throughput import mfu_of
from perfsearch.training import clock as timing
from perfsearch.training.base import TrainStep
from perfsearch.training.process_groups import Groups
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.profile import SyncWatch
from perfsearch.workers.trial import Trainer, _Feed
from perfsearch.workloads.spec import WorkloadSpec

WARM_STEPS = 12
PROFILED_STEPS = 5
_MARKER = "spin_kernel"
"""The kernel of ``torch.cuda._sleep``, by which phases are found on the device's timeline."""
_MARKER_CYCLES = 500_000
"""So long that the event behind a marking kernel is queued before the kernel ends."""


@contextmanager
def one_rank(
    size: str, kind: str = "cuda", samples: int | None = None
) -> Iterator[tuple[TrainStep, _Feed]]:
    """GPT-2 under DistributedDataParallel on one device, built as in a trial, and warm."""
    workload = WorkloadSpec("gpt", size=size, global_batch=samples).resolve(kind, 80.0, 1)
    spec = GroupSpec(workload=asdict(workload), device=kind, nproc=1)
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as name:
        groups = Groups(spec, Path(name), 0, 0, 1, device, leads=True)
        trainer = Trainer(groups)
        groups.ensure({}, {}, 300.0)
        assert workload.global_batch is not None
        request = TrialRequest(0, "training.ddp", {}, samples_per_step=workload.global_batch)
        step = trainer.build(request)
        feed = _Feed(trainer, step, workload.global_batch)
        for _ in range(WARM_STEPS):
            step.run(feed, _ignore)
        timing.synchronize(device)
        try:
            yield step, feed
        finally:
            step.close()
            groups.destroy()


def _ignore(phase: str) -> None:
    """Nothing is timed."""


def events(store: Store, size: str) -> None:
    """Phases by events, against the device's own timeline for the same steps."""
    if store.has("events", size):
        return
    from torch.profiler import ProfilerActivity, profile

    with one_rank(size) as (step, feed), tempfile.TemporaryDirectory() as name:
        for attempt in range(2):  # the first session of the profiler sets itself up
            clock = feed.clock = timing.DeviceClock()
            order: list[str] = []
            mark = _marking(clock, order)
            clock.mark = mark  # type: ignore[method-assign] # the feed marks on it, too
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
                mark("start")
                for _ in range(PROFILED_STEPS):
                    step.run(feed, mark)
                    mark("step")
                torch.cuda.synchronize()
            print(f"events: profiled session {attempt + 1} of 2", flush=True)
        trace = Path(name) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        timeline = _phases_of(trace, order)
    seconds, phases = clock.read()
    for phase, profiled_ms in timeline.items():
        found_ms = (phases[phase] if phase != "step" else statistics.fmean(seconds)) * 1e3
        store.add(
            "events", f"{size} {phase}", events_ms=found_ms, profiler_ms=profiled_ms,
            error=found_ms / profiled_ms - 1, steps=PROFILED_STEPS,
        )  # fmt: skip
    store.add("events", size, kernels=len(order))


def _marking(clock: timing.Clock, order: list[str]) -> Callable[[str], None]:
    """Mark a phase with a kernel of its own, and with the event at that kernel's end."""
    original = clock.mark

    def mark(phase: str) -> None:
        torch.cuda._sleep(_MARKER_CYCLES)
        original(phase)
        order.append(phase)

    return mark


def _phases_of(trace: Path, order: list[str]) -> dict[str, float]:
    """Mean milliseconds a step of each phase, between the ends of a trace's marking kernels."""
    listed = json.loads(trace.read_text())["traceEvents"]
    ends = sorted(
        (float(e["ts"]) + float(e["dur"])) / 1e3
        for e in listed
        if e.get("cat") == "kernel" and _MARKER in str(e.get("name"))
    )
    if len(ends) != len(order):
        raise RuntimeError(f"{len(ends)} marking kernels were seen of {len(order)}")
    totals: dict[str, float] = {}
    step_begin = ends[0]
    for previous, now, phase in zip(ends, ends[1:], order[1:], strict=False):
        if phase == "step":
            totals["step"] = totals.get("step", 0.0) + now - step_begin
            step_begin = now
        elif phase != "dataloader_next":  # which is the host's time
            totals[phase] = totals.get(phase, 0.0) + now - previous
    return {phase: ms / PROFILED_STEPS for phase, ms in totals.items()}


def smi(store: Store, seconds: float = 20.0) -> None:
    """The sampler's utilisation, memory and power against nvidia-smi at the same time."""
    if store.has("smi", "utilization.gpu"):
        return
    from perfsearch.metrics.system import SystemSampler

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = "utilization.gpu,memory.used,power.draw"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={query}", "-lms", "250"]
    with one_rank("small") as (step, feed):
        sampler = SystemSampler(0.25, [uuid])
        reading = subprocess.Popen(
            [*command, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True
        )
        sampler.start()
        try:
            time.sleep(2.0)  # the first readings of both
            begin = time.monotonic()
            while time.monotonic() - begin < seconds:
                step.run(feed, _ignore)
                torch.cuda.synchronize()
            found = sampler.window(begin, time.monotonic())
        finally:
            sampler.stop()
            reading.terminate()
            output = reading.communicate()[0]
    rows = [line.split(",") for line in output.splitlines()[8:-1]]
    columns = [statistics.fmean(float(row[i]) for row in rows) for i in range(3)]
    mib = 2**20 / 1e6
    for name, theirs, key in (
        ("utilization.gpu", columns[0], "gpu_utilization_percentage"),
        ("memory.used", columns[1] * mib, "gpu_memory_usage_megabytes"),
        ("power.draw", columns[2], "gpu_power_usage_watts"),
    ):
        store.add("smi", name, nvidia_smi=theirs, sampler=found[key], error=found[key] / theirs - 1)


def cost(store: Store, size: str, blocks: int, kind: str, samples: int | None) -> None:
    """What light and full timings, and the sampler, add to a step: on against off, interleaved.

    ``samples`` a step: the job's own where ``None``.
    """
    named = size if samples is None else f"{size} x {samples}"
    if store.has("cost", f"{named} full"):
        return
    with one_rank(size, kind, samples) as (step, feed), _sampler_process(kind) as sampler:
        new_clock = partial(timing.make_clock, feed.device)
        ways: dict[str, Callable[[], float]] = {
            "off": lambda: _window(step, feed, None),
            "light": lambda: _window(step, feed, new_clock()),
            "full": lambda: _window(step, feed, new_clock(), closely=True),
            "sampler": lambda: _with(sampler, lambda: _window(step, feed, None)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        count = max(2, math.ceil(0.4 / _window(step, feed, None, steps=4)))
        generator = random.Random(0)
        for block in range(blocks):
            for name in generator.sample(list(ways), len(ways)):
                seconds[name].append(_repeat(ways[name], count))
            if block % 5 == 4:
                print(f"cost: block {block + 1} of {blocks}", flush=True)
    for name in ("sampler", "light", "full"):
        middle, _ = compare(seconds[name], [seconds["off"]], generator)
        store.add(
            "cost", f"{named} {name}", step_ms=statistics.median(seconds["off"]) * 1e3,
            overhead=middle.value, low=middle.low, high=middle.high, blocks=blocks,
        )  # fmt: skip


def _repeat(way: Callable[[], float], steps: int) -> float:
    """Seconds a step over enough windows of two steps to hold ``steps``."""
    return statistics.fmean(way() for _ in range(math.ceil(steps / 2)))


def _window(
    step: TrainStep,
    feed: _Feed,
    clock: timing.Clock | None,
    steps: int = 2,
    closely: bool = False,
) -> float:
    """Seconds a step, by the host between two waits for the device; clocks are read outside."""
    step.marks_communication = clock is not None
    feed.clock = clock or _Silent()
    mark = feed.clock.mark
    timing.synchronize(feed.device)
    begin = time.perf_counter()
    with SyncWatch() if closely else nullcontext():
        mark("start")
        for _ in range(steps):
            step.run(feed, mark)
            mark("step")
    timing.synchronize(feed.device)
    return (time.perf_counter() - begin) / steps


class _Silent(timing.HostClock):
    """Marks nothing."""

    def mark(self, phase: str) -> None:
        """Nothing."""


_SAMPLE = """
import sys, time
from perfsearch.metrics.system import SystemSampler
SystemSampler(1.0, sys.argv[1:]).start()
print("ready", flush=True)
time.sleep(3600)
"""


@contextmanager
def _sampler_process(kind: str) -> Iterator[subprocess.Popen[str]]:
    """The system sampler in a process of its own, as in a search; stopped until it is wanted."""
    uuids = [f"GPU-{torch.cuda.get_device_properties(0).uuid}"] if kind == "cuda" else []
    process = subprocess.Popen(
        [sys.executable, "-c", _SAMPLE, *uuids], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(2.0)  # its first sample opens NVML
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


def _with(process: subprocess.Popen[str], run: Callable[[], float]) -> float:
    process.send_signal(signal.SIGCONT)
    try:
        return run()
    finally:
        process.send_signal(signal.SIGSTOP)


def tuning(store: Store, size: str, seconds: float, confirm_seconds: float, kind: str) -> None:
    """MFU and diagnosis of GPT-2 before and after a search over all visible GPUs."""
    if store.has("tuning", f"{size} best"):
        return
    from _metrics_search import search

    knobs = {
        **dict.fromkeys(("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"), "search"),
        "optimizer_implementation": "search",
        "pin_memory": "search",
        "compile_mode": ["none", "default"],
    }
    if kind == "cpu":
        del knobs["pin_memory"]
    session, verdict = search(size, knobs, seconds, confirm_seconds, kind)
    trials = session.trials
    fastest = max((t for t in trials if t.measurement), key=lambda t: t.measurement.samples_per_s)  # type: ignore[union-attr]
    best = fastest if verdict.winner is None else session.numbered(verdict.winner)
    arms = {"baseline": session.runner.baseline, "best": best.configuration}
    for label, configuration in arms.items():
        measured = profiled_measurement(trials, configuration)
        if measured is None:
            raise RuntimeError(f"the {label} has no measurement: {trials[0].reason}")
        store.add("tuning", f"{size} {label}", **_told(measured), configuration=dict(configuration))
    found = upper_bounds(profiled_measurement(trials, session.runner.baseline))  # type: ignore[arg-type]
    interval = verdict.interval
    store.add(
        "tuning", f"{size} verdict", reason=verdict.reason,
        bound=headroom_of(found, session.runner.space.knobs),
        gain=None if interval is None else interval.ratio - 1,
        bounds={b.part: b.share for b in found},
    )  # fmt: skip


def _told(measured: Measurement) -> dict[str, Any]:
    evidence = measured.bottleneck_evidence
    wanted = ("device_busy_ms", "device_exposed_ms", "without_communication_ms", "kernels_per_step")
    return {
        "step_ms": measured.step_time_s * 1e3,
        "samples_per_s": measured.samples_per_s,
        "mfu": mfu_of(measured),
        "precision": measured.environment.get("precision"),
        "peak_tflops": (measured.environment.get("peak_flops_per_s") or 0.0) / 1e12,
        "world_size": measured.world_size,
        "phases_ms": measured.phases_ms,
        "findings": measured.environment.get("findings", []),
        "evidence": {name: evidence[name] for name in wanted if name in evidence},
    }
