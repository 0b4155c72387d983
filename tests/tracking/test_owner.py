from __future__ import annotations

import subprocess
import sys

from perfsearch.tracking import owner


def test_a_living_process_is_not_dead_and_a_reused_id_is():
    """optuna/optuna#4234: liveness goes by process id and start time, never by a clock."""
    tags = owner.owner_tags()
    assert not owner.is_dead(tags)
    assert owner.is_dead({**tags, owner.START: str(float(tags[owner.START]) - 1000)})


def test_a_process_that_ended_is_dead_and_one_elsewhere_is_not():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    tags = {**owner.owner_tags(), owner.PID: str(process.pid)}
    assert owner.is_dead(tags)
    assert not owner.is_dead({**tags, owner.HOST: "another-host"})
    assert not owner.is_dead({})
