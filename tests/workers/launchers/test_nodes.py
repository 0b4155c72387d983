"""Which nodes a search takes in, what it says of the others, and how long it waits."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from perfsearch.config.schema import validate
from perfsearch.core.errors import BadInputError, NodesGoneError
from perfsearch.core.hardware import Gpu, Hardware
from perfsearch.core.trial import Status
from perfsearch.workers import join, launchers
from perfsearch.workers.failures import Evidence, ProcessEnd, classify
from perfsearch.workers.group import with_reports
from perfsearch.workers.launchers import _agreement, _nodes
from perfsearch.workers.launchers._addresses import listen_at
from perfsearch.workers.launchers._gate import Doors
from perfsearch.workers.launchers.base import NodeReport
from perfsearch.workers.launchers.slurm import other_nodes
from perfsearch.workers.launchers.torchrun import Torchrun
from perfsearch.workers.messages import Channel, RankError

CPU = Hardware("cpu", 1, 2, (), 1)
SECRET = "0123456789abcdef"


class Search:
    """A search's side, with nodes that say what they are told to."""

    def __init__(self, hardware=CPU, nnodes=2, wait_s=0.0):
        self.said = []
        self.launcher = Torchrun(Torchrun.Options(endpoint="127.0.0.1:0", wait_s=wait_s), nnodes)
        with pytest.raises(NodesGoneError):
            self.launcher.open(hardware, self.said.append)
        host, port = self.launcher.endpoint.split(":")
        self.doors = Doors((host, int(port)), SECRET)

    def joins(self, instance, name="b", **changes):
        """A node that joins; its channel and the answer."""
        channel = Channel(self.doors.call())
        hello = {"event": "join", "instance": instance, "name": name, **_agreement.facts({})}
        channel.send({**hello, **changes})
        return channel, channel.receive(10)

    def close(self):
        self.launcher.close()
        self.doors.close()


