"""The launcher of a search over a script: whose argument is whose."""

import json
import sys

from perfsearch.instrument import launch
from perfsearch.instrument.launch import ENTRY
from perfsearch.workers.forkserver import run_ranks
from perfsearch.workers.messages import LAUNCHER_REPORT, Place


def test_the_scripts_arguments_are_kept_from_torchruns_parser():
    words = ["train.py", "--log", "x", "--nproc", "-m", ENTRY, "--", "--rdzv-conf"]
    options = launch.options_of([*launch.torchrun_arguments(3), "-m", ENTRY, *words])
    python = [*launch.python_arguments(), "-m", ENTRY]
    assert options.training_script == sys.executable
    assert options.training_script_args == [*python, *words]
    assert (options.no_python, options.nproc_per_node) == (True, "3")


def test_a_usage_error_of_the_launcher_is_reported(tmp_path, capfd):
    Place("group", "token", 1, 1.0).write(tmp_path)
    words = ["--max-restarts=none", "-m", ENTRY, "train.py"]
    assert run_ranks(tmp_path, lambda: launch.options_of(words)) == 1
    error = json.loads((tmp_path / LAUNCHER_REPORT).read_text())["error"]
    assert error["type"] == "UsageError"
    assert error["message"] == "argument --max-restarts/--max_restarts: invalid int value: 'none'"
    assert "UsageError" in capfd.readouterr().err
