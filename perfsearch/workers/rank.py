"""A rank, forked by torch's launcher: ``serve`` is what that calls.

It imports torch and perfsearch's own rank side, nothing of what the controller needs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from perfsearch.training.clock import slowest
from perfsearch.training.process_groups import AbortWatch, Groups
from perfsearch.workers import log
from perfsearch.workers.log import report_error, switch_log
from perfsearch.workers.messages import (
    AFTER_PEER,
    SOCKET_FILE,
    Channel,
    ChannelClosed,
    Place,
    RankError,
    Startup,
    TrialRequest,
)
from perfsearch.workers.processes import started_at, watch_controller
from perfsearch.workers.results import combine
from perfsearch.workers.stack_dumps import answer_stack_requests
from perfsearch.workers.trial import RankResult, Trainer, run_trial

_FIRST_TIMEOUT_S = 1800.0  # of collectives; the controller's own limits end sooner

_RECOVERY = timedelta(seconds=120)
"""How long the leading rank waits for its peers; the controller's patience ends sooner."""


def serve(directory: str) -> None:
    """What torch's launcher calls in each rank; it returns once the controller says so.

    Raises:
        SystemExit: the rank failed.
    """
    # The launcher's handlers came along with the fork; a rank that waits in a collective would
    # never run them, and its peers' death could not end it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    code = main(Path(directory))
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)  # taking torch's modules down costs a second and frees nothing


def main(directory: Path) -> int:
    """Serve trials until told to stop."""
    log.begin()
    rank = int(os.environ["RANK"])
    startup = Startup.read(directory)
    switch_log(startup.log_directory, rank)
    answer_stack_requests(directory, rank)
    place = Place.read(directory)
    watch_controller(place.owner_pid, place.owner_started, place.token, directory)
    channel = Channel.connect(directory / SOCKET_FILE) if rank == 0 else None
    try:
        loop = _make_loop(directory, startup, rank, channel)
        loop.introduce()
    except Exception as error:
        report_error(startup.log_directory, rank, error, "start")
        return 1
    return loop.serve()


def own_thread_pool() -> None:
    """Make torch's thread pool anew, as a fork leaves it without threads.

    Otherwise the threads of the first backward pass do so, one for each GPU and all at once, and
    the process is aborted when two of them meet: ``Invalid thread pool!`` (pytorch#178535).
    """
    torch.set_num_threads(torch.get_num_threads())


def _make_loop(directory: Path, startup: Startup, rank: int, channel: Channel | None) -> Loop:
    own_thread_pool()
    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    groups = Groups(startup.spec, directory, rank, local_rank, world_size)
    if groups.spec.device == "cuda":
        groups.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(groups.device)
    return Loop(Trainer(groups), channel, startup, Place.read(directory))


class Loop:
    """The life of a rank: take a request, run it, say what came of it, be ready for the next.

    The leading rank has the channel, and passes requests on to the others through the store.

    Args:
        trainer: the warm part of the rank.
        channel: to the controller, on the leading rank.
        startup: how the group was started.
        place: the node that it is on.

    """

    def __init__(
        self, trainer: Trainer, channel: Channel | None, startup: Startup, place: Place
    ) -> None:
        self._trainer = trainer
        self._groups = trainer.groups
        self._channel = channel
        self._startup = startup
        self._store = self._groups.connect()
        self._watch_store = self._groups.connect()
        self._send_lock = threading.Lock()
        self._place = {"host": place.host, "device": _device_name(self._groups.device)}
        self._node = place.node

    def serve(self) -> int:
        """Run until the controller says ``close`` or is gone; return the exit code."""
        serial = 0
        while True:
            try:
                message = self._next(serial)
            except ChannelClosed as error:
                print(f"the controller is gone: {error}", flush=True)
                return 1
            if message["op"] == "close":
                self._groups.destroy()
                return 0
            request = TrialRequest.from_json(message["request"])
            switch_log(request.log_directory, self._groups.rank)
            print(f"request {json.dumps(message['request'])}", flush=True)
            self._serve_trial(request)
            serial += 1

    def introduce(self) -> None:
        """Make the first process group, and tell the controller that every rank is there."""
        self._groups.ensure(self._startup.group_values, self._startup.group_env, _FIRST_TIMEOUT_S)
        slowest([0.0], self._groups.device)
        log.note("the ranks have met")
        process = {"pid": os.getpid(), "started": started_at(os.getpid()), "node": self._node}
        hello = json.dumps({**self._place, **process})
        self._store.set(f"hello/{self._groups.rank}", hello)
        if self._channel is None:
            return
        ranks = [json.loads(self._store.get(f"hello/{r}")) for r in self._all_ranks()]
        self._send({"event": "ready", "ranks": ranks, "info": self._trainer.info()})

    def _all_ranks(self) -> range:
        return range(self._groups.world_size)

    def _next(self, serial: int) -> dict[str, Any]:
        key = f"command/{serial}"
        if self._channel is not None:
            message = self._channel.receive()
            self._store.set(key, json.dumps(message))
            return message
        received: dict[str, Any] = json.loads(self._store.get(key))
        return received

    def _send(self, message: dict[str, Any]) -> None:
        assert self._channel is not None
        with self._send_lock:
            self._channel.send(message)

    def _serve_trial(self, request: TrialRequest) -> None:
        abort_key = f"abort/{request.serial}"
        outcome = self._attempt(request, abort_key)
        failed = isinstance(outcome, RankError)
        if failed:
            self._trainer.release()
        self._store.set(
            f"result/{request.serial}/{self._groups.rank}",
            json.dumps({"failed": failed, **asdict(outcome)}),
        )
        if self._channel is not None:
            self._conclude(request)
        elif failed or self._store.check([abort_key]):
            self._recover(request)

    def _attempt(self, request: TrialRequest, abort_key: str) -> RankResult | RankError:
        def on_abort() -> None:
            if self._channel is not None:
                self._send({"event": "failing"})
            self._groups.abort()

        rank = self._groups.rank
        with AbortWatch(self._watch_store, abort_key, on_abort):
            try:
                result = run_trial(self._trainer, request)
                result.environment.update(self._place)
                return result
            except Exception as error:
                peer = self._store.check([abort_key])
                if not peer:
                    self._store.set(abort_key, str(rank))
                record = report_error(
                    request.log_directory, rank, error, AFTER_PEER if peer else self._trainer.phase
                )
                error.__traceback__ = None  # its frames hold the tensors that must be freed
                self._groups.abort()
        self._groups.destroy()
        return record

    def _conclude(self, request: TrialRequest) -> None:
        """On the leading rank: gather what each rank has to say, and tell the controller."""
        self._store.set_timeout(_RECOVERY)
        results = [
            json.loads(self._store.get(f"result/{request.serial}/{rank}"))
            for rank in self._all_ranks()
        ]
        if any(r["failed"] for r in results):
            self._recover(request)
            errors = [{k: v for k, v in r.items() if k != "failed"} for r in results if r["failed"]]
            self._send({"event": "outcome", "errors": errors})
        else:
            self._send({"event": "outcome", "errors": [], **combine(results)})
        self._store.set_timeout(timedelta(days=30))

    def _recover(self, request: TrialRequest) -> None:
        """Join the others in a new process group, and see that it works."""
        self._groups.destroy()
        self._trainer.release()
        self._groups.ensure(request.group_values, request.group_env, request.timeout_s)
        slowest([0.0], self._groups.device)


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return str(torch.cuda.get_device_properties(device).uuid)
