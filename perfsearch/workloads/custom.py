"""The user's own job: ``workload.factory=module:function``."""

from __future__ import annotations

from perfsearch.core.registry import imported
from perfsearch.workloads.base import Job, as_job
from perfsearch.workloads.spec import WorkloadSpec


class FactoryError(RuntimeError):
    """The user's own code does not even get as far as making a job."""


def build(spec: WorkloadSpec, seed: int) -> Job:
    """Call the factory, which takes no arguments.

    The current directory can be imported from. torch's generator has been seeded, so that weights
    are the same on every rank; a factory that draws from others seeds them itself.

    Raises:
        FactoryError: its module cannot be imported.
        TypeError: it returned something else than a job.

    """
    assert spec.factory is not None
    try:
        factory = imported(spec.factory)
    except Exception as error:
        raise FactoryError(
            f"workload.factory={spec.factory}: its module cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    return as_job(factory(), spec.factory)
