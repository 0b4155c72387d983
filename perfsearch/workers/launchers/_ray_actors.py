"""Holds a placement group of Ray's and an actor on each of its nodes, for as long as a search.

Started by the search as ``python -m perfsearch.workers.launchers._ray_actors JSON``, it does not
outlive it. A process of its own, because ``ray.init`` takes over signals and starts threads.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import psutil

from perfsearch.core.signals import ExitCode
from perfsearch.workers.launchers import _agreement
from perfsearch.workers.launchers._nodes import AGAIN_S

_LOOK_S = 1.0
_TELL_AFTER_S = 10.0


class Lender:
    """The actor: lends the node that it is on, and holds what is warm there."""

    def lend(self, endpoint: str, secret: str, interface: str, wait_s: float) -> int:
        """What ``perfsearch join`` does; returns its exit code."""
        from perfsearch.workers.join import Member

        drop_variables_of_ray()
        take_back_niceness()
        host, _, port = endpoint.rpartition(":")
        member = Member((host, int(port)), secret, interface, wait_s)
        try:
            return member.lend()
        finally:
            member.close()


def drop_variables_of_ray() -> None:
    """Take back what Ray set in this process, such as ``OMP_NUM_THREADS``, but not its devices.

    A rank's settings are those of the search and of the node, not those of an actor.
    """
    as_started = psutil.Process().environ()
    for name in _agreement.shared_variables(os.environ):
        if name not in as_started:
            del os.environ[name]


def take_back_niceness() -> None:
    """Run as the node's own processes do: Ray has its workers give way to all others (nice 15).

    Ranks on this node would be slower than those of the search's node wherever cores are short.
    """
    own = psutil.Process()
    raylet = own.parent()
    usual = 0 if raylet is None else raylet.nice()
    if own.nice() <= usual:
        return
    try:
        own.nice(usual)
    except psutil.AccessDenied:
        say(
            f"warning: Ray runs what it starts at nice {own.nice()}, and ranks here are slower for "
            "it. Start Ray with RAY_worker_niceness=0"
        )


class Actors:
    """A lender on each of the other nodes.

    Args:
        asked: what ``launcher=ray`` asks for.
        secret: of the search.

    """

    def __init__(self, asked: dict[str, Any], secret: str) -> None:
        import ray
        from ray.util.placement_group import placement_group

        ray.init(address=asked["address"], logging_level="ERROR")
        here = ray.get_runtime_context().get_node_id()
        own, others = int(asked["reserve_here"]), int(asked["others"])
        label = "ray.io/node-id"  # an address may be that of several nodes
        self._asked, self._secret, self._first = asked, secret, own
        self._lenders: dict[int, Any] = {}  # an actor that nobody holds is ended
        self._not_before: dict[int, float] = {}
        self._group = placement_group(
            [asked["bundle"]] * (own + others),
            strategy="STRICT_SPREAD",
            bundle_label_selector=[{label: here}] * own + [{label: f"!{here}"}] * others,
        )

    def await_group(self, search: int) -> None:
        """Wait until Ray has the nodes, or the search is gone."""
        begin, told = time.monotonic(), False
        while not self._group.wait(_LOOK_S) and os.getppid() == search:
            if not told and time.monotonic() - begin > _TELL_AFTER_S:
                told = True
                here = "this node and " if self._first else ""
                say(
                    f"waiting for Ray to have {self._asked['bundle']} free on {here}"
                    f"{self._asked['others']} more: `ray status` shows what it has"
                )

    def run(self, search: int) -> int:
        """Have the nodes lent until the search is over; return the exit code."""
        import ray

        waited = {self._start(place): place for place in range(self._asked["others"])}
        while waited and os.getppid() == search:
            ended, _ = ray.wait(list(waited), timeout=_LOOK_S)
            for one in ended:
                place = waited.pop(one)
                try:
                    code = ray.get(one)
                except ray.exceptions.RayError as error:
                    say(f"an actor is gone: {type(error).__name__}")
                    code = ExitCode.NO_TRIAL_SUCCEEDED
                if code != ExitCode.DONE:
                    time.sleep(max(0.0, self._not_before[place] - time.monotonic()))
                    waited[self._start(place)] = place
        return ExitCode.DONE if not waited else ExitCode.NO_TRIAL_SUCCEEDED

    def _start(self, place: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, self._first + place)
        bundle = self._asked["bundle"]
        lender = ray.remote(Lender).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy
        )
        names = ("endpoint", "interface", "wait_s")
        told = {name: self._asked[name] for name in names}
        self._not_before[place] = time.monotonic() + AGAIN_S
        self._lenders[place] = lender.remote()
        return self._lenders[place].lend.remote(secret=self._secret, **told)


def say(text: str) -> None:
    """One line for people."""
    print(f"launcher=ray: {text}", flush=True)


def main(words: list[str]) -> int:
    """Hold the group and its actors; return the exit code."""
    search = os.getppid()
    secret = sys.stdin.readline().strip()
    try:
        actors = Actors(json.loads(words[0]), secret)
    except (ConnectionError, ValueError, RuntimeError) as error:
        say(f"Ray is not to be reached, or refuses the placement group: {error}")
        return ExitCode.NO_TRIAL_SUCCEEDED
    actors.await_group(search)
    return actors.run(search)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
