"""A rank's part in tuning: it counts steps, times them, and does what rank 0 decides."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from perfsearch.core.errors import BadInputError
from perfsearch.core.files import why_not_writable
from perfsearch.core.knob import Value
from perfsearch.core.signals import pause_at_end
from perfsearch.knobs.ddp import HIERARCHY, MIB, constructor_parameters
from perfsearch.knobs.optimizer import DEFAULT, IMPLEMENTATION
from perfsearch.online import ddp, log
from perfsearch.online.controller import NOT_IN_TIME, Controller, NotRestoredError, Steps
from perfsearch.online.optimizer import ImplementationSwitch, why_not_switchable
from perfsearch.online.options import PREFIX, AutotuneOptions
from perfsearch.online.proposer import ProposerProcess
from perfsearch.online.store import APPLY, END, FAIL, RUN, Channel, Instruction, Report
from perfsearch.training.clock import StepTimer, synchronize

_PROBE_ELEMENTS = 1024

_LEADERS_OWN = ("log_file", "start_from", "freeze")
"""Options that only the deciding rank reads, and that may differ elsewhere."""


class RankAgent:
    """Tunes one model on one rank.

    Args:
        model: the wrapper; held weakly.
        options: what the user asked for; rank 0's count, and others must be equal.
        channel: how ranks agree.
        controller: on the deciding rank, its instructions.
        on_end: called once with the reason, when tuning is over.

    Attributes:
        running: whether tuning still goes on.
        train_iter: steps of the model's optimizer so far.

    """

    def __init__(
        self,
        model: DistributedDataParallel,
        options: AutotuneOptions,
        channel: Channel,
        controller: Steps | None,
        on_end: Callable[[str], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._options = options
        self._channel = channel
        self._controller = controller
        self._on_end = on_end
        self._device = torch.device(model.device)
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._parameters = {id(p) for p in model.module.parameters()}
        self._switch: ImplementationSwitch | None = None
        self._before: dict[str, Value] | None = None
        self._hung: set[int] = set()
        self.train_iter = 0
        self._told_facts = False
        self._timer = StepTimer(self._device)
        self._plan = Instruction(RUN, discard=options.warmup_samples * options.steps_per_sample)
        self.running = True
        if controller is not None:
            next(controller)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that ``optimizer`` has stepped."""
        if not self.running or not self.is_ours(optimizer):
            return
        model = self._model()
        if model is not None and model._join_config.enable:
            return  # ranks with less data no longer step, and could not take part
        self.train_iter += 1
        if not self._timer.clock.is_open:  # the first step of all, whose beginning was not seen
            self._timer.open(self._plan.steps - 1)
        else:
            self._timer.step()
        if self._timer.left <= 0:
            self._boundary()

    @property
    def has_begun(self) -> bool:
        """Whether a step was counted."""
        return self.train_iter > 0

    @property
    def model_lives(self) -> bool:
        """Whether there is still something to tune."""
        return self._model() is not None

    def is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is the one that this model's steps are counted by.

        That is the first that was seen; once the script has let go of it, the next one.
        """
        if self._optimizer is None or self._optimizer() is None:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not owned & self._parameters:
                return False
            self._optimizer = weakref.ref(optimizer)
            before, self._switch = self._switch, None
            if not why_not_switchable(optimizer):
                self._switch = ImplementationSwitch(optimizer)
                if before is not None:  # what is being timed, or is in force, goes on
                    self._switch.apply(before.choice)
        return self._optimizer() is optimizer

    def _boundary(self) -> None:
        model = self._model()
        assert model is not None  # whose turn it is has a model that lives
        synchronize(self._device)
        report = self._timed_report(model)
        while True:
            self._channel.report(report)
            instruction = self._decide() if self._channel.leads else self._channel.await_decision()
            report = Report(self.train_iter)
            if instruction.kind == APPLY:
                if self._before is None:  # what every rank has confirmed
                    self._before = self._in_force(model)
                begin = time.monotonic()
                failure = self._apply(model, instruction.configuration)
                report = Report(self.train_iter, failure, time.monotonic() - begin)
                continue
            if instruction.goes_back and self._before is not None:
                failure = self._apply(model, self._before)
                if failure:
                    raise RuntimeError(f"what held before could not be put back: {failure}")
            self._before = None
            if instruction.kind == FAIL:
                raise RuntimeError(instruction.reason)
            if instruction.kind == END:
                self._end(instruction.reason)
                return
            if instruction.steps:
                break
        self._plan = instruction
        self._timer.open(instruction.steps)

    def _in_force(self, model: DistributedDataParallel) -> dict[str, Value]:
        found = ddp.configuration_of(model)
        if self._switch is not None:
            found[IMPLEMENTATION.name] = self._switch.choice
        return found

    def _timed_report(self, model: DistributedDataParallel) -> Report:
        seconds, _ = self._timer.clock.read_steps()
        facts: dict[str, Any] = {}
        if not self._told_facts:
            facts, self._told_facts = self._facts(model), True
        count = len(seconds) - self._plan.score
        return Report(
            self.train_iter, discarded_s=seconds[:count], step_s=seconds[count:], facts=facts
        )

    def _facts(self, model: DistributedDataParallel) -> dict[str, Any]:
        optimizer = None if self._optimizer is None else self._optimizer()
        assert optimizer is not None
        options = self._options.to_plain()
        for name in _LEADERS_OWN:
            options.pop(name)
        choice = None if self._switch is None else self._switch.choice
        return {**facts_of(model, optimizer, choice), "options": options}

    def _decide(self) -> Instruction:
        assert self._controller is not None
        reports = self._channel.gather()
        if reports is None:
            reason = (
                "a rank did not come to the same step in time; do all ranks train the same number "
                "of steps?"
            )
            return self._channel.decide(Instruction(END, reason=reason, goes_back=True))
        try:
            instruction = self._controller.send(reports)
        except NotRestoredError as error:
            instruction = Instruction(FAIL, reason=str(error))
        except Exception as error:  # training goes on, whatever is wrong with tuning
            traceback.print_exc()
            instruction = Instruction(END, reason=f"{type(error).__name__}: {error}")
        return self._channel.decide(instruction)

    def _apply(self, model: DistributedDataParallel, configuration: Mapping[str, Value]) -> str:
        """Put a configuration into force; why it could not be, empty where it is.

        Whatever goes wrong is an answer, since all ranks have to go back together.
        """
        size = HIERARCHY.number(configuration)
        if size in self._hung:
            return f"{NOT_IN_TIME} {self._options.time_limit_s:g} s before: groups of {size}"
        try:
            ddp.rewrap(model, configuration)
            choice = IMPLEMENTATION.of(configuration)
            if self._switch is not None:
                self._switch.apply(choice)
            elif choice not in (None, DEFAULT):
                return f"the optimizer that the script has made since cannot be {choice}"
            self._probe(model)
        except queue.Empty:
            self._hung.add(size)
            return f"{NOT_IN_TIME} {self._options.time_limit_s:g} s"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _probe(self, model: DistributedDataParallel) -> None:
        """Try the paths of a hierarchical all-reduce, so that one that hangs holds up no step."""
        hierarchy = ddp.hierarchy_of(model)
        if hierarchy is None:
            return
        tensor = torch.ones(_PROBE_ELEMENTS, device=self._device)
        outcome: queue.Queue[Exception | None] = queue.Queue()

        def probe() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # which each thread has of its own
            try:
                hierarchy.reduce_and_wait(tensor)
            except Exception as error:  # raised in the thread that waits for it
                outcome.put(error)
            else:
                outcome.put(None)

        threading.Thread(target=probe, name="probe-all-reduce", daemon=True).start()
        failure = outcome.get(timeout=self._options.time_limit_s)
        if failure is not None:
            raise failure

    def _end(self, reason: str) -> None:
        self.running = False
        self._on_end(reason)


# -----------------------------------------------------------------------------
# From a wrapped model to tuning under way: one optimizer hook for all models of a process.

_NO_STEP = (
    "no optimizer of torch's has stepped over the model's parameters (steps inside of join() do "
    "not count)"
)

_LONGEST_ROUND = 2.0
"""A round waits this many time limits for a rank: one that is late must still be able to say so."""


_files: Counter[Path] = Counter()
"""How many models of this process were to log into each file."""


class _Recorder:
    """Rows to the log, remarks to standard error, on the deciding rank.

    Args:
        options: what the user asked for.
        job: what is tuned.
        model: the wrapper.
        serial: which model of this process it is.

    Raises:
        BadInputError: the log cannot be written.

    """

    def __init__(
        self, options: AutotuneOptions, job: str, model: DistributedDataParallel, serial: int
    ) -> None:
        self._name = f", model {serial} ({type(model.module).__name__})"
        self._serial = serial
        self._path = options.log_file
        if self._path is not None:
            number = _files[self._path]
            _files[self._path] += 1
            if number:  # an earlier model of this process writes there
                name = f"{self._path.stem}-model{number}{self._path.suffix}"
                self._path = self._path.with_name(name)
            why = why_not_writable(self._path.parent)
            if why:
                raise BadInputError(
                    f"{PREFIX}.log_file={self._path}: {why}. Give a file that can be written."
                )
        self._job = job
        self._writer: log.LogWriter | None = None

    def open(self, knobs: list[str]) -> None:
        """Name the columns."""
        if self._path is not None:
            with self._going_on():
                self._writer = log.LogWriter(self._path, self._job, knobs)

    def write(self, entry: log.Entry) -> None:
        """Append a row."""
        if self._writer is not None:
            with self._going_on():
                self._writer.write(entry)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Do without the log where it can no longer be written: training goes on."""
        try:
            yield
        except OSError as error:
            self._writer = None
            self.say(f"{self._path} is no longer written: {error.strerror}")

    def say(self, text: str) -> None:
        """Tell the user, and of several models which one it is about."""
        name = self._name if self._serial or len(_sessions) > 1 else ""
        print(f"perfsearch autotune{name}: {text}", file=sys.stderr, flush=True)

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
        self._controller: Controller | None = None
        self._proposers: list[ProposerProcess] = []
        steps = None
        if channel.leads:
            job = job_name(model)
            self._recorder = _Recorder(options, job, model, serial)
            earlier = self._earlier(options, job)
            self._controller = Controller(
                options, self._start_proposer, self._recorder, time.monotonic, earlier
            )
            steps = self._controller.run()
            atexit.register(self._close_at_exit)
        self.agent = RankAgent(model, options, channel, steps, self.close)

    def _earlier(self, options: AutotuneOptions, job: str) -> log.Log | None:
        """The log to start from, or to freeze; another job's is refused for the former."""
        path = options.start_from or options.freeze
        if path is None:
            return None
        assert self._recorder is not None
        found = log.read(path)
        if found.job != job and options.start_from is not None:
            self._recorder.say(
                f"{path} is not used: it was measured on {found.job}, and this is {job}"
            )
            return None
        if found.job != job:
            self._recorder.say(f"{path} was measured on {found.job}, and this is {job}")
        return found

    def _start_proposer(self) -> ProposerProcess:
        for old in self._proposers:
            old.close()
        self._proposers = [ProposerProcess()]
        return self._proposers[0]

    def _close_at_exit(self) -> None:
        if self.agent.train_iter:
            self.close("training ended before tuning did; this is the best so far")
        else:
            self.close(_NO_STEP)

    def close(self, reason: str) -> None:
        """End the side process and the log; nothing happens the second time."""
        for proposer in self._proposers:
            proposer.close()
        self._proposers = []
        if self._recorder is None or self._controller is None:
            return
        row = self._controller.unfinished(reason)
        if row is not None:
            self._recorder.write(row)
        if self._controller.kept is None and reason:
            self._recorder.say(f"ended: {reason}")
        self._recorder.close()
        self._controller = None


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
    _sessions[:] = [s for s in _sessions if s.agent.running and s.agent.model_lives]
    for session in _sessions:
        if session.agent.has_begun or session.agent.is_ours(optimizer):
            session.agent.on_step(optimizer)
            _sessions.remove(session)
            _sessions.insert(0, session)  # whose turn it is comes first
            return


