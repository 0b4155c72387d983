"""Runs the command on a replay over and over, killed with SIGKILL at one event after another.

usage: kill_command.py DIRECTORY STRATEGY [EVENT:PHASE ...]     (PHASE: before, middle, after)

Each run is a fork of this process, which has imported everything. Without events, or after the
last of them, the command runs undisturbed. Prints the exit codes.
"""

import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

import perfsearch.cli.search
import perfsearch.cli.view
import perfsearch.pipeline.search
from perfsearch.core.journal import Journal


def kill_at(place: int, phase: str) -> None:
    write = Journal._write

    def killing(self: Journal, record: dict) -> None:
        here = record.get("n") == place
        if here and phase == "middle":
            os.write(self._file, repr(record).encode()[:40])
        if here and phase != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, record)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal._write = killing  # type: ignore[method-assign]


def run(strategy: str, kill: str) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if kill:
            place, phase = kill.split(":")
            kill_at(int(place), phase)
        arguments = "runner=replay runner.table=table.csv seed=5 budget.trials=8 run_dir=run"
        arguments += f" budget.seconds=null sentinel_every=4 strategy={strategy}"
        arguments += " confirm.max_repeats=3 confirm.seconds=null tracking.enabled=false"
        code = int(perfsearch.cli.search.main(arguments.split()))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    os.chdir(Path(sys.argv[1]))
    importlib.import_module(f"perfsearch.strategies.{sys.argv[2]}")
    codes = [run(sys.argv[2], kill) for kill in sys.argv[3:]]
    if 0 not in codes:
        codes.append(run(sys.argv[2], ""))
    print(*codes)


if __name__ == "__main__":
    main()
