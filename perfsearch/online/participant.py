"""A rank's part in tuning: it counts steps, times them, and does what rank 0 decides."""

from __future__ import annotations

import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from perfsearch.core.knob import Value
from perfsearch.online import wrapper as wrapping
from perfsearch.online.channel import Channel
from perfsearch.online.facts import facts_of
from perfsearch.online.messages import APPLY, END, FAIL, RUN, Instruction, Report
from perfsearch.online.optimizer import ImplementationSwitch, why_not
from perfsearch.online.options import AutotuneOptions
from perfsearch.online.sampling import NOT_IN_TIME, NotRestoredError, Steps
from perfsearch.parallel.optimizers import DEFAULT
from perfsearch.workers.measure import Clock, make_clock, synchronize

_PROBE_ELEMENTS = 1024

_LEADERS_OWN = ("log_file", "start_from", "freeze")
"""Options that only the deciding rank looks at, and that may differ elsewhere."""


class Participant:
    """Tunes one model on one rank.

    Args:
        model: the wrapper; held weakly.
        options: what the user asked for; rank 0's count, and others must be equal.
        channel: how ranks agree.
        director: on the deciding rank, its instructions.
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
        director: Steps | None,
        on_end: Callable[[str], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._options = options
        self._channel = channel
        self._director = director
        self._on_end = on_end
        self._device = torch.device(model.device)
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._parameters = {id(p) for p in model.module.parameters()}
        self._switch: ImplementationSwitch | None = None
        self._before: dict[str, Value] | None = None
        self._hung: set[int] = set()
        self.train_iter = 0
        self._told_facts = False
        self._clock: Clock = make_clock(self._device)
        self._plan = Instruction(RUN, discard=options.warmup_samples * options.steps_per_sample)
        self._done_steps = 0
        self.running = True
        if director is not None:
            next(director)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that ``optimizer`` has stepped."""
        if not self.running or not self.is_ours(optimizer):
            return
        model = self._model()
        if model is not None and model._join_config.enable:
            return  # ranks with less data no longer step, and could not take part
        self.train_iter += 1
        if not self._clock.is_open:
            self._clock.mark("start")  # the first step of all, whose beginning was not seen
        else:
            self._clock.mark("step")
        self._done_steps += 1
        if self._done_steps >= self._plan.discard + self._plan.score:
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
            if not why_not(optimizer):
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
            if instruction.discard + instruction.score:
                break
        self._plan, self._done_steps = instruction, 0
        self._clock = make_clock(self._device)
        self._clock.mark("start")

    def _in_force(self, model: DistributedDataParallel) -> dict[str, Value]:
        found = wrapping.configuration_of(model)
        if self._switch is not None:
            found["optimizer_implementation"] = self._switch.choice
        return found

    def _timed_report(self, model: DistributedDataParallel) -> Report:
        seconds = self._clock.read()[0] if self._clock.is_open else []
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
        assert self._director is not None
        reports = self._channel.gather()
        if reports is None:
            reason = (
                "a rank did not come to the same step in time; do all ranks train the same number "
                "of steps?"
            )
            return self._channel.decide(Instruction(END, reason=reason, goes_back=True))
        try:
            instruction = self._director.send(reports)
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
        size = int(configuration.get("hierarchical_group_size") or 0)
        if size in self._hung:
            return f"{NOT_IN_TIME} {self._options.time_limit_s:g} s before: groups of {size}"
        try:
            wrapping.rewrap(model, configuration)
            choice = configuration.get("optimizer_implementation")
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
        hierarchy = wrapping.hierarchy_of(model)
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
