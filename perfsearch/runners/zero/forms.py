"""Has a framework load the form of a configuration that is made for it, and say what it read.

A form is handed over only where that is the configuration that was measured. The framework is
imported in a process of its own, ``python -m perfsearch.runners.zero.forms NAME FILE``: the
controller imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perfsearch.core.python import module_command
from perfsearch.knobs.batch import ACCUMULATION, MICRO_BATCH
from perfsearch.knobs.fsdp import CPU_OFFLOAD, STAGE
from perfsearch.workers.failures import one_line

PACKAGES = {
    "ds_config.json": "deepspeed",
    "hf_trainer_args.json": "transformers",
    "accelerate_fsdp.yaml": "accelerate",
}
"""Forms, and the package that each is for."""

_LIMIT_S = 180.0
_MARK = "perfsearch-form "
"""Before the answer in the output, in which frameworks write too."""


def why_not_handed_over(name: str, text: str, measured: Mapping[str, Any]) -> str:
    """Why a form is none of what was measured, as its framework reads it; empty where it is.

    Args:
        name: of the form.
        text: the form.
        measured: what a loader below may say, as it was measured.

    """
    package = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed here, so that it could not be loaded"
    with tempfile.TemporaryDirectory(prefix="perfsearch-form-") as place:
        file = Path(place) / name
        file.write_text(text)
        told = _told(name, file)
    if isinstance(told, str):
        return f"{_with_version(package)} does not load it: {told}"
    differing = [
        f"{key}={told[key]} for {value}"
        for key, value in measured.items()
        if key in told and told[key] != value
    ]
    said = ", ".join(differing)
    made = f"{_with_version(package)} makes another configuration of it: {said}"
    return made if differing else ""


def _with_version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _told(name: str, file: Path) -> dict[str, Any] | str:
    """What the framework has read, or why it has not."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_"))}
    try:
        done = subprocess.run(
            module_command(__name__, name, str(file)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            env={**environ, "OMP_NUM_THREADS": "1"},
            cwd=file.parent,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_LIMIT_S:g} s"
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return found
    words = [line for line in done.stderr.splitlines() if line.strip()]
    return one_line(words[-1], 200) if words else f"it ended with exit code {done.returncode}"


# -----------------------------------------------------------------------------
# In the process that loads it.


def _deepspeed(file: Path) -> dict[str, Any]:
    from deepspeed.runtime import config

    form = json.loads(file.read_text())
    per_rank = form["train_micro_batch_size_per_gpu"] * form["gradient_accumulation_steps"]
    ranks = form["train_batch_size"] // per_rank
    # it holds the batch against the ranks that there are, and there is this process alone
    config.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda *_: ranks)
    made = config.DeepSpeedConfig(str(file))
    zero = made.zero_config
    offload = getattr(zero, "offload_optimizer", None)
    return {
        "ranks": made.train_batch_size // per_rank,
        MICRO_BATCH.name: made.train_micro_batch_size_per_gpu,
        ACCUMULATION.name: made.gradient_accumulation_steps,
        STAGE.name: int(zero.stage),
        "half": bool(getattr(made, "bfloat16_enabled", False) or _enabled(made, "bfloat16_config")),
        CPU_OFFLOAD.name: offload is not None and str(offload.device).endswith("cpu"),
    }


def _enabled(made: Any, section: str) -> bool:
    return bool(getattr(getattr(made, section, None), "enabled", False))


def _trainer(file: Path) -> dict[str, Any]:
    from transformers import TrainingArguments

    form = json.loads(file.read_text())
    made = TrainingArguments(output_dir=str(file.parent / "out"), **form)
    told = {
        MICRO_BATCH.name: made.per_device_train_batch_size,
        ACCUMULATION.name: made.gradient_accumulation_steps,
        "half": bool(made.bf16),
        "checkpointed": bool(made.gradient_checkpointing),
        STAGE.name: 0,
    }
    if form.get("fsdp"):
        told.update(_plugin(_fsdp_plugin(made)))
    return told


def _fsdp_plugin(made: Any) -> Any:
    """The plugin that Trainer gives to Accelerate."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(**made.fsdp_plugin_args)


def _accelerate(file: Path) -> dict[str, Any]:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    asked = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    made, *_ = _validate_launch_command(asked)
    assert made.use_fsdp, "it is not launched with FSDP"
    os.environ.update(prepare_multi_gpu_env(made))
    told = {"ranks": made.num_processes, "half": made.mixed_precision == "bf16"}
    return {**told, **_plugin(FullyShardedDataParallelPlugin())}


def _plugin(plugin: Any) -> dict[str, Any]:
    """What Accelerate's plugin for FSDP will do."""
    assert plugin.fsdp_version == 2, f"it makes FSDP{plugin.fsdp_version} of it"
    return {
        STAGE.name: 3 if plugin.reshard_after_forward is True else 2,
        "checkpointed": bool(plugin.activation_checkpointing),
        CPU_OFFLOAD.name: type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
        "block_class": list(plugin.transformer_cls_names_to_wrap or []),
    }


_LOADERS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "ds_config.json": _deepspeed,
    "hf_trainer_args.json": _trainer,
    "accelerate_fsdp.yaml": _accelerate,
}

if __name__ == "__main__":
    print(_MARK + json.dumps(_LOADERS[sys.argv[1]](Path(sys.argv[2]))), flush=True)
