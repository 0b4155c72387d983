"""The rank protocol of a search over a script: tell of each step, and do as the controller says."""

from __future__ import annotations

import contextlib
import copy
import gzip
import math
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.optim.lr_scheduler import LRScheduler

from perfsearch.core.files import temporary_directory
from perfsearch.instrument.facts import Facts
from perfsearch.instrument.launch import Finished
from perfsearch.instrument.optimizers import OPTIMIZER
from perfsearch.instrument.patching import after_import, wrap
from perfsearch.instrument.phases import OTHER, Phases, Transfers
from perfsearch.instrument.script import Script
from perfsearch.instrument.tape import BatchTape, RandomState
from perfsearch.metrics.reading import Guard
from perfsearch.metrics.slow_steps import Cause
from perfsearch.training.clock import (
    FIRST_LOSSES,
    LOADING,
    StepTimer,
    is_detailed,
    read_peaks,
    reset_peaks,
    synchronize,
)
from perfsearch.workers.messages import Channel, trace_file

_SITES = 5
"""Lines that wait for the device which are named."""

_MOST_SWALLOWED = 3
"""How often a script may catch ``Finished`` before its process is ended without asking."""

_MEMORY_SHARE = 0.3  # of what is free on this host, for what is kept to go back to

_PROFILER = "profiler"


