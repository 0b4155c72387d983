"""``fully_shard`` and FullyShardedDataParallel in a script, once it imports them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from perfsearch.instrument.imports import after_import
from perfsearch.instrument.patches import wrap
from perfsearch.search.knob import Value

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


class Sharding:
    """Every module that the script shards from now on.

    ``zero_stage`` 3 gathers parameters again for the backward pass, 2 keeps them.

    Args:
        knobs: values to put into force; those that are ``None`` or absent are left alone.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self.knobs = dict(knobs)
        self._sharded: list[weakref.ref[Any]] = []
        self._own: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._wrapped: list[weakref.ref[Any]] = []
        after_import(_FULLY_SHARD, self._meet_fully_shard)
        after_import(_FSDP1, self._meet_fsdp1)

    @property
    def kinds(self) -> list[str]:
        """``fully_shard`` and ``fsdp1``, where the script uses them."""
        found = {"fully_shard": self._sharded, "fsdp1": self._wrapped}
        return [name for name, made in found.items() if made]

    def _meet_fully_shard(self, module: ModuleType) -> None:
        wrap(module, "fully_shard", self._shard)

    def _meet_fsdp1(self, module: ModuleType) -> None:
        wrap(module.FullyShardedDataParallel, "__init__", self._construct)

    def _shard(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        stage = self.knobs.get("zero_stage")
        given = dict(kwargs)
        if stage is not None:
            given["reshard_after_forward"] = stage == 3
        made = original(*args, **given)
        for module in made if isinstance(made, list) else [made]:
            self._sharded.append(weakref.ref(module))
            self._own[module] = kwargs.get("reshard_after_forward")
        return made

    def _construct(
        self, original: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        import inspect

        from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

        bound = inspect.signature(original).bind(*args, **kwargs)
        given = bound.arguments
        stage = self.knobs.get("zero_stage")
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
        prefetch = self.knobs.get("fsdp_backward_prefetch")
        if prefetch is not None:
            given["backward_prefetch"] = {
                "pre": BackwardPrefetch.BACKWARD_PRE,
                "post": BackwardPrefetch.BACKWARD_POST,
                "none": None,
            }[str(prefetch)]
        if self.knobs.get("fsdp_forward_prefetch") is not None:
            given["forward_prefetch"] = bool(self.knobs["fsdp_forward_prefetch"])
        original(*bound.args, **bound.kwargs)
        self._wrapped.append(weakref.ref(given["self"]))

    def change(self, knobs: Mapping[str, Value]) -> None:
        """Give every ``fully_shard`` module another stage, between two steps."""
        self.knobs = dict(knobs)
        stage = self.knobs.get("zero_stage")
        for module in self._live(self._sharded):
            if self._own.get(module) is None:
                self._own[module] = _reshards(module)  # what torch chose, to go back to
            reshard = stage == 3 if stage is not None else self._own[module]
            module.set_reshard_after_forward(reshard, recurse=False)

    def why_not_again(self) -> str:
        """Why stages need another start; empty where they can be changed between two steps."""
        partly = [m for m in self._live(self._sharded) if type(self._own.get(m)) is int]
        return "fully_shard reshards to a smaller group" if partly else ""

    @staticmethod
    def _live(refs: list[weakref.ref[Any]]) -> list[Any]:
        return [made for ref in refs if (made := ref()) is not None]

    def values(self) -> dict[str, Value]:
        """What is in force, as the modules themselves have it."""
        found: dict[str, Value] = {}
        stages: set[int] = set()
        for module in self._live(self._sharded):
            stages.add(3 if _reshards(module) else 2)
        for wrapper in self._live(self._wrapped):
            name = wrapper.sharding_strategy.name
            stages.add({"NO_SHARD": 0}.get(name, 2 if "GRAD_OP" in name or "ZERO2" in name else 3))
            prefetch = wrapper.backward_prefetch
            found["fsdp_backward_prefetch"] = (
                "none" if prefetch is None else prefetch.name.removeprefix("BACKWARD_").lower()
            )
            found["fsdp_forward_prefetch"] = bool(wrapper.forward_prefetch)
        if stages:
            # the outermost module is never resharded unless it is told to
            found["zero_stage"] = max(stages)
        return found


def _reshards(module: Any) -> bool:
    """Whether a ``fully_shard`` module frees its gathered parameters after the forward pass."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.13 has one
        groups = [g for g in [getattr(state, "_fsdp_param_group", None)] if g is not None]
    return any(group.post_forward_mesh_info is not None for group in groups)
