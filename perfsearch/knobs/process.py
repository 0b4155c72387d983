"""torch's settings that hold for a whole process: threads, kernels, precision.

torch is imported only inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import combinations

from perfsearch.core.knob import Kind, Knob, Numerics, Part, Scope, Value
from perfsearch.knobs.base import NO_CONVOLUTIONS, Job, Record, Taker, Use

THREADS_VARIABLE = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class ProcessSwitch(Record):
    """A knob that is one setting of torch.

    Attributes:
        get: what holds now; ``None`` where that cannot be told.
        put: sets it.
        code: the Python statements that set a value.
        variable: an environment variable that sets it too, for processes that are to be started.

    """

    _: KW_ONLY
    uses: frozenset[Use] = frozenset({Use.DDP, Use.SCRIPT})
    takers: tuple[Taker, ...] = (Taker.PROCESS,)
    get: Callable[[], Value]
    put: Callable[[Value], None]
    code: Callable[[Value], Sequence[str]]
    variable: str = ""

    def variables(self, value: Value) -> dict[str, str]:
        """The variable, where there is one."""
        return {self.variable: str(value)} if self.variable and value is not None else {}


def _as_read(knob: Knob, job: Job, default: Value) -> Knob:
    """The knob of a script, where torch's default has a name, as it is read back by it."""
    if job.seen is None:
        return knob  # ``None`` leaves what the job's own code has set
    values = tuple(default if value is None else value for value in knob.values)
    return replace(knob, default=default, values=values)


def _statement(text: str) -> Callable[[Value], Sequence[str]]:
    """What sets a value by one statement."""
    return lambda value: [text.format(value=value)]


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
    code=_statement("torch.backends.cudnn.benchmark = {value!r}"),
)  # fmt: skip

THREADS = ProcessSwitch(
    Knob(
        "omp_num_threads", Kind.ORDINAL, 1, values=(1,), unit="threads",
        numerics=Numerics.REORDERED, help="CPU threads of each rank",
    ),
    effect=74, fit=_threads_fit, get=_get_threads, put=_put_threads,
    code=_statement("torch.set_num_threads({value})"), variable=THREADS_VARIABLE,
    script_scope=Scope.PROCESS,
)  # fmt: skip

# -----------------------------------------------------------------------------
# What computes scaled dot-product attention.

_DEFAULT = "default"
_MATH = "math"
KERNELS = ("flash", "efficient", "cudnn")
"""Kernels that torch has beside the plain way, which computes whatever they cannot."""

_SWITCHES = {"flash": "flash", "efficient": "mem_efficient", "cudnn": "cudnn", _MATH: "math"}
"""How torch names them in ``torch.backends.cuda.enable_NAME_sdp``."""

_ATTENTION_WORDS = (
    _DEFAULT,
    *("+".join(on) for n in range(2, len(_SWITCHES)) for on in combinations(_SWITCHES, n)),
)
"""What is read back where the script itself has set several, or none."""


def _kernels_of(value: Value) -> set[str]:
    """What a value leaves on."""
    words = str(value).split("+")
    return set(_SWITCHES) if _DEFAULT in words else {*words, _MATH} & set(_SWITCHES)


def _attention_fits(knob: Knob, job: Job) -> Knob | str:
    # where the plain way is in force, attention shows no kernels
    today = ATTENTION.of(job.seen.values) if job.seen is not None else None
    if not job.may_attend and today in (None, _DEFAULT):
        return "nothing is computed by scaled_dot_product_attention's kernels"
    if job.seen is not None and job.seen.compiled:
        return "the script compiles its model, which keeps its kernels"
    fitting = knob if job.on_gpu else replace(knob, values=(None, _MATH))
    return _as_read(fitting, job, _DEFAULT)


def _get_attention() -> Value:
    """One word for one kernel and the plain way; several where the script itself has several."""
    import torch

    backends = torch.backends.cuda
    on = [kind for kind, name in _SWITCHES.items() if getattr(backends, f"{name}_sdp_enabled")()]
    if len(on) == len(_SWITCHES):
        return _DEFAULT
    fused = [kind for kind in on if kind != _MATH]
    return fused[0] if len(fused) == 1 and _MATH in on else "+".join(on)


