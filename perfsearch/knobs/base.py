"""All that is known of a knob, in one record; and the job that it is set in. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from perfsearch.core.errors import nearest
from perfsearch.core.knob import Kind, Knob, Numerics, Scope, Value, same_value
from perfsearch.core.narrow import SEARCH, KnobError, require_possible, too_much_error

NO_CONVOLUTIONS = "the model has no convolutions"
ALONE = "one rank exchanges nothing with others"


class Use(StrEnum):
    """Where a knob exists."""

    DDP = "ddp"
    """Built-in data-parallel jobs (``runner=ddp``)."""
    ZERO = "zero"
    """Built-in sharded jobs (``runner=zero``)."""
    SCRIPT = "script"
    """Unchanged scripts (``workload=script``, ``perfsearch-run``)."""
    ONLINE = "online"
    """Between two steps of a job that goes on (``perfsearch.autotune``)."""


class Taker(StrEnum):
    """What of a script takes a knob: an object that it builds, or its whole process."""

    DDP = "ddp"
    FULLY_SHARD = "fully_shard"
    FSDP1 = "fsdp1"
    LOADER = "loader"
    OPTIMIZER = "optimizer"
    MODULE = "module"
    PROCESS = "process"


class Machine(Protocol):
    """Devices and ranks."""

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""

    @property
    def nproc(self) -> int:
        """Ranks on this node."""

    @property
    def nnodes(self) -> int:
        """Number of nodes."""

    @property
    def cores(self) -> int:
        """CPU cores that this node's processes may use."""

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""


class Seen(Protocol):
    """What was seen of a script; see ``perfsearch.instrument.facts.Facts``."""

    @property
    def wrappers(self) -> Sequence[str]:
        """Kinds of data-parallel wrappers that it makes."""

    @property
    def values(self) -> Mapping[str, Value]:
        """What is in force."""

    @property
    def draws_in_loader(self) -> bool | None:
        """Whether loading draws random numbers; ``None``: unknown."""

    @property
    def accumulates(self) -> bool:
        """Whether gradients are accumulated without being reduced."""

    @property
    def shared_out(self) -> bool:
        """Whether worker processes share samples out among each other."""

    @property
    def implementations(self) -> Sequence[str] | None:
        """Those of its optimizers; ``None``: unknown."""

    @property
    def convolutional(self) -> bool | None:
        """Whether its backward pass goes through convolutions; ``None``: unknown."""

    @property
    def images(self) -> bool | None:
        """Whether modules that it trains have convolutions over images; ``None``: unknown."""

    @property
    def blocks(self) -> int | None:
        """How many blocks of one class a module that it trains repeats; ``None``: unknown."""

    @property
    def attention(self) -> Sequence[str] | None:
        """What computes scaled dot-product attention, other than plainly; ``None``: unknown."""

    @property
    def compiled(self) -> bool:
        """Whether it has torch compile any of it."""

    def changeable(self) -> Mapping[str, str]:
        """Knobs that can be changed from outside, and through what."""


