from __future__ import annotations

from perfsearch.core.hardware import Hardware
from perfsearch.core.hints import Hints
from perfsearch.core.space import Space
from perfsearch.knobs import of
from perfsearch.knobs.base import Job, Use, declare
from perfsearch.knobs.starts import starts
from perfsearch.strategies.bayes import Bayes

SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def knobs(environ: dict[str, str], *names: str):
    job = Job(Hardware("cuda", 4, 1, (), 64), environ, frozenset({"bucket_cap_mb"}))
    found = [k for k in declare(of(Use.DDP), job)[0] if not names or k.name in names]
    return {k.name: k for k in found}, {k.name: k.default for k in found}


def test_over_sockets_several_of_them_come_first_then_what_seldom_harms():
    found = starts(*knobs(SOCKETS))
    assert all(point["bucket_cap_mb"] == 64 for point in found)
    assert [point["nccl_socket_nthreads"] for point in found] == [2, 2, 2, 1, 4, None]
    assert found[-1]["optimizer_implementation"] == "fused"
    assert found[-1]["dataloader_workers"] == 2


def test_without_sockets_there_is_one_and_it_names_searched_knobs_only():
    (found,) = starts(*knobs({}, "bucket_cap_mb", "nccl_algo"))
    assert found == {"bucket_cap_mb": 64.0, "nccl_algo": None}
    assert starts(*knobs({}, "nccl_algo")) == []


def test_a_strategy_begins_with_them():
    by_name, baseline = knobs(SOCKETS, "bucket_cap_mb", "nccl_socket_nthreads")
    hints = Hints(baseline, starts=tuple(starts(by_name, baseline)))
    strategy = Bayes(Space(list(by_name.values())), hints, 0)
    asked = [strategy.ask() for _ in range(3)]
    assert [point["nccl_socket_nthreads"] for point in asked] == [2, 1, 4]
