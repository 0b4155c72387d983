"""Describe a job's memory in a process of its own: ``python -m perfsearch.parallel.probe``.

Reads a JSON object with ``workload``, ``seed``, ``device`` from standard input, and writes one
with the facts to standard output. No device is touched and no weight initialised.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys

LIMIT_S = 120
"""Seconds after which it ends itself, whatever the user's code does."""


def main() -> int:
    """Answer one request."""
    signal.alarm(LIMIT_S)
    request = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what user code prints must not mix with the answer
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    import torch

    from perfsearch.parallel.facts import describe, parameters_on_meta
    from perfsearch.workloads.spec import WorkloadSpec

    torch.set_num_threads(1)
    torch.manual_seed(request["seed"])
    workload = WorkloadSpec(**request["workload"])
    module = importlib.import_module(f"perfsearch.workloads.{workload.name}")
    with parameters_on_meta():
        job = module.build(workload, request["seed"])
    json.dump(describe(job, request["device"]), answer)
    answer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
