"""Stores and process groups of a rank: one generation after another, never through ``env://``.

Under torch's launcher the store behind ``env://`` outlives a process group and keeps the addresses
of its dead sockets, so that a second group made through it fails to connect.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perfsearch.core.hardware import GroupSpec

_IDLE = timedelta(days=30)
_ABORT_POLL_S = 0.25
_STORE_FILE = "store"
_PREFIX = "perfsearch"


@dataclass
class Groups:
    """The process groups of the present generation.

    Attributes:
        spec: the group of ranks.
        directory: the group's 0700 directory.
        rank: this rank over all nodes.
        local_rank: this rank on its node.
        world_size: ranks over all nodes.
        device: where this rank computes.
        generation: counts process groups; each has its own prefix in the store.

    """

    spec: GroupSpec
    directory: Path
    rank: int
    local_rank: int
    world_size: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - devices are immutable
    generation: int = -1
    _values: dict[str, Any] = field(default_factory=dict)
    _spawn_env: dict[str, str | None] = field(default_factory=dict)
    _subgroups: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    _aborting: threading.Lock = field(default_factory=threading.Lock)

    def connect(self) -> Any:
        """A new client of the group's own store; threads must not share one.

        A file in the group's directory on one node. On several it is the store at which torch's
        launchers met; its port on this host's loopback leads there from each node.
        """
        if self.spec.nnodes == 1:
            store = dist.FileStore(str(self.directory / _STORE_FILE), -1)
        else:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
            store = dist.PrefixStore(_PREFIX, store)
        store.set_timeout(_IDLE)
        return store

    @property
    def alive(self) -> bool:
        """Whether there is a process group now."""
        return bool(dist.is_initialized())

    def ensure(self, values: dict[str, Any], env: dict[str, str], timeout_s: float) -> bool:
        """Make a new generation unless the present one was made for the same ``values``.

        Args:
            values: group-scope knob values.
            env: environment to create its communicators under.
            timeout_s: how long a collective may take.

        Returns:
            Whether a new one was made.

        """
        if self.alive and values == self._values:
            return False
        self.destroy()
        self._set_env(env)
        self.generation += 1
        self._values = dict(values)
        options: dict[str, Any] = {}
        if self.device.type == "cuda":
            options["device_id"] = self.device  # communicators are made now, under this environment
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"g{self.generation}", self.connect()),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
            **options,
        )
        return True

    def _set_env(self, env: dict[str, str]) -> None:
        for name, value in self._spawn_env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._spawn_env = {name: os.environ.get(name) for name in env}
        os.environ.update(env)

    def hierarchy(self, size: int) -> tuple[Any, Any]:
        """Groups of ``size`` neighbouring ranks, and across them; made once a generation.

        Returns:
            This rank's group inside, and its group across.

        """
        if size not in self._subgroups:
            inside = across = None
            for first in range(0, self.world_size, size):
                ranks = list(range(first, first + size))
                made = dist.new_group(ranks)
                inside = made if self.rank in ranks else inside
            for place in range(size):
                ranks = list(range(place, self.world_size, size))
                made = dist.new_group(ranks)
                across = made if self.rank in ranks else across
            self._subgroups[size] = (inside, across)
        return self._subgroups[size]

    def destroy(self) -> None:
        """End the present generation; peers that wait in a collective of gloo's see it closed."""
        self._subgroups.clear()
        if dist.is_initialized():
            if self.device.type == "cuda":
                gc.collect()  # of garbage too, NCCL awaits the graphs that use a communicator
            dist.destroy_process_group()

    def abort(self) -> None:
        """Break collectives that will not end, from any thread; only NCCL can.

        With gloo, peers see the connections close once the failed rank destroys its group.
        """
        with self._aborting:
            if self.device.type == "cuda" and dist.is_initialized():
                dist.distributed_c10d._abort_process_group()


class AbortWatch:
    """A thread that breaks this rank's collectives once a peer has failed.

    Use it as a context manager around the trial.
    """

    def __init__(self, store: Any, key: str, on_abort: Callable[[], None]) -> None:
        self._store = store
        self._key = key
        self._on_abort = on_abort
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watch-abort", daemon=True)

    def __enter__(self) -> AbortWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._done.wait(_ABORT_POLL_S):
            try:
                failed = self._store.check([self._key])
            except RuntimeError:  # such as no descriptor left, of which there may be some again
                continue
            if failed:
                self._on_abort()
                return
