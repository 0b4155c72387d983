"""The user's launch command: what it says, and the same command for another configuration."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfsearch.core.errors import BadInputError, nearest

_KEY = "workload.command"
_EXAMPLE = "workload.command='deepspeed --num_gpus 4 train.py --deepspeed_config ds_config.json'"

_CONFIG_FLAGS = (
    "--deepspeed_config",
    "--deepspeed",
    "--deepspeed_config_file",
    "--deepspeed-config",
)
"""Options of scripts, of HF Trainer and of ``accelerate launch`` that take the file's path."""

_HOSTFILE = "/job/hostfile"
"""Where DeepSpeed looks for other hosts without being told."""


ON_ONE_NODE = (
    "Tune DeepSpeed's settings on one node, with the micro-batch that a rank has on all of them. "
    "What is around DeepSpeed is searched over all: perfsearch-run --search --nnodes N -o "
    "runner=ddp SCRIPT ARGUMENTS, whose ranks torch's launcher starts"
)
"""What to do where ranks on several nodes are asked for."""


@dataclass(frozen=True)
class Command:
    """A launch command, taken apart.

    Attributes:
        words: as the user gave them.
        launcher: a name of ``LAUNCHERS``.
        options_from: place of the launcher's first option.
        script_at: place of the script.
        config: path of the DeepSpeed configuration, where an option that is not known takes it.

    """

    words: tuple[str, ...]
    launcher: str
    options_from: int
    script_at: int
    config: str = ""

    @classmethod
    def parse(cls, given: Any) -> Command:
        """Take ``workload.command`` apart.

        Raises:
            BadInputError: it is no command, its launcher is not known, or it starts no script.

        """
        if not given:
            raise BadInputError(f"{_KEY}: missing. Give your launch command, as in {_EXAMPLE}")
        try:
            words = shlex.split(given) if isinstance(given, str) else [str(w) for w in given]
        except ValueError as error:
            raise BadInputError(f"{_KEY}={given}: {error}") from error
        launcher, first = _launcher_of(words)
        known = LAUNCHERS[launcher]
        place = first
        while place < len(words) and words[place].startswith("-"):
            takes_value = "=" not in words[place] and words[place] not in known.flags
            place += 2 if takes_value else 1
        if place >= len(words):
            raise BadInputError(f"{_KEY}={shlex.join(words)}: starts no script. As in {_EXAMPLE}")
        return cls(tuple(words), launcher, first, place)

    @property
    def options(self) -> tuple[str, ...]:
        """The launcher's own words."""
        return self.words[self.options_from : self.script_at]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the script is given."""
        return self.words[self.script_at + 1 :]

    @property
    def autotuning(self) -> str:
        """``tune``, ``run``, or empty where the command asks for no tuning by itself."""
        value = value_of(self.options, ("--autotuning",)) or ""
        if value and value not in ("tune", "run"):
            raise BadInputError(f"--autotuning {value}: allowed are tune and run")
        return value

    @property
    def config_path(self) -> str | None:
        """Path of the DeepSpeed configuration, where the command names it."""
        return next((value for _, _, value in self._config_places()), None)

    def _config_places(self) -> Iterator[tuple[int, str, str]]:
        """Where the path stands: place of the word, what stands before it there, the path."""
        for place, word in enumerate(self.words):
            name, joined, value = word.partition("=")
            if name not in _CONFIG_FLAGS:
                if place > self.script_at and self._is_config(value if joined else word):
                    yield place, f"{name}=" if joined else "", value if joined else word
                continue
            if joined and ".json" in value:
                yield place, f"{name}=", value
            elif not joined and place + 1 < len(self.words) and ".json" in self.words[place + 1]:
                yield place + 1, "", self.words[place + 1]

    def _is_config(self, word: str) -> bool:
        return bool(self.config) and os.path.abspath(word) == os.path.abspath(self.config)

    def ranks(self) -> int | None:
        """Processes that it starts on this node; ``None``: one for each visible GPU.

        Raises:
            BadInputError: several nodes, or a number that is none.

        """
        known = LAUNCHERS[self.launcher]
        nodes = value_of(self.options, known.nodes)
        if nodes is not None and nodes not in ("1", "-1", "1:1"):
            raise BadInputError(
                f"{known.nodes[0]} {nodes}: runner=deepspeed starts ranks on one. {ON_ONE_NODE}"
            )
        text = value_of(self.options, known.ranks)
        if self.launcher == "deepspeed":
            self._refuse_hosts()
            chosen = self.devices()
            if chosen is not None:
                return len(chosen)
        if text is None:
            return 1 if self.launcher == "torchrun" else None
        if text in ("gpu", "auto", "-1"):
            return None
        if not text.isdigit() or int(text) < 1:
            raise BadInputError(f"{known.ranks[0]} {text}: a whole number from 1 is needed")
        return int(text)

    def devices(self) -> tuple[int, ...] | None:
        """GPUs that ``--include`` chooses, by number; ``None`` where it chooses none.

        Raises:
            BadInputError: it names several hosts.

        """
        if self.launcher != "deepspeed":
            return None
        text = value_of(self.options, ("--include", "-i"))
        if not text:
            return None
        if "@" in text:
            raise BadInputError(
                f"--include {text}: runner=deepspeed starts ranks on one node. {ON_ONE_NODE}"
            )
        _, _, slots = text.partition(":")
        return tuple(int(s) for s in slots.split(",")) if slots else None

    def _refuse_hosts(self) -> None:
        path = Path(value_of(self.options, ("--hostfile", "-H")) or _HOSTFILE)
        if not path.exists():
            return
        lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        hosts = [line.split()[0] for line in lines if line]
        if len(hosts) > 1:
            raise BadInputError(
                f"--hostfile {path}: lists {len(hosts)} hosts, and runner=deepspeed starts ranks "
                f"on one, without the file. {ON_ONE_NODE}"
            )

    def argument(self, flag: str) -> str | None:
        """The value of an option of the script."""
        return value_of(self.arguments, (flag,))

    def for_trial(self, config: Path, arguments: Mapping[str, str], port: int | None) -> list[str]:
        """The same command with another configuration, and without DeepSpeed's own tuning.

        Args:
            config: path of the file, put where the command names its own.
            arguments: options of the script that get another value, appended where absent.
            port: of the rendezvous, where the command settles none.

        """
        words = list(self.words)
        for place, before, _ in self._config_places():
            words[place] = f"{before}{config}"
        tail = with_values(words[self.script_at + 1 :], arguments)
        head = words[: self.script_at + 1]
        options = _without(head[self.options_from : self.script_at], "--autotuning")
        known = LAUNCHERS[self.launcher]
        settled = any(w.partition("=")[0] in known.has_port for w in options)
        if port is not None and not settled:
            options = [known.port, str(port), *options]
        return [*head[: self.options_from], *options, head[self.script_at], *tail]


def value_of(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of an option by any of its names, in both ways of writing; the last one counts."""
    found = None
    for place, word in enumerate(words):
        name, joined, value = word.partition("=")
        if name not in names:
            continue
        if joined:
            found = value
        elif place + 1 < len(words):
            found = words[place + 1]
    return found


