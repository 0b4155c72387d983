"""Sharded models in a script, of either kind that torch has."""

from __future__ import annotations

from collections.abc import Mapping

from perfsearch.core.knob import Value
from perfsearch.instrument.fsdp1 import Fsdp1
from perfsearch.instrument.fully_shard import FullyShard


class Sharding:
    """Every module that the script shards from now on.

    ``zero_stage`` 3 gathers parameters again for the backward pass, 2 keeps them.

    Args:
        knobs: values to put into force; those that are ``None`` or absent are left alone.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self._fully_shard = FullyShard(knobs)
        self._fsdp1 = Fsdp1(knobs)

    @property
    def kinds(self) -> list[str]:
        """``fully_shard`` and ``fsdp1``, where the script uses them."""
        found = {"fully_shard": self._fully_shard.live, "fsdp1": self._fsdp1.live}
        return [name for name, made in found.items() if made]

    def put_into_force(self) -> None:
        """Set what can be set only once the whole model is there, before the first step ends."""
        self._fully_shard.put_into_force()

    def change(self, knobs: Mapping[str, Value]) -> None:
        """Give every ``fully_shard`` module other values, between two steps."""
        self._fully_shard.change(knobs)

    def why_not_again(self) -> str:
        """Why values need another start; empty where they can be changed between two steps."""
        return self._fully_shard.why_not_again()

    def values(self) -> dict[str, Value]:
        """What is in force, as the modules themselves have it."""
        found = [self._fully_shard.values(), self._fsdp1.values()]
        stages = [int(v["zero_stage"] or 0) for v in found if "zero_stage" in v]
        return {**found[0], **found[1], **({"zero_stage": max(stages)} if stages else {})}
