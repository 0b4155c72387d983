"""What of a running job can be changed between two steps, as knobs. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfsearch.core.hardware import Hardware
from perfsearch.core.knob import Kind, Knob, Scope, Value, same_value
from perfsearch.core.narrow import SEARCH, KnobError, narrow
from perfsearch.core.space import Constraint, Space
from perfsearch.online import log
from perfsearch.online.options import TUNABLE, AutotuneOptions
from perfsearch.runners import _ddp_knobs
from perfsearch.workloads.spec import Traits

_ON_REQUEST = {
    "static_graph": "that the graph never changes is a promise which only you can give",
}
_SMALLEST_BUCKET_MB, _LARGEST_BUCKET_MB = 1 / 16, 512.0
_PLAIN = Traits(samples_per_rank={}, auto_cpu="", auto_gpu="")


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
        elif by_default and knob.name in _ON_REQUEST:
            left_out[knob.name] = _ON_REQUEST[knob.name]
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
    searched = [_with_default(knob) for knob in searched]
    return Space(searched, _constraints(searched, present)), pinned, left_out


def _declare(
    facts: Mapping[str, Any], options: AutotuneOptions
) -> tuple[list[Knob], dict[str, str]]:
    hardware = Hardware(facts["device"], facts["ranks_per_node"], facts["nodes"], gpus=(), cores=1)
    takes = frozenset(facts["wrapper_parameters"])
    everything, absent = _ddp_knobs.declare(_ddp_knobs.Surroundings(hardware, _PLAIN, {}, takes))
    present: Mapping[str, Value] = facts["configuration"]
    knobs = []
    left_out = {name: why for name, why in absent.items() if name in TUNABLE}
    for knob in everything:
        if knob.name not in TUNABLE:
            continue
        if knob.name not in present:
            left_out[knob.name] = "it cannot be changed in this job"
            continue
        knob = replace(knob, default=present[knob.name], scope=Scope.STEP)
        chosen = options.knobs.get(knob.name, SEARCH) != SEARCH
        if knob.name in ("bucket_cap_mb", "first_bucket_mb") and chosen:
            knob = replace(
                knob, kind=Kind.REAL, values=(), low=_SMALLEST_BUCKET_MB, high=_LARGEST_BUCKET_MB
            )
        elif knob.name == "bucket_cap_mb":
            knob = _buckets_of(knob, float(facts["gradient_mib"]))
        elif knob.name == "first_bucket_mb":
            knob = _up_to(knob, max(1.0, float(facts["gradient_mib"])))
        knobs.append(knob)
    return knobs, left_out


def _buckets_of(knob: Knob, gradient_mib: float) -> Knob:
    """Powers of two up to where everything is in one bucket, and what is in force today."""
    largest = min(_LARGEST_BUCKET_MB, 2.0 ** math.ceil(math.log2(max(gradient_mib, 0.5))))
    smallest = 1.0 if largest >= 64 else 0.25
    count = round(math.log2(largest / smallest)) + 1
    values = [smallest * 2.0**i for i in range(count)]
    return replace(
        knob, kind=Kind.ORDINAL, values=tuple(values), low=None, high=None, log=False, step=None
    )


def _up_to(knob: Knob, largest: float) -> Knob:
    kept = tuple(v for v in knob.values if isinstance(v, int | float) and v <= largest)
    return replace(knob, values=kept or knob.values[:1])


def _with_default(knob: Knob) -> Knob:
    """A knob that can take what is in force today, which is the first thing to be measured."""
    if knob.contains(knob.default):
        return knob
    if knob.is_range:
        assert knob.low is not None and knob.high is not None
        assert isinstance(knob.default, int | float)
        return replace(
            knob, low=min(knob.low, knob.default), high=max(knob.high, knob.default), step=None
        )
    values: Sequence[Value] = (*knob.values, knob.default)
    if knob.kind is Kind.ORDINAL:
        values = sorted(values, key=lambda v: float(v))  # type: ignore[arg-type]
    return replace(knob, values=tuple(values))


def _constraints(knobs: Sequence[Knob], present: Mapping[str, Value]) -> list[Constraint]:
    """A first bucket that is larger than the others is another name for larger buckets."""
    names = {knob.name for knob in knobs}
    if not {"bucket_cap_mb", "first_bucket_mb"} <= names:
        return []

    def holds(configuration: Mapping[str, Value]) -> bool:
        first, cap = configuration["first_bucket_mb"], configuration["bucket_cap_mb"]
        today = all(same_value(configuration[n], present[n]) for n in names)
        return today or float(first or 0) <= float(cap or 0)

    return [Constraint("the first bucket is no larger than the others", holds)]


# -----------------------------------------------------------------------------
# What is wrong with options of tuning in any job, told before one starts. No torch here.

_RANKS = 5040  # a number with many divisors: the real one is known once the ranks are there
_ANY_JOB: dict[str, Any] = {
    "device": "cuda",
    "ranks_per_node": _RANKS,
    "nodes": 1,
    "gradient_mib": 512.0,
    "wrapper_parameters": ["bucket_cap_mb_list", "gradient_as_bucket_view", "static_graph"],
    "configuration": {
        "bucket_cap_mb": 25.0,
        "first_bucket_mb": 1.0,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "hierarchical_group_size": 0,
        "optimizer_implementation": "default",
    },
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