def with_values(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Options with other values; one that is absent is appended."""
    changed = list(words)
    for flag, value in values.items():
        seen = False
        for place, word in enumerate(changed):
            if word == flag and place + 1 < len(changed):
                changed[place + 1], seen = value, True
            elif word.startswith(f"{flag}="):
                changed[place], seen = f"{flag}={value}", True
        if not seen:
            changed += [flag, value]
    return changed


def _without(words: Sequence[str], name: str) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.startswith(f"{name}="):
            skip = False
            continue
        if word == name:
            skip = True
            continue
        kept.append(word)
    return kept


def _launcher_of(words: Sequence[str]) -> tuple[str, int]:
    """Which launcher, and where its options begin."""
    name, place = Path(words[0]).name, 1
    if re.fullmatch(r"python[\d.]*", name):
        rest = [w for w in words[1:4] if w not in ("-u", "-P")]
        if rest and rest[0] == "-m":
            module = words[words.index("-m") + 1] if words.index("-m") + 1 < len(words) else ""
            name, place = MODULES.get(module, module), words.index("-m") + 2
        elif rest:
            name, place = Path(rest[0]).name, words.index(rest[0]) + 1
    if name == "accelerate" and place < len(words) and words[place] == "launch":
        place += 1
    if name not in LAUNCHERS:
        raise BadInputError(
            f"{_KEY}={shlex.join(words)}: {name} is no launcher of DeepSpeed jobs that is known. "
            f"{nearest(name, LAUNCHERS)} As in {_EXAMPLE}"
        )
    return name, place


# -----------------------------------------------------------------------------
# The launchers that DeepSpeed jobs are started by, as far as their options must be understood.


@dataclass(frozen=True)
class Launcher:
    """What must be known of a launcher's own options.

    Attributes:
        ranks: options that say how many processes to start here.
        nodes: options that say on how many nodes.
        port: option for the port of the rendezvous.
        has_port: options of which each already settles the port.
        flags: options without a value; every other one takes the next word.

    """

    ranks: tuple[str, ...]
    nodes: tuple[str, ...]
    port: str
    has_port: tuple[str, ...]
    flags: frozenset[str]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LAUNCHERS = {
    "deepspeed": Launcher(
        ("--num_gpus", "--num_accelerators"),
        ("--num_nodes",),
        "--master_port",
        ("--master_port",),
        _words(
            "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi "
            "--save_pid --bind_cores_to_rank --quiet -q"
        ),
    ),
    "torchrun": Launcher(
        ("--nproc-per-node", "--nproc_per_node"),
        ("--nnodes",),
        "--master-port",
        ("--master-port", "--master_port", "--standalone", "--rdzv-endpoint", "--rdzv_endpoint"),
        _words("--standalone --module -m --no-python --no_python --run-path --run_path"),
    ),
    "accelerate": Launcher(
        ("--num_processes", "--num-processes"),
        ("--num_machines", "--num-machines"),
        "--main_process_port",
        ("--main_process_port", "--main-process-port"),
        _words(
            "--cpu --multi_gpu --multi-gpu --use_deepspeed --use-deepspeed --module -m "
            "--no_python --no-python --debug --quiet -q"
        ),
    ),
}

MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