def begin_tuning(
    model: DistributedDataParallel, options: AutotuneOptions
) -> DistributedDataParallel:
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
    ddp.make_tunable(model)
    if options.level == 0:
        return model
    if dist.get_world_size(model.process_group) < 2:
        print("perfsearch autotune: one process alone has nothing to tune", file=sys.stderr)
        return model
    pause_at_end()
    _install_hook()
    _sessions.append(Session(model, options, next(_serial)))
    return model


# -----------------------------------------------------------------------------
# What a rank says of its job when tuning begins: plain values for the process that proposes.


def facts_of(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, implementation: Value
) -> dict[str, Any]:
    """Device, sizes, what is in force, and what may not be changed for which reason.

    Args:
        model: the wrapper.
        optimizer: that its steps are counted by.
        implementation: which implementation of the optimizer is in force, ``None`` where it
            cannot change.

    """
    world = dist.get_world_size(model.process_group)
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    trained = [p for p in model.module.parameters() if p.requires_grad]
    configuration = ddp.configuration_of(model)
    fixed = ddp.why_not_each(model)
    if implementation is not None:
        configuration[IMPLEMENTATION.name] = implementation
    else:
        fixed[IMPLEMENTATION.name] = why_not_switchable(optimizer)
    return {
        "device": torch.device(model.device).type,
        "ranks_per_node": per_node if world % per_node == 0 else world,
        "nodes": world // per_node if world % per_node == 0 else 1,
        "gradient_mib": sum(p.numel() * p.element_size() for p in trained) / MIB,
        "wrapper_parameters": sorted(constructor_parameters()),
        "configuration": configuration,
        "fixed": fixed,
    }


