"""``ds_config.json`` read and written so that what is not changed stays as it was typed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError

_SECTIONS = (
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "bf16",
    "bfloat16",
    "checkpoint",
    "comms_logger",
    "compile",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "eigenvalue",
    "elasticity",
    "flops_profiler",
    "fp16",
    "hybrid_engine",
    "nebula",
    "optimizer",
    "pipeline",
    "progressive_layer_drop",
    "scheduler",
    "sparse_attention",
    "tensor_parallel",
    "tensorboard",
    "wandb",
    "zero_optimization",
)
"""Keys that hold an object, or ``null`` as if they were absent."""

_EXAMPLES = {"autotuning": '{"fast": true}', "zero_optimization": '{"stage": "all"}'}


class Number(float):
    """A number that remembers how it was typed: ``5e8`` is not written back as ``500000000.0``."""

    def __new__(cls, text: str) -> Number:
        """Parse it."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def read(path: Path) -> dict[str, Any]:
    """The configuration, its keys in order.

    Raises:
        BadInputError: no such file, no JSON, no object, a key that stands there twice, or a
            section that is no object.

    """
    try:
        text = path.read_text()
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        found = json.loads(text, parse_float=Number, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise BadInputError(
            f"{path}: line {error.lineno} is no JSON: {error.msg}. DeepSpeed reads plain JSON"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise BadInputError(f"{path}: holds no object. A DeepSpeed configuration is {{...}}")
    for name in _SECTIONS:
        if not isinstance(found.get(name), dict | None):
            raise BadInputError(
                f"{path}: {name}={json.dumps(found[name])}: an object is needed, as in "
                f"{_EXAMPLES.get(name, '{...}')}; or remove it"
            )
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands there twice, which DeepSpeed refuses. Remove one")
    return found


def dump(value: Any, indent: str = "") -> str:
    """JSON text, numbers as they were typed."""
    inner = indent + "    "
    if isinstance(value, Number):
        return value.text
    if isinstance(value, Mapping):
        items = [f"{inner}{json.dumps(str(k))}: {dump(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}" if items else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(dump(item, inner) for item in value) + "]"
    return json.dumps(value)


def write(path: Path, configuration: Mapping[str, Any]) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(dump(configuration) + "\n")
    unfinished.rename(path)
