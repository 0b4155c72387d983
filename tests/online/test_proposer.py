"""The side process: its answers, its end, and what it keeps out of the rank."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from support.online_fakes import BASELINE, facts

from perfsearch.core.trial import Purpose, Status, Trial
from perfsearch.online.controller import ProposerEndedError
from perfsearch.online.options import AutotuneOptions
from perfsearch.online.proposer import ProposerProcess


@pytest.fixture
def proposer():
    made = ProposerProcess()
    yield made
    made.close()


def trial(configuration, cost):
    return Trial(0, dict(configuration), Purpose.SEARCH, Status.OK, cost=cost, cost_error=0.01)


def test_it_is_asked_and_told(proposer):
    proposer.open(facts(), AutotuneOptions().to_plain())
    described = proposer.answer(60)
    assert "bucket_cap_mb" in described["searched"]
    proposer.tell(trial(BASELINE, 1.0))
    seen = []
    for number in range(5):
        proposer.ask()
        configuration = proposer.answer(60)["configuration"]
        assert set(configuration) == set(BASELINE)
        seen.append(str(configuration))
        proposer.tell(trial(configuration, 1.0 + number))
    assert len(set(seen)) == 5


def test_bad_values_are_an_answer(proposer):
    options = {**AutotuneOptions().to_plain(), "knobs": {"bucket_cap_mb": 9999}}
    proposer.open(facts(), options)
    assert "autotune.knobs.bucket_cap_mb=9999" in proposer.answer(60)["refused"]


def test_an_answer_that_is_not_there_is_not_waited_for(proposer):
    assert proposer.answer(0.01) is None


def test_its_death_is_an_error_of_its_own(proposer):
    os.kill(proposer._process.pid, signal.SIGKILL)
    with pytest.raises(ProposerEndedError, match="exit code -9"):
        proposer.answer(30)
    with pytest.raises(ProposerEndedError):
        proposer.ask()


def test_it_ends_with_the_rank():
    code = (
        "from perfsearch.online.proposer import ProposerProcess; import os, sys;"
        "p = ProposerProcess(); print(p._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    process_id = int(done.stdout)
    try:
        psutil.Process(process_id).wait(30)
    except psutil.NoSuchProcess:
        return


def test_ranks_load_nothing_of_what_it_needs():
    heavy = {"torch", "sklearn", "scipy", "hydra", "omegaconf", "mlflow", "nevergrad", "pandas"}
    modules = ("perfsearch", "perfsearch.online", "perfsearch.online.proposer")
    for module in modules:
        code = f"import sys, {module}; print(*{{m.partition('.')[0] for m in sys.modules}})"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert not heavy & set(done.stdout.split()), module
    code = "import sys, perfsearch.online.rank; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not (heavy - {"torch"}) & loaded
