"""``perfsearch-run --search`` and ``--profile``: the same as ``perfsearch workload=script``."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError
from perfsearch.run_arguments import RunArguments

_ALLOWED = ("nproc_per_node", "standalone", "module", "nnodes", "max_restarts", "run_path")
"""torchrun's options that mean something to a search on this node."""

_SIGNS = {
    "deepspeed": re.compile(r"^\s*(?:import|from)\s+deepspeed\b", re.MULTILINE),
    "zero": re.compile(r"\bfully_shard\b|\bFullyShardedDataParallel\b|\bFSDPStrategy\b"),
}
_ARGUMENT_SIGNS = {
    "deepspeed": ("--deepspeed", "--deepspeed_config", "--deepspeed-config"),
    "zero": ("--fsdp", "--use_fsdp"),
}


def search(asked: RunArguments) -> int:
    """Search over starts of the script, or profile one; return the command's exit code.

    Raises:
        BadInputError: an option that a search cannot honour.

    """
    from perfsearch import cli

    _require_one_node(asked)
    overrides = list(asked.overrides)
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    taken = sorted(key for key in keys if key == "workload" or key.startswith("workload.command"))
    if taken:
        raise BadInputError(f"-o {taken[0]}=...: the script and its arguments stand after it.")
    if "runner" not in keys:
        runner = runner_for(asked)
        print(f"perfsearch-run: runner={runner}, as the script calls for it", file=sys.stderr)
        overrides.insert(0, f"runner={runner}")
    if asked.profile:
        if "mode" in keys:
            raise BadInputError("-o mode=...: --profile is -o mode=profile. Leave one of them out.")
        overrides.append("mode=profile")
    nproc = _nproc(asked)
    if nproc is not None and "nproc" not in keys:
        overrides.append(f"nproc={nproc}")
    return cli.main(
        ["workload=script", "workload.command=[SCRIPT]", *overrides], {"workload": workload(asked)}
    )


def workload(asked: RunArguments) -> dict[str, Any]:
    """The ``workload.*`` keys that the command line stands for."""
    given: dict[str, Any] = {
        "command": [asked.script, *asked.arguments],
        "module": bool(asked.parsed.module),
    }
    if asked.maps:
        given["map"] = list(asked.maps)
    if asked.map_files:
        given["map_file"] = list(asked.map_files)
    if asked.preset:
        given["preset"] = asked.preset
    return given


def runner_for(asked: RunArguments) -> str:
    """Which runner's knobs fit the script: by its arguments, else by what its source names.

    DeepSpeed's need its configuration; where none is named, what is around DeepSpeed is searched.
    """
    runner = _called_for(asked)
    if runner == "deepspeed" and not _is_configured(asked):
        print(
            "perfsearch-run: no argument names the script's DeepSpeed configuration, so only what "
            "is around DeepSpeed is searched. To search its settings: -o runner=deepspeed "
            "-o runner.ds_config=FILE.json",
            file=sys.stderr,
        )
        return "ddp"
    return runner


def _called_for(asked: RunArguments) -> str:
    if asked.preset == "deepspeed":
        return asked.preset
    for runner, words in _ARGUMENT_SIGNS.items():
        if any(argument.partition("=")[0] in words for argument in asked.arguments):
            return runner
    source = "" if asked.parsed.module else Path(asked.script).read_text(errors="replace")
    return next((runner for runner, sign in _SIGNS.items() if sign.search(source)), "ddp")


def _is_configured(asked: RunArguments) -> bool:
    from perfsearch.runners.deepspeed.job import names_configuration

    given = any(o.lstrip("+~").startswith("runner.ds_config=") for o in asked.overrides)
    return given or names_configuration(workload(asked))


def _nproc(asked: RunArguments) -> int | str | None:
    if not any(_names(option, "nproc_per_node") for option in asked.torchrun):
        return None
    text = str(asked.parsed.nproc_per_node)
    return int(text) if text.isdigit() else "auto"


def _names(option: str, destination: str) -> bool:
    """Whether a token is that option, abbreviations included."""
    name = option.partition("=")[0].lstrip("-").replace("-", "_")
    return option.startswith("--") and bool(name) and destination.startswith(name)


def _require_one_node(asked: RunArguments) -> None:
    doing = "--profile" if asked.profile else "--search"
    if asked.parsed.nnodes not in ("1", "1:1"):
        raise BadInputError(
            f"--nnodes={asked.parsed.nnodes} {doing}: trials start on this node alone. Search on "
            "one node, then start on all of them with --knobs best/config.yaml"
        )
    refused = _unusual(asked.torchrun)
    if refused:
        raise BadInputError(
            f"{refused} {doing}: the ranks are started in perfsearch's own way. Leave it out; "
            "--nproc-per-node, --standalone and -m are taken over"
        )


def _unusual(torchrun: Sequence[str]) -> str:
    """The first option of torchrun that a search would have to ignore."""
    for option in torchrun:
        if option.startswith("--") and not any(_names(option, name) for name in _ALLOWED):
            return option.partition("=")[0]
        if option.startswith("-") and not option.startswith("--") and option != "-m":
            return option
    return ""
