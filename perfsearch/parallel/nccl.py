"""NCCL's settings: which variable a knob is, and what NCCL says it really used. No torch here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from perfsearch.core.knob import Value

PROCESS_VARIABLES = {
    "nccl_nsocks_perthread": "NCCL_NSOCKS_PERTHREAD",
    "nccl_socket_nthreads": "NCCL_SOCKET_NTHREADS",
    "nccl_min_ctas": "NCCL_MIN_CTAS",
    "nccl_max_ctas": "NCCL_MAX_CTAS",
    "nccl_buffsize": "NCCL_BUFFSIZE",
}
"""Read once a process, at first use (``NCCL_PARAM``)."""

GROUP_VARIABLES = {"nccl_algo": "NCCL_ALGO", "nccl_proto": "NCCL_PROTO"}
"""Read whenever a communicator is made (``ncclGetEnv`` in NCCL's ``graph/tuning.cc``)."""

VARIABLES = {**PROCESS_VARIABLES, **GROUP_VARIABLES}

_SPELLED: dict[tuple[str, Value], str] = {("nccl_algo", "Tree"): "Ring;allreduce:Tree"}
"""Tree exists for all-reduces alone: named without a collective it leaves the others none."""

_CHOICE = re.compile(
    r"(?P<collective>\w+): (?P<bytes>\d+) Bytes -> Algo (?P<algo>\w+) proto (?P<proto>\w+)",
    re.IGNORECASE,
)
_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")


def environment(configuration: Mapping[str, Value], variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a configuration sets; a knob that is ``None`` or absent sets none."""
    return {
        variable: _SPELLED.get((knob, configuration[knob]), str(configuration[knob]))
        for knob, variable in variables.items()
        if configuration.get(knob) is not None
    }


def read_back(environ: Mapping[str, str], configuration: Mapping[str, Value]) -> dict[str, Value]:
    """What the process's environment says of the knobs in ``configuration``."""
    found: dict[str, Value] = {}
    for knob, variable in VARIABLES.items():
        if knob not in configuration:
            continue
        text = environ.get(variable)
        text = next((str(v) for (k, v), t in _SPELLED.items() if (k, t) == (knob, text)), text)
        found[knob] = int(text) if text is not None and text.isdigit() else text
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
    return {"nccl_algo": algo, "nccl_proto": proto}


def _named(text: str, names: tuple[str, ...]) -> str:
    if text.isdigit():
        return names[int(text)] if int(text) < len(names) else text
    plain = text.replace("_", "").lower()
    return next((name for name in names if name.lower() == plain), text)
