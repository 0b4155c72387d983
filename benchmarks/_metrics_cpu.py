"""Known truths with real clocks, on the processors: loader, slowed link, phases."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _metrics_store import ROOT, Store

from perfsearch.core.hardware import Environment
from perfsearch.core.objective import Limits
from perfsearch.core.trial import Measurement, Purpose
from perfsearch.metrics.bounds import upper_bounds
from perfsearch.metrics.diagnosis import diagnose
from perfsearch.runners.base import Plan
from perfsearch.runners.ddp.runner import DDP
from perfsearch.workloads.spec import WorkloadSpec

SLEEPS_MS = (20.0, 60.0, 120.0)
LINK_MBIT = (50, 200, 500)
GRADIENT_MIB = 4.0
PHASE_JOBS = (("gpt", "tiny"), ("mlp", "tiny"), ("resnet", "tiny"), ("dlrm", "tiny"))
_HOSTS = ("10.217.41.1", "10.217.41.2")
_SPACES = ("perfsearch-a", "perfsearch-b")
_PORT = 29_417
_NAMES = Path("/etc/netns")
"""Where ``ip netns exec`` finds a namespace's own ``/etc/hosts``."""


def look(workload: WorkloadSpec, repeats: int = 1, **environment: Any) -> list[Measurement]:
    """Close looks at the baseline of a job."""
    with tempfile.TemporaryDirectory() as name:
        one_thread = {"OMP_NUM_THREADS": "1"}  # more would wait for each other on few processors
        limits = Limits(120, 180, 10)
        where = Environment(Path(name), limits=limits, variables=one_thread, **environment)
        runner = DDP(DDP.Options("cpu", {"static_graph": "search"}), workload, where)
        runner.open(Path(name))
        found = []
        try:
            for number in range(repeats):
                plan = Plan(
                    number=number,
                    purpose=Purpose.BASELINE,
                    log_directory=Path(name) / "logs" / str(number),
                    time_limit_s=180.0,
                    detail="full",
                )
                outcome = runner.measure(runner.baseline, plan)
                if outcome.measurement is None:
                    raise RuntimeError(f"{outcome.status}: {outcome.reason}")
                found.append(outcome.measurement)
        finally:
            runner.close()
    return found


def custom(name: str) -> WorkloadSpec:
    """A job of ``_metrics_jobs``, 4 samples a rank."""
    return WorkloadSpec("custom", factory=f"benchmarks._metrics_jobs:{name}", global_batch=8)


def loader(store: Store) -> None:
    """A loader that sleeps so many milliseconds for each batch is found with just these."""
    for sleep_ms in SLEEPS_MS:
        key = f"{sleep_ms:g} ms"
        if store.has("loader", key):
            continue
        with _variable("BENCHMARK_SLEEP_MS", str(sleep_ms)):
            looks = look(custom("sleeping"), repeats=3)
        found_ms = statistics.median(m.phases_ms["dataloader_next"] for m in looks)
        store.add(
            "loader", key, slept_ms=sleep_ms, found_ms=found_ms, error=found_ms / sleep_ms - 1,
            finding=diagnose(looks[0])[0].name,
        )  # fmt: skip


def phases(store: Store) -> None:
    """On each rank the phases sum to its step."""
    for name, size in PHASE_JOBS:
        if store.has("phases", name):
            continue
        worst = 0.0
        for measured in look(WorkloadSpec(name, size=size), repeats=3):
            for rank in measured.environment["ranks"]:
                step_ms = rank["step_ms"]
                worst = max(worst, abs(sum(rank["phases_ms"].values()) / step_ms - 1))
        store.add("phases", name, step_ms=step_ms, worst_error=worst)


def link(store: Store) -> None:
    """Two ranks in network namespaces, the link between them slowed by ``tc``."""
    wanted = [None, *LINK_MBIT]
    if all(store.has("link", _name(rate)) for rate in wanted):
        return
    try:
        with _namespaces():
            for rate in wanted:
                if not store.has("link", _name(rate)):
                    _slow(rate)
                    store.add("link", _name(rate), **_over_the_link(rate))
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"link: no network namespaces with tc here: {error}", flush=True)


def _name(rate: int | None) -> str:
    return "free" if rate is None else f"{rate} Mbit/s"


