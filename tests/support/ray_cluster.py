"""A Ray cluster of two nodes on this host, its daemons started by the tests and ended with them."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

LONGEST_S = 120
SECOND = "127.0.0.2"
"""Address of the second node."""


def why_not() -> str:
    """Why Ray cannot be had here; empty where it can."""
    there = importlib.util.find_spec("ray") is not None
    return "" if there else "Ray is not installed: pip install '.[ray]'"


class Ray:
    """A head and a second raylet, of two CPUs each; ``close`` ends them.

    Attributes:
        environment: variables by which Ray's own code finds the cluster.

    """

    def __init__(self, directory: Path):
        self._directory, self._daemons = directory, []
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        self.environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        said = self._start(
            "head", "--head", f"--port={port}", f"--temp-dir={directory / 'ray'}",
            "--include-dashboard=false",
        )  # fmt: skip
        address = re.search(rf"--address='(\S+:{port})'", said)[1]
        self.environment["RAY_ADDRESS"] = address
        self._start("second", f"--address={address}", f"--node-ip-address={SECOND}")

    def _start(self, name, *words):
        log = self._directory / f"{name}.log"
        plain = ["--block", "--num-cpus=2", "--object-store-memory=100000000"]
        program = Path(sys.executable).with_name("ray")
        with log.open("wb") as file:
            self._daemons.append(
                subprocess.Popen(
                    [program, "start", *plain, *words], stdout=file, stderr=file,
                    env={**os.environ, **self.environment}, cwd=self._directory,
                )
            )  # fmt: skip
        deadline = time.monotonic() + LONGEST_S
        while "will now block forever" not in log.read_text():  # its last word
            if time.monotonic() > deadline or self._daemons[-1].poll() is not None:
                self.close()
                raise RuntimeError(f"Ray does not start\n{log.read_text()}")
            time.sleep(0.1)
        return log.read_text()

    def close(self):
        """End every daemon."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
