"""What is advised on each finding of the diagnosis: the one home of it, as data.

The sentences behind a finding, the page docs/advice.md, what ``fast``, ``bayes`` and ``auto`` try
first, and what an external proposer is told are all made of these records. A gain is one that was
seen elsewhere, by the source that the record names; none is promised here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any

from perfsearch.core.knob import Knob, Numerics, Value, same_value
from perfsearch.core.space import Space, key_of
from perfsearch.knobs import batch, collection, ddp, fsdp, loader, model, optimizer, process, zero
from perfsearch.knobs.base import Record
from perfsearch.metrics.diagnosis import (
    DATA,
    DEVICE,
    DISK,
    LOADERS,
    NETWORK,
    OTHER_JOBS,
    PROCESSORS,
    UNKNOWN,
    UNPROFILED,
)
from perfsearch.metrics.slow_steps import Cause


class Turn(Enum):
    """To which side of today's value an ordered knob is turned."""

    MORE = "more"
    LESS = "less"


@dataclass(frozen=True)
class Advice:
    """One thing to do about what holds a job back.

    Attributes:
        findings: of the diagnosis on which it is advised.
        do: what to do, in words that complete a sentence.
        cause: of the finding, for which it is advised; empty: for each.
        knob: that does it; ``None``: perfsearch has none, and it is the user's to do.
        to: value to set it to, or the side of today's.
        switch: how the library that has it writes it.
        alters: what it does to the computation where no knob says so; ``None``: nothing is
            computed by it.
        gain: what was seen of it elsewhere, by ``source``.
        trap: what goes wrong with it.
        source: where gain and trap are from.

    """

    findings: tuple[str, ...]
    do: str
    _: KW_ONLY
    cause: str = ""
    knob: Record | None = None
    to: Value | Turn = None
    switch: str = ""
    alters: Numerics | None = None
    gain: str = ""
    trap: str = ""
    source: str = ""

    @property
    def numerics(self) -> Numerics | None:
        """What it does to the computation; ``None``: nothing is computed by it."""
        return self.alters if self.knob is None else self.knob.knob.numerics

    def value_in(self, knob: Knob, today: Value) -> Value:
        """Value of a job's knob that is advised; ``None`` where it has none."""
        if not isinstance(self.to, Turn):
            return self.to if knob.contains(self.to) else None
        choices = knob.choices() or ()
        places = [i for i, value in enumerate(choices) if same_value(value, today)]
        if not knob.is_ordered or not places:
            return None
        if self.to is Turn.LESS:
            return choices[places[0] - 1] if places[0] else None
        later, start = choices[places[0] + 1 :], None if self.knob is None else self.knob.start
        usual = [v for v in later if _is_number(v) and _is_number(start) and v >= start]  # type: ignore[operator]
        return next(iter(usual or later), None)

    def is_done(self, in_force: Mapping[str, Value]) -> bool:
        """Whether a job whose knobs are so has the advised value."""
        if self.knob is None or isinstance(self.to, Turn) or self.knob.name not in in_force:
            return False
        return same_value(in_force[self.knob.name], self.to)

    def to_plain(self) -> dict[str, Any]:
        """Plain values for programs."""
        return {
            "findings": list(self.findings),
            "cause": self.cause,
            "do": self.do,
            "switch": self.switch,
            "knob": None if self.knob is None else self.knob.name,
            "to": self.to.value if isinstance(self.to, Turn) else self.to,
            "numerics": None if self.numerics is None else str(self.numerics),
            "gain": self.gain,
            "trap": self.trap,
            "source": self.source,
        }


def on(found: Mapping[str, Sequence[str]]) -> Iterator[Advice]:
    """What is advised on findings, that on the first of them first.

    Args:
        found: names of findings, the bottleneck first, each with its causes.

    """
    for finding, causes in found.items():
        for cause in ("", *causes):
            yield from (a for a in ADVICE if finding in a.findings and a.cause == cause)


