"""NCCL's settings: environment variables, and what NCCL says it really used. No torch here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from perfsearch.core.knob import Configuration, Kind, Knob, Numerics, Part, Scope, Value
from perfsearch.core.space import Constraint
from perfsearch.knobs.base import ALONE, Fit, Job, Record, Use

_MIB = 2**20
_MAX_SOCKETS = 64  # NCCL's limit on threads times sockets of one connection


def _on_gpu(knob: Knob, job: Job) -> Knob | str:
    """The knob with what the user has set as its default."""
    if not job.on_gpu:
        return "NCCL is not used on a CPU, only with runner.device=cuda"
    if job.is_alone:
        return ALONE
    text = job.environ.get(knob.name.upper())
    today: Value = int(text) if text is not None and text.isdigit() else text
    values = knob.values if today in knob.values else (today, *knob.values)
    return replace(knob, default=today, values=values)


def _over_sockets(knob: Knob, job: Job) -> Knob | str:
    """Connections go over TCP sockets between nodes, or where the user forces them to."""
    off = all(job.environ.get(f"NCCL_{way}_DISABLE") == "1" for way in ("P2P", "SHM"))
    if job.on_gpu and not job.is_alone and job.machine.nnodes < 2 and not off:
        return "one node does not talk over sockets"
    return _on_gpu(knob, job)


@dataclass(frozen=True)
class NcclVariable(Record):
    """A knob that is an environment variable of NCCL, of the same name in capitals."""

    _: KW_ONLY
    uses: frozenset[Use] = frozenset({Use.DDP, Use.SCRIPT})
    fit: Fit = _on_gpu
    words: tuple[str, ...] | None = None  # whatever the user has set today

    @property
    def variable(self) -> str:
        """The variable's name."""
        return self.name.upper()

    @property
    def of_communicator(self) -> bool:
        """Whether it is read whenever a communicator is made, not once a process.

        See ``ncclGetEnv`` in NCCL's ``graph/tuning.cc``, and ``NCCL_PARAM``.
        """
        return self.knob.scope is Scope.GROUP

    @property
    def reaches_scripts(self) -> bool:
        """Through their environment."""
        return True

    def variables(self, value: Value) -> dict[str, str]:
        """The variable; none for ``None``."""
        if value is None:
            return {}
        return {self.variable: _SPELLED.get((self.variable, value), str(value))}


def _number(
    name: str, values: tuple[Value, ...], unit: str, numerics: Numerics = Numerics.REORDERED
) -> Knob:
    return Knob(
        name, Kind.ORDINAL, None, values=values, unit=unit, scope=Scope.PROCESS,
        numerics=numerics, help=name.upper(), shortens=(Part.COMMUNICATION,),
    )  # fmt: skip


def _word(name: str, values: tuple[Value, ...]) -> Knob:
    return Knob(
        name, Kind.CATEGORICAL, None, values=values, scope=Scope.GROUP,
        numerics=Numerics.REORDERED, help=name.upper(), shortens=(Part.COMMUNICATION,),
    )  # fmt: skip


SOCKETS = NcclVariable(
    _number("nccl_nsocks_perthread", (1, 2, 4, 8), "sockets", Numerics.EXACT),
    effect=90, fit=_over_sockets,
)  # fmt: skip
SOCKET_THREADS = NcclVariable(
    _number("nccl_socket_nthreads", (1, 2, 4, 8), "threads", Numerics.EXACT),
    effect=88, fit=_over_sockets,
)  # fmt: skip
MIN_CTAS = NcclVariable(_number("nccl_min_ctas", (4, 8, 16, 32), "thread blocks"), effect=60)
MAX_CTAS = NcclVariable(_number("nccl_max_ctas", (4, 8, 16, 32), "thread blocks"), effect=62)
BUFFER = NcclVariable(
    _number("nccl_buffsize", tuple(n * _MIB for n in (1, 2, 4, 8, 16)), "B"), effect=58
)
ALGORITHM = NcclVariable(_word("nccl_algo", ("Ring", "Tree")), effect=66)
PROTOCOL = NcclVariable(_word("nccl_proto", ("Simple", "LL")), effect=64)

RECORDS = (SOCKETS, SOCKET_THREADS, MIN_CTAS, MAX_CTAS, BUFFER, ALGORITHM, PROTOCOL)

VARIABLES = {record.name: record.variable for record in RECORDS}

