"""The configuration that the command would run with, composed inside somebody else's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from perfsearch.cli_errors import explain
from perfsearch.cli_job import plain
from perfsearch.cli_knobs import open_knobs
from perfsearch.config import GROUPS
from perfsearch.config_options import ConfigError, join, plain_value
from perfsearch.core.errors import BadInputError

_MISSING = "???"
"""What OmegaConf holds for a key that still needs a value."""

_CONFIG_MODULE = "pkg://perfsearch.conf"


def compose(
    overrides: Sequence[str],
    values: Mapping[str, Any],
    why_no_knobs: Callable[[str], str] = lambda runner: "",
) -> dict[str, Any]:
    """Defaults, then ``KEY=VALUE`` overrides as on the command line, then plain values.

    Hydra's global state is afterwards as it was, so that this works inside of a Hydra application.

    Args:
        overrides: as the command takes them, no sweeps.
        values: by top-level key. A group is the name of one of its options, or a mapping with
            that ``name`` and further keys; mappings are merged into what they meet.
        why_no_knobs: says of a runner why it has no keys ``runner.knobs``; empty where it has.

    Raises:
        BadInputError: the message is the command's.

    """
    words, merged = list(overrides), {}
    for key, value in values.items():
        if key in GROUPS:
            name, rest = _option(key, value)
            words += [f"{key}={name}"] if name else []
            merged[key] = plain_value(rest)
        else:
            merged[key] = plain_value(value)
    with _hydra_as_it_was():
        try:
            composed = _compose(open_knobs(words))
        except BadInputError:
            raise
        except Exception as error:
            message = explain(error, lambda: _compose([]), why_no_knobs)
            if message is None:
                raise
            raise BadInputError(message) from error
    whole = _merge(composed, merged)
    _refuse_missing(whole, "")
    return whole


def _option(group: str, value: Any) -> tuple[str, Any]:
    """Name and further keys of a group's option."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping):
        rest = {k: v for k, v in value.items() if k != "name"}
        return str(value.get("name", "")), rest
    if group == "workload" and callable(value):
        return "custom", {"factory": _factory(value)}
    raise ConfigError(
        group, f"{group}={value!r}: the name of an option, or a mapping with name and its keys."
    )


def _factory(function: Any) -> str:
    """``module:function`` of a factory, which the ranks import."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if module in ("", "__main__") or not name.isidentifier():
        raise ConfigError(
            "workload",
            f"workload={name or function!r}: the ranks are other processes and cannot import it. "
            "Put the function at the top of a module (in a notebook: a cell with %%writefile "
            "my_job.py) and give workload=my_job.build.",
        )
    return f"{module}:{name}"


def _compose(overrides: list[str]) -> dict[str, Any]:
    from hydra._internal.hydra import Hydra
    from hydra._internal.utils import create_config_search_path
    from hydra.types import RunMode

    path = create_config_search_path(_CONFIG_MODULE)
    hydra = Hydra.create_main_hydra2(task_name="perfsearch", config_search_path=path)
    try:
        config = hydra.compose_config(
            config_name="config",
            overrides=overrides,
            run_mode=RunMode.RUN,
            with_log_configuration=False,
        )
    finally:
        _forget_hydra()
    return plain(config, complete=False)


def _refuse_missing(node: Any, key: str) -> None:
    if isinstance(node, Mapping):
        for name, value in node.items():
            _refuse_missing(value, join(key, name))
    elif node == _MISSING:
        raise ConfigError(key, f"{key}: it needs a value, and has no default. Set {key}=VALUE.")


def _forget_hydra() -> None:
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()


@contextmanager
def _hydra_as_it_was() -> Iterator[None]:
    """Let Hydra start anew inside, whether or not it is in use outside."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    present, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().hydra = None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = present
        HydraConfig.instance().cfg = config


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(under, Mapping)
        merged[key] = _merge(under, value) if both else value  # type: ignore[arg-type]
    return merged
