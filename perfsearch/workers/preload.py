"""The controller's end of the launcher: one process with torch imported, forked for every group."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.files import private
from perfsearch.core.python import module_command
from perfsearch.workers import processes
from perfsearch.workers.messages import EXIT_FILE, TOKEN_VARIABLE

LATE_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Variables that are read when a process group is made; every other may be read by an import."""

_POLL_S = 0.02


class LauncherGone(RuntimeError):
    """The launcher ended or does not answer; its log says more."""


class ForkedLauncher:
    """torch's launcher for one group, in a fork of the preloaded process."""

    def __init__(
        self, pid: int, started: float, directory: Path, parent_runs: Callable[[], bool]
    ) -> None:
        self.pid = pid
        self._parent_runs = parent_runs
        self._started = started
        self._exit_file = directory / EXIT_FILE
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code once it has ended (negative: by that signal), ``None`` while it runs."""
        if self._code is None and self._exit_file.exists():
            self._code = int(self._exit_file.read_text())
        # Its parent reaps it and writes the file; only without a parent nobody will.
        nobody_writes = not self._parent_runs() or not self._exit_file.parent.exists()
        if self._code is None and nobody_writes and not self._runs():
            written = self._exit_file.exists()
            self._code = int(self._exit_file.read_text()) if written else -signal.SIGKILL
        return self._code

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("launcher", timeout_s or 0.0)
            time.sleep(_POLL_S)
        return code

    def _runs(self) -> bool:
        return processes.is_alive(self.pid, self._started)

    def kill(self) -> None:
        """Send it SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Preloaded:
    """A process that has torch imported and nothing else done, to fork groups from.

    Args:
        environment: variables for it and every fork; those that an import may read are fixed
            from here on.
        run_dir: where it is put on record.
        log: file for what it prints while importing.
        module: what it runs: imports, and then ``forkserver.serve_forks``.
        directory: its working directory; ``None``: the current one.
        python: the interpreter; empty: this one.
        arguments: further ones of the module.
        first: what it is told on its first line; ``None``: nothing.

    Attributes:
        early: its variables that an import may have read.
        said: what it said when it was ready.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        run_dir: Path,
        log: Path,
        module: str = "perfsearch.workers.forkserver",
        directory: Path | None = None,
        python: str = "",
        arguments: Sequence[str] = (),
        first: Mapping[str, Any] | None = None,
    ) -> None:
        self.token = uuid.uuid4().hex
        self.said: dict[str, Any] = {}
        self.early = early_variables(environment)
        self.environment = dict(environment)
        self.module, self.directory, self.python = module, directory, python
        self._run_dir = run_dir
        self.record()
        log.parent.mkdir(parents=True, exist_ok=True)
        me = os.getpid()
        with open(log, "ab", opener=private) as stderr:
            self._process = subprocess.Popen(
                module_command(
                    module, str(me), repr(processes.started_at(me)), *arguments, python=python
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**environment, TOKEN_VARIABLE: self.token},
                cwd=directory,
                start_new_session=True,
            )
        self._unread = b""
        self._unsent = b"" if first is None else json.dumps(first).encode() + b"\n"

    def record(self, directory: Path = Path()) -> None:
        """Put it on record, with the directory of the group that is forked from it now."""
        processes.record_group(self._run_dir, self.token, directory)

    def strike_directory(self) -> None:
        """Note that the directory of the group that was forked from it is gone."""
        processes.strike_directory(self._run_dir, self.token)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def await_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait until it has imported what it was to import; what it said then.

        Raises:
            LauncherGone: the process died.
            TimeoutError: it took longer than ``timeout_s``.
        """
        if not self.said:
            line, self._unsent = self._unsent, b""
            if line:
                self._tell(line)
            self.said = self._answer(time.monotonic() + timeout_s)
        return self.said

    def fork(
        self,
        directory: Path,
        environment: Mapping[str, str],
        log: Path,
        timeout_s: float,
        **more: Any,
    ) -> ForkedLauncher:
        """Start torch's launcher for a group.

        Args:
            directory: the group's own.
            environment: the whole environment of the group; its early variables equal this
                process's where ranks are forked in their turn.
            log: file for the launcher's output.
            timeout_s: longest wait, importing torch included.
            more: plain values that the module wants besides.

        Raises:
            LauncherGone: the process died.
            TimeoutError: it took longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        self.await_ready(timeout_s)
        request = {
            "directory": str(directory),
            "environment": dict(environment),
            "unset": [name for name in self.environment if name not in environment],
            "log": str(log),
            **more,
        }
        self._tell(json.dumps(request).encode() + b"\n")
        answer = self._answer(deadline)
        pid, started = int(answer["pid"]), float(answer["started"])
        return ForkedLauncher(pid, started, directory, lambda: self.alive)

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise LauncherGone("the launcher is gone") from error

    def _answer(self, deadline: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not select.select([descriptor], [], [], min(left, 0.25))[0]:
                if not self.alive:
                    raise LauncherGone(f"the launcher ended with code {self._process.poll()}")
                continue
            chunk = os.read(descriptor, 65_536)
            if not chunk:
                code = self._process.wait()
                raise LauncherGone(f"the launcher ended with code {code}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self, grace_s: float) -> None:
        """End it and everything that descends from it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        processes.end_all(self.token, grace_s)
        self._process.wait()
        processes.forget_group(self._run_dir, self.token)


def early_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that an import may read."""
    return {k: v for k, v in environment.items() if not k.startswith(LATE_PREFIXES)}
