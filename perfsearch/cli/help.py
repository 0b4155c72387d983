"""The text of ``perfsearch --help``: static, from the option files and the typed settings.

Nothing is composed or imported for it, so that it answers at once.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable

from perfsearch.config.options import describe_type, show
from perfsearch.config.schema import GROUPS, Selected, Settings
from perfsearch.core.docstrings import attribute_help, summary

_USAGE = """\
Find the fastest configuration of a PyTorch training job that does the same computation.

Examples: perfsearch-run --search train.py --lr 1         your own script, as you start it
          perfsearch                                      a built-in job, in a few minutes
          perfsearch mode=profile                         where the time goes; searches nothing
          perfsearch runner=zero workload=gpt nproc=4     another runner, on so many devices
          perfsearch runner.knobs.bucket_cap_mb=[8,25,64] these values only

Usage: perfsearch [GROUP=OPTION ...] [KEY=VALUE ...]     search
       perfsearch -m strategy=bayes,random seed=1,2      one search for each combination
       perfsearch --cfg job [KEY=VALUE ...]              show the configuration, run nothing
       perfsearch --config-dir DIRECTORY ...             take option files of your own as well
       perfsearch space [KEY=VALUE ...]                  what can be tuned; searches nothing
       perfsearch session [KEY=VALUE ...]                holds a job open for the next command
       perfsearch try KEY=VALUE ...                      one configuration beside the baseline
       perfsearch compare A B                            which of two jobs is faster; see its --help
       perfsearch mcp [KEY=VALUE ...]                    lets an agent do these for one job
       perfsearch --version | --help | --help-all | --hydra-help
"""

_KNOBS = """\
Knobs (runner.knobs.NAME=...; quote braces and brackets for the shell)
  25                    pins it             search    its built-in values
  [8,25,64]             names its choices   null      the library's own default
  {min: 2, max: 64}     bounds it           ~runner.knobs.NAME drops it
"""

_EXIT_CODES = """\
Exit: 0 done, also with "no gain" or "inconclusive"; 1 no trial succeeded; 2 bad input; 3 a circuit
      breaker ended a search that has results, or the disk is full; 129, 130 and 143 for SIGHUP,
      SIGINT and SIGTERM. Of perfsearch compare: 0 faster, 4 no difference, 5 slower, 6 other work.
"""

_MORE = """\
Shown are the knobs and keys of runner={runner} and of the strategy and workload chosen with it:
  perfsearch runner=zero --help    those of another; perfsearch --help-all    all, thresholds too
  perfsearch space [KEY=VALUE ...] the values and today's settings of this job's knobs
