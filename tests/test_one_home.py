"""What stands in one place of the package only: whoever needs it takes it from there."""

import ast
import re
from pathlib import Path

import pytest

from perfsearch import knobs

PACKAGE = Path(__file__).parents[1] / "perfsearch"

HOMES = {
    "the warm-up rule": (r"\bis_steady\(|> 2 \* [\w.]*scored_seconds", {"training/clock.py"}),
    "how many steps are apart": (r"(MIN|MAX)_DISCARDED|^WARMUP_STEPS\b", {"training/clock.py"}),
    "reading a clock's step times": (r"def read_steps\(", {"training/clock.py"}),
    "gathering evidence of a failure": (r"\bEvidence\(", {"workers/group.py"}),
    "waiting for a group's devices": (r"(?<!def )\bwait_until_free\(", {"workers/group.py"}),
    "asking ranks where they stand": (r"(?<!def )ask_for_stacks\(", {"workers/group.py"}),
    "the start of a timed window": (r"mark\(\"start\"\)", {"training/clock.py"}),
}
"""What is meant, how it looks in a line, and the files that may hold it, below the package."""


@pytest.mark.parametrize("fact", HOMES)
def test_a_fact_has_one_home(fact):
    pattern, homes = HOMES[fact]
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text(), re.MULTILINE)
    }
    assert found == homes


WORDS_OF_OTHERS = {
    ("perfsearch/instrument/fsdp.py", "backward_prefetch"): "an argument of torch's FSDP",
    ("perfsearch/instrument/fsdp.py", "forward_prefetch"): "an argument of torch's FSDP",
    ("perfsearch/instrument/loaders.py", "pin_memory"): "an argument of torch's DataLoader",
    ("perfsearch/online/ddp.py", "mixed_precision"): "an attribute of torch's wrapper",
    ("perfsearch/runners/deepspeed/config.py", "activation_checkpointing"): "DeepSpeed's section",
    ("perfsearch/runners/deepspeed/config.py", "pin_memory"): "DeepSpeed's key",
    ("perfsearch/runners/_script/export.py", "cpu_offload"): "Accelerate's argument",
    ("perfsearch/runners/zero/export.py", "cpu_offload"): "HF Trainer's key",
    ("perfsearch/soap/rules/random.py", "pin_memory"): "an argument of torch's random functions",
    ("perfsearch/runners/zero/export.py", "activation_checkpointing"): "HF Trainer's key",
    ("perfsearch/runners/zero/export.py", "mixed_precision"): "Accelerate's key",
    ("perfsearch/runners/zero/export.py", "pin_memory"): "DeepSpeed's key",
}
"""Where a word that is also a knob's name is somebody else's."""


def words_of(file):
    """Every string of a file that is a knob's name."""
    tree = ast.parse(file.read_text())
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return {text for text in texts if isinstance(text, str) and text in knobs.by_name}


def test_a_knobs_name_is_text_in_its_record_only():
    """Elsewhere the record is asked; see CONTRIBUTING.md."""
    found = {
        (file.relative_to(PACKAGE.parent).as_posix(), word)
        for file in PACKAGE.rglob("*.py")
        if PACKAGE / "knobs" not in file.parents
        for word in words_of(file)
    }
    assert found == set(WORDS_OF_OTHERS)


def test_a_knobs_name_stands_once_among_the_records():
    texts = [
        node.value
        for file in (PACKAGE / "knobs").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant)
    ]
    twice = {name for name in knobs.by_name if texts.count(name) != 1}
    assert twice == {"static_graph"}  # an attribute of torch's wrapper, too
