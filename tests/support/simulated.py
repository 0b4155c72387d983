"""A training step on a clock of its own, whose phases take what a test says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsearch.core.trial import Measurement
from perfsearch.training import clock
from perfsearch.training.base import LoaderOptions, TrainStep
from perfsearch.workers import profile
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.profile import SyncWatch
from perfsearch.workers.results import combine
from perfsearch.workers.trial import RankResult


@dataclass(frozen=True)
class Costs:
    """Milliseconds of one step of one rank; ``item`` is a call that waits, inside of forward."""

    loading: float = 1.0
    copying: float = 1.0
    forward: float = 20.0
    item: float = 0.0
    backward: float = 20.0
    communication: float = 0.0
    optimizer: float = 5.0

    @property
    def step(self) -> float:
        return sum(asdict(self).values())


class World:
    """The present, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def spend(self, ms: float) -> None:
        self.now += ms / 1e3

    def clock(self) -> clock.Clock:
        world = self

        class WorldClock(clock.HostClock):
            def now(self) -> Any:
                return world.now

        return WorldClock()


class SimulatedStep(TrainStep):
    loader = LoaderOptions(1)

    def __init__(self, world: World, costs: Costs) -> None:
        self._world, self._costs = world, costs
        self._alone = False
        self.job = SimpleNamespace(flops_per_sample=1.0)

    def run(self, next_batch: Any, mark: Any) -> torch.Tensor:
        loss = next_batch()
        self._world.spend(self._costs.forward)
        if self._costs.item:
            loss.item()
        mark("forward")
        self._world.spend(self._costs.backward)
        mark("backward")
        self._world.spend(0.0 if self._alone else self._costs.communication)
        mark("comm_exposed")
        self._world.spend(self._costs.optimizer)
        mark("optimizer")
        return loss

    def in_force(self) -> dict[str, Any]:
        return {}

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._alone = True
        yield
        self._alone = False


class SimulatedFeed:
    device = torch.device("meta")
    rank = 0

    def __init__(self, world: World, costs: Costs) -> None:
        self._world, self._costs = world, costs
        self.clock = world.clock()

    def __call__(self) -> torch.Tensor:
        self._world.spend(self._costs.loading)
        self.clock.mark("dataloader_next")
        self._world.spend(self._costs.copying)
        self.clock.mark("to_device")
        return torch.zeros(())


def measured(monkeypatch: pytest.MonkeyPatch, *ranks: Costs, **request: Any) -> Measurement:
    """A job of several ranks, profiled; each rank has a host and a device of its own."""
    asked = TrialRequest(0, "none", {}, detail="full", scored_seconds=1.0, **request)
    results = []
    for number, costs in enumerate(ranks):
        world = World()
        monkeypatch.setattr(clock, "make_clock", lambda device, w=world: w.clock())
        monkeypatch.setattr(clock, "slowest", lambda values, device: list(values))
        monkeypatch.setattr(
            profile,
            "SyncWatch",
            lambda w=world: SyncWatch(lambda tensor: True, lambda: w.now),
        )

        def item(tensor: torch.Tensor, w: World = world, c: Costs = costs) -> float:
            w.spend(c.item)
            return 1.0

        monkeypatch.setattr(torch.Tensor, "item", item, raising=False)
        step, feed = SimulatedStep(world, costs), SimulatedFeed(world, costs)
        found = profile.take_profile(step, feed, asked, costs.step / 1e3, steps_before=11)
        place = {"host": f"node{number}", "device": f"GPU-{number}"}
        result = RankResult(
            "ok",
            agreed={"step_seconds": [max(r.step for r in ranks) / 1e3] * 8, "samples_per_step": 8},
            phases_ms=found.phases_ms,
            evidence=found.evidence,
            environment={**found.environment, **place},
        )
        results.append(asdict(result))
    return Measurement(**combine(results)["measurement"])
