"""A start of a script as its controller sees it, without processes."""

from pathlib import Path


class Group:
    """What a start of a script looked like when it ended."""

    def __init__(self, failure=None, steps=(0, 0), ended=(), tail="", messages=()):
        self.nproc, self.logs, self.log = 2, Path("logs"), Path("logs/rank0.log")
        self.launcher_log = Path("logs/launcher.log")
        self.steps, self.ended = list(steps), list(ended)
        self._failure, self._tail, self._messages = failure, tail, list(messages)

    def tails(self):
        return {0: self._tail}

    def why_gone(self, gone):
        return self._failure

    def send(self, order):
        self.told = order

    def receive(self, event, limit_s):
        return self._messages
