"""The one home of each knob: declared, applied, read back, bounded and handed over by its record.

A name of a knob stands as text nowhere else but in ``conf/``: other packages ask its record. No
torch here but inside functions, so that the controller can read what ranks apply.
"""

from perfsearch.knobs import (
    batch,
    collection,
    ddp,
    fsdp,
    loader,
    model,
    nccl,
    optimizer,
    process,
    zero,
)
from perfsearch.knobs.base import Record, Taker, Use, by_effect

__all__ = ["RECORDS", "by_name", "effect_order", "names_of_taker", "of"]

RECORDS: tuple[Record, ...] = (
    *ddp.RECORDS,
    *fsdp.RECORDS,
    *loader.RECORDS,
    *optimizer.RECORDS,
    *model.RECORDS,
    *process.RECORDS,
    *collection.RECORDS,
    *nccl.RECORDS,
    *batch.RECORDS,
    *zero.RECORDS,
)
"""Every knob."""

by_name = {record.name: record for record in RECORDS}


def of(use: Use) -> list[Record]:
    """The knobs of one use, the one with the largest expected effect first."""
    return by_effect(RECORDS, use)


def effect_order(use: Use) -> tuple[str, ...]:
    """Their names, in the same order."""
    return tuple(record.name for record in of(use))


def names_of_taker(taker: Taker) -> list[str]:
    """The knobs that go into objects of one kind of a script, or into its process."""
    return [record.name for record in RECORDS if taker in record.takers]
