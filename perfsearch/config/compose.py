"""Composing a configuration: option files, then ``KEY=VALUE`` as on the command line, then values.

Hydra is imported when something is composed, and not before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

from perfsearch.config.messages import FORCE, explain, needs_value
from perfsearch.config.options import ConfigError, join, plain_value
from perfsearch.config.schema import CONFIG_MODULE, GROUPS, available
from perfsearch.core import command
from perfsearch.core.errors import BadInputError

MISSING = "???"
"""What OmegaConf holds for a key that still needs a value."""

NAME = "perfsearch"
VERSION_BASE = "1.3"
"""The version of Hydra whose behaviour we ask for."""

_OF_ONE = re.compile(r"^strategy\.(\w+)\.\w[^=]*=")
_CHOICE = re.compile(r"^(runner|workload)=(\w+)$")
_KNOB = re.compile(r"^runner\.knobs(\.[^=]+=|=\s*\{)")


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
    odd = next((word for word in overrides if not isinstance(word, str)), None)
    if odd is not None:
        raise BadInputError(f"{odd!r}: KEY=VALUE is needed, as text, such as 'seed=1'.")
    words, given = list(overrides), {}
    for key, value in values.items():
        if key in GROUPS:
            name, rest = _option(key, value)
            words += [f"{key}={name}"] if name else []
            if key == "strategy":
                _refuse_others(name, rest)
            given[key] = plain_value(rest)
        else:
            given[key] = plain_value(value)
    with initialized():
        try:
            below = plain(composed(open_keys(words)), complete=False)
        except BadInputError:
            raise
        except Exception as error:
            message = explain(error, lambda: plain(composed([]), complete=False), why_no_knobs)
            if message is None:
                raise
            raise BadInputError(message) from error
    whole = merged(below, given)
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
    if group == "strategy" and callable(value):
        return "external", {"command": _named(value)}
    raise ConfigError(
        group, f"{group}={value!r}: the name of an option, or a mapping with name and its keys."
    )


def _refuse_others(name: str, keys: Mapping[str, Any]) -> None:
    """Refuse keys of another strategy, which only a sweep over several has."""
    for key, value in keys.items():
        if isinstance(value, Mapping) and key != name and key in available("strategy"):
            raise _of_another(f"strategy.{key}", key, [name] if name else [])


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


def _named(function: Any) -> str:
    """``module:function``, or the class of what can be called without being a function."""
    known = function if hasattr(function, "__qualname__") else type(function)
    return f"{known.__module__ or ''}:{known.__qualname__}"


@contextmanager
def initialized(directory: str | None = None) -> Iterator[None]:
    """Let ``composed`` read our option files, or those of a directory.

    Hydra may be in use outside, as in somebody's Hydra application, and is afterwards as it was.
    """
    from hydra import initialize_config_dir, initialize_config_module, version
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    outside, config = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    base = version.VersionBase.instance().version_base
    GlobalHydra.instance().clear()
    try:
        if directory is None:
            begun = initialize_config_module(CONFIG_MODULE, NAME, version_base=VERSION_BASE)
        else:
            begun = initialize_config_dir(directory, NAME, version_base=VERSION_BASE)
        with begun:
            yield
    finally:
        GlobalHydra.instance().hydra = outside
        HydraConfig.instance().cfg = config
        version.VersionBase.instance().version_base = base


def composed(overrides: Sequence[str], name: str = "config") -> Any:
    """What Hydra composes of the file ``name`` and overrides, its own node included."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    config = hydra.compose(name, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(config)  # for ${hydra:...} in values
    return config


def _refuse_missing(node: Any, key: str) -> None:
    if isinstance(node, Mapping):
        for name, value in node.items():
            _refuse_missing(value, join(key, name))
    elif node == MISSING:
        raise ConfigError(key, needs_value(key))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings with the values of ``above`` in their place, group by group."""
    both = dict(below)
    for key, value in above.items():
        under = both.get(key)
        nested = isinstance(value, Mapping) and isinstance(under, Mapping)
        both[key] = merged(under, value) if nested else value  # type: ignore[arg-type]
    return both


def plain(config: Any, complete: bool = True) -> dict[str, Any]:
    """The composed configuration as plain dicts, lists and scalars, without Hydra's own node.

    Args:
        config: what Hydra composed.
        complete: whether a key that still needs a value is an error.

    """
    from omegaconf import OmegaConf, open_dict

    with open_dict(config):
        config.pop("hydra", None)
    container = OmegaConf.to_container(config, resolve=True, throw_on_missing=complete)
    assert isinstance(container, dict)
    return {str(k): v for k, v in container.items()}


def open_keys(words: Sequence[str]) -> list[str]:
    """Let keys stand that no file has.

    - ``strategy.NAME.KEY=VALUE``: a key of one strategy of several that are swept over.
    - Any name below ``runner.knobs`` where no file can hold them all. A runner whose file has
      ``knobs: {}`` learns their names from the model, and ``workload=script`` has the script's own;
      the runners refuse what there is not.

    Everywhere else a key must be in the option's file.

    Args:
        words: of a command line, options among them.

    Raises:
        ConfigError: a key of a strategy that is not searched with.

    """
    return _open_knobs([_opened(word, words) for word in words])


def _opened(word: str, words: Sequence[str]) -> str:
    match = _OF_ONE.match(word)
    if match is None or match[1] not in available("strategy"):
        return word
    asked = [given.partition("=")[2] for given in words if given.startswith("strategy=")]
    named = re.findall(r"\w+", asked[-1]) if asked else []
    if match[1] not in named and "glob" not in named:
        raise _of_another(word, match[1], named)
    return f"{FORCE}{word}"


def _of_another(written: str, strategy: str, named: Sequence[str]) -> ConfigError:
    """What to raise of a key of one strategy that is not among those to search with."""
    choice = f"strategy={strategy}"
    if command.given().sweeps and named:
        choice = f"{choice}, or -m strategy={','.join([*named, strategy])}"
    return ConfigError(
        written.partition("=")[0],
        f"{written}: it is for strategy={strategy}, which is not among those to search with. "
        f"Choose it by {choice}, or leave the key out.",
    )


def _open_knobs(words: list[str]) -> list[str]:
    chosen = {match[1]: match[2] for word in words if (match := _CHOICE.match(word))}
    if not any(map(_KNOB.match, words)):
        return words
    if chosen.get("workload") != "script" and not _learns_knobs(chosen.get("runner", "")):
        return words
    return [f"{FORCE}{word}" if _KNOB.match(word) else word for word in words]


def _learns_knobs(runner: str) -> bool:
    """Whether the runner's file names no knobs."""
    file = resources.files(CONFIG_MODULE) / "runner" / f"{runner}.yaml"
    return file.is_file() and re.search(r"^knobs: \{\}", file.read_text(), re.MULTILINE) is not None