def _put_attention(value: Value) -> None:
    import torch

    on = _kernels_of(value)
    for kind, name in _SWITCHES.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(kind in on)


def _attention_code(value: Value) -> list[str]:
    on = _kernels_of(value)
    return [
        f"torch.backends.cuda.enable_{name}_sdp({kind in on})" for kind, name in _SWITCHES.items()
    ]


ATTENTION = ProcessSwitch(
    Knob(
        "attention_backend", Kind.CATEGORICAL, None, values=(None, *KERNELS, _MATH),
        numerics=Numerics.REORDERED, shortens=(Part.COMPUTING,), redraws=True,
        help="what computes scaled_dot_product_attention where it can; else torch picks",
    ),
    effect=79, words=_ATTENTION_WORDS, fit=_attention_fits, get=_get_attention,
    put=_put_attention, code=_attention_code,
)  # fmt: skip


def why_not_attending(asked: Value, seen: Sequence[str] | None) -> str:
    """Why attention is not computed as asked for; empty where it is, or where nobody knows.

    Args:
        asked: value of the knob; ``None``: it was not asked for.
        seen: kernels that computed it, the plain way apart.

    """
    wanted = asked if asked in (*KERNELS, _MATH) else None
    if seen is None or wanted is None or (wanted in seen if wanted != _MATH else not seen):
        return ""
    return (
        f"{ATTENTION.name}={wanted} was asked for, and torch computes attention by "
        f"{' and '.join(seen) or _MATH}, since {wanted} does not take its inputs"
    )


# -----------------------------------------------------------------------------
# How finely float32 matrices are multiplied.


def _precision_fits(knob: Knob, job: Job) -> Knob | str:
    if not job.on_gpu:
        return "on a CPU it seldom changes anything"
    return _as_read(knob, job, "highest")


def _get_precision() -> Value:
    import torch

    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # torch refuses where newer settings than this one were used too
        return None


def _put_precision(value: Value) -> None:
    import torch

    torch.set_float32_matmul_precision(str(value))


PRECISION = ProcessSwitch(
    Knob(
        "float32_matmul_precision", Kind.CATEGORICAL, None, values=(None, "high"),
        numerics=Numerics.ALTERING, shortens=(Part.COMPUTING,),
        help="high multiplies float32 matrices in TensorFloat-32",
    ),
    effect=77, words=("highest", "medium"), fit=_precision_fits, get=_get_precision,
    put=_put_precision, code=_statement("torch.set_float32_matmul_precision({value!r})"),
)  # fmt: skip

RECORDS = (CUDNN_BENCHMARK, THREADS, ATTENTION, PRECISION)


def apply(configuration: Mapping[str, Value]) -> None:
    """Set what the configuration names."""
    for record in RECORDS:
        value = record.of(configuration)
        if value is not None:
            record.put(value)


def values() -> dict[str, Value]:
    """What holds now, as far as it can be told."""
    found = {record.name: record.get() for record in RECORDS}
    return {name: value for name, value in found.items() if value is not None}


def code_lines(knobs: Mapping[str, Value]) -> list[str]:
    """Statements that set the knobs."""
    return [
        line for record in RECORDS if (value := record.of(knobs)) is not None
        for line in record.code(value)
    ]  # fmt: skip


def set_by_code(knobs: Mapping[str, Value]) -> dict[str, Value]:
    """Those of the knobs that no environment variable sets."""
    return {r.name: r.of(knobs) for r in RECORDS if r.of(knobs) is not None and not r.variable}


def changed(configuration: Mapping[str, Value]) -> dict[str, Value]:
    """Those of them that are not torch's own default."""
    given = set_by_code(configuration)
    return {r.name: given[r.name] for r in RECORDS if given.get(r.name, r.default) != r.default}
