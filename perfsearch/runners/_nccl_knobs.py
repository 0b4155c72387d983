"""NCCL's settings as knobs, and the rules among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfsearch.core.knob import Configuration, Kind, Knob, Numerics, Scope, Value
from perfsearch.core.space import Constraint
from perfsearch.parallel.nccl import VARIABLES

Made = Knob | tuple[str, str]
"""A knob, or the name of one that does not exist here and the reason."""

_MIB = 2**20
_MAX_SOCKETS = 64  # NCCL's limit on threads times sockets of one connection


def nccl_knobs(environ: Mapping[str, str], on_gpu: bool, over_sockets: bool) -> list[Made]:
    """NCCL's knobs, each with what the user has set as its default, or why there are none."""
    if not on_gpu:
        reason = "NCCL is not used on a CPU, only with runner.device=cuda"
        return [(name, reason) for name in VARIABLES]
    made: list[Made] = []
    sockets = {"nccl_nsocks_perthread": "sockets", "nccl_socket_nthreads": "threads"}
    for name, unit in sockets.items():
        if over_sockets:
            made.append(_variable(environ, name, (1, 2, 4, 8), unit, Numerics.EXACT))
        else:
            made.append((name, "one node does not talk over sockets"))
    for name in ("nccl_min_ctas", "nccl_max_ctas"):
        made.append(_variable(environ, name, (4, 8, 16, 32), "thread blocks", Numerics.REORDERED))
    sizes = tuple(n * _MIB for n in (1, 2, 4, 8, 16))
    made.append(_variable(environ, "nccl_buffsize", sizes, "B", Numerics.REORDERED))
    for name, choices in (("nccl_algo", ("Ring", "Tree")), ("nccl_proto", ("Simple", "LL"))):
        made.append(_variable(environ, name, choices, "", Numerics.REORDERED))
    return made


def _variable(
    environ: Mapping[str, str], name: str, choices: Sequence[Value], unit: str, numerics: Numerics
) -> Knob:
    """A knob that is an environment variable: what the user has set is its default."""
    text = environ.get(VARIABLES[name])
    today: Value = int(text) if text is not None and text.isdigit() else text
    values = tuple(choices) if today in choices else (today, *choices)
    named = any(isinstance(v, str) for v in choices)
    return Knob(
        name,
        Kind.CATEGORICAL if named else Kind.ORDINAL,
        today,
        values=values,
        unit=unit,
        scope=Scope.GROUP if named else Scope.PROCESS,
        numerics=numerics,
        help=VARIABLES[name],
    )


def constraints(names: Sequence[str], pinned: Mapping[str, Value]) -> list[Constraint]:
    """Rules among NCCL's knobs, for those that are searched or pinned."""

    def number(configuration: Configuration, name: str) -> int | None:
        value = configuration.get(name, pinned.get(name))
        return None if value is None or isinstance(value, str) else int(value)

    def few_sockets(configuration: Configuration) -> bool:
        each = number(configuration, "nccl_nsocks_perthread") or 1
        return each * (number(configuration, "nccl_socket_nthreads") or 1) <= _MAX_SOCKETS

    def ordered_ctas(configuration: Configuration) -> bool:
        low, high = (number(configuration, f"nccl_{end}_ctas") for end in ("min", "max"))
        return low is None or high is None or low <= high

    rules = {
        ("nccl_nsocks_perthread", "nccl_socket_nthreads"): Constraint(
            "nccl_sockets",
            few_sockets,
            f"nccl_nsocks_perthread x nccl_socket_nthreads is above NCCL's {_MAX_SOCKETS}",
        ),
        ("nccl_min_ctas", "nccl_max_ctas"): Constraint(
            "nccl_ctas", ordered_ctas, "nccl_min_ctas is above nccl_max_ctas"
        ),
    }
    return [rule for concerned, rule in rules.items() if set(concerned) & set(names)]
