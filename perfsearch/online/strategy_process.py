"""The deciding rank's end of the side process that holds the strategy."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from perfsearch.core.trial import Trial
from perfsearch.online.sampling import ProposerEndedError

_OF_THE_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")
_FAREWELL_S = 5.0


class StrategyProcess:
    """Starts the process at once, so that its imports are done when the first answer is needed."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_JOB}
        environment.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "perfsearch.online.strategist"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,  # Ctrl-C is the job's to handle
        )
        self._read = b""

    def open(self, facts: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Say what there is to tune; it is answered."""
        self._send({"do": "open", "facts": dict(facts), "options": dict(options)})

    def tell(self, trial: Trial) -> None:
        """Pass on a trial."""
        self._send({"do": "tell", "trial": trial.to_json()})

    def ask(self) -> None:
        """Ask what to try next; it is answered."""
        self._send({"do": "ask"})

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """The next answer, ``None`` where it does not come in time.

        Raises:
            ProposerEndedError: it will never come.

        """
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + within_s
        while b"\n" not in self._read:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], left)[0]:
                return None
            piece = os.read(descriptor, 65536)
            if not piece:
                raise self._ended()
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> ProposerEndedError:
        code = self._process.wait()
        return ProposerEndedError(
            f"the process that proposes configurations ended (exit code {code}); "
            "its error stands above"
        )

    def close(self) -> None:
        """End it at once: it has nothing to lose, and training waits.

        The end of its input would end it too, but loader processes may hold that open.
        """
        self._process.terminate()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()
        try:
            self._process.wait(_FAREWELL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
