"""The scripts of ``benchmarks/scripts``, and what an expert would try on each by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Case:
    """One script and its grid.

    Attributes:
        name: of the script.
        steps: of a plain start, of which the second half is timed.
        reordered: what an expert tries that computes the same, best combinations included.
        altering: what an expert tries that changes numbers, or what is seen.
        arguments: of each start.
        small: what comes after them for tiny sizes.
        small_cpu: what comes after those on a CPU.
        steps_argument: by which the script takes its number of steps.

    """

    name: str
    steps: int
    reordered: tuple[str, ...]
    altering: tuple[str, ...] = ()
    arguments: str = ""
    small: str = ""
    small_cpu: str = ""
    steps_argument: str = "--steps"

    def script(self, steps: int | str, small: bool, on_gpu: bool, more: str = "") -> list[str]:
        """The script and its arguments.

        Args:
            steps: how many it makes.
            small: whether sizes are tiny.
            on_gpu: whether there is one.
            more: options from the grid.

        """
        words = [self.steps_argument, str(steps), *self.arguments.split()]
        if small:
            words += self.small.split() + ([] if on_gpu else self.small_cpu.split())
        return [str(SCRIPTS / f"{self.name}.py"), *words, *more.split()]

    def grid(self, small: bool) -> list[tuple[str, bool]]:
        """Options and whether they alter numbers; what compiles is left out of small sizes."""
        whole = [(o, False) for o in self.reordered] + [(o, True) for o in self.altering]
        return [(o, a) for o, a in whole if not small or "compile" not in o]


_ONE_MICRO_BATCH = "--micro-batch 32 --accumulate 1 --optimizer fused"
_ONE_OF_LLAMA = "--micro-batch 16 --accumulate 1 --optimizer fused"

CASES = (
    Case(
        "resnet50",
        steps=60,
        reordered=(
            "--channels-last",
            "--cudnn-benchmark",
            "--channels-last --cudnn-benchmark",
            "--compile default",
            "--channels-last --compile default",
            "--channels-last --cudnn-benchmark --optimizer fused --compile default",
        ),
        altering=(
            "--tf32",
            "--bf16",
            "--bf16 --channels-last --cudnn-benchmark --optimizer fused --compile default",
        ),
        small="--arch resnet18 --batch-size 4 --image-size 64 --images 4096 --workers 1",
    ),
    Case(
        "gpt",
        steps=60,
        reordered=(
            "--optimizer fused",
            "--attention flash",
            "--attention cudnn",
            "--micro-batch 32 --accumulate 1",
            _ONE_MICRO_BATCH,
            "--compile default --optimizer fused",
            f"--compile default --compile-blocks {_ONE_MICRO_BATCH}",
            f"--compile default {_ONE_MICRO_BATCH}",
        ),
        altering=(f"--bf16-weights --compile default {_ONE_MICRO_BATCH}",),
        small="--block 64 --width 64 --layers 2 --heads 2 --vocabulary 512 --tokens 100000",
    ),
    Case(
        "bert_uneven",
        steps=40,
        steps_argument="--max_steps",
        arguments="--output_dir out --bf16 True --per_device_train_batch_size 64 "
        "--save_strategy no --report_to none --logging_steps 10 --disable_tqdm True",
        reordered=(
            "--attention efficient",
            "--attention flash",
            "--attention math",
            "--attention efficient --dataloader_num_workers 4",
            "--attention efficient --torch_compile True",
            "--attention math --torch_compile True",
        ),
        altering=("--attention efficient --train_sampling_strategy group_by_length",),
        small="--hidden_size 64 --layers 2 --heads 2 --vocabulary 512 --texts 2000",
        small_cpu="--use_cpu True --bf16 False --per_device_train_batch_size 8",
    ),
    Case(
        "llama",
        steps=40,
        reordered=(
            "--optimizer fused",
            "--attention flash",
            "--attention cudnn",
            "--micro-batch 16 --accumulate 1",
            _ONE_OF_LLAMA,
            "--compile default --optimizer fused",
            f"--compile default --compile-blocks {_ONE_OF_LLAMA}",
            f"--compile default {_ONE_OF_LLAMA}",
        ),
        small="--length 64 --hidden-size 64 --layers 2 --heads 2 --vocabulary 512 --sequences 512",
    ),
    Case(
        "vit",
        steps=60,
        reordered=(
            "--optimizer fused",
            "--attention flash",
            "--attention cudnn",
            "--compile default",
            "--compile default --compile-blocks --optimizer fused",
            "--compile default --optimizer fused --cudnn-benchmark",
        ),
        altering=("--bf16-weights --compile default --optimizer fused",),
        small="--model vit_tiny_patch16_224 --batch-size 4 --image-size 32 --images 4096 "
        "--workers 1",
    ),
    Case(
        "lstm",
        steps=100,
        reordered=(
            "--optimizer fused",
            "--compile default",
            "--compile default --optimizer fused",
        ),
        altering=("--tf32", "--bf16", "--bf16 --optimizer fused"),
        small="--batch-size 4 --bptt 16 --width 64 --vocabulary 512 --tokens 20000",
    ),
    Case(
        "dcgan",
        steps=100,
        reordered=(
            "--channels-last",
            "--cudnn-benchmark",
            "--channels-last --cudnn-benchmark",
            "--channels-last --cudnn-benchmark --optimizer fused",
            "--compile default",
            "--channels-last --cudnn-benchmark --optimizer fused --compile default",
        ),
        altering=(
            "--bf16",
            "--bf16 --channels-last --cudnn-benchmark --optimizer fused --compile default",
        ),
        small="--batch-size 4 --width 16 --images 4096 --workers 1",
    ),
    Case(
        "dlrm",
        steps=100,
        reordered=(
            "--workers 8",
            "--workers 8 --pin-memory",
            "--workers 14 --pin-memory",
            "--optimizer fused",
            "--workers 14 --pin-memory --optimizer fused",
            "--workers 14 --pin-memory --optimizer fused --compile default",
        ),
        altering=(
            "--tf32",
            "--bf16",
            "--tf32 --workers 14 --pin-memory --optimizer fused --compile default",
        ),
        small="--batch-size 64 --clicks 8192 --rows 1000 --width 16 --workers 1",
    ),
)
