"""The command ``perfsearch mcp``: what ``space``, ``session``, ``try`` and ``compare`` do, for a
client of the Model Context Protocol, over standard input and output.

Each call is carried out by the command of that name, in a process of its own, with what the command
says. Who starts the server says which job it is; its client chooses values of knobs.
"""

# Without ``annotations`` of ``__future__``: the package looks at those of the tools, as they are.

import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.cli.arguments import OwnParser, of_script, positive
from perfsearch.core.errors import BadInputError
from perfsearch.core.extras import how_to_install
from perfsearch.core.python import module_command
from perfsearch.core.signals import ExitCode, ends_with_parent

if TYPE_CHECKING:
    from mcp.server import MCPServer

_DESCRIPTION = """\
Serves one job to a client of the Model Context Protocol (an agent, an editor), over standard input
and output: what can be tuned in it, one configuration beside the baseline within seconds, and which
of several commits and configurations is faster. All other words are those of a search, and are the
client's only choice left out: it sets values of knobs, and starts no other command.
"""

_EPILOG = """\
It ends when its standard input does, with all that it has started. Exit: 0; 2 bad input; 129, 130
and 143 where a signal ended it.
"""

_INSTRUCTIONS = """\
perfsearch measures settings of one PyTorch training job, that which this server was started for.
Begin with `space`: what can be tuned, what it does to the result, and the most that it can gain.
`open_session` starts the job, measures it as it is, says what holds it back, and keeps it warm;
`try_configuration` then measures one configuration beside it. One reading shows no speed-up: give
`repeats` (6 or more) for a 95% interval. Whoever tries many finds one by luck: believe what
`compare` shows, or a search. Nothing else should run on the machine meanwhile. Close the session
when you are done, since it holds its devices.
"""

AS_IT_IS = "job"
"""The arm that is the job as it was named."""

_ENDS_S = 60.0
"""How long what was started may take to end its own processes and finish its record."""

_LAST_LINES = 20

Heard = Callable[[str], Awaitable[None]]
"""Is told each line that a command prints."""


def command(arguments: Sequence[str]) -> int:
    """Serve until the client is gone; return the exit code.

    Raises:
        BadInputError: the job is not named as it should be, or the package is missing.

    """
    parser = make_parser()
    if any(word in ("--help", "-h") for word in arguments):
        print(parser.format_help(), end="")
        return ExitCode.DONE
    asked, words = parser.parse_known_args(list(arguments))
    if any(word in ("-m", "--multirun") for word in words):
        raise BadInputError("--multirun: the server is of one job. Start one for each.")
    of_script(asked.command, words)  # which refuses what is no script
    if importlib.util.find_spec("mcp") is None:
        raise BadInputError(
            "perfsearch mcp needs the package mcp, which is not installed. "
            f"Run: {how_to_install('mcp', 'mcp')}"
        )
    return asyncio.run(_serve(Work(asked.command, words, asked.idle_minutes)))


def make_parser() -> OwnParser:
    """The parser of the command's own words."""
    parser = OwnParser(
        prog="perfsearch mcp",
        usage="perfsearch mcp [options] [GROUP=OPTION | KEY=VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--command", metavar="'SCRIPT ...'", help="a script, as you start it")
    parser.add_argument(
        "--idle-minutes", type=positive, default=30.0, metavar="M",
        help="a session ends when nothing was tried for so long (default 30)",
    )  # fmt: skip
    return parser


