"""What went wrong in composing a configuration, in one message for the user.

Hydra is recognised by the names of its exceptions, so that nothing here imports it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from perfsearch.config.options import REPLACED, leaves, show
from perfsearch.config.schema import no_option_file
from perfsearch.core import command
from perfsearch.core.errors import nearest

FORCE = "++"
"""What Hydra wants before a key that it is to set whether or not the files have it."""

_QUOTED_KEY = r"'([^']+)'"
_NO_SUCH_KEY = re.compile(
    rf"Could not (?:override {_QUOTED_KEY}|delete from config\. {_QUOTED_KEY} does not exist)"
)
_EXISTS = re.compile(rf"Could not append to config\. An item is already at {_QUOTED_KEY}")
_AMBIGUOUS = re.compile(r"Ambiguous value for argument '([^']+)'")
_NOISE = re.compile(
    r"To append to your config use|Set the environment variable|https?://"
    r"|full_key:|object_type=|reference_type=|Config search path|provider=|^\s*$"
)


def _no_reason(runner: str) -> str:
    return ""


def explain(
    error: BaseException,
    known: Callable[[], Mapping[str, Any]],
    why_no_knobs: Callable[[str], str] = _no_reason,
) -> str | None:
    """One message for an error of composition; ``None`` where it is a bug of ours.

    Args:
        error: what was raised while a configuration was composed.
        known: composes the configuration that is nearest to the one asked for; called only when
            the message needs valid keys.
        why_no_knobs: says of a runner why it has no keys ``runner.knobs``; empty where it has.

    """
    if not _is_users(error):
        return None
    text = str(error)
    kind = type(error).__name__
    if kind == "MissingConfigException":
        return _missing_option(error, text)
    if kind == "OverrideParseException":
        return _unreadable(getattr(error, "override", "").removeprefix(FORCE), text)
    if match := _NO_SUCH_KEY.search(text):
        inside = getattr(error.__cause__, "full_key", None)  # of a mapping that was given
        return no_such_key(inside or next(g for g in match.groups() if g), known(), why_no_knobs)
    if match := _EXISTS.search(text):
        key = match.group(1)
        return f"+{key}: the key exists. Write {key}=VALUE, without the plus sign."
    if match := _AMBIGUOUS.search(text):
        asked = match.group(1).removeprefix(FORCE)
        key, _, value = asked.partition("=")
        if key.startswith("runner.knobs.") and "@" in value:
            return (
                f"{asked}: the comma stands for a sweep here. Quote an operator's parts and "
                f"devices, for the shell and for the value: '{key}=\"{value}\"'."
            )
        each = "Add -m to search with each of them; a" if command.given().sweeps else "A"
        return (
            f"{asked}: one value is needed. {each} list is {key}=[a,b], text with a comma "
            f"{key}='\"a,b\"'."
        )
    if kind == "MissingMandatoryValue":
        key = getattr(error, "full_key", "") or text.rpartition(" ")[2]
        return needs_value(key)
    if getattr(error, "full_key", None):
        return f"{error.full_key}: {_plain_words(text)}"  # type: ignore[attr-defined]
    cause = f" {_plain_words(str(error.__cause__))}" if _is_users(error.__cause__) else ""
    return f"{_plain_words(text)}{cause}"


def needs_value(key: str) -> str:
    """What to say of a key that has neither a value nor a default."""
    where = "; the same command with --help says what it may be" * command.given().sweeps
    return f"{key}: it needs a value, and has no default. Set {key}=VALUE{where}."


def no_such_key(
    key: str, tree: Mapping[str, Any], why_no_knobs: Callable[[str], str] = _no_reason
) -> str:
    """Say that ``key`` does not exist, and which one of ``tree`` was probably meant."""
    if key in REPLACED:
        return f"{key}: no such key any more: {REPLACED[key]}."
    parts = key.split(".")
    level: Any = tree
    for depth, part in enumerate(parts):
        if not isinstance(level, Mapping):
            parent = ".".join(parts[:depth])
            return f"{key}: no such key. {parent}={show(level)} has no keys below it."
        if part not in level:
            break
        level = level[part]
    else:
        # Hydra says of a key whose value is null that it does not exist.
        return f"{key}: it is null here. Nothing is left to drop; to set it write {key}=VALUE."
    assert isinstance(level, Mapping)
    if parts[:2] == ["runner", "knobs"] and depth == 1:
        reason = why_no_knobs(str(level.get("name")))
        if reason:
            return f"{key}: {reason}"
    elsewhere = [path for path, _ in leaves(tree) if path.split(".")[-1] == parts[-1]]
    if elsewhere:
        return f"{key}: no such key. Did you mean {elsewhere[0]!r}?"
    prefix = ".".join(parts[:depth])
    if not level:
        return f"{key}: no such key. {prefix} has no keys."
    told = f"{key}: no such key. {nearest(parts[depth], map(str, level), prefix)}"
    if prefix == "strategy" and command.given().sweeps:
        told += f" Of several strategies, strategy.NAME.{parts[depth]}=VALUE is for that one."
    return told


def _is_users(error: BaseException | None) -> bool:
    modules = [cls.__module__.partition(".")[0] for cls in type(error).__mro__]
    return any(module in ("hydra", "omegaconf", "yaml", "antlr4") for module in modules)


def _missing_option(error: BaseException, text: str) -> str:
    missing: str = getattr(error, "missing_cfg_file", None) or ""
    options: list[str] = list(getattr(error, "options", None) or [])
    group, slash, name = missing.rpartition("/")
    if not slash or not options:
        return _plain_words(text)
    half = no_option_file(group, name)
    return half or f"{group}={name}: no such option. {nearest(name, options)}"


def _unreadable(override: str, text: str) -> str:
    reason = text.partition("\n")[0]
    reason = re.sub(r"^.*?Error parsing override '.*?'\s*", "", reason).strip()
    because = f" ({reason})" if reason and "Error parsing" not in reason else ""
    return (
        f"{override}: cannot be read as KEY=VALUE{because}. Quote values that hold any of "
        "= , : { } [ ] or blanks, for the shell and for the value: "
        "'KEY=\"a=b\"'."
    )


def _plain_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if not _NOISE.search(line)]
    return " ".join(line for line in lines if line) or text.strip()
