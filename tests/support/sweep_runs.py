"""Run directories of a sweep, with nothing but their journals."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from support.search_runs import journal_in, trial

from perfsearch.core.trial import Purpose, Status
from perfsearch.core.verdict import Interval


def searched(
    directory: Path,
    costs: Sequence[float | None],
    parameters: dict[str, object],
    speed_up: float | None = None,
    sentinel: float | None = None,
) -> Path:
    """A run directory with the journal of a search; of a trial without a cost it failed."""
    journal = journal_in(directory, directory.name)
    journal.append("opened", unix_s=time.time(), definition={}, parameters=parameters)
    trials = [
        trial(n, cost=cost, objective=100 / cost) if cost else trial(n, Status.OOM)
        for n, cost in enumerate(costs)
    ]
    if sentinel:
        again = trial(len(costs), cost=sentinel, objective=100 / sentinel)
        again.purpose = Purpose.SENTINEL
        trials.append(again)
    for one in trials:
        journal.append("finished", unix_s=time.time(), trial=one.to_json())
    if speed_up is not None:
        interval = vars(Interval(speed_up, speed_up - 0.1, speed_up + 0.1, 6))
        journal.append("confirmed", blocks=6, intervals={"1": interval})
    tags = {"perfsearch.verdict": "gain" if speed_up else "no gain"}
    tags["perfsearch.best_trial"] = "1" if speed_up else "0"
    journal.append("summarised", numbers={}, tags=tags, note="", files=[])
    journal.close()
    return directory


def of(strategy: str, seed: int, **others: object) -> dict[str, object]:
    return {"runner": "ddp", "strategy": strategy, "seed": seed, **others}