async def _serve(work: "Work") -> int:
    """Answer a client until it is gone or a signal comes; then end all that was started."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    serving = asyncio.create_task(make_server(work).run_stdio_async())
    either: list[asyncio.Future[Any]] = [serving, stopped]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    await work.end()
    if stopped.done():
        os._exit(128 + stopped.result())  # a thread waits for standard input, and would for ever
    await serving
    return ExitCode.DONE


# -----------------------------------------------------------------------------
# The tools.


def make_server(work: "Work") -> "MCPServer[Any]":
    """The server with its tools, whose docstrings and arguments a client is shown."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError

    from perfsearch.core.version import version

    server: MCPServer[Any] = MCPServer(
        "perfsearch", instructions=_INSTRUCTIONS, version=version(), log_level="WARNING"
    )

    async def done(call: Callable[[Heard], Awaitable[dict[str, Any]]], ctx: Any) -> dict[str, Any]:
        """Do it, tell the client each line meanwhile, and what is wrong in the command's words."""
        said = 0

        async def heard(line: str) -> None:
            nonlocal said
            said += 1
            await ctx.report_progress(said, message=line)

        try:
            return await call(heard)
        except BadInputError as error:
            raise ToolError(str(error)) from error

    @server.tool()
    async def space(ctx: Context) -> dict[str, Any]:
        """What can be tuned in the job, without starting it: each knob with its value today, its
        values, what must restart to change it (scope), what it does to the result (numerics), and
        the most that it can gain where a search has profiled the job; why others are left out.
        """
        return await done(work.space, ctx)

    @server.tool()
    async def open_session(ctx: Context) -> dict[str, Any]:
        """Start the job, measure it as it is, and keep it warm for try_configuration. Tells what
        holds it back, what to do about it, and what there is to gain at most.
        """
        return await done(work.open_session, ctx)

    @server.tool()
    async def try_configuration(
        ctx: Context, knobs: dict[str, bool | int | float | str | None], repeats: int = 1
    ) -> dict[str, Any]:
        """Measure one configuration beside the baseline in the open session.

        Args:
            ctx: of the call.
            knobs: values by the name of the knob; all others are as the job has them.
            repeats: how often both are measured, 1 to 100; from 2 on with a 95% interval. One
                reading shows no speed-up.

        """
        return await done(lambda heard: work.try_configuration(knobs, repeats, heard), ctx)

    @server.tool()
    async def close_session(ctx: Context) -> dict[str, Any]:
        """End the session and its processes; tells where its record is."""
        return await done(work.close_session, ctx)

    async def compare(
        ctx: Context,
        arms: list[str],
        max_starts: int = 8,
        budget_seconds: float | None = None,
        min_gain: float | None = None,
    ) -> dict[str, Any]:
        """Prove which is faster, by starts in fresh processes, in an order that is drawn, until
        that is decided: minutes. Losses are compared, too. No session may be open meanwhile.

        Args:
            ctx: of the call.
            arms: two or more, the reference first: "job" (the job as it is), "git:REVISION" (the
                script at a commit), "outputs/RUN/best/config.yaml" or "outputs/RUN#12" (what a
                search over the job has found, or its trial 12).
            max_starts: most starts of each.
            budget_seconds: time for all of it.
            min_gain: relative difference that matters; 0.02 is 2%.

        """
        options = {"max-starts": max_starts, "budget-seconds": budget_seconds, "min-gain": min_gain}
        return await done(lambda heard: work.compare(arms, options, heard), ctx)

    if work.script is not None:
        server.tool()(compare)
    return server


# -----------------------------------------------------------------------------
# What is started for them.


