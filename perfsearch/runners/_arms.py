"""Several jobs, measured as if they were configurations of one: its only knob is ``arm``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from perfsearch.core.hardware import Environment, used_gib
from perfsearch.core.knob import Configuration, Kind, Knob, Scope
from perfsearch.core.space import Space
from perfsearch.core.trial import PARAMETERS, Measurement, Outcome, Purpose, Status
from perfsearch.metrics.system import available_bytes
from perfsearch.runners._script.runner import Script
from perfsearch.runners.base import (
    HoldsDevices,
    MeasuresInTurns,
    Plan,
    Runner,
    StartsScripts,
    Turns,
)

ARM = "arm"

_SAME_WORK = 0.02
"""Relative difference of samples or tokens a step that windows of the same job may show."""


_MOST_MEMORY = 0.9
"""Part of the free memory that starts which are alive together may take."""

_CONTEXT_GIB = 1.0
"""Memory of a GPU that a rank takes beside its allocator's: CUDA's own and communicators'."""


@dataclass(frozen=True)
class Footprint:
    """What a start takes of the machine.

    Attributes:
        device_gib: peak memory of each of its devices; 0 of a job without GPUs.
        host_gib: memory of the host.
        devices: that its ranks used.

    """

    device_gib: float
    host_gib: float
    devices: frozenset[str]


class Arms(Runner, HoldsDevices, StartsScripts, MeasuresInTurns):
    """Starts one of the jobs at a time, or several of which one is measured at a time.

    Args:
        arms: the jobs by name; the first is the one that others are compared with.
        environment: where it is on record.
        in_turns: whether starts of several may be alive at the same time.

    Attributes:
        in_turns: the same, for as long as nothing speaks against it.
        said: remarks of jobs that were started since it was last emptied.
        in_one_start: whether the arms are measured inside one start, switched between its steps.

    """

    in_one_start = False
    in_turns = False

    def __init__(
        self, arms: Mapping[str, Script], environment: Environment, in_turns: bool = True
    ) -> None:
        super().__init__(self.Options(), environment)
        names = tuple(arms)
        self.arms = dict(arms)
        self.space = Space([Knob(ARM, Kind.CATEGORICAL, names[0], names, scope=Scope.PROCESS)])
        self.baseline = {ARM: names[0]}
        self.hardware = arms[names[0]].hardware
        self.devices = max(script.devices for script in arms.values())
        self.cautions = list(dict.fromkeys(c for s in arms.values() for c in s.cautions))
        self.said: list[str] = []
        self.in_turns = in_turns
        self._opened: set[str] = set()
        self._taken: dict[str, Footprint] = {}
        self._ended_early: set[str] = set()
        self._reference: Measurement | None = None

    def device_set(self) -> str:
        """What all of them use together."""
        used = {name for s in self.arms.values() for name in s.device_set().split(",")}
        return ",".join(sorted(used))

    def open(self, run_dir: Path) -> None:
        """Get ready; each job is started when it is first measured."""
        super().open(run_dir)
        for files in {id(script.files): script.files for script in self.arms.values()}.values():
            files.own = [run_dir, *files.own]

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Start the job anew and measure it; it has ended when this returns."""
        name = str(configuration[ARM])
        script, whole = self.arms[name], replace(plan, fresh=True)
        if name not in self._opened:
            self._opened.add(name)
            script.open(self.environment.run_dir / "arms" / str(len(self._opened)))
            self.said += [f"{name}: {remark}" for remark in script.remarks]
            # which has started it, to see how that is done: it is measured in this start
            whole = replace(plan, fresh=False, purpose=Purpose.BASELINE)
        outcome = replace(script.measure(script.baseline, whole), fresh_process=True)
        if self.in_turns:
            self._note(name, outcome.measurement)
        script.rest()
        return self._same_work(configuration, outcome)

    def measure_in_turns(self, configuration: Configuration, plan: Plan) -> Turns[Outcome]:
        """Start the job anew, and measure it in windows between those of others.

        It was measured alone before.
        """
        name = str(configuration[ARM])
        script = self.arms[name]
        outcome = yield from script.measure_in_turns(script.baseline, replace(plan, fresh=True))
        if outcome.status is Status.OK and not script.is_alive:
            self._ended_early.add(name)
        script.rest()
        return self._same_work(configuration, replace(outcome, fresh_process=True))

    def _note(self, name: str, measured: Measurement | None) -> None:
        """Note what a start takes that has just been measured and still lives."""
        if measured is None:
            return
        on_gpu = bool(self.arms[name].hardware.gpus)
        peak_gib = measured.peak_reserved_gib or measured.peak_allocated_gib or 0.0
        ranks = measured.environment.get("ranks", [])
        self._taken[name] = Footprint(
            peak_gib + _CONTEXT_GIB if on_gpu else 0.0,
            self.arms[name].host_gib(),
            frozenset(f"{rank['host']} {rank['device']}" for rank in ranks),
        )

    def why_not_in_turns(self) -> str:
        """What speaks against starts of all arms at the same time; empty where nothing does.

        Told from the first look at each: it is asked while nothing runs.
        """
        if self._ended_early:
            return f"{', '.join(sorted(self._ended_early))} came to its end before the others"
        taken = list(self._taken.values())
        for one, other in itertools.combinations(taken, 2):
            if one.devices.isdisjoint(other.devices):
                return "they use different devices"
        free_gib = _MOST_MEMORY * available_bytes() / 2**30
        host_gib = sum(each.host_gib for each in taken)
        if host_gib > free_gib:
            return f"they take {host_gib:.3g} GiB together, and {free_gib:.3g} GiB are to be had"
        device_gib = sum(each.device_gib for each in taken)
        gpus = self.hardware.gpus
        for gpu, used in zip(gpus, used_gib(gpus), strict=False):
            free_gib = _MOST_MEMORY * (gpu.memory_gib - used)
            if device_gib > free_gib:
                return (
                    f"they take {device_gib:.3g} GiB of a GPU together, and {free_gib:.3g} GiB of "
                    f"{gpu.name} are to be had"
                )
        return self._shared_files()

    def _shared_files(self) -> str:
        """Files that starts of two arms would both meet, in words; empty where there are none.

        What one writes in a directory another may read there, as a checkpoint to go on from.
        """
        scripts = list(self.arms.values())
        for one, other in itertools.combinations(scripts, 2):
            changed = one.files.changed & other.files.changed
            if changed:
                named = os.path.relpath(min(changed))
                return f"a start of one changes files that another would meet ({named})"
        return ""

    def _same_work(self, configuration: Configuration, outcome: Outcome) -> Outcome:
        """The outcome, which is a failure where a step of it is other work than the first's."""
        measured = outcome.measurement
        if outcome.status is not Status.OK or measured is None:
            return outcome
        first = str(self.baseline[ARM])
        if configuration[ARM] == first:
            self._reference = self._reference or measured
            return outcome
        why = "" if self._reference is None else other_work(self._reference, measured, first)
        return Outcome(Status.DIVERGED, None, why, outcome.log_path, True) if why else outcome

    def export(self, configuration: Configuration, directory: Path) -> list[Path]:
        """Nothing is handed over."""
        return []

    def identity(self) -> dict[str, str]:
        """Commands, devices and versions: what the result holds for."""
        commands = {f"{ARM} {n}": s.identity()["workload"] for n, s in self.arms.items()}
        return {**commands, **self.hardware.identity()}

    def not_as_before(self) -> list[str]:
        """Which of the user's files are not as they were; nothing runs any more."""
        self.close()
        here = {id(s.files): s.files for s in self.arms.values() if not s.environment.directory}
        return [line for files in here.values() if (line := files.not_as_before())]

    def close(self) -> None:
        """End whatever runs."""
        for script in self.arms.values():
            script.close()


