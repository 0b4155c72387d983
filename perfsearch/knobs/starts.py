"""What somebody who knows data-parallel training would try first."""

from __future__ import annotations

from collections.abc import Mapping

from perfsearch import knobs
from perfsearch.core.knob import Knob, Value
from perfsearch.knobs import ddp, nccl
from perfsearch.knobs.base import Use


def starts(searched: Mapping[str, Knob], baseline: Mapping[str, Value]) -> list[dict[str, Value]]:
    """Configurations to begin with, by the knobs that are searched; the likeliest first."""

    def with_values(wanted: Mapping[str, Value]) -> dict[str, Value]:
        able = {n: v for n, v in wanted.items() if n in searched and searched[n].contains(v)}
        return {**baseline, **able}

    seldom_harmful = {r.name: r.start for r in knobs.of(Use.DDP) if r.start is not None}
    found = [with_values({**ddp.START, **seldom_harmful})]
    if {nccl.SOCKETS.name, nccl.SOCKET_THREADS.name} & set(searched):
        found = [with_values({**ddp.START, **pair}) for pair in nccl.SOCKET_STARTS] + found
    return [point for point in found if point != dict(baseline)]
