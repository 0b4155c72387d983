"""What rank 0 says of a script that was started without a search. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

from perfsearch.core.knob import Value, same_value
from perfsearch.instrument.facts import Facts
from perfsearch.knobs import names_of_taker
from perfsearch.knobs.base import Taker
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.fsdp import STAGE
from perfsearch.knobs.nccl import VARIABLES


def lines(
    knobs: Mapping[str, Value],
    mapped: Mapping[str, str],
    facts: Facts,
    given: Mapping[str, Value] | None = None,
) -> list[str]:
    """What is in force of what was asked for; without knobs, what could be changed.

    Args:
        knobs: what was asked for.
        mapped: knobs that the script was given by its own arguments, and which.
        facts: what the script has built.
        given: values of those, which are compared with what can be read back.

    """
    asked = {name: value for name, value in knobs.items() if value is not None}
    if not asked and not mapped:
        return _offers(facts)
    through = facts.changeable()
    lost = without_effect(knobs, facts)
    lost.update(
        without_effect({n: v for n, v in (given or {}).items() if n in facts.values}, facts)
    )
    if facts.backend and "nccl" not in facts.backend:
        unused = [name for name in mapped if name in VARIABLES]
        lost.update({name: f"{name}: the ranks talk over {facts.backend}" for name in unused})
    told = [f"{name} by {argument}" for name, argument in mapped.items() if name not in lost]
    for name, value in asked.items():
        if name not in lost and name not in mapped:
            told.append(
                f"{name}={_shown(value)}" + (f" ({through[name]})" if name in through else "")
            )
    found = [f"in force: {', '.join(told)}"] if told else []
    return found + [f"without effect: {reason}" for reason in lost.values()]


def _offers(facts: Facts) -> list[str]:
    through = facts.changeable()
    engine = _of_engine(facts)
    if not through and not engine:
        return [
            "nothing was changed, and of this script nothing could be: it makes no "
            "DistributedDataParallel, no FSDP module, no DataLoader and no torch optimizer"
        ]
    shown = [
        f"{name}" + (f"={_shown(facts.values[name])}" if name in facts.values else "")
        for name in through
    ]
    return [
        "nothing was changed. What could be, with its value now: " + ", ".join([*engine, *shown]),
        "to search them: perfsearch-run --search SCRIPT ARGS; to set what a search has found: "
        "perfsearch-run --knobs best/config.yaml SCRIPT ARGS",
    ]


def _of_engine(facts: Facts) -> list[str]:
    """DeepSpeed's settings, which go into its configuration."""
    if "deepspeed" not in facts.wrappers:
        return []
    return [f"{name}={_shown(facts.values[name])}" for name in OF_ENGINE if name in facts.values]


def without_effect(knobs: Mapping[str, Value], facts: Facts) -> dict[str, str]:
    """Knobs that were asked for and are not in force, and why."""
    lost: dict[str, str] = {}
    through = facts.changeable()
    for name, value in knobs.items():
        if value is None:
            continue
        if name in facts.ignored:
            lost[name] = facts.ignored[name]
        elif name in facts.values:
            if not agree(value, facts.values[name]):
                found = _shown(facts.values[name])
                lost[name] = f"{name}={_shown(value)} was asked for, {found} is in force"
        elif name in OF_OBJECTS and name not in through and value not in _OFF:
            lost[name] = f"{name}={_shown(value)}: the script makes nothing that takes it"
    return lost


_OFF = (False, 0, "none", "default")
"""Values that do nothing, so that nothing is missed where they have no place."""

OF_ENGINE = (STAGE.name, MICRO_BATCH.name, ACCUMULATION.name)
"""Knobs that DeepSpeed's engine tells the value of."""

OF_OBJECTS = frozenset(
    name for taker in Taker if taker is not Taker.PROCESS for name in names_of_taker(taker)
)
"""Knobs that exist only where the script builds what they belong to."""


def agree(wanted: Value, found: Value) -> bool:
    """Whether a value that was read back is the one that was asked for."""
    if isinstance(wanted, bool) or isinstance(found, bool):
        return same_value(wanted, found)
    if isinstance(wanted, int | float) and isinstance(found, int | float):
        return abs(wanted - found) <= 1e-6 * max(1.0, abs(wanted))
    return str(wanted).lower() == str(found).lower() or wanted == "default"


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