class Switched(Arms):
    """One script with knobs that a running job can change, measured inside one start of it.

    Its readings vary by what steps vary by, and not by what starts do. Where it turns out that the
    script cannot be taken back to its first step, each reading has a start of its own.

    Args:
        script: with these knobs in its space.
        arms: the knobs that are not as the script has them, by the arm's name.
        environment: where it is on record.

    """

    in_one_start = True

    def __init__(
        self, script: Script, arms: Mapping[str, Configuration], environment: Environment
    ) -> None:
        super().__init__(dict.fromkeys(arms, script), environment, in_turns=False)
        self._script, self._knobs = script, arms

    def measure(self, configuration: Configuration, plan: Plan) -> Outcome:
        """Go on in the running start, from its first step on, with the arm's knobs."""
        script, whole = self._script, replace(plan, fresh=plan.fresh or not self.in_one_start)
        first = not self._opened
        if first:
            self._opened.update(self.arms)
            script.open(self.environment.run_dir / "arms" / "1")
            self.said += [line for line in script.remarks if line.startswith("warning")]
            whole = replace(plan, fresh=False, purpose=Purpose.BASELINE)
        knobs = self._knobs[str(configuration[ARM])]
        outcome = script.measure({**script.baseline, **knobs}, whole)
        outcome = replace(outcome, fresh_process=first or outcome.fresh_process)
        if not self.in_one_start:
            script.rest()
        return self._same_work(configuration, outcome)


def other_work(reference: Measurement, measured: Measurement, whose: str) -> str:
    """What a step trains that is not what the reference's does; empty where it is the same.

    Args:
        reference: of the job that is compared with.
        measured: of the other job.
        whose: name of the former.

    """
    for (what, before, apart), (_, now, _) in zip(_work(reference), _work(measured), strict=True):
        if before == now:
            continue
        if before is None or now is None or abs(now - before) > apart * before:
            shown = ["not counted" if n is None else str(n) for n in (now, before)]
            return f"{what}: {shown[0]}, and {shown[1]} in {whose}"
    return ""


def _work(measured: Measurement) -> list[tuple[str, int | None, float]]:
    """What is counted of a step, how much it is, and what windows of one job may differ by."""
    return [
        ("samples a step", measured.samples_per_step, _SAME_WORK),
        ("tokens a step", measured.tokens_per_step, _SAME_WORK),
        ("trained parameters", measured.environment.get(PARAMETERS), 0.0),
    ]