def _over_the_link(rate: int | None) -> dict[str, Any]:
    """Measure in the first namespace, with a rank lent from the second."""
    common = [f"--nnodes={2}", "--nproc=1", f"--rdzv-endpoint={_HOSTS[0]}:{_PORT}"]
    with tempfile.TemporaryDirectory() as name:
        join = [
            *(*_inside(_SPACES[1]), sys.executable, "-m", "perfsearch.workers.join"),
            *(*common, "--interface=link1", "--patience=30", f"--logs={name}/joined"),
        ]
        joined = subprocess.Popen(join, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            command = [sys.executable, str(ROOT / "benchmarks" / "metrics.py"), "link-rank"]
            inside = [*_inside(_SPACES[0]), *command, f"--store={name}/out.jsonl"]
            subprocess.run(inside, cwd=ROOT, check=True, timeout=300)
            (found,) = Store(Path(name) / "out.jsonl", "").of("link-rank")
        finally:
            joined.terminate()
            joined.wait(30)
    truth_ms = None if rate is None else GRADIENT_MIB * 2**20 * 8 / (rate * 1e6) * 1e3
    return {"wire_ms": truth_ms, **{k: found[k] for k in _KEPT}}


def _inside(space: str) -> list[str]:
    """Run in a namespace, as a host of that name: torch's rendezvous goes by hosts' names."""
    named = f'hostname {space} && exec ip netns exec {space} "$@"'
    return ["unshare", "--uts", "sh", "-c", named, "sh"]


_KEPT = ("step_ms", "share", "exposed_ms", "without_ms", "bound", "finding")


def link_rank(store: Store) -> None:
    """The part of ``link`` that runs inside of the first namespace."""
    looks = look(
        custom("wide"), nproc=1, nnodes=2, rdzv_endpoint=f"{_HOSTS[0]}:{_PORT}",
        interface="link0",
    )  # fmt: skip
    evidence = [m.bottleneck_evidence for m in looks]
    shares = [{b.part: b.share for b in upper_bounds(m)}["communication"] for m in looks]
    store.add(
        "link-rank",
        "",
        step_ms=statistics.median(e["with_everything_ms"] for e in evidence),
        share=statistics.median(
            m.phases_ms["comm_exposed"] / m.bottleneck_evidence["detailed_step_ms"] for m in looks
        ),
        exposed_ms=statistics.median(m.phases_ms["comm_exposed"] for m in looks),
        without_ms=statistics.median(e["without_communication_ms"] for e in evidence),
        bound=statistics.median(shares),
        finding=diagnose(looks[0])[0].name,
    )


@contextmanager
def _namespaces() -> Iterator[None]:
    """Two namespaces, joined by a pair of virtual interfaces; gone afterwards."""
    _take_down()
    try:
        for space in _SPACES:
            _run("ip", "netns", "add", space)
        _run("ip", "link", "add", "link0", "netns", _SPACES[0], "type", "veth", "peer", "name",
             "link1", "netns", _SPACES[1])  # fmt: skip
        for space, interface, host in zip(_SPACES, ("link0", "link1"), _HOSTS, strict=True):
            _run("ip", "-n", space, "addr", "add", f"{host}/30", "dev", interface)
            _run("ip", "-n", space, "link", "set", interface, "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            names = _NAMES / space / "hosts"
            names.parent.mkdir(parents=True, exist_ok=True)
            known = "".join(f"{h} {s}\n" for h, s in zip(_HOSTS, _SPACES, strict=True))
            names.write_text(f"127.0.0.1 localhost\n{known}")
        yield
    finally:
        _take_down()


def _take_down() -> None:
    for space in _SPACES:
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)
        shutil.rmtree(_NAMES / space, ignore_errors=True)


def _slow(rate: int | None) -> None:
    for space, interface in zip(_SPACES, ("link0", "link1"), strict=True):
        remove = ["tc", "-n", space, "qdisc", "del", "dev", interface, "root"]
        subprocess.run(remove, capture_output=True, check=False)
        if rate is not None:
            _run("tc", "-n", space, "qdisc", "add", "dev", interface, "root", "tbf", "rate",
                 f"{rate}mbit", "burst", "64kb", "latency", "200ms")  # fmt: skip


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
