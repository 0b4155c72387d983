"""From lowered calls to operators: what belongs together is joined, and everything is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from perfsearch.parallel.soap.blocks import take_apart, takes_apart
from perfsearch.parallel.soap.draft import Draft
from perfsearch.parallel.soap.graph import INPUT, Graph, Operator, Role, Stage
from perfsearch.parallel.soap.layouts import is_real
from perfsearch.parallel.soap.rules import read, sizes

_JOINED = frozenset({"pointwise", "cast", "dropout", "reshape", "permute", "expand"})
"""Kinds that are computed with their only input's operator."""

_ELEMENTWISE = frozenset({"pointwise", "cast", "dropout"})
_ONLY_ELEMENTWISE = frozenset({"batch_norm"})
"""Heads whose parts must not overlap, as those behind a reshape may."""

_ALONE = frozenset({"whole", "elementwise_loss", "class_loss", "total"})


def assemble(drafts: Sequence[Draft], output: str, batch: int) -> Graph:
    """Join, drop what the loss does not need, name, and put together.

    Args:
        drafts: in the order of the program.
        output: name of the loss's draft.
        batch: samples.

    """
    needed = _needed(drafts, output)
    _freeze(drafts, output)
    joined, owner = _join([d for d in drafts if d.name in needed], output)
    names = _names(joined)
    final = {old: names[head] for old, head in owner.items()}
    operators = tuple(_operator(draft, names[draft.name], final) for draft in joined)
    local = frozenset(names[d.name] for d in joined if d.value.local)
    return Graph(operators, local, final[output], batch)


def _needed(drafts: Sequence[Draft], output: str) -> set[str]:
    by_name = {draft.name: draft for draft in drafts}
    needed: set[str] = set()
    # what is drawn is drawn, whether the loss needs it or not
    waiting = [output, *(d.name for d in drafts if d.kind == "dropout")]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        lowered = by_name[name].lowered
        if lowered is not None:
            waiting += [value.name for value, _ in lowered.operands]
    return needed | {d.name for d in drafts if d.kind == INPUT}


def _freeze(drafts: Sequence[Draft], output: str) -> None:
    """Parameters that the loss has no gradient by are not trained: theirs is none, not zero."""
    reached = {output}
    trained: set[str] = set()
    for draft in reversed(drafts):
        lowered = draft.lowered
        if lowered is None or draft.name not in reached:
            continue
        if lowered.attributes.get("detach") or not is_real(draft.value.dtype):
            continue
        reached |= {value.name for value, _ in lowered.operands}
        trained |= {parameter.key for parameter in draft.parameters}
    for draft in drafts:
        draft.parameters = tuple(
            replace(p, trained=p.trained and p.key in trained) for p in draft.parameters
        )


def _join(drafts: Sequence[Draft], output: str) -> tuple[list[Draft], dict[str, str]]:
    uses = Counter(
        value.name for d in drafts if d.lowered is not None for value, _ in d.lowered.operands
    )
    readers = Counter(p.key for d in drafts for p in d.parameters)
    owner: dict[str, str] = {}
    heads: dict[str, Draft] = {}
    for draft in drafts:
        head = _head(draft, owner, heads, uses)
        if head is None:
            heads[draft.name] = draft
            owner[draft.name] = draft.name
        elif takes_apart(head, draft, readers):
            take_apart(head, draft)
            owner[draft.name] = head.name
        else:
            head.followers.append(draft)
            owner[draft.name] = head.name
    return list(heads.values()), owner


def _head(
    draft: Draft, owner: Mapping[str, str], heads: Mapping[str, Draft], uses: Mapping[str, int]
) -> Draft | None:
    """The operator that a draft is computed with."""
    lowered = draft.lowered
    if lowered is None or draft.kind not in _JOINED or draft.parameters:
        return None
    if len(lowered.operands) != 1:
        return None
    before = lowered.operands[0][0]
    head = heads[owner[before.name]]
    if uses[before.name] != 1 or head.kind == INPUT or head.value.local or head.kind in _ALONE:
        return None
    if head.kind in _ONLY_ELEMENTWISE and draft.kind not in _ELEMENTWISE:
        return None
    return head


def _names(drafts: Sequence[Draft]) -> dict[str, str]:
    """The path of the module that owns the parameters, else that of the caller and the kind."""
    names: dict[str, str] = {}
    taken: Counter[str] = Counter()
    for draft in drafts:
        name = draft.name
        if draft.kind == "parameter":
            name = draft.parameters[0].key
        elif draft.parameters and draft.parameters[0].name in ("weight", "bias"):
            name = draft.module or draft.parameters[0].key.rpartition(".")[0] or draft.kind
        elif draft.kind != INPUT:
            label = draft.name if draft.kind in ("pointwise", "call", "whole") else draft.kind
            name = f"{draft.module}.{label}" if draft.module else label
        taken[name] += 1
        names[draft.name] = name if taken[name] == 1 else f"{name}_{taken[name]}"
    return names


def _operator(draft: Draft, name: str, final: Mapping[str, str]) -> Operator:
    if draft.lowered is None:
        value = draft.value
        return Operator(name, INPUT, (), (), value.shape, value.dtype, (None,) * len(value.shape))
    stages = tuple(_stage(part) for part in draft.stages)
    operands = draft.lowered.operands
    operator = Operator(
        name=name,
        kind=draft.kind,
        inputs=tuple(final[value.name] for value, _ in operands),
        input_shapes=tuple(value.shape for value, _ in operands),
        shape=draft.output.shape,
        dtype=draft.output.dtype,
        roles=(),
        parameters=draft.parameters,
        stages=stages,
        flops=sum(part.lowered.flops for part in draft.stages if part.lowered is not None),
        source=draft.place,
    )
    return replace(operator, roles=_roles(draft))


def _stage(draft: Draft) -> Stage:
    assert draft.lowered is not None
    return Stage(
        kind=draft.kind,
        shape=draft.value.shape,
        reads=tuple(axes for _, axes in draft.lowered.operands),
        attributes=draft.lowered.attributes,
        dtype=draft.value.dtype,
    )


def _roles(draft: Draft) -> tuple[Role | None, ...]:
    """What each dimension is, where splitting it leaves each part less to compute."""
    labels = draft.output.labels
    return tuple(label if _splits(draft, dim) else None for dim, label in enumerate(labels))


def _splits(draft: Draft, dim: int) -> bool:
    size = draft.output.shape[dim]
    if size < 2:
        return False
    rectangle = tuple(
        (0, -(-size // 2) if d == dim else full) for d, full in enumerate(draft.output.shape)
    )
    for part in reversed(draft.stages):
        assert part.lowered is not None
        shape = part.value.shape
        narrowed = [
            d for d, (n, full) in enumerate(zip(sizes(rectangle), shape, strict=True)) if n < full
        ]
        if not narrowed or not all(part.lowered.splittable[d] for d in narrowed):
            return False
        if part is not draft:
            before = read(part.lowered.operands[0][1], rectangle)
            assert before is not None
            rectangle = before
    return True