class Work:
    """The commands that a client has asked for: one at a time, beside the session that is open.

    Args:
        script: the job, as it is started; ``None``: the words say all.
        words: of a search, which say the rest of it.
        idle_minutes: a session ends when nothing was tried for so long.

    """

    def __init__(self, script: str | None, words: Sequence[str], idle_minutes: float) -> None:
        self.script, self._idle_minutes = script, idle_minutes
        self._job = [*([] if script is None else ["--command", script]), *words]
        self._session: _Session | None = None
        self._running: set[_Process] = set()
        self._one_at_a_time = asyncio.Lock()

    async def space(self, heard: Heard) -> dict[str, Any]:
        """What ``perfsearch space --json`` prints."""
        async with self._one_at_a_time:
            code, lines = await self._run(["space", "--json", *self._job], heard=None)
        if code:
            raise BadInputError(_last_words(lines))
        text = "\n".join(lines[lines.index("{") :])
        found: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
        return found

    async def open_session(self, heard: Heard) -> dict[str, Any]:
        """Start ``perfsearch session``, and wait until it can be asked."""
        async with self._one_at_a_time:
            if self._session is not None and self._session.process.runs:
                raise BadInputError(
                    f"a session is open already, in {self._session.run_dir}: close_session ends it"
                )
            idle = f"--idle-minutes={self._idle_minutes:g}"
            process = await self._start(["session", idle, *self._job], heard)
            try:
                run_dir = await process.line_after(_opened())
            except BaseException:
                process.end()
                raise
            if run_dir is None:
                raise BadInputError(_last_words(process.lines))
            self._session = _Session(process, Path(run_dir))
            process.heard = None
            return {"run_dir": run_dir, "said": process.unread()}

    async def try_configuration(
        self, knobs: Mapping[str, Any], repeats: int, heard: Heard
    ) -> dict[str, Any]:
        """Ask the session, as ``perfsearch try`` does."""
        async with self._one_at_a_time:
            session = self._open()
            session.process.heard = heard
            try:
                reply = await session.ask({"op": "try", "knobs": knobs, "repeats": repeats})
            finally:
                session.process.heard = None
            if "error" in reply:
                raise BadInputError(str(reply["error"]))
            return reply

    async def close_session(self, heard: Heard) -> dict[str, Any]:
        """End it, as ``perfsearch try --end`` does."""
        async with self._one_at_a_time:
            session = self._open()
            session.process.unread()
            await session.ask({"op": "end"})
            code = await session.process.ended()
            self._session = None
            return {"exit_code": code, "said": session.process.unread()}

    async def compare(
        self, arms: Sequence[str], options: Mapping[str, Any], heard: Heard
    ) -> dict[str, Any]:
        """What ``perfsearch compare --json`` writes."""
        from perfsearch.core.files import temporary_directory

        async with self._one_at_a_time:
            if self._session is not None and self._session.process.runs:
                raise BadInputError("a session holds the devices: close_session ends it")
            given = [f"--{name}={value}" for name, value in options.items() if value is not None]
            own = [self._arm(arm) for arm in arms]
            with temporary_directory() as directory:
                file = directory / "comparison.json"
                words = [
                    "compare",
                    f"--command={self.script}",
                    f"--json={file}",
                    *given,
                    "--",
                    *own,
                ]
                code, lines = await self._run(words, heard)
                if not file.is_file():
                    raise BadInputError(_last_words(lines))
                found: dict[str, Any] = json.loads(file.read_text())
                return {**found, "exit_code": code}

    def _arm(self, text: str) -> str:
        """An arm as ``perfsearch compare`` takes it, if it starts nothing but the job.

        Raises:
            BadInputError: it is, or may be, another command.

        """
        from perfsearch.cli.arms import GIT, parse_arms, parse_command
        from perfsearch.cli.security import CODE_KEYS

        assert self.script is not None
        if text == AS_IT_IS:
            return self.script
        if text.startswith(GIT):
            return text
        search = None
        if re.search(r"#\d+$|\.ya?ml$", text):
            (arm,) = parse_arms([text], self.script)
            search = arm.search
        if search is None:
            raise BadInputError(
                f"{text}: allowed: {AS_IT_IS}, git:REVISION, outputs/RUN/best/config.yaml, "
                "outputs/RUN#NUMBER. Other commands are compared by perfsearch compare, by hand"
            )
        options, job = search.workload.options, parse_command(self.script)
        words = [str(word) for word in options["command"]]
        if words != list(job.words) or bool(options.get("module")) != job.module:
            raise BadInputError(f"{text}: it is of another command: {' '.join(words)}")
        for key in CODE_KEYS:
            group, _, name = key.partition(".")
            if group == "workload" and name not in ("command", "module") and options.get(name):
                raise BadInputError(
                    f"{text}: it sets {key}, which only you may. Compare it by hand: "
                    "perfsearch compare"
                )
        return text

    def _open(self) -> "_Session":
        """The session that is open.

        Raises:
            BadInputError: there is none.

        """
        session = self._session
        if session is None:
            raise BadInputError("no session is open: open_session opens one")
        if not session.process.runs:
            self._session = None
            raise BadInputError(
                "the session has ended, and open_session opens another. It said: "
                f"{_last_words(session.process.lines)}"
            )
        return session

    async def _run(self, words: Sequence[str], heard: Heard | None) -> tuple[int, list[str]]:
        """Exit code and lines of a command that ends by itself."""
        process = await self._start(words, heard)
        try:
            return await process.ended(), process.lines
        finally:
            process.end()

    async def _start(self, words: Sequence[str], heard: Heard | None) -> "_Process":
        self._running = {process for process in self._running if process.runs}
        process = await _Process.start(words, heard)
        self._running.add(process)
        return process

    async def end(self) -> None:
        """End all that still runs, and wait for it."""
        for process in self._running:
            process.end()
        for process in self._running:
            await process.gone()


