"""The page on tuning while it trains says what the code does, and its example runs."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfsearch.config.options import show
from perfsearch.online import log
from perfsearch.online.options import TUNABLE, AutotuneOptions

ROOT = Path(__file__).parent.parent.parent


def test_every_option_stands_in_the_table_with_its_default():
    page = (ROOT / "docs" / "online.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE))
    defaults = AutotuneOptions()
    for field in dataclasses.fields(AutotuneOptions):
        assert table.pop(field.name) == show(getattr(defaults, field.name)), field.name
    assert set(table) <= set(TUNABLE)
    for knob in TUNABLE:
        assert f"`{knob}`" in page


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(str(ROOT / "examples" / "autotune_ddp.py"), "--steps", "1001", "--log-file", "log.csv"),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
    assert "step 100: loss" in done.stdout
    assert log.read(tmp_path / "log.csv").trials
