"""The DataLoader's knobs: arguments of its constructor. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope, Value
from perfsearch.knobs.base import Job, Record, Taker, Use, with_default


@dataclass(frozen=True)
class LoaderArgument(Record):
    """A knob that is an argument of the constructor.

    Attributes:
        argument: its name, and the loader's attribute; empty: the knob's own.
        of_processes: whether torch takes it only beside loader processes.

    """

    _: KW_ONLY
    uses: frozenset[Use] = frozenset({Use.DDP, Use.SCRIPT})
    takers: tuple[Taker, ...] = (Taker.LOADER,)
    missing: str = "the script makes no DataLoader"
    script_scope: Scope | None = Scope.PROCESS
    argument: str = ""
    of_processes: bool = False

    @property
    def parameter(self) -> str:
        """The constructor's name for it."""
        return self.argument or self.name


def _processes(knob: Knob, job: Job) -> Knob:
    """No more than there are cores; where workers draw random numbers, another computation."""
    counts = tuple(n for n in knob.values if int(n or 0) <= job.cores_per_rank)
    draws, seen = job.draws_in_loader, job.seen
    if draws is None and seen is not None:
        draws = seen.draws_in_loader
        if seen.shared_out:  # one process has all samples, as the rank itself has
            counts = counts[:2]
            draws = draws or WORKERS.of(seen.values) not in counts
    return replace(knob, values=counts, numerics=Numerics.ALTERING if draws else Numerics.EXACT)


def _beside_processes(knob: Knob, job: Job) -> Knob:
    counts = _processes(WORKERS.knob, job)
    if job.seen is not None:
        counts = with_default(counts, WORKERS.of(job.seen.values))
    return replace(knob, when={WORKERS.name: tuple(n for n in counts.values if n)})


def _to_a_gpu(knob: Knob, job: Job) -> Knob | str:
    return knob if job.on_gpu else "no GPU is used"


WORKERS = LoaderArgument(
    Knob(
        "dataloader_workers", Kind.ORDINAL, 0, values=(0, 1, 2, 4, 8), unit="processes",
        help="loader processes of each rank; 0 loads in the training process",
        shortens=(Part.LOADING,),
    ),
    effect=84, fit=_processes, argument="num_workers", start=2,
)  # fmt: skip

PREFETCH = LoaderArgument(
    Knob(
        "prefetch_factor", Kind.ORDINAL, 2, values=(2, 4, 8), unit="batches",
        help="batches that each loader process keeps ready", shortens=(Part.LOADING,),
    ),
    effect=42, fit=_beside_processes, of_processes=True,
)  # fmt: skip

PERSISTENT = LoaderArgument(
    Knob(
        "persistent_workers", Kind.BOOLEAN, False,
        help="loader processes live on between epochs", shortens=(Part.LOADING,),
    ),
    uses=frozenset({Use.SCRIPT}), effect=44, fit=_beside_processes, of_processes=True,
)  # fmt: skip

PIN_MEMORY = LoaderArgument(
    Knob(
        "pin_memory", Kind.BOOLEAN, False, shortens=(Part.LOADING,),
        help="batches are copied to page-locked memory, and from there beside computing",
    ),
    effect=46, fit=_to_a_gpu, start=True,
)  # fmt: skip

RECORDS = (WORKERS, PREFETCH, PERSISTENT, PIN_MEMORY)

WITHOUT_PROCESSES = ("timeout", "multiprocessing_context")
"""Arguments that are no knobs and that torch takes only beside loader processes."""


def arguments_given(own: Mapping[str, Any], knobs: Mapping[str, Value]) -> dict[str, Any]:
    """A script's own arguments with the knobs' in their place, and consistent."""
    merged = dict(own)
    merged.update({r.parameter: r.of(knobs) for r in RECORDS if r.of(knobs) is not None})
    if not merged.get(WORKERS.parameter):
        for record in RECORDS:
            if record.of_processes and merged.get(record.parameter):
                merged[record.parameter] = False if record.knob.kind is Kind.BOOLEAN else None
        merged["timeout"] = 0
        merged.pop("multiprocessing_context", None)
    return merged


def script_arguments(knobs: Mapping[str, Value]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Arguments that give a script's loaders the knobs, and those that must go for it."""
    found = {r.parameter: r.of(knobs) for r in RECORDS if r.of(knobs) is not None}
    if found.get(WORKERS.parameter) != 0:
        return found, ()
    without = (*(r.parameter for r in RECORDS if r.of_processes), *WITHOUT_PROCESSES)
    return {name: value for name, value in found.items() if name not in without}, without


def arguments(configuration: Mapping[str, Value]) -> dict[str, Value]:
    """Arguments of the constructor that differ from torch's defaults."""
    found: dict[str, Value] = {}
    for record in RECORDS:
        value = record.of(configuration)
        if record.of_processes and not WORKERS.of(configuration):
            continue
        if value if record is not PREFETCH else value is not None:
            found[record.parameter] = value
    return found


def code_lines(given: Mapping[str, Value]) -> list[str]:
    """What to give a loader's constructor."""
    text = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return [f"# loader = torch.utils.data.DataLoader(dataset, ..., {text})"] if given else []


def script_code_lines(knobs: Mapping[str, Value]) -> list[str]:
    """What to give a script's loaders, spelled out also where it turns something off."""
    given = arguments(knobs)
    if WORKERS.of(knobs) == 0:
        given[WORKERS.parameter] = 0
    if PERSISTENT.of(knobs) is not None:
        given[PERSISTENT.parameter] = PERSISTENT.of(knobs)
    return code_lines(given)


def values_of(loader: Any, use: Use) -> dict[str, Value]:
    """What is in force, as a loader itself has it."""
    found: dict[str, Value] = {}
    for record in RECORDS:
        if use in record.uses and (record is not PREFETCH or loader.num_workers):
            value = getattr(loader, record.parameter)
            found[record.name] = bool(value) if record.knob.kind is Kind.BOOLEAN else value
    return found