SOCKET_STARTS: tuple[Mapping[str, Value], ...] = tuple(
    {SOCKETS.name: each, SOCKET_THREADS.name: threads}
    for each, threads in ((4, 2), (8, 2), (1, 2), (4, 1), (1, 4))
)
"""Sockets per thread and threads: around what NCCL takes by itself on the clouds that it knows
(8 and 2, 1 and 4; net_socket.cc), since one socket rarely fills a fast network."""

_SPELLED: dict[tuple[str, Value], str] = {(ALGORITHM.variable, "Tree"): "Ring;allreduce:Tree"}
"""Tree exists for all-reduces alone: named without a collective it leaves the others none."""

_CHOICE = re.compile(
    r"(?P<collective>\w+): (?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)",
    re.IGNORECASE,
)
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")


def environment(
    configuration: Mapping[str, Value], of_communicator: bool | None = None
) -> dict[str, str]:
    """The variables that a configuration sets; a knob that is ``None`` or absent sets none.

    Args:
        configuration: values by knob.
        of_communicator: only those that are read for each communicator, or only the others.

    """
    return {
        variable: text
        for record in RECORDS
        if of_communicator in (None, record.of_communicator)
        for variable, text in record.variables(record.of(configuration)).items()
    }


def read_back(environ: Mapping[str, str], configuration: Mapping[str, Value]) -> dict[str, Value]:
    """What the process's environment says of the knobs in ``configuration``."""
    found: dict[str, Value] = {}
    for record in RECORDS:
        if record.name not in configuration:
            continue
        text = environ.get(record.variable)
        spelled = {t: v for (variable, v), t in _SPELLED.items() if variable == record.variable}
        text = str(spelled[text]) if text in spelled else text
        found[record.name] = int(text) if text is not None and text.isdigit() else text
    return found


def effective(lines: Iterable[str]) -> dict[str, str]:
    """Algorithm and protocol that most bytes of all-reduces went by.

    Args:
        lines: of a log under ``NCCL_DEBUG=INFO`` and ``NCCL_DEBUG_SUBSYS=TUNING``, such as
            ``AllReduce: 26214400 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..15}``.
            Older versions print numbers for names.

    Returns:
        ``nccl_algo`` and ``nccl_proto`` in the spelling of NCCL's variables; empty where the log
        says nothing.

    """
    carried: Counter[tuple[str, str]] = Counter()
    for line in lines:
        match = _CHOICE.search(line)
        if match is None or match["collective"].lower() != "allreduce":
            continue
        choice = (_named(match["algo"], _ALGORITHMS), _named(match["proto"], _PROTOCOLS))
        carried[choice] += max(1, int(match["bytes"]))
    if not carried:
        return {}
    algo, proto = carried.most_common(1)[0][0]
    return {ALGORITHM.name: algo, PROTOCOL.name: proto}


def _named(text: str, names: tuple[str, ...]) -> str:
    if text.isdigit():
        return names[int(text)] if int(text) < len(names) else text
    plain = text.replace("_", "").lower()
    return next((name for name in names if name.lower() == plain), text)


def constraints(names: Sequence[str], pinned: Mapping[str, Value]) -> list[Constraint]:
    """Rules among NCCL's knobs, for those that are searched or pinned."""

    def number(configuration: Configuration, record: Record) -> int | None:
        value = configuration.get(record.name, pinned.get(record.name))
        return None if value is None or isinstance(value, str) else int(value)

    def few_sockets(configuration: Configuration) -> bool:
        each = number(configuration, SOCKETS) or 1
        return each * (number(configuration, SOCKET_THREADS) or 1) <= _MAX_SOCKETS

    def ordered_ctas(configuration: Configuration) -> bool:
        low, high = number(configuration, MIN_CTAS), number(configuration, MAX_CTAS)
        return low is None or high is None or low <= high

    rules = {
        (SOCKETS.name, SOCKET_THREADS.name): Constraint(
            "nccl_sockets",
            few_sockets,
            f"{SOCKETS.name} x {SOCKET_THREADS.name} is above NCCL's {_MAX_SOCKETS}",
        ),
        (MIN_CTAS.name, MAX_CTAS.name): Constraint(
            "nccl_ctas", ordered_ctas, f"{MIN_CTAS.name} is above {MAX_CTAS.name}"
        ),
    }
    return [rule for concerned, rule in rules.items() if set(concerned) & set(names)]
