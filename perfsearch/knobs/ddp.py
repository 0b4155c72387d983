"""DistributedDataParallel's knobs: arguments of its constructor, and a hook. No torch here.

A plain boolean argument is one line of ``RECORDS`` and one of ``conf/runner/ddp.yaml``: it is then
searched by ``runner=ddp``, given to the wrappers of unchanged scripts, tuned between two steps of
a job that goes on, read back from the wrapper, and handed over.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope, Value, same_value
from perfsearch.core.space import Constraint
from perfsearch.knobs.base import ALONE, Fit, Job, Record, Taker, Use
from perfsearch.knobs.fsdp import STAGE

MIB = 2**20

DEFAULT_FIRST_BUCKET_MB = 1.0
_START_BUCKET_MB = 64.0
"""Horovod's fusion threshold of old: fewer, larger messages than torch's 25 MiB."""

_SMALLEST_BUCKET_MB, _LARGEST_BUCKET_MB = 1 / 16, 512.0
_WHOLE = {STAGE.name: (0, 1)}
"""The stages of ``runner=zero`` that wrap by DistributedDataParallel."""

OnlineFit = Callable[[Knob, float, bool], Knob]
"""Makes a knob one of a running job, whose gradients have so many MiB; the user may have named
values."""


def _in_stages(knob: Knob, job: Job) -> Knob:
    return replace(knob, when=_WHOLE) if job.use is Use.ZERO else knob


@dataclass(frozen=True)
class DdpArgument(Record):
    """A knob that is an argument of the constructor.

    Attributes:
        argument: its name; empty: the knob's own.
        lacking: what is said where the installed constructor does not take it.
        read: its value from a wrapper; ``None``: the attribute of the argument's name.
        attributes: what the wrapper keeps of it, taken over when it changes between two steps;
            empty: the attribute of the argument's name.
        online_fit: which values make sense in a running job.
        off: how a script is told to do without it, where it has it today.

    """

    _: KW_ONLY
    fit: Fit = _in_stages
    uses: frozenset[Use] = frozenset({Use.DDP, Use.SCRIPT, Use.ONLINE})
    takers: tuple[Taker, ...] = (Taker.DDP,)
    missing: str = "the script makes no DistributedDataParallel"
    argument: str = ""
    lacking: str = "the installed torch lacks it"
    read: Callable[[Any], Value] | None = None
    attributes: tuple[str, ...] = ()
    online_fit: OnlineFit = lambda knob, gradient_mib, named: knob
    off: str = "# DistributedDataParallel: without {name}"

    @property
    def parameter(self) -> str:
        """The constructor's name for it."""
        return self.argument or self.name

    @property
    def kept_as(self) -> tuple[str, ...]:
        """Attributes of the wrapper that hold it."""
        return self.attributes or (self.parameter,)

    def declare(self, job: Job) -> Knob | str:
        """The knob, unless the installed torch takes no such argument."""
        return super().declare(job) if self.parameter in job.wrapper_parameters else self.lacking

    def value_of(self, wrapper: Any) -> Value:
        """What is in force in a wrapper."""
        if self.read is not None:
            return self.read(wrapper)
        found: Value = getattr(wrapper, self.parameter)
        return bool(found) if self.knob.kind is Kind.BOOLEAN else found


def _bucket(knob: Knob, job: Job) -> Knob | str:
    if job.is_alone:
        return ALONE
    if job.use is not Use.ZERO:
        return knob
    sizes = (5.0, 25.0, 100.0, 400.0)
    return replace(knob, kind=Kind.ORDINAL, values=sizes, low=None, high=None, log=False,
                   when=_WHOLE)  # fmt: skip


def _cap_mb(wrapper: Any) -> float:
    listed = getattr(wrapper, "bucket_bytes_cap_list", None)
    return float((listed[-1] if listed else wrapper.bucket_bytes_cap) / MIB)


def _first_mb(wrapper: Any) -> float:
    """Torch's own rule: the first bucket is small where no size was asked for."""
    listed = getattr(wrapper, "bucket_bytes_cap_list", None)
    if listed:
        return float(listed[0] / MIB)
    cap = _cap_mb(wrapper)
    if getattr(wrapper, "bucket_bytes_cap_default", False):
        return min(cap, DEFAULT_FIRST_BUCKET_MB)
    return cap


def _any_size(knob: Knob) -> Knob:
    low, high = _SMALLEST_BUCKET_MB, _LARGEST_BUCKET_MB
    return replace(knob, kind=Kind.REAL, values=(), low=low, high=high)


