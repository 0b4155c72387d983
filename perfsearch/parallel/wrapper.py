"""From knobs to the arguments of DistributedDataParallel. No torch here: exports need it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfsearch.core.knob import Value

DEFAULT_BUCKET_MB = 25.0
DEFAULT_FIRST_BUCKET_MB = 1.0


def wrapper_arguments(configuration: Mapping[str, Value]) -> dict[str, Any]:
    """Arguments of the wrapper that the knobs stand for; what is torch's default is left out.

    torch keeps the first bucket at 1 MiB only while the cap is its default, so the baseline names
    neither. Elsewhere the first bucket is as large as the others, unless ``first_bucket_mb`` says
    otherwise.
    """
    arguments: dict[str, Any] = {}
    cap = float(configuration.get("bucket_cap_mb") or DEFAULT_BUCKET_MB)
    first = configuration.get("first_bucket_mb")
    usual = DEFAULT_FIRST_BUCKET_MB if cap == DEFAULT_BUCKET_MB else cap
    if first is not None and float(first) != usual:
        arguments["bucket_cap_mb_list"] = [float(first), cap]
    elif cap != DEFAULT_BUCKET_MB:
        arguments["bucket_cap_mb"] = cap
    for name in ("gradient_as_bucket_view", "static_graph"):
        if configuration.get(name):
            arguments[name] = True
    return arguments
