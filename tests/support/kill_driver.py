"""Runs a search over and over, killed with SIGKILL at one point of the journal after another.

usage: kill_driver.py RUN_DIR STRATEGY [EVENT:PHASE ...]     (PHASE: before, middle, after)

Each run is a fork of this process, which has imported everything; the first that ends is the last.
Without events, or where none of them ends, the search runs undisturbed. Prints the exit codes.
"""

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.small_search import Search

from perfsearch.core.journal import Journal


def kill_at(at: int, phase: str) -> None:
    append, write = Journal.append, Journal._write

    def killing_append(self: Journal, name: str, **data: object):
        here = self._count + 1 == at
        if here and phase == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        event = append(self, name, **data)
        if here and phase == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return event

    def killing_write(self: Journal, record: dict) -> None:
        if record.get("n") == at and phase == "middle":
            line = json.dumps(record)
            os.write(self._file, line[: len(line) // 2].encode())
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, record)

    Journal.append, Journal._write = killing_append, killing_write  # type: ignore[method-assign]


def run(run_dir: Path, strategy: str, kill: str) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        if kill:
            at, phase = kill.split(":")
            kill_at(int(at), phase)
        search = Search(run_dir)
        search(strategy={"name": strategy}, budget={"trials": 8, "seconds": None}, sentinel_every=4)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    run_dir, strategy = Path(sys.argv[1]), sys.argv[2]
    importlib.import_module(f"perfsearch.strategies.{strategy}")
    codes: list[int] = []
    for kill in [*sys.argv[3:], ""]:
        codes.append(run(run_dir, strategy, kill))
        if codes[-1] == 0:
            break
    print(*codes)


if __name__ == "__main__":
    main()
