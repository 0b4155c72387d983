"""How ranks agree between two steps: through the job's store, with no collective.

Nothing here can hang: every wait has a limit, and a round that not everybody reached in time ends
tuning on all ranks alike, since whoever writes its outcome first decides it.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from perfsearch.online.messages import END, Instruction, Report

_ROUNDS_KEPT = 2


class Channel:
    """Rounds of one report a rank, answered by one instruction for all of them.

    Args:
        store: of the job; a connection of its own is made where the kind of store allows it.
        ranks: global ranks that take part, the one that decides first.
        rank: this process's.
        serial: which tuned model of this process it is for.
        limit_s: how long a round may wait for a rank.

    """

    def __init__(self, store: Any, ranks: list[int], rank: int, serial: int, limit_s: float):
        name = hashlib.sha256(str(ranks).encode()).hexdigest()[:12]
        own = store.clone() if hasattr(store, "clone") else store
        self._store = dist.PrefixStore(f"perfsearch/online/{name}/{serial}", own)
        self._ranks = ranks
        self._rank = rank
        self._limit = timedelta(seconds=limit_s)
        self._round = 0

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self._rank == self._ranks[0]

    def report(self, report: Report) -> None:
        """Begin a round with this rank's report."""
        self._round += 1
        self._store.set(f"{self._round}/{self._rank}", report.to_text())

    def gather(self) -> list[Report] | None:
        """On the deciding rank: every rank's report, ``None`` where one did not come in time."""
        keys = [f"{self._round}/{rank}" for rank in self._ranks]
        try:
            self._store.wait(keys, self._limit)
        except (dist.DistStoreError, RuntimeError):
            return None
        return [Report.from_text(self._store.get(key).decode()) for key in keys]

    def decide(self, instruction: Instruction) -> Instruction:
        """On the deciding rank: answer the round.

        Returns:
            What holds: another rank may have given up the wait, and thereby ended tuning.

        """
        held = self._settle(instruction)
        self._forget(self._round - _ROUNDS_KEPT)
        return held

    def await_decision(self) -> Instruction:
        """On the other ranks: the answer of the round, ``end`` where none came in time."""
        key = f"{self._round}/decision"
        try:
            # the deciding rank waits for every report first, and decides after that
            self._store.wait([key], 3 * self._limit)
        except (dist.DistStoreError, RuntimeError):
            reason = f"rank {self._ranks[0]} did not answer in time"
            return self._settle(Instruction(END, reason=reason, goes_back=True))
        return Instruction.from_text(self._store.get(key).decode())

    def _settle(self, instruction: Instruction) -> Instruction:
        key = f"{self._round}/decision"
        held = self._store.compare_set(key, "", instruction.to_text())
        return Instruction.from_text(held.decode())

    def _forget(self, number: int) -> None:
        if number < 1:
            return
        for name in (*self._ranks, "decision"):
            self._store.delete_key(f"{number}/{name}")
