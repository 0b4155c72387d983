"""torch's settings that hold for a whole process: threads, cuDNN. torch only inside functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope, Value
from perfsearch.knobs.base import NO_CONVOLUTIONS, Job, Record, Taker, Use

THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ProcessSwitch(Record):
    """A knob that is one setting of torch.

    Attributes:
        get: what holds now.
        put: sets it.
        line: the Python statement that sets ``{value}``.
        variable: an environment variable that sets it too, for processes that are to be started.

    """

    _: KW_ONLY
    uses: frozenset[Use] = frozenset({Use.DDP, Use.SCRIPT})
    takers: tuple[Taker, ...] = (Taker.PROCESS,)
    get: Callable[[], Value]
    put: Callable[[Value], None]
    line: str
    variable: str = ""

    def variables(self, value: Value) -> dict[str, str]:
        """The variable, where there is one."""
        return {self.variable: str(value)} if self.variable and value is not None else {}


def _cudnn_fits(knob: Knob, job: Job) -> Knob | str:
    if not job.on_gpu:
        return "no GPU is used"
    if not job.may_convolve:
        return NO_CONVOLUTIONS
    return knob


def _get_benchmark() -> Value:
    import torch

    return bool(torch.backends.cudnn.benchmark)


def _put_benchmark(value: Value) -> None:
    import torch

    torch.backends.cudnn.benchmark = bool(value)


def _threads_fit(knob: Knob, job: Job) -> Knob | str:
    if job.on_gpu:
        return "on a GPU the host's threads do not compute"
    most = job.cores_per_rank
    choices = {1, most, job.threads, *(2**i for i in range(8) if 2**i <= most)}
    if len(choices) < 2:
        return f"{job.machine.nproc} ranks on {job.machine.cores} cores leave one"
    return replace(knob, default=job.threads, values=tuple(sorted(choices)))


def _get_threads() -> Value:
    import torch

    found: int = torch.get_num_threads()
    return found


def _put_threads(value: Value) -> None:
    import torch

    threads = int(value or 1)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


CUDNN_BENCHMARK = ProcessSwitch(
    Knob(
        "cudnn_benchmark", Kind.BOOLEAN, False, numerics=Numerics.REORDERED,
        help="cuDNN tries its algorithms and keeps the fastest", shortens=(Part.COMPUTING,),
    ),
    effect=74, fit=_cudnn_fits, get=_get_benchmark, put=_put_benchmark,
    line="torch.backends.cudnn.benchmark = {value}",
)  # fmt: skip

THREADS = ProcessSwitch(
    Knob(
        "omp_num_threads", Kind.ORDINAL, 1, values=(1,), unit="threads",
        numerics=Numerics.REORDERED, help="CPU threads of each rank",
    ),
    effect=74, fit=_threads_fit, get=_get_threads, put=_put_threads,
    line="torch.set_num_threads({value})", variable=THREADS_VARIABLE, script_scope=Scope.PROCESS,
)  # fmt: skip

RECORDS = (CUDNN_BENCHMARK, THREADS)


def apply(configuration: Mapping[str, Value]) -> None:
    """Set what the configuration names."""
    for record in RECORDS:
        value = record.of(configuration)
        if value is not None:
            record.put(value)


def values() -> dict[str, Value]:
    """What holds now."""
    return {record.name: record.get() for record in RECORDS}


def code_lines(knobs: Mapping[str, Value]) -> list[str]:
    """Statements that set the knobs."""
    return [r.line.format(value=r.of(knobs)) for r in RECORDS if r.of(knobs) is not None]