@dataclass(frozen=True)
class Job:
    """What decides which knobs there are, and which values they have.

    Attributes:
        machine: devices and ranks.
        environ: the user's environment, whose settings are the baseline's.
        wrapper_parameters: what the installed ``DistributedDataParallel`` takes.
        threads: CPU threads of a rank today.
        convolutional: whether the model has convolutions.
        draws_in_loader: whether loading draws random numbers; ``None``: unknown.
        use: which of its records it looks at.
        attends: whether the model calls ``scaled_dot_product_attention``.
        repeats: whether the model repeats blocks, such as the layers of a transformer.

    """

    machine: Machine
    environ: Mapping[str, str]
    wrapper_parameters: frozenset[str]
    threads: int = 1
    convolutional: bool = False
    draws_in_loader: bool | None = None
    use: Use = Use.DDP
    attends: bool = False
    repeats: bool = False

    @property
    def seen(self) -> Seen | None:
        """What was seen of the job, where it is a script."""
        return None

    @property
    def on_gpu(self) -> bool:
        """Whether it runs on GPUs."""
        return self.machine.device == "cuda"

    @property
    def is_alone(self) -> bool:
        """Whether one rank trains, which exchanges nothing with others."""
        return self.machine.world_size == 1

    @property
    def may_convolve(self) -> bool:
        """Whether the model has convolutions, or may have, where that is not known."""
        return self.convolutional if self.seen is None else self.seen.convolutional is not False

    @property
    def may_attend(self) -> bool:
        """The same of kernels for scaled dot-product attention."""
        return self.attends if self.seen is None else self.seen.attention != []

    @property
    def may_repeat(self) -> bool:
        """The same of blocks that the model repeats; a script that was not seen may have some."""
        if self.seen is None:
            return self.repeats or self.use is Use.SCRIPT
        return self.seen.blocks != 0

    @property
    def cores_per_rank(self) -> int:
        """CPU cores that each rank may use."""
        return max(1, self.machine.cores // self.machine.nproc)


Fit = Callable[[Knob, Job], Knob | str]
"""Makes a knob one of this job, or says why the job has none of it."""


@dataclass(frozen=True)
class Record:
    """One knob. A family of knobs that are applied alike has a class of its own.

    Attributes:
        knob: its declaration, as far as it does not depend on the job.
        uses: where it exists.
        effect: how much is expected of it, from 0 to 100: those of the largest are tried first.
        zero_effect: the same where the model is sharded (``runner=zero``).
        fit: what the job makes of the declaration.
        takers: what of a script takes it; empty where it cannot be given to one from outside, or
            goes into its environment.
        missing: why a script without a taker has none of it.
        script_scope: what must restart to change it in a script; ``None``: as in built-in jobs.
        searched: whether it is searched where nothing is said of it, or ``SEARCH_ON_GPU``.
        start: a value that seldom does harm, tried early; ``None``: there is none.
        promise: a value that holds the script to something in every step, and to what.
        on_request: why online tuning leaves it alone unless asked; empty: it does not.
        words: further values that are handed over, such as torch's own name of its default;
            ``None``: any.

    """

    knob: Knob
    _: KW_ONLY
    uses: frozenset[Use] = frozenset(Use)
    effect: int = 0
    zero_effect: int = 0
    fit: Fit = lambda knob, job: knob
    takers: tuple[Taker, ...] = ()
    missing: str = ""
    script_scope: Scope | None = None
    searched: bool | str = True
    start: Value = None
    promise: tuple[Value, str] | None = None
    on_request: str = ""
    words: tuple[str, ...] | None = ()

    @property
    def name(self) -> str:
        """In configurations, journals, MLflow and on the command line."""
        return self.knob.name

    @property
    def default(self) -> Any:
        """The library's own."""
        return self.knob.default

    @property
    def setting(self) -> Any:
        """What ``runner.knobs`` has of it where nothing is said."""
        if isinstance(self.searched, str):
            return self.searched
        return SEARCH if self.searched else self.default

    def effect_in(self, use: Use) -> int:
        """How much is expected of it in one use."""
        return self.zero_effect if use is Use.ZERO else self.effect

    @property
    def reaches_scripts(self) -> bool:
        """Whether it can be given to a script from outside, not by its arguments alone."""
        return Use.SCRIPT in self.uses and bool(self.takers)

    def of(self, configuration: Mapping[str, Value]) -> Any:
        """Its value in a configuration; ``None`` where it has none."""
        return configuration.get(self.name)

    def number(self, configuration: Mapping[str, Value]) -> int:
        """The same as a whole number; 0 where it has none."""
        return int(self.of(configuration) or 0)

    def declare(self, job: Job) -> Knob | str:
        """The knob with the values that it has in a job, or why the job has none."""
        knob = self.knob
        if job.use is Use.SCRIPT and self.script_scope is not None:
            knob = replace(knob, scope=self.script_scope)
        made = self.fit(knob, job)
        if isinstance(made, str) or job.seen is None:
            return made
        return with_default(made, job.seen.values.get(self.name))

    def variables(self, value: Value) -> dict[str, str]:
        """Environment variables that hand a value over to new processes."""
        return {}

    def require(self, value: Any, key: str) -> None:
        """Refuse a value that no job can have. What one can have, narrow the job's own values to.

        Args:
            value: one that is to be put into force.
            key: how it was named, for the message.

        Raises:
            KnobError: the message has the key, the value and what is allowed.

        """
        is_word = isinstance(value, str) and (self.words is None or value in self.words)
        if not is_word:
            require_possible(self.knob, value, key)


def with_default(knob: Knob, today: Value) -> Knob:
    """The knob with the job's own value as its default; ``None`` leaves the library's."""
    if today is None:
        return knob
    if knob.contains(today):
        return replace(knob, default=today)
    if knob.is_range:
        assert knob.low is not None and knob.high is not None and not isinstance(today, str)
        low, high = min(knob.low, today), max(knob.high, today)
        return replace(knob, default=today, low=low, high=high, step=None)
    if knob.kind is Kind.ORDINAL:
        values = sorted([*knob.values, today], key=lambda v: float(v or 0))
        return replace(knob, default=today, values=tuple(values))
    return replace(knob, default=today, values=(today, *knob.values))


def by_effect(records: Iterable[Record], use: Use) -> list[Record]:
    """Those of one use, the largest expected effect first; of equals, the one that stands first."""
    found = [record for record in records if use in record.uses]
    return sorted(found, key=lambda record: -record.effect_in(use))


def declare(records: Sequence[Record], job: Job) -> tuple[list[Knob], dict[str, str]]:
    """A job's knobs, in the order of the records, and why each other one is not there."""
    knobs: list[Knob] = []
    absent: dict[str, str] = {}
    for record in records:
        made = record.declare(job)
        if isinstance(made, str):
            absent[record.name] = made
        else:
            knobs.append(made)
    return knobs, absent


def applicable(
    wanted: Mapping[str, Any],
    declared: Sequence[Knob],
    absent: Mapping[str, str],
    today: Mapping[str, Value],
    allowed: Numerics,
    exempt: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, str]]:
    """What of ``runner.knobs`` there is in a job, and why the rest is left out.

    What is in force today can be asked for in any case, also where a knob has no other value.

    Args:
        wanted: ``runner.knobs``, as written.
        declared: knobs that the job has.
        absent: others, with the reason.
        today: what is in force of those.
        allowed: the most that a searched knob may do to the computation.
        exempt: names of those that may do anything, as the user has allowed it by another key.

    Raises:
        KnobError: an unknown knob, or one that was asked for expressly and cannot be.

    """
    by_name = {knob.name: knob for knob in declared}
    settings: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, setting in wanted.items():
        if name in absent:
            if setting not in (SEARCH, None, False, 0) and not _is_todays(setting, today, name):
                raise KnobError(
                    f"runner.knobs.{name}={setting}: {absent[name]}. Leave the key out."
                )
            left_out[name] = absent[name]
            continue
        if name not in by_name:
            raise KnobError(
                f"runner.knobs.{name}: no such knob. {nearest(name, {*by_name, *absent})}"
            )
        knob = by_name[name]
        too_much = knob.numerics.rank > allowed.rank and name not in exempt
        if too_much and setting == SEARCH:
            left_out[name] = f"it is {knob.numerics} and numerics={allowed}"
            continue
        if too_much and isinstance(setting, list | tuple | Mapping):
            raise too_much_error(knob, allowed)
        settings[name] = setting
    return settings, left_out


def _is_todays(setting: Any, today: Mapping[str, Value], name: str) -> bool:
    return name in today and same_value(setting, today[name])
