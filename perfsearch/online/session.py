"""From a wrapped model to tuning under way: one optimizer hook for all models of a process."""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsearch.ending import pause_at_end
from perfsearch.online import log as logs
from perfsearch.online.channel import Channel
from perfsearch.online.director import Director
from perfsearch.online.facts import job_name
from perfsearch.online.options import AutotuneOptions
from perfsearch.online.participant import Participant
from perfsearch.online.strategy_process import StrategyProcess
from perfsearch.online.wrapper import adopt

_NO_STEP = (
    "no optimizer of torch's has stepped over the model's parameters (steps inside of join() do "
    "not count)"
)

_LONGEST_ROUND = 2.0
"""A round waits this many time limits for a rank: one that is late must still be able to say so."""


_files: Counter[Path] = Counter()
"""How many models of this process were to log into each file."""


class _Recorder:
    """Rows to the log, remarks to standard error, on the deciding rank."""

    def __init__(self, options: AutotuneOptions, job: str) -> None:
        self._path = options.log_file
        if self._path is not None:
            number = _files[self._path]
            _files[self._path] += 1
            if number:  # an earlier model of this process writes there
                name = f"{self._path.stem}-model{number}{self._path.suffix}"
                self._path = self._path.with_name(name)
        self._job = job
        self._writer: logs.LogWriter | None = None

    def open(self, knobs: list[str]) -> None:
        """Name the columns."""
        if self._path is not None:
            self._writer = logs.LogWriter(self._path, self._job, knobs)

    def write(self, entry: logs.Entry) -> None:
        """Append a row."""
        if self._writer is not None:
            self._writer.write(entry)

    def say(self, text: str) -> None:
        """Tell the user."""
        print(f"perfsearch autotune: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the log."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Session:
    """Tuning of one model in this process.

    Args:
        model: the wrapper.
        options: what the user asked for.
        serial: which model of this process it is.

    """

    def __init__(
        self, model: DistributedDataParallel, options: AutotuneOptions, serial: int
    ) -> None:
        ranks = dist.get_process_group_ranks(model.process_group)
        limit_s = _LONGEST_ROUND * options.time_limit_s
        store = dist.distributed_c10d._get_default_store()
        channel = Channel(store, ranks, dist.get_rank(), serial, limit_s)
        self._recorder: _Recorder | None = None
        self._director: Director | None = None
        self._proposers: list[StrategyProcess] = []
        steps = None
        if channel.leads:
            job = job_name(model)
            self._recorder = _Recorder(options, job)
            earlier = self._earlier(options, job)
            self._director = Director(
                options, self._start_proposer, self._recorder, time.monotonic, earlier
            )
            steps = self._director.run()
            atexit.register(self._close_at_exit)
        self.participant = Participant(model, options, channel, steps, self.close)

    def _earlier(self, options: AutotuneOptions, job: str) -> logs.Log | None:
        """The log to start from, or to freeze; another job's is refused for the former."""
        path = options.start_from or options.freeze
        if path is None:
            return None
        assert self._recorder is not None
        found = logs.read(path)
        if found.job != job and options.start_from is not None:
            self._recorder.say(
                f"{path} is not used: it was measured on {found.job}, and this is {job}"
            )
            return None
        if found.job != job:
            self._recorder.say(f"{path} was measured on {found.job}, and this is {job}")
        return found

    def _start_proposer(self) -> StrategyProcess:
        for old in self._proposers:
            old.close()
        self._proposers = [StrategyProcess()]
        return self._proposers[0]

    def _close_at_exit(self) -> None:
        if self.participant.train_iter:
            self.close("training ended before tuning did; this is the best so far")
        else:
            self.close(_NO_STEP)

    def close(self, reason: str) -> None:
        """End the side process and the log; nothing happens the second time."""
        for proposer in self._proposers:
            proposer.close()
        self._proposers = []
        if self._recorder is None or self._director is None:
            return
        row = self._director.unfinished(reason)
        if row is not None:
            self._recorder.write(row)
        if self._director.kept is None and reason:
            self._recorder.say(f"ended: {reason}")
        self._recorder.close()
        self._director = None


_sessions: list[Session] = []
_begun: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
_serial = itertools.count()


@functools.cache
def _install_hook() -> Any:
    return register_optimizer_step_post_hook(_on_step)


def _on_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Let models take their turns: what one tries would disturb what another measures.

    The turn is that of the model whose optimizer steps first, until it has ended or is gone.
    """
    _sessions[:] = [s for s in _sessions if s.participant.running and s.participant.model_lives]
    for session in _sessions:
        if session.participant.has_begun or session.participant.is_ours(optimizer):
            session.participant.on_step(optimizer)
            _sessions.remove(session)
            _sessions.insert(0, session)  # whose turn it is comes first
            return


def begin(model: DistributedDataParallel, options: AutotuneOptions) -> DistributedDataParallel:
    """Tune a wrapped model from its next optimizer step on.

    Args:
        model: as its constructor left it; every rank of its process group calls this alike.
        options: the same on every rank.

    Returns:
        The same object.

    Raises:
        BadInputError: a log that was given cannot be read.

    """
    if model in _begun:
        return model
    _begun.add(model)
    adopt(model)
    if options.level == 0:
        return model
    if dist.get_world_size(model.process_group) < 2:
        print("perfsearch autotune: one process alone has nothing to tune", file=sys.stderr)
        return model
    pause_at_end()
    _install_hook()
    _sessions.append(Session(model, options, next(_serial)))
    return model