def job_name(model: DistributedDataParallel) -> str:
    """Which job numbers belong to: ranks, device, size of the model, version of torch."""
    device = torch.device(model.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    parameters = sum(p.numel() for p in model.module.parameters())
    world = dist.get_world_size(model.process_group)
    return f"{world} x {name}, {parameters} parameters, torch {torch.__version__}"


# -----------------------------------------------------------------------------
# Makes DistributedDataParallel's constructor hand over to tuning when it is done.

_options: list[AutotuneOptions] = []
_pauses: list[None] = []


@contextmanager
def tuning_paused() -> Iterator[None]:
    """Construct a wrapper inside without tuning it."""
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()


def patch_wrappers(options: AutotuneOptions) -> None:
    """Begin tuning with ``options`` wherever a wrapper is constructed from now on."""
    _options[:] = [options]
    _patch()


def leave_wrappers() -> None:
    """Tune no wrapper that is constructed from now on."""
    _options.clear()


@functools.cache
def _patch() -> None:
    construct = DistributedDataParallel.__init__
    made: list[bool] = []

    @functools.wraps(construct)
    def constructed(self: Any, *arguments: Any, **named: Any) -> None:
        construct(self, *arguments, **named)
        made.append(True)
        if type(self) is DistributedDataParallel and _options and not _pauses:
            begin_tuning(self, _options[0])

    DistributedDataParallel.__init__ = constructed
    if os.environ.get("RANK", "0") == "0":
        atexit.register(_say_nothing_was_wrapped, made)


def _say_nothing_was_wrapped(made: list[bool]) -> None:
    if not made:
        print(
            "perfsearch autotune: nothing was tuned: the script has wrapped no model with "
            "DistributedDataParallel. perfsearch-run --search tunes others over several starts.",
            file=sys.stderr,
            flush=True,
        )
