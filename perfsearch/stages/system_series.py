"""System metrics over time, of all sessions of a search."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.tracking.files import write_text

SYSTEM_SERIES = "system.jsonl"


def keep_series(
    run_dir: Path, samples: Sequence[Mapping[str, Any]], interval_s: float
) -> list[dict[str, Any]]:
    """Write this session's samples behind those of earlier ones, and return all of them.

    Earlier ones are moved to end right before this session: what lies between is no part of the
    search. Their clock ends with the machine's; what another boot left is not kept.

    Raises:
        OSError: the file cannot be written.

    """
    path = run_dir / SYSTEM_SERIES
    earlier: list[dict[str, Any]] = []
    if not samples:
        return []
    if path.exists():
        begin = float(samples[0]["time_s"])
        try:
            known = [json.loads(line) for line in path.read_text().splitlines()]
            earlier = [sample for sample in known if sample["time_s"] < begin]
        except (ValueError, KeyError, TypeError):
            earlier = []  # edited by hand: a picture is not worth the end of a search
        if earlier:
            shift = begin - interval_s - max(sample["time_s"] for sample in earlier)
            earlier = [{**sample, "time_s": sample["time_s"] + shift} for sample in earlier]
    every = [*earlier, *map(dict, samples)]
    write_text(path, "".join(json.dumps(sample) + "\n" for sample in every))
    return every
