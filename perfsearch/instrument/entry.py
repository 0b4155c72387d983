"""What torch's launcher runs in each rank: the instruments, and then the script itself."""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsearch.core.signals import pause_at_end
from perfsearch.instrument import imports
from perfsearch.instrument.files import keep_files
from perfsearch.instrument.launch import (
    VARIABLE,
    Finished,
    LaunchConfig,
    calls_for_torchrun,
    socket_path,
)
from perfsearch.instrument.patching import (
    MODULES,
    OwnLauncherError,
    after_import,
    expect,
    explain_exec,
    once,
    watch_for_launchers,
)
from perfsearch.instrument.report import lines
from perfsearch.instrument.seeds import seed_process
from perfsearch.workers.log import report_error, switch_log
from perfsearch.workers.messages import Channel, Place, keep_worker_sockets
from perfsearch.workers.processes import started_at, watch_controller
from perfsearch.workers.stack_dumps import answer_stack_requests

if TYPE_CHECKING:
    from perfsearch.instrument.rank import RankProtocol
    from perfsearch.instrument.script import Script


_COMPILER = "torch._dynamo"
"""What an optimizer imports, whether or not anything is compiled: as large as torch itself."""


def main() -> int:
    """Run the script of ``PERFSEARCH_SCRIPT``; return its exit code.

    The command line repeats the script's path, for those who look at the process table.
    """
    pause_at_end()
    config = LaunchConfig.from_environment(os.environ)
    os.environ.pop(VARIABLE)  # not for what the script starts in its turn
    if config.directory:
        return run_in_search(config)
    here = _Start(config)
    attach_at_import(here.attach)
    watch_for_launchers(config.script, here.warn)
    try:
        run_script(config, sys.argv[2:])
    except SystemExit as error:
        if isinstance(error.code, str):
            here.go_on_by_torchrun(error)
        importlib.import_module("torch")  # the instruments come with it, and say what there is
        raise
    except BaseException as error:
        error.__traceback__ = without_our_frames(error.__traceback__)
        here.go_on_by_torchrun(error)
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    importlib.import_module("torch")
    return 0


def run_script(config: LaunchConfig, arguments: list[str]) -> None:
    """Run the script as ``python SCRIPT ARGUMENTS`` or ``python -m MODULE ARGUMENTS`` would."""
    sys.argv = [config.script, *arguments]
    path = script_path(config)
    first = first_in_path(config)
    if first:
        sys.path.insert(0, first)
    if config.module:
        runpy.run_module(config.script, run_name="__main__", alter_sys=True)
        return
    main = imports.blank_main(path)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def script_path(config: LaunchConfig) -> str:
    """The script's own ``__file__``; not tidied up, as Python does not."""
    return os.path.join(os.getcwd(), config.script)


def first_in_path(config: LaunchConfig) -> str:
    """What is put first in ``sys.path`` for the script; empty: nothing."""
    if os.environ.get("PYTHONSAFEPATH"):
        return ""
    script = os.path.realpath(script_path(config))
    return os.getcwd() if config.module else os.path.dirname(script)


def attach_at_import(attach: Callable[[], object]) -> None:
    """Have the instruments made once the script has imported torch, and no earlier.

    torch reads some variables of the environment when it is imported, which the script may set.
    """
    owner = os.getpid()

    def meet(torch: types.ModuleType) -> None:
        if os.getpid() == owner:  # and not in what it has forked
            attach()

    expect(*MODULES, _COMPILER)
    after_import("torch", meet)


class _Start:
    """A start of a script outside of a search.

    Args:
        config: how it is run.

    """

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        self._stepped = False
        self._said: set[str] = set()

    def attach(self) -> None:
        """Make the instruments, and have rank 0 say what is in force."""
        from perfsearch.instrument.script import Script

        self._reporting(Script(self._config.knobs))
        if self._config.autotune is not None:
            from perfsearch import online
            from perfsearch.online.options import AutotuneOptions

            online.enable(AutotuneOptions.from_mapping(self._config.autotune))

    def _reporting(self, script: Script) -> None:
        """Have it said once: after some steps, or when the script ends."""
        config, steps, said = self._config, 0, False

        def say_once() -> None:
            nonlocal said
            if not said:
                said = True
                for line in lines(config.knobs, config.mapped, script.facts(), config.given):
                    say(line)

        def before_step() -> None:
            self._stepped = True
            script.put_into_force()

        def after_step() -> None:
            nonlocal steps
            steps += 1
            if config.knobs:
                script.end_step()
            if steps == config.report_after_steps and reports:
                say_once()

        script.optimizers.before_step = once(before_step)
        script.losses.keeping = False
        script.loaders.counting = False
        says = config.autotune is None or bool(config.knobs or config.mapped)
        reports = config.report and says and os.environ.get("RANK", "0") == "0"
        if reports:
            atexit.register(say_once)
        if reports or config.knobs:
            script.optimizers.after_step = after_step

    def warn(self, text: str) -> None:
        """Say once that knobs do not reach what the script starts."""
        if text not in self._said:
            self._said.add(text)
            say(f"{text}. Knobs do not reach what it starts.")

    def go_on_by_torchrun(self, error: BaseException) -> None:
        """Have torchrun start the script where its failure says that it is one for torchrun.

        Where it has not trained yet; then this process becomes torchrun, and nothing returns.
        """
        command = self._config.by_torchrun
        words = "".join(traceback.format_exception(error))
        if not command or self._stepped or not calls_for_torchrun(words):
            return
        say(
            f"the script is one for torchrun ({type(error).__name__}: {error}): it is started "
            "again, as one rank by torchrun; --nproc-per-node N for another number"
        )
        self._said.add(explain_exec(self._config.script))
        sys.stdout.flush()
        os.execv(command[0], command)