def sentences(
    finding: str, causes: Sequence[str] = (), in_force: Mapping[str, Value] | None = None
) -> str:
    """What to do about a finding, for people: a sentence for each cause.

    Args:
        finding: its name.
        causes: what of it was seen.
        in_force: knobs as the job has them; what is so already is not advised.

    """
    said = []
    for cause in ("", *causes):
        asked = [a for a in ADVICE if finding in a.findings and a.cause == cause]
        there = [a.do for a in asked if not a.is_done(in_force or {})]
        *others, last = list(dict.fromkeys(there)) or [""]
        text = ", ".join([*others, f"or {last}"] if others else [last])
        said += [f"{text[0].upper()}{text[1:]}."] if text else []
    return " ".join(dict.fromkeys(said))


def proposals(
    found: Mapping[str, Sequence[str]],
    space: Space,
    today: Mapping[str, Value],
    without: Collection[str] = (),
) -> list[dict[str, Value]]:
    """Configurations to try first: ``today``'s with all that is advised, then with each alone.

    Args:
        found: names of findings, the bottleneck first, each with its causes.
        space: whose knobs may change.
        today: a configuration of it.
        without: knobs that are left alone.

    """
    alone: list[tuple[str, Value]] = []
    for advice in on(found):
        name = "" if advice.knob is None else advice.knob.name
        knob = space.by_name.get(name)
        value = None if knob is None else advice.value_in(knob, today[name])
        if value is not None and name not in without:
            alone.append((name, value))
    together = dict(reversed(alone))  # of two values of a knob, that which is advised first
    wanted = [together, *({name: value} for name, value in alone)]
    points = [space.canonical({**today, **some}) for some in wanted]
    distinct = {key_of(point): point for point in points if space.feasible(point)}
    distinct.pop(key_of(space.canonical(today)), None)
    return list(distinct.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -----------------------------------------------------------------------------
# The records.

_LOADING = ("input_bound",)
_SLOW_STEPS = ("uneven_steps",)
_LAUNCHING = ("launch_bound",)
_OPTIMIZER = ("optimizer_bound",)
_COMMUNICATION = ("communication_bound",)
_COMPUTING = ("compute_bound", "mostly_computing")
_NEW_SHAPES = ("new_shapes",)
_MEMORY = ("memory_pressure",)

_BRIDGE = "Megatron-Bridge's performance guide"
_LOADER_DOCS = "torch.utils.data, documentation"
_OPTIM_DOCS = "torch.optim, documentation"
_COMPILE_GAIN = "1.43x in the mean of 163 models (A100); 1.16x (8B, torchtitan)"
_COMPILE_TRAP = "compiles for minutes, again for each new shape; not the same numbers to the bit"
_COMPILE_SOURCE = "PyTorch 2.0, get started; torchtitan"

_MORE_LOADERS: dict[str, Any] = {
    "knob": loader.WORKERS,
    "to": Turn.MORE,
    "switch": "DataLoader(num_workers=...)",
    "gain": "10x (pytorch#23048); 1.27x (pocket-tts#267); up to 47x where misconfigured (Plumber)",
    "trap": "random draws in loader processes differ; /dev/shm fills; too many are slower",
    "source": "pytorch#23048; pocket-tts#267; Plumber (MLSys 2022)",
}
_SHARD_LESS_TRAP = "takes memory"

ADVICE: tuple[Advice, ...] = (
    # ------------------------------------------------------------------ loading
    Advice(_LOADING, "keep the data on a faster disk or in memory", cause=DISK),
    Advice(_LOADING, "read it in larger pieces", cause=DISK),
    Advice(_LOADING, "give the job processors of its own", cause=OTHER_JOBS),
    Advice(_LOADING, "use more dataloader workers", cause=OTHER_JOBS, **_MORE_LOADERS),
    Advice(
        _LOADING, "do less a sample: preprocess once and store it", cause=PROCESSORS,
        alters=Numerics.EXACT, trap="random augmentation has to stay in the loader",
    ),
    Advice(_LOADING, "do it on the device", cause=PROCESSORS, alters=Numerics.REORDERED),
    Advice(_LOADING, "cache the data locally", cause=NETWORK),
    Advice(
        _LOADING, "prefetch more of it", cause=NETWORK, knob=loader.PREFETCH, to=Turn.MORE,
        switch="DataLoader(prefetch_factor=...)", trap="takes the host's memory",
        source=_LOADER_DOCS,
    ),
    Advice(_LOADING, "use more dataloader workers", cause=UNKNOWN, **_MORE_LOADERS),
    Advice(
        _LOADING, "a larger prefetch factor", cause=UNKNOWN, knob=loader.PREFETCH, to=Turn.MORE,
        switch="DataLoader(prefetch_factor=...)", trap="takes the host's memory",
        source=_LOADER_DOCS,
    ),
    Advice(
        ("host_to_device_copy",), "use pin_memory with non_blocking copies",
        knob=loader.PIN_MEMORY, to=True,
        switch="DataLoader(pin_memory=True), .to(device, non_blocking=True)",
        trap="page-locked memory is taken from the host's; the copy has to be awaited before its "
        "source is written again",
        source="PyTorch tutorial on pin_memory and non_blocking",
    ),
    Advice(
        ("host_to_device_copy",), "send smaller types (uint8, bf16)", alters=Numerics.ALTERING,
        trap="uint8 is exact where images are bytes; bf16 rounds",
    ),
    # ------------------------------------------------------- the host in between
    Advice(
        ("cpu_quota",), "raise the quota", switch="cpu.max",
    ),
    Advice(
        ("cpu_quota",),
        "start fewer threads and loader processes than it has processors for",
        knob=process.THREADS, to=Turn.LESS, switch="OMP_NUM_THREADS",
    ),
    Advice(
        ("cpu_quota",),
        "start fewer threads and loader processes than it has processors for",
        knob=loader.WORKERS, to=Turn.LESS, switch="DataLoader(num_workers=...)",
    ),
    Advice(
        ("other_work",),
        "move logging, metrics, checkpoints, evaluation and Python between steps out of the step",
        alters=Numerics.EXACT, trap="the script has to be changed",
    ),
    Advice(("other_work",), "do them every N steps", alters=Numerics.EXACT),
    Advice(
        ("sync_points",), "call .item(), .cpu() and print of tensors less often",
        alters=Numerics.EXACT, trap="the script has to be changed",
        source="PyTorch performance tuning guide",
    ),
    Advice(("sync_points",), "after the step", alters=Numerics.EXACT),
    Advice(
        _LAUNCHING, "use torch.compile", knob=model.COMPILE, to="default", switch="torch.compile",
        gain=_COMPILE_GAIN, trap=_COMPILE_TRAP, source=_COMPILE_SOURCE,
    ),
    Advice(
        _LAUNCHING, "CUDA graphs", knob=model.COMPILE, to="reduce-overhead",
        switch="torch.compile(mode='reduce-overhead'), torch.cuda.make_graphed_callables",
        gain="1.20 to 1.33x where launching limits, nothing elsewhere (Megatron-Bridge); 1.305x "
        "(torchtitan#3441)",
        trap="shapes must not change; takes gigabytes of memory",
        source=f"{_BRIDGE}; torchtitan#3441",
    ),
    Advice(
        _LAUNCHING, "a fused or foreach optimizer", knob=optimizer.IMPLEMENTATION, to="fused",
        switch="torch.optim.AdamW(..., fused=True)", trap="not for every data type",
        source=_OPTIM_DOCS,
    ),
    Advice(
        _LAUNCHING, "a larger micro-batch", knob=batch.MICRO_BATCH, to=Turn.MORE,
        switch="DataLoader(batch_size=...)",
        gain="+12% over hand-tuned data parallelism, with another stage (GPT-2 large, four H100s)",
        trap="takes memory; dropout and BatchNorm see other batches",
        source="benchmarks/results/zero.md",
    ),
    # ----------------------------------------------------------------- optimizer
    Advice(
        _OPTIMIZER, "use its fused or foreach implementation", knob=optimizer.IMPLEMENTATION,
        to="fused", switch="torch.optim.AdamW(..., fused=True)",
        gain="fused is faster than foreach, and that than a loop",
        trap="not for every data type", source=_OPTIM_DOCS,
    ),
    Advice(
        _OPTIMIZER, "shard its state", knob=fsdp.STAGE, to=Turn.MORE,
        switch="ZeroRedundancyOptimizer, fully_shard", trap="ranks exchange parameters",
        source="torch.distributed.optim, documentation",
    ),
    Advice(
        _OPTIMIZER, "accumulate gradients", knob=batch.ACCUMULATION, to=Turn.MORE,
        switch="DistributedDataParallel.no_sync",
        trap="where the global batch grows with it, another training",
    ),
    # ------------------------------------------------- ranks and their exchanges
    Advice(
        ("straggler",),
        "look at that device's clocks, temperature and neighbours, and at that rank's data",
        cause=DEVICE,
    ),
    Advice(
        ("straggler",),
        "look at that rank's data, and at what else reads and computes on its node",
        cause=DATA,
    ),
    # They load ahead while their rank waits in a collective, so that only the last one shows.
    Advice(
        ("straggler",),
        "use more loader processes, where those of all ranks are as slow and its own began last",
        cause=LOADERS, **_MORE_LOADERS,
    ),
    Advice(
        ("rank_imbalance",), "balance what the ranks get in a step (lengths of samples)",
        alters=Numerics.ALTERING, gain="up to 2x, 20% less memory, where lengths are uneven",
        trap="the order of samples is another", source="Hugging Face, padding-free training",
    ),
    Advice(
        ("rank_imbalance",), "collect garbage on all ranks together", knob=collection.COLLECT_EACH,
        to=Turn.MORE, switch="gc.freeze(), gc.disable(), gc.collect()",
        gain="grows with the ranks: once 20% (horovod#1767)",
        trap="memory of cycles is kept for longer", source="pytorch#149334; horovod#1767",
    ),
    Advice(("rank_imbalance",), "look for other jobs beside this one"),
    Advice(
        _COMMUNICATION, "search bucket sizes and NCCL's settings", knob=ddp.BUCKET_CAP,
        to=ddp.START[ddp.BUCKET_CAP.name],
        switch="DistributedDataParallel(bucket_cap_mb=...), NCCL_NSOCKS_PERTHREAD and others",
        gain="+163% over TCP, +18% over NVLink (GPT-2 small, four H100s); 1.07 to 1.32x by "
        "NCCL's settings (AutoCCL)",
        trap="NCCL ignores impossible pairs of settings without a word",
        source="benchmarks/results/ddp_4xh100.md; AutoCCL (NSDI 2025)",
    ),
    Advice(
        _COMMUNICATION, "have gradients live in the buckets", knob=ddp.BUCKET_VIEW, to=True,
        switch="DistributedDataParallel(gradient_as_bucket_view=True)",
        trap="detach_() fails on gradients",
        source="DistributedDataParallel, documentation",
    ),
    Advice(
        _COMMUNICATION, "gather parameters ahead", knob=fsdp.FORWARD_PREFETCH, to=Turn.MORE,
        switch="FSDPModule.set_modules_to_forward_prefetch", trap=_SHARD_LESS_TRAP,
        source="torch.distributed.fsdp, documentation",
    ),
    Advice(
        _COMMUNICATION, "accumulate gradients", knob=batch.ACCUMULATION, to=Turn.MORE,
        switch="DistributedDataParallel.no_sync",
        trap="where the global batch grows with it, another training",
    ),
    Advice(
        _COMMUNICATION, "shard less", knob=fsdp.STAGE, to=Turn.LESS,
        switch="fully_shard(reshard_after_forward=False)", trap=_SHARD_LESS_TRAP,
        source="torch.distributed.fsdp, documentation",
    ),
    Advice(
        _COMMUNICATION, "send gradients in bf16 (another result)", alters=Numerics.ALTERING,
        switch="bf16_compress_hook, MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
        gain="halves what is sent",
        trap="safe but for rings of 128 ranks and more (Megatron-Bridge)",
        source=f"{_BRIDGE}; DDP communication hooks, documentation",
    ),
    # -------------------------------------------------------------------- memory
    Advice(
        _MEMORY, "have the allocator's segments grow",
        switch="PYTORCH_ALLOC_CONF=expandable_segments:True", alters=Numerics.EXACT,
        gain="none of itself: makes room for a larger batch",
        trap="not with CUDA IPC or NCCL's user buffers; with CUDA graphs NCCL_GRAPH_REGISTER=0",
        source=f"{_BRIDGE}; SkyRL#1470",
    ),
    Advice(
        _MEMORY, "use a smaller micro-batch with more accumulation", knob=batch.MICRO_BATCH,
        to=Turn.LESS, switch="DataLoader(batch_size=...)",
        trap="losses of uneven lengths are averaged otherwise",
    ),
    Advice(
        _MEMORY, "activation checkpointing", knob=zero.CHECKPOINTING, to=Turn.MORE,
        switch="torch.utils.checkpoint",
        trap="costs about 30% where all is computed again, 2 to 5% by operator (Megatron-Bridge)",
        source=_BRIDGE,
    ),
    Advice(
        _MEMORY, "sharding", knob=fsdp.STAGE, to=Turn.MORE, switch="fully_shard",
        trap="ranks exchange parameters", source="torch.distributed.fsdp, documentation",
    ),
    # ----------------------------------------------------------------- computing
    Advice(
        _COMPUTING, "use torch.compile", knob=model.COMPILE, to="default", switch="torch.compile",
        gain=_COMPILE_GAIN, trap=_COMPILE_TRAP, source=_COMPILE_SOURCE,
    ),
    Advice(
        _COMPUTING, "better kernels", knob=process.ATTENTION, to="cudnn",
        switch="torch.nn.attention.sdpa_kernel",
        gain="up to 1.75x over FlashAttention-2 on H100, of attention alone (torch 2.5)",
        trap="cuDNN plans anew for each new length", source="PyTorch 2.5 release; pytorch#188150",
    ),
    Advice(
        _COMPUTING, "better kernels", knob=model.CHANNELS_LAST, to=True,
        switch="model.to(memory_format=torch.channels_last)",
        gain="1.08 to 1.35x with automatic mixed precision", trap="views of images break",
        source="PyTorch tutorial on channels_last",
    ),
    Advice(
        _COMPUTING, "better kernels", knob=process.CUDNN_BENCHMARK, to=True,
        switch="torch.backends.cudnn.benchmark = True", trap="each new shape is tried anew",
        source="PyTorch performance tuning guide",
    ),
    Advice(
        _COMPUTING, "better kernels", alters=Numerics.REORDERED,
        switch="apply_liger_kernel_to_*, TrainingArguments(use_liger_kernel=True)",
        gain="1.2x, 60% less memory (8B, eight A100s)", trap="a fused loss returns no logits",
        source="Liger Kernel",
    ),
    Advice(
        _COMPUTING, "lower precision (another result)", knob=process.PRECISION, to="high",
        switch="torch.set_float32_matmul_precision('high')",
        trap="float32 matrices are multiplied with 10 bits of mantissa",
        source="torch.set_float32_matmul_precision, documentation",
    ),
    Advice(
        _COMPUTING, "lower precision (another result)", alters=Numerics.ALTERING,
        switch="torch.autocast('cuda', dtype=torch.bfloat16)", trap="fp16 needs a scaler",
        source="torch.amp, documentation",
    ),
    Advice(
        _COMPUTING, "lower precision (another result)", alters=Numerics.ALTERING,
        switch="torchao.float8", gain="1.25x tensorwise, 1.10x rowwise (8B, eight H100s)",
        trap="needs torch.compile; small hidden sizes gain nothing", source="torchao; torchtitan",
    ),
    # ------------------------------------------- lengths that were not met before
    Advice(
        _NEW_SHAPES, "use attention kernels that need no plan", knob=process.ATTENTION,
        to="efficient", switch="torch.nn.attention.sdpa_kernel",
        gain="2.2x and 2.8x, in two runs (BERT, batches of uneven length, H200: "
        "benchmarks/results/scripts.md)",
        trap="cuDNN's are faster where lengths come again", source="pytorch#188150",
    ),
    Advice(
        _NEW_SHAPES, "use attention kernels that need no plan", knob=process.ATTENTION,
        to="flash", switch="torch.nn.attention.sdpa_kernel",
        trap="takes no mask", source="torch.nn.attention, documentation",
    ),
    Advice(
        _NEW_SHAPES, "pad batches to a few lengths", alters=Numerics.REORDERED,
        trap="padding to the largest length may cost more than it saves",
        source="pytorch#188150; open-instruct#1445",
    ),
    # ------------------------------------------------------- where nothing is named
    Advice(
        ("mostly_before_backward", "mostly_one_phase"),
        "look at a few steps of it with metrics.trace=true",
    ),
    Advice(("balanced",), "measure with metrics.detail=full", cause=UNPROFILED),
    Advice(("balanced",), "search: single causes are not in sight"),
    # ---------------------------------------------------------------- slow steps
    Advice(
        _SLOW_STEPS, "validate less often", cause=Cause.VALIDATION, alters=Numerics.EXACT,
    ),
    Advice(_SLOW_STEPS, "on less data", cause=Cause.VALIDATION, alters=Numerics.EXACT),
    Advice(
        _SLOW_STEPS, "use more loader workers that load ahead", cause=Cause.LOADING,
        **_MORE_LOADERS,
    ),
    Advice(
        _SLOW_STEPS, "persistent_workers where loaders start again with each epoch",
        cause=Cause.LOADING, knob=loader.PERSISTENT, to=True,
        switch="DataLoader(persistent_workers=True)",
        trap="datasets of the loader processes live on, changed as they are",
        source=_LOADER_DOCS,
    ),
    Advice(_SLOW_STEPS, "save less often", cause=Cause.SAVING, alters=Numerics.EXACT),
    Advice(
        _SLOW_STEPS, "in the background (torch.distributed.checkpoint)", cause=Cause.SAVING,
        switch="torch.distributed.checkpoint.async_save", alters=Numerics.EXACT,
        trap="takes the host's memory",
        source="torch.distributed.checkpoint, documentation",
    ),
    Advice(
        _SLOW_STEPS,
        "give torch.compile shapes that repeat (padding to some lengths, dynamic=True)",
        cause=Cause.COMPILING, switch="torch.compile(dynamic=True)", alters=Numerics.REORDERED,
        trap="padding to the largest length may cost more than it saves",
        source="pytorch#188150; open-instruct#1445",
    ),
    Advice(
        _SLOW_STEPS, "call gc.freeze() once all is built", cause=Cause.COLLECTING,
        switch="gc.freeze()", alters=Numerics.EXACT, source="pytorch#149334",
    ),
    Advice(
        _SLOW_STEPS, "collect at a set step on all ranks", cause=Cause.COLLECTING,
        knob=collection.COLLECT_EACH, to=Turn.MORE, switch="gc.disable(), gc.collect()",
        gain="grows with the ranks: once 20% (horovod#1767)",
        trap="memory of cycles is kept for longer", source="pytorch#149334; horovod#1767",
    ),
    Advice(_SLOW_STEPS, "raise the container's CPU limit", cause=Cause.QUOTA),
    Advice(
        _SLOW_STEPS, "use fewer threads and workers", cause=Cause.QUOTA, knob=process.THREADS,
        to=Turn.LESS, switch="OMP_NUM_THREADS",
    ),
    Advice(
        _SLOW_STEPS,
        "look at what the script does between steps: logging, evaluation, rollouts",
        cause=Cause.OWN,
    ),
    *(
        Advice(_SLOW_STEPS, "look at what happens in those steps", cause=cause)
        for cause in (Cause.BACKWARD, Cause.OPTIMIZER, Cause.UNKNOWN)
    ),
)  # fmt: skip
"""All of it; of one finding and cause what an expert turns first stands first."""
