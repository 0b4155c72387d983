"""Runs a search and kills itself with SIGKILL at one point of the journal's life.

usage: kill_driver.py RUN_DIR STRATEGY EVENT_NUMBER before|middle|after   (EVENT_NUMBER 0: never)
"""

import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.small_search import Search

from perfsearch.core.journal import Journal


def main() -> None:
    run_dir, strategy, at, phase = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
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
    search = Search(run_dir)
    search(strategy={"name": strategy}, budget={"trials": 8, "seconds": None}, sentinel_every=4)


if __name__ == "__main__":
    main()
