"""What is wrong with options of tuning in any job, told before one starts. No torch here."""

from __future__ import annotations

from typing import Any

from perfsearch.online import log
from perfsearch.online.knobs import make_space
from perfsearch.online.options import AutotuneOptions

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


def check(options: AutotuneOptions) -> None:
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
