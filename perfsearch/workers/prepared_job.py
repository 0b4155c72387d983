"""The job of the next group, built once before ranks are forked, which begin with it at hand.

Drawing the weights of a large model takes longer than everything else that a new process does.
Ranks share the pages with the process that drew them until they write to them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch

from perfsearch.metrics.system import available_bytes
from perfsearch.training.state import seed_everything
from perfsearch.workloads.base import Job
from perfsearch.workloads.spec import TRAITS, WorkloadSpec

_SHARE = 0.5
"""Of the memory that is available, what a job may take here; ranks need the rest."""

_kept: dict[str, Job] = {}


def build_job(workload: WorkloadSpec, seed: int) -> Job:
    """Build the job of a workload, its weights drawn from ``seed``."""
    seed_everything(seed)
    module = importlib.import_module(f"perfsearch.workloads.{workload.name}")
    job: Job = module.build(workload, seed)
    return job


def prepare_job(workload: dict[str, Any], seed: int) -> None:
    """Build a job for the forks to come, in place of an earlier one.

    Only a built-in one, as the user's own code may do what no fork survives. Where it fails,
    nothing is kept, and ranks meet the error themselves. No thread is started.
    """
    key = _key(workload, seed)
    if key in _kept:
        return
    _kept.clear()
    if workload.get("name") not in TRAITS.keys() - {"custom"}:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _bounded_memory():
            _kept[key] = build_job(WorkloadSpec(**workload), seed)
    except Exception as error:
        print(f"ranks build the job themselves: {error}", file=sys.stderr, flush=True)
    finally:
        torch.set_num_threads(threads)


def take_prepared_job(workload: dict[str, Any], seed: int) -> Job | None:
    """The job that was prepared, if it is this one; it is given away."""
    return _kept.pop(_key(workload, seed), None)


def _key(workload: dict[str, Any], seed: int) -> str:
    return json.dumps([workload, seed], sort_keys=True)


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """Refuse an allocation that would take too much, before the kernel ends this process for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        used = _data_bytes()
    except OSError:  # no procfs
        yield
        return
    limit = int(used + _SHARE * available_bytes())
    for present in (soft, hard):
        if present != resource.RLIM_INFINITY:
            limit = min(limit, present)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int:
    """What RLIMIT_DATA counts: private writable memory."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    raise OSError("no VmData in /proc/self/status")
