"""What rank 0 tells the ranks between two steps, and what they report back: plain JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from perfsearch.core.knob import Value

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


def slowest(reports: list[Report]) -> list[float]:
    """Seconds of each scored step on the rank that took longest."""
    return [max(steps) for steps in zip(*(r.step_s for r in reports), strict=True)]


def slowest_discarded(reports: list[Report]) -> list[float]:
    """Seconds of each step that is not scored, on the rank that took longest."""
    return [max(steps) for steps in zip(*(r.discarded_s for r in reports), strict=True)]
