"""What of a running job can be changed between two steps, as knobs. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Kind, Knob, Scope, Value
from perfsearch.core.narrow import SEARCH, KnobError, narrow
from perfsearch.core.space import Space
from perfsearch.knobs import by_name, of
from perfsearch.knobs.base import Job, Use, declare, with_default
from perfsearch.knobs.ddp import DdpArgument, constructor_records, online_constraints
from perfsearch.online import log
from perfsearch.online.options import AutotuneOptions


def make_space(
    facts: Mapping[str, Any], options: AutotuneOptions
) -> tuple[Space, dict[str, Value], dict[str, str]]:
    """The knobs to tune in a job.

    Args:
        facts: what the ranks found: ``device``, ``ranks_per_node``, ``nodes``, ``gradient_mib``,
            ``wrapper_parameters``, ``configuration`` (what is in force), ``fixed`` (knob to the
            reason why it stays as it is).
        options: what the user narrowed or fixed.

    Returns:
        The space, every fixed knob's value, and why knobs that exist elsewhere are not tuned.

    Raises:
        KnobError: the user's setting of a knob cannot be honoured.

    """
    present: Mapping[str, Value] = facts["configuration"]
    declared, left_out = _declare(facts, options)
    settings: dict[str, Any] = {}
    for knob in declared:
        asked = options.knobs.get(knob.name, SEARCH)
        by_default = knob.name not in options.knobs
        if knob.name in facts["fixed"]:
            if not by_default and asked not in (SEARCH, present[knob.name]):
                why = facts["fixed"][knob.name]
                raise KnobError(f"autotune.knobs.{knob.name}={asked}: {why}")
            left_out[knob.name] = facts["fixed"][knob.name]
            settings[knob.name] = present[knob.name]
        elif by_default and by_name[knob.name].on_request:
            left_out[knob.name] = by_name[knob.name].on_request
            settings[knob.name] = present[knob.name]
        elif by_default and knob.numerics.rank > options.numerics.rank:
            left_out[knob.name] = f"it is {knob.numerics} and numerics={options.numerics}"
            settings[knob.name] = present[knob.name]
        else:
            settings[knob.name] = asked
    for name, asked in options.knobs.items():
        is_off = asked is None or asked is False or asked == 0
        if name in left_out and name not in settings and asked != SEARCH and not is_off:
            raise KnobError(f"autotune.knobs.{name}={asked}: {left_out[name]}")
    try:
        searched, pinned = narrow(declared, settings, options.numerics)
    except KnobError as error:
        raise KnobError(str(error).replace("runner.knobs.", "autotune.knobs.")) from error
    searched = [_with_today(knob) for knob in searched]
    rules = online_constraints({knob.name for knob in searched}, present)
    return Space(searched, rules), pinned, left_out


_POINTS = 16
"""Values of a range that are tried where what is in force today lies outside of it."""


def _with_today(knob: Knob) -> Knob:
    """The knob with what is in force today, which is the first thing to be measured.

    A range stays as it was asked for: where today's value lies outside, it becomes a list.
    """
    if not knob.is_range or knob.contains(knob.default):
        return with_default(knob, knob.default)
    if knob.count is not None and knob.count <= _POINTS:
        values = knob.choices() or ()
    else:
        values = tuple(knob.from_unit(place / (_POINTS - 1)) for place in range(_POINTS))
    listed = replace(
        knob, kind=Kind.ORDINAL, values=values, low=None, high=None, log=False, step=None
    )
    return with_default(listed, knob.default)


def _declare(
    facts: Mapping[str, Any], options: AutotuneOptions
) -> tuple[list[Knob], dict[str, str]]:
    machine = Hardware(facts["device"], facts["ranks_per_node"], facts["nodes"], gpus=(), cores=1)
    takes = frozenset(facts["wrapper_parameters"])
    present: Mapping[str, Value] = facts["configuration"]
    found, left_out = declare(of(Use.ONLINE), Job(machine, {}, takes, use=Use.ONLINE))
    knobs = []
    for knob in found:
        if knob.name not in present:
            left_out[knob.name] = "it cannot be changed in this job"
            continue
        knob = replace(knob, default=present[knob.name], scope=Scope.STEP)
        record = by_name[knob.name]
        if isinstance(record, DdpArgument):
            named = options.knobs.get(knob.name, SEARCH) != SEARCH
            knob = record.online_fit(knob, float(facts["gradient_mib"]), named)
        knobs.append(knob)
    return knobs, left_out


# -----------------------------------------------------------------------------
# What is wrong with options of tuning in any job, told before one starts. No torch here.

_RANKS = 5040  # a number with many divisors: the real one is known once the ranks are there
_ANY_JOB: dict[str, Any] = {
    "device": "cuda",
    "ranks_per_node": _RANKS,
    "nodes": 1,
    "gradient_mib": 512.0,
    "wrapper_parameters": [record.parameter for record in constructor_records(Use.ONLINE)],
    "configuration": {record.name: record.default for record in of(Use.ONLINE)},
    "fixed": {},
}
"""Facts, as the ranks find them, of a job in which every knob can be tuned."""


def check_knobs(options: AutotuneOptions) -> None:
    """Refuse what the ranks would only come upon in the middle of training, or rank 0 alone.

    Raises:
        BadInputError: the log to start from or to freeze is none, or no job can have what is asked
            of a knob.

    """
    for path in (options.start_from, options.freeze):
        if path is not None:
            log.read(path)
    if options.knobs:
        make_space(_ANY_JOB, options)
