"""Secrets among arguments, variables and texts: what is taken for one, and how it is masked.

One redactor serves everything that is written or shown: settings, journal, files, MLflow's view. A
command that is handed over asks for what was masked in it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfsearch.core.errors import BadInputError

MASK = "***"

_VARIABLE = r"(?i:SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH)"
"""In the name of an environment variable, which are set for many more uses than arguments are."""

_ENDS = (
    r"(?:secret|passw(?:or)?d|passwd|passphrase|pwd|credentials?|authorization|bearer"
    r"|(?:api|access|account|private|secret|shared|auth|encryption)[-_]?key"
    r"|(?<!pad[-_])(?<!eos[-_])(?<!bos[-_])(?<!unk[-_])(?<!sep[-_])(?<!cls[-_])(?<!mask[-_])"
    r"(?<!image[-_])(?<!special[-_])(?<!per[-_])(?<!stop[-_])(?<!next[-_])token"
    r"|(?<!\w)(?:auth|sig|pat))\d*"
)
"""How the name of an argument, a key or a parameter ends whose value is a secret."""

_NAME = rf"(?i)^[-+~]*[\w.-]*?{_ENDS}$"

_NO_SECRET = r"(?:true|false|null|none|yes|no|on|off|\*\*\*)\b"

# The name and what stands between it and its value: `name=`, `"name": `, `name = '`; `--name `, and
# the same as two elements of a list in JSON, YAML and Python.
_NAMED = rf"""(?ix)(?P<before>{_ENDS}["']?\s*(?:=|:)\s*(?:Bearer\s+|Basic\s+)?
    | (?<![\w-])--?[\w.-]*?{_ENDS}(?:["']?\s*,\s*|["']?\s*\n\s*-\s+|[ ]+)(?!["']?--?[a-zA-Z])
    | \b(?:Bearer|Basic)\s+(?=[\w+/=.~-]{{16}}))
    (?!["']?{_NO_SECRET})(?P<quote>["'])?(?(quote)[^"'\n]+|[^\s"',;&\]\)}}]+)"""

_IN_URL = r"(?<=://)[^/\s:@\"']*:[^\s@\"']+(?=@)"

_SHAPES = (
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
"""Tokens that tell by their form what they are, wherever they stand."""

_SHORTEST = 6
"""Shorter values (``1``, ``true``) stand all over any text and are no secrets."""

_learned: set[str] = set()


class Redactor:
    """Masks secrets by the name that they have, by their form, and by value where that is known.

    Known are the values of environment variables whose names tell of secrets, and those that were
    learned from a command.

    Args:
        environment: where secrets are looked up; the process's own by default.

    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._variables = {
            value
            for name, value in variables.items()
            if re.search(_VARIABLE, name) and _is_value(value) and not _is_place(value)
        }

    def text(self, value: str) -> str:
        """The text with secrets masked."""
        for secret in self._known():
            value = value.replace(secret, MASK)
        value = re.sub(_SHAPES, MASK, re.sub(_IN_URL, MASK, value))
        return re.sub(_NAMED, lambda found: f"{found['before']}{found['quote'] or ''}{MASK}", value)

    def data(self, value: bytes) -> bytes:
        """The same for a file's content, whatever its encoding; in binary ones by value only."""
        for secret in self._known():
            value = value.replace(secret.encode(), MASK.encode())
        if b"\0" in value:
            return value
        return self.text(value.decode("utf-8", "surrogateescape")).encode(
            "utf-8", "surrogateescape"
        )

    def tree(self, value: Any, name: str = "") -> Any:
        """The same for plain values, nested in any way.

        Args:
            value: mappings, lists, texts and numbers.
            name: the key that it has.

        """
        if isinstance(value, Mapping):
            return {key: self.tree(below, str(key)) for key, below in value.items()}
        if isinstance(value, list | tuple):
            if value and all(isinstance(each, int | float | None) for each in value):
                return list(value)
            marked = [place for place, *_ in _named(value)]
            return [
                self._word(each) if place in marked else self.tree(each)
                for place, each in enumerate(value)
            ]
        if not isinstance(value, str):
            return value
        return MASK if value and re.match(_NAME, name) and _is_secret(value) else self.text(value)

    def words(self, command: Sequence[str]) -> list[str]:
        """The words of a command with secrets masked."""
        masked: list[str] = self.tree(list(command))
        return masked

    def _word(self, word: Any) -> str:
        name, joined, _ = str(word).partition("=")
        return f"{name}={MASK}" if joined and re.match(_NAME, name) else MASK

    def _known(self) -> list[str]:
        return sorted(self._variables | _learned, key=len, reverse=True)


def learn(command: Sequence[str]) -> None:
    """Remember the secrets among a command's arguments: a job may print them anywhere."""
    _learned.update(value for _, _, value in _named(command) if _is_value(value))


def in_shell(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], list[str], list[str]]:
    """A command's words for a shell script that holds no secret.

    Args:
        command: the words.
        environment: variables of today. One that has a secret's value is where the script will read
            it; another secret gets a variable of its argument's name.

    Returns:
        The words, quoted; lines that ask for what is not set when the script runs; and the names of
        the variables.

    """
    places = {place: (name, value) for place, name, value in _masked(command)}
    words, lines, variables = [], [], []
    for place, word in enumerate(command):
        if place not in places:
            words.append(shlex.quote(word))
            continue
        name, value = places[place]
        variable = next(
            (n for n, v in environment.items() if v == value and re.search(_VARIABLE, n)), name
        )
        before = word.removesuffix(value)
        words.append(f'{shlex.quote(before) if before else ""}"${variable}"')
        if variable not in variables:
            variables.append(variable)
            lines += [
                f'if [ -z "${{{variable}:-}}" ]; then',
                f"  printf '{variable} is not set; its value: ' >&2",
                "  stty -echo 2>/dev/null",
                f"  IFS= read -r {variable} || exit 2",
                "  stty echo 2>/dev/null; echo >&2",
                "fi",
            ]
    return words, lines, variables


def filled(command: Sequence[str], environment: Mapping[str, str], key: str) -> list[str]:
    """The words of a command that a search has recorded, with what it masked put back.

    Args:
        command: the words, some of them masked.
        environment: where the values are read.
        key: of the settings, for the message.

    Raises:
        BadInputError: a value is not there.

    """
    words = list(command)
    for place, word in enumerate(words):
        if MASK not in word:
            continue
        before, variable = _variable(words, place)
        if not environment.get(variable):
            raise BadInputError(
                f"{key}: {word!r} of the command was masked when it was recorded. Set the "
                f"environment variable {variable} to its value, or give {key}=[...] whole."
            )
        words[place] = before + environment[variable]
    return words


def _masked(command: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Of each word that is masked: its place, the variable for its value, and the value."""
    words = Redactor().words(command)
    for place, word in enumerate(words):
        if word != command[place]:
            before, variable = _variable(words, place)
            yield place, variable, command[place].removeprefix(before)


def _variable(words: Sequence[str], place: int) -> tuple[str, str]:
    """What stands before a word's value, and the name of the variable that has the value."""
    name, joined, _ = words[place].partition("=")
    if joined and re.match(_NAME, name):
        return f"{name}=", _plain_name(name)
    if place and re.match(_NAME, words[place - 1]):
        return "", _plain_name(words[place - 1])
    return "", f"ARGUMENT_{place}"


def _plain_name(option: str) -> str:
    return re.sub(r"\W+", "_", option.lstrip("-+~")).upper()


def _named(words: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """Of each word that a name marks as a secret, or holds one: place, name, value."""
    before = ""
    for place, word in enumerate(words):
        if not isinstance(word, str):
            before = ""
            continue
        name, joined, value = word.partition("=")
        if joined and re.match(_NAME, name) and _is_secret(value):
            yield place, name, value
        elif before.startswith("-") and re.match(_NAME, before) and _is_secret(word):
            yield place, before, word
        before = word


def _is_secret(value: str) -> bool:
    """Whether what an option of a telling name is given is a value, and no switch."""
    return bool(value) and not value.startswith("--") and not re.fullmatch(_NO_SECRET, value, re.I)


def _is_value(value: str) -> bool:
    """Whether a value says enough to be looked for anywhere."""
    return len(value) >= _SHORTEST and not (value.isalpha() and value.islower() and len(value) < 10)


def _is_place(value: str) -> bool:
    """Whether a value is a path here, which is a setting: masking it would blank out texts."""
    top = re.match(r"/[^/]+", value)
    return value.startswith("/") and top is not None and os.path.isdir(top[0])
