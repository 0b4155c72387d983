"""Keys below ``runner.knobs`` that only the job itself can tell: operators, a script's knobs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from perfsearch.cli_errors import FORCE

_CHOICE = re.compile(r"^(runner|workload)=(\w+)$")
_KNOB = re.compile(r"^runner\.knobs(\.[^=]+=|=\s*\{)")


def open_knobs(words: Sequence[str]) -> list[str]:
    """Let any name stand below ``runner.knobs`` where no file can hold them all.

    Those of ``runner=soap`` are the model's operators, and ``workload=script`` has the script's
    own; the runners refuse what there is not. Everywhere else a key must be in the option's file.

    Args:
        words: of a command line, options among them.

    """
    chosen = {match[1]: match[2] for word in words if (match := _CHOICE.match(word))}
    if chosen.get("runner") != "soap" and chosen.get("workload") != "script":
        return list(words)
    return [f"{FORCE}{word}" if _KNOB.match(word) else word for word in words]
