"""The knobs of an unchanged script: what it builds, what its environment and arguments set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from perfsearch import knobs
from perfsearch.core.knob import Kind, Knob, Numerics, Scope, Value
from perfsearch.core.narrow import SEARCH
from perfsearch.knobs.base import Job, Record, Seen, Use
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.transport import Mapped, current
from perfsearch.knobs.zero import CHECKPOINTING


@dataclass(frozen=True)
class ScriptJob(Job):
    """What decides which knobs a script has.

    Attributes:
        facts: what the script builds; ``None``: it could not be seen, so everything may be there.
        arguments: the script's.
        maps: knobs that it takes by these.
        free: whether the global batch may change.
        wanted: ``runner.knobs``; the choices of mapped knobs that are the script's own come of it.

    """

    _: KW_ONLY
    facts: Seen | None
    arguments: Sequence[str] = ()
    maps: Sequence[Mapped] = ()
    free: bool = False
    wanted: Mapping[str, Any] = field(default_factory=dict)
    use: Use = Use.SCRIPT

    @property
    def seen(self) -> Seen | None:
        """What was seen of it, if anything was."""
        return self.facts


def declare(job: ScriptJob) -> tuple[list[Knob], dict[str, str]]:
    """Every knob that the script has, and why each other one does not exist for it.

    Those of the largest expected effect come first; mapped ones of names of their own come last.
    """
    mapped = {one.name: _mapped(job, one) for one in job.maps}
    found: dict[str, Knob] = {}
    absent: dict[str, str] = {}
    for record in knobs.of(Use.SCRIPT):
        # the script's own argument is the surer way
        made = mapped.pop(record.name, None) or _outside(record, job)
        if isinstance(made, str):
            absent[record.name] = made
        elif made is not None:
            found[record.name] = made
    for name, made in mapped.items():
        assert isinstance(made, Knob)
        found[name] = made
    return list(found.values()), absent


def _outside(record: Record, job: ScriptJob) -> Knob | str | None:
    """The knob where it is set from outside; ``None`` where only an argument could set it."""
    if not record.reaches_scripts:
        return None
    seen = job.seen
    if seen is not None and record.missing and record.name not in seen.changeable():
        return record.missing
    return record.declare(job)


def _mapped(job: ScriptJob, mapped: Mapped) -> Knob | str:
    """The knob of an argument, or of a file's key."""
    name, today = mapped.name, current(job.arguments, mapped)
    if name == MICRO_BATCH.name:
        return _micro_batch(job, today)
    if name == ACCUMULATION.name:
        return f"it follows from {MICRO_BATCH.name}, so that the global batch stays"
    if name == CHECKPOINTING.name:
        return replace(
            CHECKPOINTING.knob, kind=Kind.BOOLEAN, default=bool(today), values=(False, True),
            scope=Scope.PROCESS, help="activations are computed again in the backward pass",
        )  # fmt: skip
    if isinstance(today, bool):
        return Knob(name, Kind.BOOLEAN, today, scope=Scope.PROCESS, **_nature(name))
    return Knob(
        name, Kind.CATEGORICAL, today, values=_choices(job, name, today), scope=Scope.PROCESS,
        help=f"the script's {mapped}", **_nature(name),
    )  # fmt: skip


def _nature(name: str) -> dict[str, Any]:
    """What a mapped argument does, where it has the name of a knob that is known.

    Any other may do anything, as one does that names the implementation of attention.
    """
    record = knobs.by_name.get(name)
    if record is None:
        return {"redraws": True}
    return {"shortens": record.knob.shortens, "redraws": record.knob.redraws}


def _micro_batch(job: ScriptJob, micro: Value) -> Knob | str:
    accumulations = [current(job.arguments, m) for m in job.maps if m.name == ACCUMULATION.name]
    accumulation = accumulations[-1] if accumulations else None
    if not isinstance(micro, int) or isinstance(micro, bool):
        return "its value today is not among the script's arguments"
    if isinstance(accumulation, int):
        share = micro * accumulation
        values: tuple[Value, ...] = tuple(d for d in range(1, share + 1) if share % d == 0)
    elif job.free:
        values = tuple(micro * 2**i // 4 for i in range(6) if micro * 2**i >= 4)
    else:
        return f"alone it would change the global batch: map {ACCUMULATION.name} too"
    return replace(
        MICRO_BATCH.knob, default=micro, values=values, scope=Scope.PROCESS,
        numerics=Numerics.REORDERED,
    )  # fmt: skip


def _choices(job: ScriptJob, name: str, today: Value) -> tuple[Value, ...]:
    """Today's value and those that the user names; nothing else is known of a script's argument."""
    wanted = job.wanted.get(name)
    named = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
    scalars = [v for v in named if isinstance(v, bool | int | float | str)]
    return (today, *(v for v in scalars if v != SEARCH))
