"""What somebody who knows data-parallel training would try first."""

from __future__ import annotations

from collections.abc import Mapping

from perfsearch.core.knob import Knob, Value

_SOCKETS = ((4, 2), (8, 2), (1, 2), (4, 1), (1, 4))
"""Sockets per thread and threads: around what NCCL takes by itself on the clouds that it knows
(8 and 2, 1 and 4; net_socket.cc), since one socket rarely fills a fast network."""

_BUCKET_MIB = 64.0
"""Horovod's fusion threshold of old: fewer, larger messages than torch's 25 MiB."""

_SELDOM_HARMFUL: Mapping[str, Value] = {
    "optimizer_implementation": "fused",
    "gradient_as_bucket_view": True,
    "pin_memory": True,
    "dataloader_workers": 2,
}
"""Tried all at once: each saves copies, launches or waiting where there are any."""


def starts(knobs: Mapping[str, Knob], baseline: Mapping[str, Value]) -> list[dict[str, Value]]:
    """Configurations to begin with, by the knobs that are searched; the likeliest first."""

    def with_values(wanted: Mapping[str, Value]) -> dict[str, Value]:
        able = {n: v for n, v in wanted.items() if n in knobs and knobs[n].contains(v)}
        return {**baseline, **able}

    bucket: dict[str, Value] = {"bucket_cap_mb": _BUCKET_MIB}
    found = [with_values(bucket | dict(_SELDOM_HARMFUL))]
    if {"nccl_nsocks_perthread", "nccl_socket_nthreads"} & set(knobs):
        pairs: list[dict[str, Value]] = [
            {"nccl_nsocks_perthread": each, "nccl_socket_nthreads": threads}
            for each, threads in _SOCKETS
        ]
        found = [with_values(bucket | pair) for pair in pairs] + found
    return [point for point in found if point != dict(baseline)]