@pytest.fixture
def search(monkeypatch):
    monkeypatch.setenv("PERFSEARCH_SECRET", SECRET)
    made = []

    def make(*args, **kwargs):
        made.append(Search(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_search_says_what_to_run_and_ends_when_nobody_comes(search):
    one = search()
    assert one.said[0] == "waiting for 1 node more"
    assert f"PERFSEARCH_SECRET={SECRET} perfsearch join {one.launcher.endpoint}" in one.said[1]
    with pytest.raises(NodesGoneError, match=r"1 node did not join within 0 s \(launcher.wait_s\)"):
        one.launcher.await_all()


def test_a_node_joins_late_and_once_and_comes_back_as_the_same(search):
    one = search(wait_s=0.0)
    first, answer = one.joins("i1")
    assert (answer["op"], answer["node"], answer["host"]) == ("welcome", 1, "b (127.0.0.1)")
    one.launcher.await_all()
    _, refused = one.joins("i2")
    assert refused["reason"] == "nnodes=2, and every node is there already: b (127.0.0.1)"
    again, answer = one.joins("i1")  # before the search has seen that it was gone
    assert (answer["op"], answer["node"]) == ("welcome", 1)
    one.launcher.await_all()
    first.close()
    again.close()
    node = one.launcher.members[1]
    node.await_word("anything", "", 10)
    assert node.lost == "node b (127.0.0.1) is gone: its connection is lost"
    with pytest.raises(NodesGoneError, match=r"node b .* did not join"):
        one.launcher.await_all()
    assert node.lost in one.said[-2]
    _, answer = one.joins("i3")  # the command was given anew
    assert answer["node"] == 1


def test_what_differs_between_nodes_is_refused_by_name(search, monkeypatch):
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    one = search()
    facts = _agreement.facts({"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "3", "NCCL_IB_HCA": "mlx5"})
    facts["versions"]["torch"] = "2.0.0"
    _, answer = one.joins("i1", **facts)
    assert answer["op"] == "refuse"
    for words in ("torch 2.0.0 there, 2", "NCCL_ALGO=Tree there, Ring here", "OMP_NUM_THREADS=3"):
        assert words in answer["reason"]
    assert "HCA" not in answer["reason"]
    assert any("node b (127.0.0.1) was refused: torch 2.0.0" in line for line in one.said)


def test_a_node_with_too_few_gpus_or_with_ours_is_refused(search, monkeypatch):
    monkeypatch.setattr(_agreement.hardware, "driver_version", lambda: "1")
    gpus = tuple(Gpu(f"GPU-{n}", "H100", 80.0) for n in range(2))
    one = search(Hardware("cuda", 2, 2, gpus, 1))
    facts = {**_agreement.facts({}), "versions": _agreement.versions(True)}
    _, answer = one.joins("i1", **{**facts, "gpus": [["GPU-9", "H100", 80.0]]})
    assert answer["reason"] == "1 GPUs are visible there, and nproc=2 needs as many"
    ours = [[gpu.uuid, gpu.name, gpu.memory_gib] for gpu in gpus]
    _, answer = one.joins("i1", **{**facts, "gpus": ours})
    assert answer["reason"].startswith("GPU GPU-0 is there already, with the search's own node")


def test_every_setting_of_the_search_reaches_the_other_nodes(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HOME_OF_MINE", "/here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    given = _nodes._own_settings({**_nodes.os.environ, "NCCL_PROTO": "LL", "WANDB_MODE": "offline"})
    assert given.items() >= {"NCCL_DEBUG": "WARN", "NCCL_PROTO": "LL"}.items()
    assert given["WANDB_MODE"] == "offline"
    assert not {"HOME_OF_MINE", "CUDA_VISIBLE_DEVICES", "PERFSEARCH_GROUP"} & given.keys()


def test_the_gate_listens_at_one_address_of_this_node():
    with listen_at("127.0.0.1:0", None) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        port = listener.getsockname()[1]
        with pytest.raises(BadInputError, match=f"launcher.endpoint=127.0.0.1:{port}: .*in use"):
            listen_at(f"127.0.0.1:{port}", None)
    with listen_at(None, "lo") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(BadInputError, match=r"Addresses here: .*127\.0\.0\.1"):
        listen_at("192.0.2.1:29400", None)
    with pytest.raises(BadInputError, match="give it as HOST:PORT"):
        listen_at("node1", None)
    with pytest.raises(BadInputError, match=r"launcher\.interface=eth77: .*Interfaces here: .*lo"):
        listen_at(None, "eth77")


def test_what_is_named_of_a_group_is_another_path_on_each_node():
    told = {"files": {"spec.json": '{"a": "/tmp/p-1/nccl.%p"}'}, "directory": "/tmp/p-1"}
    renamed = join.in_json(told, "/tmp/p-1", "/tmp/p-2")
    assert renamed == {"files": {"spec.json": '{"a": "/tmp/p-2/nccl.%p"}'}, "directory": "/tmp/p-2"}


def test_a_lost_node_is_the_cause_whatever_ranks_say():
    echo = RankError(0, 5.0, "RuntimeError", "Connection closed by peer")
    own = RankError(0, 4.0, "ValueError", "made of what did not come")
    evidence = Evidence(errors=[echo, own], timed_out=9.0)
    failure = classify(with_reports(evidence, [NodeReport(), NodeReport(lost="node b is gone")]))
    assert (failure.status, failure.reason) == (Status.INFRASTRUCTURE, "node b is gone")


def test_a_rank_that_failed_elsewhere_is_the_cause():
    echo = RankError(0, 5.0, "RuntimeError", "Connection closed by peer")
    there = RankError(3, 9.0, "ValueError", "no such column", log="rank3.log")
    report = NodeReport(errors=[there], ends=[ProcessEnd(3, 1, 9.0)], log_tails={3: "its end"})
    whole = with_reports(Evidence(errors=[echo], log_tails={0: "x"}), [report])
    assert whole.log_tails == {0: "x", 3: "its end"}
    failure = classify(whole)
    assert (failure.rank, failure.reason) == (3, "rank 3: ValueError: no such column")


def test_a_launchers_options_are_those_of_its_file():
    import yaml

    conf = Path(launchers.__file__).parents[3] / "conf" / "launcher"
    assert sorted(path.stem for path in conf.iterdir()) == launchers.names()
    for name in launchers.names():
        plain = yaml.safe_load((conf / f"{name}.yaml").read_text())
        settings = {"runner": {"name": "ddp"}, "strategy": {"name": "grid"}}
        whole = validate({**settings, "workload": {"name": "mlp"}, "launcher": plain})
        made = launchers.of_settings(whole)
        assert made.options == launchers.load(name).Options()
        assert set(plain) - {"name"} == set(vars(made.options))


def test_slurm_is_asked_for_the_other_nodes_of_the_allocation(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(BadInputError, match="this is no Slurm allocation"):
        other_nodes(2)
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf 'n1\\nn2\\nn3\\n'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert other_nodes(3) == ["n1", "n3"]
    with pytest.raises(BadInputError, match="the allocation has 3"):
        other_nodes(4)
    monkeypatch.setenv("SLURMD_NODENAME", "login")
    with pytest.raises(BadInputError, match="this is login, which is no node of the allocation"):
        other_nodes(2)


def test_without_a_node_a_search_ends_with_one_line(monkeypatch, tmp_path, capsys):
    from perfsearch.cli import search as cli

    monkeypatch.chdir(tmp_path)
    words = ["workload=mlp", "runner.device=cpu", "nproc=1", "nnodes=2", "tracking.enabled=false"]
    words += ["launcher=torchrun", "launcher.endpoint=127.0.0.1:0", "launcher.wait_s=0"]
    assert cli.main(words) == 3
    captured = capsys.readouterr()
    last = (captured.out + captured.err).strip().splitlines()[-1]
    assert last == (
        "warning: 1 node did not join within 0 s (launcher.wait_s). Have every node there, then "
        "give the same command to go on."
    )


def test_the_place_of_a_group_that_is_over_is_nowhere(search, tmp_path):
    one = search()
    with pytest.raises(LookupError):
        one.launcher._open_place("group", "store")
    one.launcher.directories["group"] = tmp_path
    assert one.launcher._open_place("group", "store") is None  # not yet
    with pytest.raises(LookupError):
        one.launcher._open_place("group", "../control.sock")
    with socket.create_server(("127.0.0.1", 0)) as store:
        (tmp_path / "store.port").write_text(str(store.getsockname()[1]))
        one.launcher._open_place("group", "store").close()


def test_a_process_of_several_ends_as_the_first_that_fails():
    own, node = SimpleNamespace(poll=lambda: None), SimpleNamespace(lost="", heard=lambda *_: None)
    whole = _nodes.SpreadProcess(own, [node], "group")
    assert whole.poll() is None
    own.poll = lambda: 0
    assert whole.poll() is None
    node.heard = lambda *_: {"code": 0}
    assert whole.poll() == 0
    node.heard = lambda *_: {"code": -9}
    assert whole.poll() == -9
    node.lost = "gone"
    assert whole.poll() == 1
