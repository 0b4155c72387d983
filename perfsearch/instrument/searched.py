"""A rank of a script that is being searched: it tells of each step, and does what it is told."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch

from perfsearch.instrument.batches import BatchTape
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.finished import Finished
from perfsearch.instrument.orders import FIRST_LOSSES
from perfsearch.instrument.phases import Phases
from perfsearch.instrument.rewind import Rewinder
from perfsearch.instrument.script import Script
from perfsearch.instrument.timing import Timing
from perfsearch.instrument.tracing import Trace
from perfsearch.workers import measure
from perfsearch.workers.channel import Channel
from perfsearch.workers.messages import trace_file

_SITES = 5
"""Lines that wait for the device which are named."""

_MOST_SWALLOWED = 3
"""How often a script may catch ``Finished`` before its process is ended without asking."""


def _name_of(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    return str(torch.cuda.get_device_properties(device).uuid) if on_gpu else str(device)


class Searched:
    """Speaks with the controller at step boundaries; inside the scored window it is silent.

    Args:
        script: the instruments.
        channel: to the controller, which has been greeted.
        rank: which rank this is.

    Attributes:
        steps: steps made so far.
        timing: of the scored window.

    """

    def __init__(self, script: Script, channel: Channel, rank: int) -> None:
        self.steps = 0
        self._rank = rank
        self._script = script
        self._rewinder = Rewinder(script, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.timing = Timing(script)
        self._trace: Trace | None = None
        self._left = 0
        self._losses: list[float | torch.Tensor | None] = []
        self._swallowed = 0
        self._ending = False
        script.loaders.tape = BatchTape()
        script.optimizers.before_step = self.before_step
        script.optimizers.after_step = self.after_step
        self._channel = channel
        self._since, self._pulled = time.perf_counter(), 0

    @property
    def _device(self) -> torch.device:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def before_step(self) -> None:
        """Called when the script's leading optimizer begins a step."""
        if self.steps == 0:
            self._script.put_into_force()
        self.timing.before_step()

    def after_step(self) -> None:
        """Called when it has made one; inside the scored window nothing is said."""
        if self._ending:
            self._end()
        self.steps += 1
        self._script.loaders.uses.end_step()
        if self.steps > FIRST_LOSSES and self._script.loaders.tape is not None:
            self._script.loaders.tape.keeps_random = False
        loss = self._script.losses.take()
        phases = self.timing.phases
        self.timing.after_step()
        if phases is not None:
            self._losses.append(loss)
            self._left -= 1
            if self._left:
                return
            self._tell_window(phases)
        elif self._trace is not None:
            self._trace.left -= 1
            if self._trace.left:
                return
            reason, self._trace = self._trace.stop(), None
            self._channel.send({"event": "traced", "step": self.steps, "reason": reason})
        else:
            device = self._device
            measure.synchronize(device)
            began = self._script.loaders.began if self.steps == 1 else None
            self._tell_step(time.perf_counter() - (began or self._since), loss)
        self._obey()
        self._since, self._pulled = time.perf_counter(), self._script.loaders.pulls

    def _tell_step(self, seconds: float, loss: float | torch.Tensor | None) -> None:
        message: dict[str, Any] = {
            "event": "step",
            "step": self.steps,
            "seconds": seconds,
            "loss": None if loss is None else float(loss),
            "pulls": self._script.loaders.pulls,
            "taken": self._script.loaders.pulls - self._pulled,
        }
        if self.steps <= 2:
            initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
            message["facts"] = self._script.facts().to_json()
            message["joined"] = torch.distributed.get_world_size() if initialised else 1
            message["device"] = str(self._device)
            message["why_not_again"] = self._script.why_not_again()
        self._channel.send(message)

    def _tell_window(self, phases: Phases) -> None:
        device = self._device
        measure.synchronize(device)
        transfers = self.timing.transfers
        self.timing.end()
        seconds, by_step = phases.read()
        timing: dict[str, float] = {}
        used = self._script.loaders.uses.read()
        facts = self._script.facts()
        sites: dict[str, float] = {}
        if transfers is not None:
            watched = sum(bool(phases) for phases in by_step)
            timing["sync_calls_per_step"] = sum(transfers.calls.values()) / watched
            timing["sync_wait_ms"] = 1e3 * transfers.seconds / watched
            found = transfers.calls.most_common(_SITES)
            sites = {site: calls / watched for site, calls in found}
        bounds = device.type == "cpu" and not phases.in_threads and not facts.why_unbounded()
        self._channel.send(
            {
                "event": "window",
                "step": self.steps,
                "step_seconds": seconds,
                "phase_seconds": by_step,
                "timing": timing,
                "sync_points": sites,
                "bounds": bounds,
                "waits_ms": [1e3 * phases.get("comm_exposed", math.nan) for phases in by_step],
                "losses": [None if loss is None else float(loss) for loss in self._losses],
                "samples": used.samples,
                "tokens": used.tokens,
                "aside": used.aside,
                "peaks": measure.read_peaks(device),
                "place": {"host": os.uname().nodename, "device": _name_of(device)},
                "facts": facts.to_json(),
                "why_not_again": self._script.why_not_again(),
            }
        )
        self._losses = []

    def _obey(self) -> None:
        """Do what the controller says until it lets the script go on."""
        while True:
            order = self._channel.receive()
            match order["op"]:
                case "go":
                    return
                case "score":
                    self.score(int(order["count"]), int(order["each"]))
                    return
                case "trace":
                    file = trace_file(order["directory"], self._rank)
                    self._trace = Trace(file, self._device, int(order["count"]))
                    return
                case "keep":
                    reason = self._rewinder.take()
                    self._channel.send({"event": "kept", "reason": reason})
                case "rewind":
                    assert self._script.loaders.tape is not None
                    self._script.loaders.tape.rewind(int(order["place"]))
                    return
                case "change":
                    self._change(order["knobs"])
                case "end":
                    self._end()
                case unknown:
                    raise ValueError(f"the controller said {unknown!r}, which means nothing here")

    def score(self, count: int, each: int) -> None:
        """Begin the scored window.

        Args:
            count: steps that are timed, and told of after the last.
            each: of how many of them one has its phases timed.

        """
        device = self._device
        self._script.loaders.uses.begin()
        self._left, self._losses = count, []
        self.timing.begin(device, each)

    def _change(self, knobs: dict[str, Any]) -> None:
        begin = time.perf_counter()
        self._rewinder.restore()
        self._script.change(knobs)
        measure.reset_peaks(self._device)
        measure.synchronize(self._device)
        self._channel.send({"event": "changed", "seconds": time.perf_counter() - begin})

    def _end(self) -> None:
        self._ending = True
        self._swallowed += 1
        if self._swallowed > _MOST_SWALLOWED:
            os._exit(0)  # it catches even SystemExit
        raise Finished(0)

    def tell_end(self) -> None:
        """Say that the script has come to its own end."""
        if not self._ending:
            self._channel.send({"event": "ended", "step": self.steps})

    def facts(self) -> Facts:
        """What the script has built so far."""
        return self._script.facts()

    def close(self) -> None:
        """End the loaders' workers; take the process group down, where the script has left one."""
        self._script.loaders.close()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
