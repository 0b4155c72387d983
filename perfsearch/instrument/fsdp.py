"""Sharded models in a script, of either kind that torch has: ``fully_shard`` and FSDP1.

Whoever shards them: the script, HF Trainer, Accelerate, Lightning.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from perfsearch.core.knob import Value
from perfsearch.instrument.patching import after_import, wrap
from perfsearch.knobs.fsdp import (
    BACKWARD_PREFETCH,
    CPU_OFFLOAD,
    FORWARD_PREFETCH,
    FSDP1_BACKWARD,
    FSDP1_FORWARD,
    STAGE,
)

_MODULE = "torch.distributed.fsdp._fully_shard._fully_shard"

_FSDP1_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"

_AHEAD = (FORWARD_PREFETCH.name, BACKWARD_PREFETCH.name)


class Sharding:
    """Every module that the script shards from now on.

    Stage 3 gathers parameters again for the backward pass, 2 keeps them.

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
        stages = [int(STAGE.of(v)) for v in found if STAGE.of(v) is not None]
        return {**found[0], **found[1], **({STAGE.name: max(stages)} if stages else {})}


class FullyShard:
    """Every module that the script gives to ``fully_shard`` from now on.

    Args:
        knobs: the stage, whether it offloads, and the units that are gathered ahead, 0 for torch's
            own way. Those that are ``None`` or absent are left alone.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self._knobs = dict(knobs)
        self._units: list[_Unit] = []
        after_import(_MODULE, self._meet)
        if CPU_OFFLOAD.of(knobs):
            after_import("torch.distributed.distributed_c10d", self._meet_groups)

    @property
    def live(self) -> list[_Unit]:
        """Units whose modules still exist, in the order of the calls."""
        return [unit for unit in self._units if unit.first is not None]

    def _meet(self, module: ModuleType) -> None:
        wrap(module, "fully_shard", self._shard)

    def _meet_groups(self, module: ModuleType) -> None:
        """Let groups reduce what rests in the host's memory, as norms of gradients then do."""
        import torch.distributed as dist

        wrap(module, "init_process_group", _for_both_memories)
        dist.init_process_group = module.init_process_group

    def _shard(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        own, given = kwargs.get("reshard_after_forward"), dict(kwargs)
        grouped = isinstance(args[0] if args else kwargs["module"], list)
        stage = STAGE.of(self._knobs)
        if stage is not None:
            given["reshard_after_forward"] = resharding(own, stage, grouped)
        if CPU_OFFLOAD.of(self._knobs) is not None:
            given["offload_policy"] = _offload_policy(
                bool(CPU_OFFLOAD.of(self._knobs)), kwargs.get("offload_policy")
            )
        made = original(*args, **given)
        self._units.append(_Unit(made if isinstance(made, list) else [made], own))
        return made

    def put_into_force(self) -> None:
        """Set what can be set only once everything is sharded."""
        for model in _models(self.live):
            for knob in _AHEAD:
                self._gather_ahead(model, knob)

    def _gather_ahead(self, model: list[_Unit], knob: str) -> None:
        wanted = self._knobs.get(knob)
        forward = knob == FORWARD_PREFETCH.name
        firsts = [unit.first for unit in model]
        for place, unit in enumerate(model):
            if unit.own_ahead is None:
                unit.own_ahead = {name: list(_ahead(unit, name)) for name in _AHEAD}
            if wanted is None:
                setattr(unit.state, _attribute(knob), list(unit.own_ahead[knob]))
            elif forward:
                unit.first.set_modules_to_forward_prefetch(firsts[place + 1 :][: int(wanted)])
            else:
                unit.first.set_modules_to_backward_prefetch(firsts[:place][::-1][: int(wanted)])

    def change(self, knobs: Mapping[str, Value]) -> None:
        """Use other values from now on, between two steps; offloading stays as it is."""
        self._knobs = dict(knobs)
        stage = STAGE.of(self._knobs)
        outermost = _outermost(self.live)
        for unit in self.live:
            reshard = resharding(unit.own, stage, len(unit.modules) > 1)
            if reshard is None:
                reshard = unit not in outermost  # torch's own choice
            unit.first.set_reshard_after_forward(bool(reshard), recurse=False)
        self.put_into_force()

    def why_not_again(self) -> str:
        """Why stages need another start; empty where they can be changed between two steps."""
        partly = [unit for unit in self.live if type(unit.own) is int]
        return "fully_shard reshards to a smaller group" if partly else ""

    def values(self) -> dict[str, Value]:
        """What is in force, as the modules themselves have it."""
        live = self.live
        groups = [group for unit in live for group in unit.groups]
        if not groups:
            return {}
        # the outermost module is never resharded unless it is told to
        reshards = any(group.post_forward_mesh_info is not None for group in groups)
        found: dict[str, Value] = {
            STAGE.name: 3 if reshards else 2,
            CPU_OFFLOAD.name: any(_is_offloading(g.offload_policy) for g in groups),
        }
        for knob in _AHEAD:
            found[knob] = max(len(_ahead(unit, knob)) for unit in live)
        return found


class _Unit:
    """What one call of ``fully_shard`` has put together: one module, or several as a group.

    Attributes:
        modules: weakly held.
        own: ``reshard_after_forward`` as the script gave it; ``None`` is torch's own choice.
        own_ahead: the modules' prefetched states by knob, as the script has set them.

    """

    def __init__(self, modules: list[Any], own: bool | int | None) -> None:
        self.modules = [weakref.ref(module) for module in modules]
        self.own = own
        self.own_ahead: dict[str, list[Any]] | None = None

    @property
    def first(self) -> Any:
        """The module that speaks for the group; ``None`` where it is gone."""
        return self.modules[0]()

    @property
    def state(self) -> Any:
        return self.first._get_fsdp_state()

    @property
    def groups(self) -> list[Any]:
        """Its parameters, as they are gathered together."""
        groups = getattr(self.state, "_fsdp_param_groups", None)
        if groups is None:  # torch before 2.13 has one
            groups = [g for g in [getattr(self.state, "_fsdp_param_group", None)] if g is not None]
        return list(groups)


def resharding(own: bool | int | None, stage: Value, grouped: bool) -> bool | int | None:
    """``reshard_after_forward`` for a stage.

    Stage 2 keeps every unit whole. Stage 3 leaves alone what the script itself reshards or lets
    torch choose (the outermost module stays whole then), and what it keeps whole as a group: the
    last modules of the forward pass are the first of the backward pass.

    Args:
        own: what the script gave.
        stage: 2, 3, or ``None`` for the script's own.
        grouped: whether several modules were given in one call.

    """
    if stage is None or (stage == 3 and (own is not False or grouped)):
        return own
    return stage == 3


def _attribute(knob: str) -> str:
    return f"_states_to_{knob}"  # torch's names are the knobs'


def _ahead(unit: _Unit, knob: str) -> list[Any]:
    """What the unit has gathered ahead."""
    states: list[Any] = getattr(unit.state, _attribute(knob))
    return states


def _outermost(units: list[_Unit]) -> list[_Unit]:
    """Units that no other one contains."""
    firsts = {id(unit.first) for unit in units}
    inner = {
        id(module)
        for unit in units
        for module in unit.first.modules()
        if module is not unit.first and id(module) in firsts
    }
    return [u for u in units if id(u.first) not in inner and len(u.modules) == 1]


def _models(units: list[_Unit]) -> Iterator[list[_Unit]]:
    """The units inside of each outermost module, in the order in which it holds them."""
    for outer in _outermost(units):
        places = {id(module): place for place, module in enumerate(outer.first.modules())}
        inside = [u for u in units if u is not outer and id(u.first) in places]
        yield sorted(inside, key=lambda unit: places[id(unit.first)])


def _is_offloading(policy: Any) -> bool:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return isinstance(policy, CPUOffloadPolicy)


def _offload_policy(wanted: bool, own: Any) -> Any:
    """The script's own policy where it does what is wanted, else one that does."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if _is_offloading(own) == wanted:
        return own if own is not None else OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if wanted else OffloadPolicy()


def _for_both_memories(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    backend = args[0] if args else kwargs.get("backend")
    if backend == "nccl":
        backend = "cpu:gloo,cuda:nccl"
        args, kwargs = (backend, *args[1:]), {k: v for k, v in kwargs.items() if k != "backend"}
    return original(*args, **kwargs)


class Fsdp1:
    """Every wrapper that the script makes from now on.

    Args:
        knobs: the stage and what is gathered early; those that are ``None`` or absent are left
            alone.

    """

    def __init__(self, knobs: Mapping[str, Value]) -> None:
        self._knobs = dict(knobs)
        self._made: list[weakref.ref[Any]] = []
        after_import(_FSDP1_MODULE, self._meet)

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
        stage = STAGE.of(self._knobs)
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
        prefetch = FSDP1_BACKWARD.of(self._knobs)
        if prefetch is not None:
            given["backward_prefetch"] = {
                "pre": BackwardPrefetch.BACKWARD_PRE,
                "post": BackwardPrefetch.BACKWARD_POST,
                "none": None,
            }[str(prefetch)]
        if FSDP1_FORWARD.of(self._knobs) is not None:
            given["forward_prefetch"] = bool(FSDP1_FORWARD.of(self._knobs))
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
            found[FSDP1_BACKWARD.name] = (
                "none" if prefetch is None else prefetch.name.removeprefix("BACKWARD_").lower()
            )
            found[FSDP1_FORWARD.name] = bool(wrapper.forward_prefetch)
        if stages:
            found[STAGE.name] = max(stages)
        return found