def _opened() -> str:
    """What a session's line begins with once it can be asked; its directory follows."""
    from perfsearch.pipeline.tries import OPEN_IN, STAGE

    return f"-- {STAGE}: {OPEN_IN}"


def _last_words(lines: Sequence[str]) -> str:
    """What a command that ended said last: its one line on bad input, or the end of its lines."""
    said = [line for line in lines if line.strip()]
    refusals = [line for line in said if re.match(r"perfsearch( \w+)?: ", line)]
    if refusals:
        return refusals[-1].partition(": ")[2]
    return "\n".join(said[-_LAST_LINES:]) or "it ended without a word"


class _Process:
    """A command of ours under way; the kernel ends it where this process is killed.

    Attributes:
        lines: that it has printed.
        heard: is told each of them.

    """

    def __init__(self, process: asyncio.subprocess.Process, heard: Heard | None) -> None:
        self.heard, self.lines = heard, list[str]()
        self._process, self._read, self._over = process, 0, False
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, words: Sequence[str], heard: Heard | None) -> "_Process":
        """Start it, in a session of its own: who ends the server's group has it end by itself."""
        process = await asyncio.create_subprocess_exec(
            *module_command("perfsearch", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ends_with_parent(),
            limit=1 << 20,
        )
        return cls(process, heard)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while raw := await self._process.stdout.readline():
            line = raw.decode(errors="replace").rstrip("\n")
            async with self._news:
                self.lines.append(line)
                self._news.notify_all()
            if self.heard is not None:
                with suppress(Exception):  # the client is gone, which ends all this elsewhere
                    await self.heard(line)
        await self._process.wait()
        async with self._news:
            self._over = True
            self._news.notify_all()

    async def line_after(self, beginning: str) -> str | None:
        """The rest of the first line that begins so; ``None``: it ended without."""

        def found() -> str | None:
            begun = (line for line in self.lines if line.startswith(beginning))
            return next((line.removeprefix(beginning) for line in begun), None)

        async with self._news:
            await self._news.wait_for(lambda: self._over or found() is not None)
            return found()

    def unread(self) -> list[str]:
        """Its lines since this was asked last."""
        lines, self._read = self.lines[self._read :], len(self.lines)
        return lines

    async def ended(self) -> int:
        """Wait until it has ended by itself; its exit code."""
        await asyncio.shield(self._reading)
        assert self._process.returncode is not None
        return self._process.returncode

    def end(self) -> None:
        """Have it end what it has started, finish its record, and end."""
        if self.runs:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)

    async def gone(self) -> None:
        """Wait until it has ended, and kill it if it does not."""
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), _ENDS_S)
        except TimeoutError:
            print("perfsearch mcp: what it started does not end; it is killed", file=sys.stderr)
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


class _Session:
    """An open session.

    Attributes:
        process: the command that holds it.
        run_dir: where it can be asked.

    """

    def __init__(self, process: _Process, run_dir: Path) -> None:
        self.process, self.run_dir = process, run_dir

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Its answer, however long that takes; who does not wait for it leaves it to be measured.

        Raises:
            BadInputError: it ended before it had answered.

        """
        from perfsearch.pipeline.session_socket import SessionEndedError, ask

        try:
            return await asyncio.to_thread(ask, self.run_dir, request)
        except SessionEndedError as error:
            raise BadInputError(str(error)) from error