def _online_bucket(knob: Knob, gradient_mib: float, named: bool) -> Knob:
    """Powers of two up to where everything is in one bucket."""
    if named:
        return _any_size(knob)
    largest = min(_LARGEST_BUCKET_MB, 2.0 ** math.ceil(math.log2(max(gradient_mib, 0.5))))
    smallest = 1.0 if largest >= 64 else 0.25
    count = round(math.log2(largest / smallest)) + 1
    values = tuple(smallest * 2.0**i for i in range(count))
    return replace(
        knob, kind=Kind.ORDINAL, values=values, low=None, high=None, log=False, step=None
    )


def _online_first(knob: Knob, gradient_mib: float, named: bool) -> Knob:
    if named:
        return _any_size(knob)
    most = max(1.0, gradient_mib)
    kept = tuple(v for v in knob.values if isinstance(v, int | float) and v <= most)
    return replace(knob, values=kept or knob.values[:1])


def _static(knob: Knob, job: Job) -> Knob | str:
    if job.seen is not None and job.seen.accumulates:
        return "torch cannot begin a static graph with gradients that are not reduced (no_sync)"
    return knob


def _unused(knob: Knob, job: Job) -> Knob | str:
    if job.seen is None or not FIND_UNUSED.of(job.seen.values):
        return "the script does not ask for it"
    return knob


def _groups(knob: Knob, job: Job) -> Knob | str:
    world = job.machine.world_size
    sizes = [d for d in range(2, world) if world % d == 0]
    if world < 4 or not sizes:
        return f"{world} ranks cannot be split into groups (at least 4, not a prime number)"
    return replace(knob, values=(0, *sizes))


BUCKET_CAP = DdpArgument(
    Knob(
        "bucket_cap_mb", Kind.REAL, 25.0, low=1.0, high=512.0, log=True, unit="MiB",
        numerics=Numerics.REORDERED, help="gradients are reduced in buckets of this size",
        shortens=(Part.COMMUNICATION,),
    ),
    uses=frozenset(Use), effect=86, zero_effect=30, fit=_bucket, read=_cap_mb,
    online_fit=_online_bucket,
    attributes=("bucket_bytes_cap", "bucket_bytes_cap_list", "bucket_bytes_cap_default",
                "_bucket_config"),
)  # fmt: skip

FIRST_BUCKET = DdpArgument(
    Knob(
        "first_bucket_mb", Kind.ORDINAL, DEFAULT_FIRST_BUCKET_MB, values=(0.25, 1.0, 4.0, 16.0),
        unit="MiB", numerics=Numerics.REORDERED, help="size of the bucket that is ready first",
        shortens=(Part.COMMUNICATION,),
    ),
    effect=56, argument="bucket_cap_mb_list", fit=_bucket, read=_first_mb,
    online_fit=_online_first,
    lacking="the installed torch takes no list of bucket sizes",
    attributes=BUCKET_CAP.attributes,
)  # fmt: skip

BUCKET_VIEW = DdpArgument(
    Knob(
        "gradient_as_bucket_view", Kind.BOOLEAN, False, shortens=(Part.COMMUNICATION,),
        help="gradients live in the buckets, which saves a copy",
    ),
    uses=frozenset(Use), effect=70, zero_effect=50, start=True,
)  # fmt: skip

STATIC_GRAPH = DdpArgument(
    Knob(
        "static_graph", Kind.BOOLEAN, False, shortens=(Part.COMMUNICATION,),
        help="the same parameters are used in every step",
    ),
    effect=48, fit=_static, promise=(True, "every step uses the same parameters"),
    on_request="that the graph never changes is a promise which only you can give",
    attributes=("static_graph", "_static_graph_delay_allreduce_enqueued"),
)  # fmt: skip

FIND_UNUSED = DdpArgument(
    Knob(
        "find_unused_parameters", Kind.BOOLEAN, False,
        help="each step looks for parameters that get no gradient",
    ),
    uses=frozenset({Use.SCRIPT}), effect=50, fit=_unused,
    promise=(False, "every step uses all parameters"),
    off="# model = DistributedDataParallel(model, ..., {name}=False)",
)  # fmt: skip

HIERARCHY = Record(
    Knob(
        "hierarchical_group_size", Kind.ORDINAL, 0, values=(0,), unit="ranks", scope=Scope.GROUP,
        numerics=Numerics.REORDERED, shortens=(Part.COMMUNICATION,),
        help="reduce-scatter inside groups of so many, all-reduce across; 0 is off",
    ),
    uses=frozenset({Use.DDP, Use.ONLINE}), effect=68, fit=_groups,
)  # fmt: skip
"""A hook beside the constructor, made by what builds the wrapper."""

RECORDS: tuple[Record, ...] = (
    BUCKET_CAP,
    FIRST_BUCKET,
    BUCKET_VIEW,
    STATIC_GRAPH,
    FIND_UNUSED,
    HIERARCHY,
)


