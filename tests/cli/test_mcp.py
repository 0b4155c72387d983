"""The command ``perfsearch mcp``, asked by a real client over standard input and output."""

import asyncio
import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from perfsearch.cli import mcp as command_mcp
from perfsearch.cli import search as cli
from perfsearch.cli.compare import make_parser as parser_of_compare
from perfsearch.cli.mcp import Work
from perfsearch.core.errors import BadInputError

TABLE = """bucket,algorithm,status,samples_per_s,step_ms,peak_allocated_gib
1,ring,ok,10,9 9 9,1
2,ring,ok,20,4.5 4.5 4.5,1
4,ring,oom,,,
1,tree,ok,10,9 9 9,1
2,tree,ok,10,9 9 9,1
"""
REPLAY = ("runner=replay", "runner.table=table.csv", "tracking.enabled=false")
REAL = (
    *("runner=ddp", "runner.device=cpu", "nproc=2", "workload=mlp", "workload.size=tiny"),
    "tracking.enabled=false",
)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A current directory of this test's own, with a recorded job in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)
    return tmp_path


def talk(conversation, *words, **environment):
    """Start a server as a client's configuration does, and say something to it."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    arguments = ["-m", "perfsearch", "mcp", *words]
    kept = {name: value for name, value in os.environ.items() if name.startswith("PERFSEARCH_")}
    server = StdioServerParameters(
        command=sys.executable, args=arguments, cwd=os.getcwd(), env={**kept, **environment}
    )

    async def run():
        async with Client(stdio_client(server, sys.__stderr__)) as client:
            return await conversation(client)

    return asyncio.run(asyncio.wait_for(run(), 300))


def refusal(result, lines=1):
    """What a tool that refuses says."""
    assert result.is_error
    (content,) = result.content
    assert len(content.text.splitlines()) <= lines
    return content.text


def left_running():
    """Processes in the current directory, but for this one."""
    found = []
    for process in psutil.process_iter():
        try:
            mine = os.path.realpath(process.cwd()) == os.path.realpath(os.getcwd())
            if mine and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(holds, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_client_finds_out_what_can_be_tuned_and_tries_it(job, capsys):
    assert cli.main(["space", "--json", *REPLAY]) == 0
    printed = json.loads(capsys.readouterr().out)
    told = []

    async def hear(progress, total, message):
        told.append(message)

    async def conversation(client):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"space", "open_session", "try_configuration", "close_session"}
        assert set(tools["try_configuration"].input_schema["properties"]) == {"knobs", "repeats"}
        assert (await client.call_tool("space")).structured_content == printed

        early = await client.call_tool("try_configuration", {"knobs": {"bucket": 2}})
        assert "no session is open: open_session opens one" in refusal(early)

        opened = (await client.call_tool("open_session", progress_callback=hear)).structured_content
        assert opened["run_dir"] == str(job / "outputs" / "session")
        assert any(line.startswith("    0  ") for line in opened["said"])
        assert told == opened["said"], "each line is told as it comes"
        again = await client.call_tool("open_session")
        assert f"a session is open already, in {opened['run_dir']}" in refusal(again)

        asked = {"knobs": {"bucket": 2}, "repeats": 3}
        tried = (await client.call_tool("try_configuration", asked)).structured_content
        assert tried["interval"]["pairs"] == 3
        assert tried["ratio"] == pytest.approx(2.0, rel=0.1)
        failed = await client.call_tool("try_configuration", {"knobs": {"bucket": 4}})
        assert not failed.is_error, "a failure is a result"
        assert failed.structured_content["tried"]["status"] == "oom"

        for arguments, words in (
            ({"knobs": {"bucket": 3.5}}, "runner.knobs.bucket=3.5: allowed: "),
            ({"knobs": {"buket": 2}}, "runner.knobs.buket: no such knob. Did you mean 'bucket'?"),
            ({"knobs": {}}, "nothing to try. Give KEY=VALUE."),
            ({"knobs": {"bucket": 2}, "repeats": 101}, "repeats=101: allowed: 1 to 100"),
        ):
            assert words in refusal(await client.call_tool("try_configuration", arguments))

        closed = (await client.call_tool("close_session")).structured_content
        assert closed["exit_code"] == 0
        assert closed["said"][0].startswith("session ended: perfsearch try --end; 2 tries")
        assert "no session is open" in refusal(await client.call_tool("close_session"))

    talk(conversation, *REPLAY)
    assert (job / "outputs" / "session" / "report.html").exists()
    assert left_running() == []


def test_a_session_that_ends_by_itself_is_told_and_another_can_be_opened(job):
    async def conversation(client):
        opened = (await client.call_tool("open_session")).structured_content
        session = os.path.join(opened["run_dir"], "session.sock")
        while os.path.exists(session):
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)  # until its process has ended, too
        while len(left_running()) > 1:
            await asyncio.sleep(0.1)
        asked = {"knobs": {"bucket": 2}}
        said = refusal(await client.call_tool("try_configuration", asked), lines=20)
        assert "the session has ended, and open_session opens another" in said
        assert "nothing was tried for 0.01 minutes" in said
        assert not (await client.call_tool("open_session")).is_error

    talk(conversation, "--idle-minutes", "0.01", *REPLAY)
    wait_until(lambda: left_running() == [])


def test_a_job_that_does_not_run_is_told_in_the_commands_words(job):
    async def conversation(client):
        return [await client.call_tool(name) for name in ("space", "open_session")]

    for result in talk(conversation, "runner=replay", "runner.table=gone.csv"):
        assert "runner.table=gone.csv" in refusal(result)
    assert left_running() == []


def test_a_signal_ends_the_server_with_what_it_has_started(job):
    async def conversation(client):
        assert not (await client.call_tool("open_session")).is_error
        (server,) = [p for p in psutil.Process().children() if "mcp" in p.cmdline()]
        assert len(left_running()) == 2
        server.send_signal(signal.SIGTERM)
        while left_running():
            await asyncio.sleep(0.1)
        return job / "outputs" / "session" / "report.html"

    assert talk(conversation, *REPLAY).exists(), "its record is finished"


@pytest.mark.slow
@pytest.mark.parametrize("server_is_killed", [False, True])
def test_nothing_is_left_of_a_client_that_goes_away_in_the_middle(job, short_tmp, server_is_killed):
    async def conversation(client):
        assert not (await client.call_tool("open_session")).is_error
        asked = {"knobs": {"bucket_cap_mb": 4}, "repeats": 100}
        measuring = asyncio.create_task(client.call_tool("try_configuration", asked))
        journal = job / "outputs" / "session" / "journal.jsonl"
        while '"asked"' not in journal.read_text():
            await asyncio.sleep(0.1)
        assert not measuring.done()
        if server_is_killed:
            (server,) = [p for p in psutil.Process().children() if "mcp" in p.cmdline()]
            server.send_signal(signal.SIGKILL)
        measuring.cancel()

    talk(conversation, *REAL, TMPDIR=str(short_tmp), OMP_NUM_THREADS="1")
    wait_until(lambda: left_running() == [])
    assert list(short_tmp.glob("perfsearch-*")) == []


# -----------------------------------------------------------------------------
# What is refused before anything is asked, and what may be compared.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m", "seed=1,2"], "--multirun: the server is of one job"),
        (["--command", "--flag"], "--command"),
        (["--idle-minutes", "0"], "--idle-minutes: '0': allowed: a number > 0"),
    ],
)
def test_a_job_that_cannot_be_served_is_refused_in_one_line(job, capsys, words, said):
    assert cli.main(["mcp", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("perfsearch mcp: ") and said in err
    assert len(err.splitlines()) == 1


def test_without_the_package_it_says_what_to_install(job, capsys, monkeypatch):
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(command_mcp, "importlib", nothing)
    assert cli.main(["mcp", *REPLAY]) == 2
    assert "pip install 'mcp" in capsys.readouterr().err


async def nobody(line):
    raise AssertionError(line)


def compared(monkeypatch, script, arms, **options):
    """The words of the command that a comparison is."""
    seen = []

    async def run(self, words, heard):
        seen.extend(words)
        file = next(word for word in words if word.startswith("--json=")).removeprefix("--json=")
        with open(file, "w") as json_file:
            json.dump({"answer": "no_difference"}, json_file)
        return 4, []

    monkeypatch.setattr(Work, "_run", run)

    async def ask():
        return await Work(script, (), 30).compare(arms, options, nobody)

    found = asyncio.run(ask())
    assert found == {"answer": "no_difference", "exit_code": 4}
    assert seen[0] == "compare"
    return parser_of_compare().parse_args(seen[1:])


def test_a_comparison_is_the_commands_with_the_named_job(job, monkeypatch):
    script = "torchrun --nproc-per-node 2 train.py --lr 1"
    asked = compared(
        monkeypatch, script, ["job", "git:main"], **{"max-starts": 4, "budget-seconds": None}
    )
    assert asked.arms == [script, "git:main"]
    assert (asked.command, asked.max_starts, asked.budget_seconds) == (script, 4, None)


def search_over(directory, command, **options):
    """What a search over a script hands over."""
    (directory / "best").mkdir(parents=True)
    words = json.dumps(command)
    (directory / "best" / "config.yaml").write_text(
        f"runner:\n  name: ddp\n  knobs: {{}}\nworkload:\n  name: script\n  command: {words}\n"
        + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in options.items())
        + "strategy:\n  name: auto\n"
    )
    return "outputs/mine/best/config.yaml"


def test_what_a_search_over_the_job_found_may_be_compared_and_no_other(job, monkeypatch):
    found = search_over(job / "outputs" / "mine", ["train.py", "--lr", "1"])
    asked = compared(monkeypatch, "train.py --lr 1", ["job", found])
    assert asked.arms == ["train.py --lr 1", found]
    with pytest.raises(BadInputError, match=r"it is of another command: train.py --lr 1"):
        compared(monkeypatch, "other.py", ["job", found])


def test_a_file_that_says_more_of_the_code_is_not_compared(job, monkeypatch):
    found = search_over(job / "outputs" / "mine", ["train.py"], map_file="/etc/passwd")
    with pytest.raises(BadInputError, match=r"it sets workload.map_file, which only you may"):
        compared(monkeypatch, "train.py", ["job", found])


@pytest.mark.parametrize(
    "arm", ["rm -rf x", "python:/usr/bin/python3", "other.py", "x.yaml", "y#1"]
)
def test_a_client_starts_no_other_command(job, monkeypatch, arm):
    with pytest.raises(BadInputError, match="allowed: job, git:REVISION"):
        compared(monkeypatch, "train.py", ["job", arm])
