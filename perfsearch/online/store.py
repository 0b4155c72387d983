"""How ranks agree between two steps: through the job's store, with no collective.

Nothing here can hang: every wait has a limit, and a round that not everybody reached in time ends
tuning on all ranks alike, since whoever writes its outcome first decides it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from perfsearch.core.knob import Value

_ROUNDS_KEPT = 2


class Channel:
    """Rounds of one report a rank, answered by one instruction for all of them.

    Args:
        store: of the job; a connection of its own is made where the kind of store allows it.
        ranks: global ranks that take part, the one that decides first.
        rank: this process's.
        serial: which tuned model of this process it is for.
        limit_s: how long a round may wait for a rank.

    """

    def __init__(self, store: Any, ranks: list[int], rank: int, serial: int, limit_s: float):
        import torch.distributed as dist

        name = hashlib.sha256(str(ranks).encode()).hexdigest()[:12]
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"perfsearch/online/{name}/{serial}", own)
        self._ranks = ranks
        self._rank = rank
        self._limit = timedelta(seconds=limit_s)
        self._round = 0

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._rank == self._ranks[0]

    def report(self, report: Report) -> None:
        """Begin a round with this rank's report."""
        self._round += 1
        self._store.set(f"{self._round}/{self._rank}", report.to_text())

    def gather(self) -> list[Report] | None:
        """On the deciding rank: every rank's report, ``None`` where one did not come in time."""
        keys = [f"{self._round}/{rank}" for rank in self._ranks]
        try:
            self._store.wait(keys, self._limit)
        except RuntimeError:  # DistStoreError is one
            return None
        return [Report.from_text(self._store.get(key).decode()) for key in keys]

    def decide(self, instruction: Instruction) -> Instruction:
        """On the deciding rank: answer the round.

        Returns:
            What holds: another rank may have given up the wait, and thereby ended tuning.

        """
        held = self._write_decision(instruction)
        self._forget(self._round - _ROUNDS_KEPT)
        return held

    def await_decision(self) -> Instruction:
        """On the other ranks: the answer of the round, ``end`` where none came in time."""
        key = f"{self._round}/decision"
        try:
            # the deciding rank waits for every report first, and decides after that
            self._store.wait([key], 3 * self._limit)
        except RuntimeError:  # DistStoreError is one
            reason = f"rank {self._ranks[0]} did not answer in time"
            return self._write_decision(Instruction(END, reason=reason, goes_back=True))
        return Instruction.from_text(self._store.get(key).decode())

    def _write_decision(self, instruction: Instruction) -> Instruction:
        key = f"{self._round}/decision"
        held = self._store.compare_set(key, "", instruction.to_text())
        return Instruction.from_text(held.decode())

    def _forget(self, number: int) -> None:
        if number < 1:
            return
        for name in (*self._ranks, "decision"):
            self._store.delete_key(f"{number}/{name}")


# -----------------------------------------------------------------------------
# What rank 0 tells the ranks between two steps, and what they report back: plain JSON.

APPLY, RUN, END, FAIL = "apply", "run", "end", "fail"


@dataclass(frozen=True)
class Instruction:
    """What every rank does next.

    Attributes:
        kind: ``apply`` puts a configuration into force at once, ``run`` trains some steps,
            ``end`` leaves things as they are for the rest of training, ``fail`` ends training,
            as ranks may differ in what is in force.
        configuration: for ``apply``.
        discard: for ``run``: steps that are not scored.
        score: for ``run``: steps that are scored, after those.
        reason: for ``end`` and ``fail``: why.
        goes_back: for ``end``: whether a configuration that not every rank has confirmed is
            taken back.

    """

    kind: str
    configuration: dict[str, Value] = field(default_factory=dict)
    discard: int = 0
    score: int = 0
    reason: str = ""
    goes_back: bool = False

    @property
    def steps(self) -> int:
        """Steps that are trained, for ``run``."""
        return self.discard + self.score

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Instruction:
        """What ``to_text`` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Report:
    """How a rank fared with the last instruction.

    Attributes:
        train_iter: optimizer steps of this model so far.
        failure: why a configuration could not be put into force; empty where it was.
        applied_s: seconds that this took.
        discarded_s: seconds of each step that is not scored.
        step_s: seconds of each scored step.
        facts: what there is to tune, in the first report.

    """

    train_iter: int
    failure: str = ""
    applied_s: float = 0.0
    discarded_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Report:
        """What ``to_text`` wrote."""
        return cls(**json.loads(text))


def slowest_rank_seconds(reports: list[Report]) -> list[float]:
    """Seconds of each scored step on the rank that took longest."""
    return [max(steps) for steps in zip(*(r.step_s for r in reports), strict=True)]


def slowest_discarded(reports: list[Report]) -> list[float]:
    """Seconds of each step that is not scored, on the rank that took longest."""
    return [max(steps) for steps in zip(*(r.discarded_s for r in reports), strict=True)]