def constructor_records(use: Use | None = None) -> list[DdpArgument]:
    """The records of arguments of the constructor, those of one use or all."""
    return [r for r in RECORDS if isinstance(r, DdpArgument) and (use is None or use in r.uses)]


def arguments(configuration: Mapping[str, Value]) -> dict[str, Any]:
    """Arguments of the constructor that the knobs stand for; what is torch's default is left out.

    torch keeps the first bucket at 1 MiB only while the cap is its default, so the baseline names
    neither. Elsewhere the first bucket is as large as the others, unless ``first_bucket_mb`` says
    otherwise.
    """
    made: dict[str, Any] = {}
    cap = float(BUCKET_CAP.of(configuration) or BUCKET_CAP.default)
    first = FIRST_BUCKET.of(configuration)
    usual = DEFAULT_FIRST_BUCKET_MB if cap == BUCKET_CAP.default else cap
    if first is not None and float(first) != usual:
        made[FIRST_BUCKET.parameter] = [float(first), cap]
    elif cap != BUCKET_CAP.default:
        made[BUCKET_CAP.parameter] = cap
    for record in _plain():
        value = record.of(configuration)
        if value is not None and not same_value(value, record.default):
            made[record.parameter] = value
    return made


def arguments_given(own: Mapping[str, Any], knobs: Mapping[str, Value]) -> dict[str, Any]:
    """A script's own arguments of the constructor with the knobs' in their place."""
    records = constructor_records()
    asked = {r.name: r.of(knobs) for r in records if r.of(knobs) is not None}
    if BUCKET_CAP.name in asked or FIRST_BUCKET.name in asked:
        listed = own.get(FIRST_BUCKET.parameter)
        cap = listed[-1] if listed else own.get(BUCKET_CAP.parameter)
        asked.setdefault(BUCKET_CAP.name, float(cap or BUCKET_CAP.default))
    dropped = replaced_arguments(asked)
    return {**{n: v for n, v in own.items() if n not in dropped}, **arguments(asked)}


def replaced_arguments(asked: Mapping[str, Value]) -> list[str]:
    """Arguments of the constructor in whose place the knobs' stand."""
    names = {r.parameter for r in constructor_records() if r.of(asked) is not None}
    buckets = {BUCKET_CAP.parameter, FIRST_BUCKET.parameter}
    return sorted(names | buckets if names & buckets else names)


def values_of(wrapper: Any, use: Use) -> dict[str, Value]:
    """What is in force, as a wrapper itself has it; without what the installed torch lacks."""
    takes = constructor_parameters()
    return {r.name: r.value_of(wrapper) for r in constructor_records(use) if r.parameter in takes}


@functools.cache
def constructor_parameters() -> frozenset[str]:
    """What the installed constructor takes, with whatever instruments a script looked through."""
    from torch.nn.parallel import DistributedDataParallel

    return frozenset(inspect.signature(inspect.unwrap(DistributedDataParallel.__init__)).parameters)


def _plain() -> list[DdpArgument]:
    """Arguments that take a knob's value as it is."""
    return [r for r in constructor_records() if r not in (BUCKET_CAP, FIRST_BUCKET)]


def script_arguments(knobs: Mapping[str, Value]) -> dict[str, Any]:
    """Arguments that give a script's wrappers the knobs, spelled out also where they are off."""
    off = {r.parameter: r.of(knobs) for r in _plain() if r.of(knobs) is not None}
    return {**arguments(knobs), **off}


def code_lines(knobs: Mapping[str, Value]) -> list[str]:
    """What to change where a script wraps its model."""
    given = ", ".join(f"{name}={value!r}" for name, value in arguments(knobs).items())
    lines = [f"# model = DistributedDataParallel(model, ..., {given})"] if given else []
    return lines + [r.off.format(name=r.parameter) for r in _plain() if r.of(knobs) is False]


def online_constraints(names: set[str], present: Mapping[str, Value]) -> list[Constraint]:
    """A first bucket that is larger than the others is another name for larger buckets."""
    if not {BUCKET_CAP.name, FIRST_BUCKET.name} <= names:
        return []

    def holds(configuration: Mapping[str, Value]) -> bool:
        today = all(same_value(configuration[n], present[n]) for n in names)
        first, cap = FIRST_BUCKET.of(configuration), BUCKET_CAP.of(configuration)
        return today or float(first or 0) <= float(cap or 0)

    return [Constraint("the first bucket is no larger than the others", holds)]


START: Mapping[str, Value] = {BUCKET_CAP.name: _START_BUCKET_MB}
"""Tried early, by itself and with what seldom does harm."""
