"""Linear layers whose outputs are taken apart at once, as heads are: split by any of the blocks.

The rows of such a weight lie (projections, heads, width of a head), say. A part that has some of
the heads reads rows from several places, which are one rectangle of the weight so viewed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from perfsearch.parallel.soap.axes import Same, Shape, Whole
from perfsearch.parallel.soap.draft import Draft
from perfsearch.parallel.soap.graph import Parameter, Role


def takes_apart(head: Draft, follower: Draft, readers: Mapping[str, int]) -> bool:
    """Whether a reshape does nothing but split the last dimension of a linear layer.

    Args:
        head: an operator.
        follower: what is to be joined to it.
        readers: how many operators read each parameter; a shared one has one view only.

    """
    lead = len(head.value.shape) - 1
    return (
        head.kind == "linear"
        and follower.kind == "reshape"
        and not head.followers
        and len(follower.value.shape) > len(head.value.shape)
        and follower.value.shape[:lead] == head.value.shape[:lead]
        and all(readers[parameter.key] == 1 for parameter in head.parameters)
    )


def take_apart(head: Draft, follower: Draft) -> None:
    """Make the linear layer give what the reshape gave."""
    assert head.lowered is not None
    lead = len(head.value.shape) - 1
    blocks = follower.value.shape[lead:]
    labels = (*head.value.labels[:lead], *(Role.PARAMETER for _ in blocks))
    head.lowered.labels = labels
    head.lowered.splittable = (True,) * len(labels)
    head.lowered.attributes["blocks"] = len(blocks)
    head.parameters = tuple(_viewed(p, lead, blocks) for p in head.parameters)
    head.value = replace(follower.value, labels=labels)


def _viewed(parameter: Parameter, lead: int, blocks: Shape) -> Parameter:
    rows = tuple(Same(lead + i) for i in range(len(blocks)))
    rest = parameter.shape[1:]
    return replace(
        parameter,
        shape=(*blocks, *rest),
        axes=(*rows, *(Whole(size) for size in rest)),
    )