def without_our_frames(whole: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that begins in the script."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    inner = whole
    while inner is not None and inner.tb_frame.f_code.co_filename in ours:
        inner = inner.tb_next
    return inner or whole


def say(text: str) -> None:
    """One line for people."""
    print(f"perfsearch: {text}", file=sys.stderr, flush=True)


# -----------------------------------------------------------------------------
# A script in a rank of a search: its log, its end, and what is left when it fails.


def run_in_search(config: LaunchConfig) -> int:
    """Run the script until the controller has seen enough of it; return the exit code."""
    rank = int(os.environ.get("RANK", "0"))  # without one it is a process by itself
    switch_log(config.log_directory, rank)
    after_import("multiprocessing.process", lambda module: keep_worker_sockets(config.directory))
    answer_stack_requests(config.directory, rank)
    place, directory = Place.read(config.directory), Path(config.directory)
    spare = [place.forked_from]
    watch_controller(place.owner_pid, place.owner_started, place.token, directory, spare)
    here = _Rank(config, rank, place)
    seed_process(config.seed, rank)
    if config.undo and os.path.isdir(config.undo):  # which other nodes may not see
        here.at_first_step = keep_files(config.undo, [config.directory]).first_step
    here.begin_imports(sys.argv[2:])
    attach_at_import(here.attach)
    watch_for_launchers(config.script, _refuse)
    try:
        run_script(config, sys.argv[2:])
        here.attach().tell_end()
        return 0
    except Finished:
        return 0
    except SystemExit as error:
        if error.code in (None, 0):
            here.attach().tell_end()
            return 0
        text = f"the script ended itself with exit code {error.code}"
        here.report(ScriptExitError(text))
    except BaseException as error:
        here.report(error)
        if rank == 0 and here.protocol is not None:
            here.protocol.facts().leave(config.log_directory)
    finally:
        if here.protocol is not None:
            here.protocol.close()
    return 1


class _Rank:
    """A rank whose instruments are made when the script has imported torch, or when it ends."""

    def __init__(self, config: LaunchConfig, rank: int, place: Place) -> None:
        self.config = config
        self.rank = rank
        self._host = place.host
        self.protocol: RankProtocol | None = None
        self.at_first_step: Callable[[], None] = lambda: None
        self._says_first: Callable[[], dict[str, Any]] = dict
        pid = os.getpid()
        self._channel = Channel.connect(socket_path(config.directory, rank))
        hello = {"pid": pid, "started": started_at(pid), "node": place.node, "host": place.host}
        self._channel.send({"event": "hello", **hello})

    def attach(self) -> RankProtocol:
        """Make the instruments, unless there are some."""
        importlib.import_module("torch")  # where it has not been, they come with it
        if self.protocol is None:
            from perfsearch.instrument.rank import RankProtocol
            from perfsearch.instrument.script import Script
            from perfsearch.instrument.store import listen_on_loopback

            listen_on_loopback()
            script = Script(self.config.knobs, self.config.perturbed)
            self.protocol = RankProtocol(script, self._channel, self.rank, self._host)
            self.protocol.at_first_step = self.at_first_step
            self.protocol.says_first = self._says_first
        return self.protocol

    def begin_imports(self, arguments: list[str]) -> None:
        """Note what is imported from here on, or whether what was imported ahead is right.

        Args:
            arguments: of the script.

        """
        config, ahead = self.config, imports.ahead
        if ahead is None and not (config.tells_imports and self.rank == 0):
            return
        recorder = imports.Recorder()

        def says_first() -> dict[str, Any]:
            modules, settings = recorder.end()
            if ahead is not None:
                return {"unlike": ahead.unlike(settings)}
            words, main = [config.script, *arguments], "" if config.module else script_path(config)
            found = imports.Imports(modules, settings, words, first_in_path(config), main)
            return {"imports": found.to_json()}

        self._says_first = says_first

    def report(self, error: BaseException) -> None:
        """Leave what the script failed of where the controller looks for it."""
        error.__traceback__ = without_our_frames(error.__traceback__)
        begun = self.protocol is not None and self.protocol.steps > 0
        building = not begun and bool(self.config.knobs or self.config.mapped)
        report_error(self.config.log_directory, self.rank, error, "build" if building else "train")


class ScriptExitError(RuntimeError):
    """The script ended itself with an exit code that tells of a failure."""


def _refuse(text: str) -> None:
    raise OwnLauncherError(text)


if __name__ == "__main__":
    sys.exit(main())
