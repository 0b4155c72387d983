"""Runs the fenced blocks of a page as they stand, one after the other, as its reader would.

Blocks of ``sh`` and ``python`` are run; with ``title="NAME"`` a block of any language is a file
that the page gives. Commands are those of this environment; searches get the smallest budget by a
wrapper in ``PATH`` or around ``perfsearch.search``, and everything else is as a reader has it, but
that only one search of a script, of the page that asks for it, is confirmed and goes to MLflow.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = {"text", "json", "yaml"}
"""Languages of blocks that are looked at, unless they have a title."""

_SMALL = ("budget.trials=1", "confirm.max_repeats=1")
_SMALLEST = ("budget.trials=1", "confirm.max_repeats=0", "tracking.enabled=false")
_SMALL_IN_PYTHON = """\
import functools as _functools
import perfsearch as _perfsearch
_perfsearch.search = _functools.partial(
    _perfsearch.search, confirm={"max_repeats": 0}, tracking={"enabled": False}
)
"""
_SUBCOMMANDS = "compare|space|session|try|mcp|join|-*"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    title: str
    text: str

    @property
    def runs(self):
        return not self.title and self.language not in SHOWN


def blocks_of(text):
    """Every fenced block; an indented one, or one without a language, is refused."""
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match[2])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(line, match[1], title[1] if title else "", match[3]))
    assert text.count("```") == 2 * len(found), "a fence that is not closed, or indented"
    return found


def wrappers(directory, whole=False):
    """Commands of this environment for ``PATH``, whose searches are as short as can be.

    Args:
        directory: where they are put.
        whole: whether searches of scripts are confirmed, and go to MLflow.

    """
    directory.mkdir(exist_ok=True)
    here = Path(sys.executable).parent
    options = " ".join(f"-o {key}" for key in (_SMALL if whole else _SMALLEST))
    texts = {
        "perfsearch": f'case "$1" in {_SUBCOMMANDS}) exec {here}/perfsearch "$@";; esac\n'
        f'exec {here}/perfsearch "$@" {" ".join(_SMALLEST)}\n',
        "perfsearch-run": 'case "$1" in --search) shift; '
        f'exec {here}/perfsearch-run --search {options} "$@";; esac\n'
        f'exec {here}/perfsearch-run "$@"\n',
    }
    for name, text in texts.items():
        file = directory / name
        file.write_text(f"#!/usr/bin/env bash\n{text}")
        file.chmod(0o755)
    return f"{directory}:{here}"


def run_block(block, directory, environment):
    """Run one block; the output is the assertion's message where it fails."""
    commands = {
        "sh": ["bash", "-euo", "pipefail", "-c", block.text],
        "python": [sys.executable, "-c", _SMALL_IN_PYTHON + block.text],
    }
    assert block.language in commands, f"line {block.line}: {block.language}: nobody can run that"
    done = subprocess.run(
        commands[block.language], cwd=directory, env=environment, capture_output=True, text=True,
        timeout=900, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"line {block.line}:\n{block.text}\n{said[-4000:]}"
    return said


def run_page(text, directory, path, known=()):
    """Run the blocks of a page in ``directory``; what each printed.

    Those all of whose lines are known have been run.
    """
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    known_lines = {line for text in known for line in text.splitlines()}
    said = []
    for block in blocks_of(text):
        if block.title:
            (directory / block.title).write_text(block.text)
        elif block.runs and not known_lines.issuperset(block.text.splitlines()):
            said.append(run_block(block, directory, environment))
    return said
