"""FullyShardedDataParallel in a script, once it imports it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.instrument.imports import after_import
from perfsearch.instrument.patches import wrap

_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"


class Fsdp1:
    """Every wrapper that the script makes from now on.

    Args:
        knobs: ``zero_stage``, ``fsdp_backward_prefetch`` and ``fsdp_forward_prefetch``; those that
            are ``None`` or absent are left alone.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self._knobs = dict(knobs)
        self._made: list[weakref.ref[Any]] = []
        after_import(_MODULE, self._meet)

    @property
    def live(self) -> list[Any]:
        """Those that still exist, in the order of their making."""
        return [made for ref in self._made if (made := ref()) is not None]

    def _meet(self, module: ModuleType) -> None:
        wrap(module.FullyShardedDataParallel, "__init__", self._construct)

    def _construct(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

        bound = inspect.signature(original).bind(*args, **kwargs)
        given = bound.arguments
        stage = self._knobs.get("zero_stage")
        if stage is not None:
            hybrid = given.get("sharding_strategy") in (
                ShardingStrategy.HYBRID_SHARD,
                ShardingStrategy._HYBRID_SHARD_ZERO2,
            )
            names = {
                (3, False): ShardingStrategy.FULL_SHARD,
                (2, False): ShardingStrategy.SHARD_GRAD_OP,
                (3, True): ShardingStrategy.HYBRID_SHARD,
                (2, True): ShardingStrategy._HYBRID_SHARD_ZERO2,
            }
            given["sharding_strategy"] = names[int(stage), hybrid]
        prefetch = self._knobs.get("fsdp_backward_prefetch")
        if prefetch is not None:
            given["backward_prefetch"] = {
                "pre": BackwardPrefetch.BACKWARD_PRE,
                "post": BackwardPrefetch.BACKWARD_POST,
                "none": None,
            }[str(prefetch)]
        if self._knobs.get("fsdp_forward_prefetch") is not None:
            given["forward_prefetch"] = bool(self._knobs["fsdp_forward_prefetch"])
        original(*bound.args, **bound.kwargs)
        self._made.append(weakref.ref(given["self"]))

    def values(self) -> dict[str, Value]:
        """What is in force, as the wrappers themselves have it."""
        found: dict[str, Value] = {}
        stages: set[int] = set()
        for wrapper in self.live:
            name = wrapper.sharding_strategy.name
            stages.add({"NO_SHARD": 0}.get(name, 2 if "GRAD_OP" in name or "ZERO2" in name else 3))
            prefetch = wrapper.backward_prefetch
            found["fsdp_backward_prefetch"] = (
                "none" if prefetch is None else prefetch.name.removeprefix("BACKWARD_").lower()
            )
            found["fsdp_forward_prefetch"] = bool(wrapper.forward_prefetch)
        if stages:
            found["zero_stage"] = max(stages)
        return found
