"""Facts of the job's tensors, from a process that runs beside the search's start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from perfsearch.metrics.memory_facts import MemoryFacts
from perfsearch.parallel.torch_features import torch_version
from perfsearch.workloads.spec import WorkloadSpec

FILE = "model_facts.json"
_DESCRIPTION = 4
"""Raised when the same job is described differently, so that older answers are not used."""

_LIMIT_S = 150.0


class FactsSource:
    """Asks ``python -m perfsearch.parallel.probe`` once, and keeps the answer beside the journal.

    Args:
        workload: resolved.
        seed: of the search.
        device: type of device that is trained on.
        directory: where the answer is kept; an existing answer to the same question is used, except
            on a factory of the user's.

    Attributes:
        error: why there are no facts, once ``get`` returned ``None``.

    """

    def __init__(self, workload: WorkloadSpec, seed: int, device: str, directory: Path) -> None:
        self._request = {"workload": asdict(workload), "seed": seed, "device": device}
        question = [self._request, torch_version(), _DESCRIPTION]
        words = json.dumps(question, sort_keys=True, default=str)
        self._key = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        self._file = directory / FILE
        # a user's own code may have changed since, which the request does not tell
        self._reusable = workload.factory is None
        self._process: subprocess.Popen[bytes] | None = None
        self._facts: MemoryFacts | None = None
        self._settled = False
        self.error = ""

    def start(self) -> None:
        """Begin, without waiting; nothing happens where the answer is known."""
        if self._settled or self._process is not None or self._from_file():
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "perfsearch.parallel.probe"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._request, default=str).encode())
        self._process.stdin.close()
        self._process.stdin = None

    def get(self) -> MemoryFacts | None:
        """The facts, waited for; ``None`` where the job cannot be described."""
        if not self._settled:
            self.start()
        if not self._settled:
            self._receive()
        return self._facts

    def _from_file(self) -> bool:
        if not self._reusable or not self._file.exists():
            return False
        try:
            kept = json.loads(self._file.read_text())
        except ValueError:  # torn by a kill; it is asked for again
            return False
        if kept.get("key") != self._key:
            return False
        self._facts = MemoryFacts.from_json(kept["facts"])
        self._settled = True
        return True

    def _receive(self) -> None:
        assert self._process is not None
        try:
            out, errors = self._process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.close()
            out, errors = b"", f"it took longer than {_LIMIT_S:g} s".encode()
        code = None if self._process is None else self._process.returncode
        self._process, self._settled = None, True
        try:
            record = json.loads(out) if code == 0 else None
        except ValueError:
            record = None
        if record is None:
            lines = errors.decode(errors="replace").strip().splitlines()
            self.error = lines[-1] if lines else f"it ended with exit code {code}"
            return
        self._facts = MemoryFacts.from_json(record)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"key": self._key, "facts": record}))

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