"""

_CHOSEN = {"runner": "ddp", "strategy": "auto", "workload": "gpt"}
"""The groups whose keys are shown as far as they are chosen, with their defaults."""

_RARE = "metrics.thresholds."
"""Keys that are shown with ``--help-all`` only."""

_NAME_WIDTH = 30


@dataclasses.dataclass(frozen=True)
class OptionFile:
    """One YAML option of a group.

    Attributes:
        group: its folder.
        name: its file name without ``.yaml``.
        help: the first sentence of the comment that it begins with.
        keys: dotted key and comment of each of its keys, in order.

    """

    group: str
    name: str
    help: str
    keys: tuple[tuple[str, str], ...]


def help_text(arguments: Sequence[str] = ()) -> str:
    """What ``perfsearch --help`` prints: of the groups' options that are chosen, or all.

    Args:
        arguments: the command line, whose ``GROUP=OPTION`` choose; ``--help-all`` shows all.

    """
    options, everything = list(option_files()), "--help-all" in arguments
    words = (word.partition("=") for word in arguments)
    chosen = {**_CHOSEN, **{group: name for group, _, name in words if group in _CHOSEN}}
    shown = [o for o in options if everything or chosen.get(o.group) == o.name]
    more = "" if everything else _MORE.format(runner=chosen["runner"])
    parts = [_USAGE, _groups(options), _KNOBS, _own_keys(shown), _keys(everything), more]
    return "\n".join(part for part in [*parts, _EXIT_CODES] if part)


def option_files() -> Iterator[OptionFile]:
    """Every option of every group of the packaged configuration, by group and name."""
    folders = [f for f in resources.files("perfsearch.conf").iterdir() if f.is_dir()]
    for folder in sorted(folders, key=lambda f: (f.name not in GROUPS, f.name)):
        files = [f for f in folder.iterdir() if f.name.endswith(".yaml")]
        for file in sorted(files, key=lambda f: f.name):
            yield read_option(folder.name, file)


def read_option(group: str, file: Traversable) -> OptionFile:
    """Read names and comments of an option file; a comment stands above its key or beside it."""
    keys: list[tuple[str, str]] = []
    parents: list[tuple[int, str]] = []
    leading: list[str] = []
    above = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment = text.lstrip("# ").strip()
            if not comment.startswith("@package"):
                above = f"{above} {comment}".strip()
                leading += [] if keys else [comment]
            continue
        match = re.match(r"^( *)([A-Za-z_]\w*):(.*)$", line)
        if match:
            indent, name, rest = len(match.group(1)), match.group(2), match.group(3)
            parents = [p for p in parents if p[0] < indent]
            key = ".".join([p[1] for p in parents] + [name])
            parents.append((indent, name))
            _, _, beside = rest.partition(" #")
            keys.append((key, beside.strip() or above))
        above = ""
    sentence = re.match(r".*?\.(?=\s|$)", " ".join(leading))
    about = sentence[0] if sentence else ""
    return OptionFile(group, file.name.removesuffix(".yaml"), about, tuple(keys))


def _groups(options: list[OptionFile]) -> str:
    lines = ["Groups (GROUP=OPTION)"]
    group = ""
    for option in options:
        shown = "" if option.group == group else f"{option.group}="
        group = option.group
        lines += _entry(f"{shown:12}{option.name}", option.help)
    return "\n".join(lines) + "\n"


def _own_keys(options: list[OptionFile]) -> str:
    """The knobs and keys of options."""
    lines = []
    for option in options:
        if option.group not in _CHOSEN:
            continue
        knobs = [(k.removeprefix("knobs."), h) for k, h in option.keys if k.startswith("knobs.")]
        own = [(k, h) for k, h in option.keys if not k.startswith("knobs") and k != "name"]
        if knobs:
            lines.append(f"Knobs of {option.group}={option.name}")
            lines += [line for name, text in knobs for line in _entry(name, text)]
            lines.append("")
        if own:
            lines.append(f"Keys of {option.group}={option.name}")
            keys = [(f"{option.group}.{name}", text) for name, text in own]
            lines += [line for name, text in keys for line in _entry(name, text)]
            lines.append("")
    return "\n".join(lines)


def _keys(everything: bool) -> str:
    lines = ["Keys (KEY=VALUE), with their defaults"]
    for key, allowed, default, text in settings_keys():
        if key not in GROUPS and (everything or not key.startswith(_RARE)):
            words = text.rstrip(".").replace("``None``", "null").replace("``", "")
            lines += _entry(f"{key}={default}", f"{words} ({allowed})")
    return "\n".join(lines) + "\n"


def settings_keys(
    cls: type[object] = Settings, prefix: str = ""
) -> Iterator[tuple[str, str, str, str]]:
    """Dotted key, what is allowed, default and meaning of every setting of ``cls``."""
    hints, texts = typing.get_type_hints(cls), attribute_help(cls)
    for spec in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = f"{prefix}{spec.name}"
        annotation = hints[spec.name]
        if dataclasses.is_dataclass(annotation) and annotation is not Selected:
            assert isinstance(annotation, type)
            yield from settings_keys(annotation, f"{key}.")
            continue
        default = "" if spec.default is dataclasses.MISSING else show(spec.default)
        allowed = describe_type(annotation, spec.metadata)
        yield key, allowed, default, texts.get(spec.name, summary(annotation))


def _entry(name: str, text: str) -> list[str]:
    import textwrap

    indent = " " * (_NAME_WIDTH + 4)
    wrapped = textwrap.wrap(text, 100 - len(indent)) or [""]
    head = f"  {name:{_NAME_WIDTH}}  "
    if len(head) > len(indent):
        return [head.rstrip(), *(indent + line for line in wrapped)]
    return [(head + wrapped[0]).rstrip(), *(indent + line for line in wrapped[1:])]