class RankProtocol:
    """Speaks with the controller at step boundaries; inside the scored window it is silent.

    Args:
        script: the instruments.
        channel: to the controller, which has been greeted.
        rank: which rank this is.
        host: what its node is called.

    Attributes:
        steps: steps made so far.
        timing: of the scored window.
        at_first_step: called when the first step is made.
        says_first: what is told besides with that step.

    """

    def __init__(self, script: Script, channel: Channel, rank: int, host: str) -> None:
        self.steps = 0
        self.at_first_step: Callable[[], None] = lambda: None
        self.says_first: Callable[[], dict[str, Any]] = dict
        self._rank = rank
        self._host = host
        self._script = script
        self._rewinder = Rewinder(script, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        self.timing = Timing(script)
        self._trace: Trace | None = None
        self._losses: list[float | torch.Tensor | None] = []
        self._swallowed = 0
        self._is_over = False
        script.loaders.tape = BatchTape()
        script.optimizers.before_step = self.before_step
        script.optimizers.after_step = self.after_step
        self._channel = channel
        self._pulled = 0
        self._children = Children()
        self._unmeasurable = Unmeasurable(script, self._give_up)

    @property
    def _device(self) -> torch.device:
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def before_step(self) -> None:
        """Called when the script's leading optimizer begins a step."""
        if self._unmeasurable.is_child(self.steps):
            return
        if self.steps == 0:
            self._script.put_into_force()
        self.timing.before_step()

    def after_step(self) -> None:
        """Called when it has made one; inside the scored window nothing is said."""
        if self._unmeasurable.is_child(self.steps):
            return
        if self._is_over:
            self._end()
        self.steps += 1
        self._script.on_backward = None
        if self.steps == 1:
            self.at_first_step()
        self._script.loaders.accounting.end_step()
        self._script.end_step()
        if self.steps > FIRST_LOSSES and self._script.loaders.tape is not None:
            self._script.loaders.tape.compares = False
        loss = self._script.losses.take()
        phases = self.timing.phases
        self.timing.after_step()
        if phases is not None:
            self._losses.append(loss)
            if self.timing.timer.left:
                return
            self._tell_window(phases)
        elif self._trace is not None:
            self._trace.left -= 1
            if self._trace.left:
                return
            reason, self._trace = self._trace.stop(), None
            self._channel.send({"event": "traced", "step": self.steps, "reason": reason})
        else:
            began = self._script.loaders.began if self.steps == 1 else None
            self.timing.timer.device = self._device
            self._tell_step(self.timing.timer.warmup_step(began), loss)
        self._obey()
        self.timing.timer.begin()
        self._pulled = self._script.loaders.pulls

    def _tell_step(self, seconds: float, loss: float | torch.Tensor | None) -> None:
        message: dict[str, Any] = {
            "event": "step",
            "step": self.steps,
            "seconds": seconds,
            "loss": None if loss is None else float(loss),
            "pulls": self._script.loaders.pulls,
            "taken": self._script.loaders.pulls - self._pulled,
        }
        if self.steps == 1:
            message.update(self.says_first())
        if self.steps <= 2:
            initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
            message["facts"] = self._script.facts().to_json()
            message["joined"] = torch.distributed.get_world_size() if initialised else 1
            message["device"] = str(self._device)
            message["samples"] = self._script.loaders.accounting.read().samples
            message["why_not_again"] = self._script.why_not_again()
        self._channel.send(message)

    def _tell_window(self, phases: Phases) -> None:
        device = self._device
        synchronize(device)
        transfers = self.timing.transfers
        self.timing.end()
        self._script.models.end_window()
        seconds, by_step = phases.read()
        timing: dict[str, float] = {}
        counts = self._script.loaders.accounting.read()
        facts = self._script.facts()
        sites: dict[str, float] = {}
        if transfers is not None:
            watched = sum(bool(phases) for phases in by_step)
            timing["sync_calls_per_step"] = sum(transfers.calls.values()) / watched
            timing["sync_wait_ms"] = 1e3 * transfers.seconds / watched
            found = transfers.calls.most_common(_SITES)
            sites = {site: calls / watched for site, calls in found}
        tape = self._script.loaders.tape
        alone = not phases.in_threads and not facts.why_unbounded()
        loading = [parts.get(Cause.LOADING, 0.0) for parts in self._script.parts.steps]
        timing["loading_host_ms"] = 1e3 * sum(loading) / max(1, len(loading))
        loads = any(name in phases for phases in by_step for name in LOADING)
        self._channel.send(
            {
                "event": "window",
                "step": self.steps,
                "step_seconds": seconds,
                "phase_seconds": by_step,
                "parts": self._script.parts.steps,
                "timing": timing,
                "sync_points": sites,
                "bounds": device.type == "cpu" and alone,
                "bounds_loading": device.type != "cpu" and loads,
                "waits_ms": [1e3 * phases.get("comm_exposed", math.nan) for phases in by_step],
                "losses": [None if loss is None else float(loss) for loss in self._losses],
                "samples": counts.samples,
                "tokens": counts.tokens,
                "aside": counts.aside,
                "shapes": 0 if tape is None else tape.shapes(),
                "peaks": read_peaks(device),
                "place": {"host": self._host, "device": _name_of(device)},
                "facts": facts.to_json(),
                "why_not_again": self._script.why_not_again(),
            }
        )
        self._losses = []

    def _obey(self) -> None:
        """Do what the controller says until it lets the script go on."""
        while True:
            try:
                command = self._channel.receive()
            finally:
                self._children.go_on()
            match command["op"]:
                case "go":
                    return
                case "score":
                    first = int(command.get("first", 0))
                    self.score(int(command["count"]), int(command["each"]), first)
                    return
                case "pause":
                    self._children.stop()
                    self._channel.send({"event": "paused", "step": self.steps})
                case "trace":
                    file = trace_file(command["directory"], self._rank)
                    self._trace = Trace(file, self._device, int(command["count"]))
                    return
                case "keep":
                    reason = self._rewinder.take()
                    self._channel.send({"event": "kept", "reason": reason})
                case "rewind":
                    assert self._script.loaders.tape is not None
                    self._script.loaders.tape.rewind(int(command["place"]))
                    return
                case "change":
                    self._change(command["knobs"], command["perturbed"])
                case "end":
                    self._end()
                case unknown:
                    raise ValueError(f"the controller said {unknown!r}, which means nothing here")

    def score(self, count: int, each: int, first: int = 0) -> None:
        """Begin the scored window.

        Args:
            count: steps that are timed, and told of after the last.
            each: of how many of them one has its phases timed.
            first: place of the first one in the stretch that it is a part of.

        """
        device = self._device
        self._script.loaders.accounting.begin()
        self._losses = []
        self._script.models.begin_window()
        self.timing.begin(device, count, each, first)

    def _change(self, knobs: dict[str, Any], perturbed: bool) -> None:
        begin = time.perf_counter()
        self._rewinder.restore()
        self._script.change(knobs, perturbed)
        reset_peaks(self._device)
        synchronize(self._device)
        self._channel.send({"event": "changed", "seconds": time.perf_counter() - begin})

    def _end(self) -> None:
        self._is_over = True
        self._swallowed += 1
        if self._swallowed > _MOST_SWALLOWED:
            os._exit(0)  # it catches even SystemExit
        raise Finished(0)

    def tell_end(self) -> None:
        """Say that the script has come to its own end."""
        if not self._is_over:
            reason = self._unmeasurable.why_no_step() if not self.steps else ""
            with contextlib.suppress(ValueError):  # the script has closed it
                print(end="", flush=True)  # its last line may say why
            self._channel.send({"event": "ended", "step": self.steps, "reason": reason})

    def _give_up(self, reason: str) -> None:
        """Say that the script cannot be measured, and why."""
        self._channel.send({"event": "ended", "step": self.steps, "reason": reason})

    def facts(self) -> Facts:
        """What the script has built so far."""
        return self._script.facts()

    def close(self) -> None:
        """End the loaders' workers; take the process group down, where the script has left one."""
        self._script.loaders.close()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _name_of(device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    return str(torch.cuda.get_device_properties(device).uuid) if on_gpu else str(device)


class Children:
    """What a rank has started, such as its loaders' workers, held still while others are measured.

    They would take time from those, and have batches ready that they had no time of their own for.
    """

    def __init__(self) -> None:
        self._stopped: list[psutil.Process] = []

    def stop(self) -> None:
        """Hold all of them still."""
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.suspend()
                self._stopped.append(child)

    def go_on(self) -> None:
        """Let go on what was stopped."""
        while self._stopped:
            with contextlib.suppress(psutil.Error):
                self._stopped.pop().resume()


# -----------------------------------------------------------------------------
# Scripts whose steps cannot be measured, noticed as soon as they show.

_MANY_PASSES = 200
"""Backward passes without any optimizer after which none is to come."""

CANNOT = "its steps cannot be measured"

_BY_HAND = (
    f"it updates its weights without a torch optimizer, whose steps are what is counted: {CANNOT}. "
    "Have the update made in step() of a subclass of torch.optim.Optimizer"
)
_IN_CHILDREN = (
    f"it trains in processes that it starts itself, of which nothing is seen: {CANNOT}. Give the "
    "command what one of them runs, as a script"
)
_UNEVEN = (
    "its ranks have uneven inputs (Join, as in model.join()), and one has no more batches while "
    f"others make steps: {CANNOT} together. Give each rank the same number of batches "
    "(DistributedSampler, drop_last=True), or so many that no epoch ends among the first 68 steps"
)


class Unmeasurable:
    """Notices scripts whose steps will never be seen, or not on all ranks alike.

    Args:
        script: the instruments.
        tell: tells the controller why.

    """

    def __init__(self, script: Script, tell: Callable[[str], None]) -> None:
        self._script = script
        self._tell = tell
        self._owner = os.getpid()
        self._told = False
        self._children = 0
        script.on_backward = self._look_for_optimizer
        wrap(BaseProcess, "start", self._count_child)
        after_import("torch.distributed.algorithms.join", self._meet_join)

    def _meet_join(self, module: Any) -> None:
        wrap(module.Join, "_get_num_nonjoined_procs", self._shadow)

    def is_child(self, steps: int) -> bool:
        """Whether this is a fork of the process that is measured, and tells of nothing.

        Args:
            steps: that the measured process had made when this was forked; a script that makes some
                itself is measured by those.

        """
        if os.getpid() == self._owner:
            return False
        if not self._told and not steps:
            self._tell(_IN_CHILDREN)
        self._told = True
        return True

    def why_no_step(self) -> str:
        """Why a script that has ended made no step; empty where it is not known."""
        if self._script.backward_passes and not self._script.optimizers.made:
            return _BY_HAND
        return _IN_CHILDREN if self._children and not self._script.backward_passes else ""

    def _look_for_optimizer(self) -> None:
        enough = self._script.backward_passes >= _MANY_PASSES
        if enough and not (self._told or self._script.optimizers.made):
            self._told = True
            self._tell(_BY_HAND)

    def _count_child(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        target = getattr(args[0], "_target", None)
        self._children += not getattr(target, "__module__", "").startswith("torch.utils.data.")
        original(*args, **kwargs)

    def _shadow(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        others = original(*args, **kwargs)
        if others and not self._told:
            self._told = True
            self._tell(_UNEVEN)
        return others


# -----------------------------------------------------------------------------
# Take a running script back to where it was after its first step, as far as losses can tell.


class Rewinder:
    """Keeps weights, optimizer state, schedules, scalers and random numbers of one point.

    What a script keeps besides (averages of weights, counters) is not taken back; whether that
    matters is found by training the same steps again and comparing their losses.

    Args:
        script: the instruments.
        local_ranks: processes that share this host's memory.

    """

    def __init__(self, script: Script, local_ranks: int) -> None:
        self._script = script
        self._local_ranks = local_ranks
        self._helpers: list[weakref.ref[Any]] = []
        self._tensors: list[tuple[Any, torch.Tensor]] = []
        self._groups: list[tuple[Any, list[dict[str, Any]]]] = []
        self._states: list[tuple[Any, dict[str, Any]]] = []
        self._random: RandomState | None = None
        wrap(LRScheduler, "__init__", self._remember)
        wrap(torch.amp.GradScaler, "__init__", self._remember)

    def _remember(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        original(*args, **kwargs)
        self._helpers.append(weakref.ref(args[0]))

    def take(self) -> str:
        """Keep the present point; return why it cannot be kept, or nothing."""
        tensors = list(self._held_tensors())
        needed = sum(t.numel() * t.element_size() for t in tensors)
        free = psutil.virtual_memory().available * _MEMORY_SHARE / self._local_ranks
        if needed > free:
            return f"{needed / 2**30:.1f} GiB of weights and state do not fit beside the script"
        self._tensors = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
        self._groups = [
            (optimizer, [_without_parameters(g) for g in optimizer.param_groups])
            for optimizer in self._script.optimizers.live
        ]
        helpers = [helper for ref in self._helpers if (helper := ref()) is not None]
        self._states = [(h, copy.deepcopy(h.state_dict())) for h in helpers]
        self._random = RandomState.now()
        return ""

    def restore(self) -> None:
        """Go back to the point that was kept."""
        with torch.no_grad():
            for tensor, kept in self._tensors:
                tensor.copy_(kept, non_blocking=True)
        for optimizer, groups in self._groups:
            for group, kept in zip(optimizer.param_groups, groups, strict=False):
                group.update(copy.deepcopy(kept))
        for helper, state in self._states:
            helper.load_state_dict(copy.deepcopy(state))
        if self._random is not None:
            self._random.restore()

    def _held_tensors(self) -> Iterable[torch.Tensor]:
        """Every tensor once: parameters, buffers, and the optimizers' state."""
        seen: set[int] = set()
        for tensor in self._all_tensors():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def _all_tensors(self) -> Iterable[torch.Tensor]:
        for wrapper in self._script.wrappers.live:
            yield from wrapper.module.parameters()
            yield from wrapper.module.buffers()
        for optimizer in self._script.optimizers.live:
            for group in optimizer.param_groups:
                yield from group["params"]
            for state in optimizer.state.values():
                yield from (v for v in state.values() if isinstance(v, torch.Tensor))


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(v) for name, v in group.items() if name != "params"}


# -----------------------------------------------------------------------------
# What times a scored window of a script: its instruments told where to mark, and then nobody.


class Timing:
    """Times a script's steps between ``begin`` and ``end``, and the phases of some of them.

    In the other steps the instruments are told of no window, so that they cost short steps little.

    Args:
        script: the instruments.

    Attributes:
        phases: of the window; ``None`` outside of one.
        transfers: copies of the window, on another device than the host where nothing is compiled.
        timer: of the steps, in the window and before it.

    """

    def __init__(self, script: Script) -> None:
        self.phases: Phases | None = None
        self.transfers: Transfers | None = None
        self.timer = StepTimer(torch.device("cpu"))
        self._script = script
        self._each, self._made, self._detailed = 1, 0, False

    def begin(self, device: torch.device, count: int, each: int = 1, first: int = 0) -> None:
        """Begin a window, once the device has come to rest.

        Args:
            device: that the script uses.
            count: steps of the window.
            each: of how many steps one has its phases timed.
            first: place of the first one in the stretch that it is a part of.

        """
        synchronize(device)
        self.timer.device = device
        self.timer.open(count)
        self.phases = Phases(self.timer.clock)
        if device.type != "cpu" and not self._script.is_compiled():
            # not in compiled code, which must not see other methods than it was compiled with
            self.transfers = Transfers(self.phases)
            self.transfers.watch()
        self._each, self._made, self._detailed = each, first, is_detailed(first, each)
        self._tell()
        self._script.parts.begin()

    def end(self) -> None:
        """Mark nothing any more."""
        self.phases, self._detailed = None, False
        self._tell()
        self._script.parts.end()
        if self.transfers is not None:
            self.transfers.undo()
            self.transfers = None

    def before_step(self) -> None:
        """Note that an optimizer's step begins."""
        if self.phases is None:
            return
        self._script.parts.passed(Cause.OWN)
        if self._detailed:
            self.phases.mark(OTHER)

    def after_step(self) -> None:
        """Note that it ended, and the whole step with it."""
        if self.phases is None:
            return
        self._script.parts.passed(Cause.OPTIMIZER)
        self._script.parts.end_step()
        if self._detailed:
            self.phases.mark(OPTIMIZER)
        self.timer.step()
        self._made += 1
        detailed = is_detailed(self._made, self._each)
        if detailed != self._detailed:
            self._detailed = detailed
            self._tell()

    def _tell(self) -> None:
        script, phases = self._script, self.phases if self._detailed else None
        script.calls.phases = script.optimizers.phases = phases
        script.loaders.mark = script.losses.mark = None if phases is None else phases.mark
        if self.transfers is not None:
            self.transfers.watching = self._detailed


# -----------------------------------------------------------------------------
# A Chrome trace of a few steps of a script, by torch's profiler.


class Trace:
    """Runs torch's profiler from now until it is stopped; a profiler that fails is no failure.

    Args:
        file: where the trace goes, compressed.
        device: that the script uses.
        steps: to be traced.

    Attributes:
        left: steps that are still to be made.

    """

    def __init__(self, file: Path, device: torch.device, steps: int) -> None:
        from torch.profiler import ProfilerActivity, profile

        self.left = steps
        self._file = file
        self._device = device
        self._guard = Guard()
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profiler = profile(activities=activities)
        self._guard.read(_PROFILER, self._profiler.start)

    def stop(self) -> str:
        """Write what was seen; why there is nothing, or empty."""
        synchronize(self._device)
        if not self._guard.unsupported:
            self._guard.read(_PROFILER, self._write)
        return self._guard.unsupported.get(_PROFILER, "")

    def _write(self) -> None:
        self._profiler.stop()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory() as directory:
            plain = directory / "trace.json"
            self._profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(self._file, "wb") as target:
                shutil.copyfileobj(source, target)
