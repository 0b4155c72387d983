"""What a trial does after its scored steps never costs it its score."""

from dataclasses import asdict, replace
from pathlib import Path

from perfsearch.core.hardware import Environment, GroupSpec
from perfsearch.core.trial import Measurement, Status
from perfsearch.workers.failures import Failure
from perfsearch.workers.group import Reply
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.pool import Pool

SPEC = GroupSpec(workload={}, device="cpu", nproc=1)
OPTIONS = {"cuda_graph": True, "examine": True}


class Group:
    """Fails whenever more is asked for than scored steps."""

    alive, spec, pids, info = True, SPEC, (), {}

    def __init__(self):
        self.requests = []

    def run(self, request, time_limit_s):
        self.requests.append(request)
        if request.detail != "light" or request.recipe_options.get("examine"):
            return Reply(failure=Failure(Status.OOM, "no memory left", 0, while_profiling=True))
        measured = asdict(Measurement([0.1], 8))
        return Reply({"status": "ok", "reason": "", "measurement": measured})


def test_a_failing_profile_or_examination_is_left_out_and_named(tmp_path):
    request = TrialRequest(
        0, "soap.recipe", {}, recipe_options=OPTIONS, log_directory=str(tmp_path)
    )
    for asked in (request, replace(request, detail="full")):
        pool = Pool(Environment(Path(tmp_path)))
        pool._group = group = Group()
        result = pool.measure(SPEC, asked, 10.0)
        assert result.status is Status.OK
        assert result.measurement.environment["unsupported"] == {"close look": "no memory left"}
        assert len(group.requests) == 2
        again = group.requests[1]
        assert (again.detail, again.recipe_options) == ("light", {"cuda_graph": True})


def test_scored_steps_that_fail_are_not_tried_again(tmp_path):
    pool = Pool(Environment(Path(tmp_path)))
    pool._group = group = Group()
    group.run = lambda request, limit: Reply(failure=Failure(Status.OOM, "no memory left", 0))
    request = TrialRequest(
        0, "soap.recipe", {}, recipe_options=OPTIONS, log_directory=str(tmp_path)
    )
    assert pool.measure(SPEC, request, 10.0).status is Status.OOM
