"""Training scripts of other people: where each is, and the few settings that make it small.

Nothing of a script is changed: it gets arguments, and data in the place where it looks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _public_data as data

EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
NANOGPT = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")
MINGPT = ("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26")
MAKEMORE = ("karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4")
CLEANRL = ("vwxyzjn/cleanrl", "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb")
DLRM = ("facebookresearch/dlrm", "090956ee2319ddd349a42232958aefccfe3f7b0a")
TIMM = ("huggingface/pytorch-image-models", "aa4b5850c1543fa488abf260f18390eda46cf85d")
TRL = ("huggingface/trl", "f2cd57710ae345ea6428ae95363267fcf38a3dc8")
PYG = ("pyg-team/pytorch_geometric", "5c6461b2305ad068a6d61165b3c55852a11aaa41")
LIGHTNING = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")


@dataclass(frozen=True)
class Case:
    """One script.

    Attributes:
        name: short, also a folder's name.
        source: repository and commit.
        folder: where it is started, relative to the repository.
        script: relative to ``folder``.
        arguments: that make it small.
        prepare: writes its data; gets the repository's folder.
        steps: of the optimizer, in one plain start; 0: not a fixed number.
        paths: of the repository that it needs; by default ``folder``.
        processes: more than one is started by torchrun.
        options: of perfsearch-run, as its manual advises for such a script.
        environment: variables, as NAME=VALUE; ``{root}`` is the repository's folder.
        plain_fails: pattern of the line by which it fails as it is on this machine.
        refusal: pattern of the true answer, where it cannot be searched.
        odd: what is out of the ordinary about it.

    """

    name: str
    source: tuple[str, str]
    folder: str
    script: str
    arguments: tuple[str, ...] = ()
    prepare: Callable[[Path], None] | None = None
    steps: int = 0
    paths: tuple[str, ...] = ()
    processes: int = 1
    options: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    plain_fails: str = ""
    refusal: str = ""
    odd: str = ""


def _in(place: str, make: Callable[..., None], *values: int) -> Callable[[Path], None]:
    """Data in a place of the repository."""
    return lambda root: make(root / place, *values)


def _word_language_model(root: Path) -> None:
    for part, words in (("train", 60_000), ("valid", 3_000), ("test", 3_000)):
        data.text(root / "word_language_model" / "data" / "small" / f"{part}.txt", words)


def _language_model(root: Path) -> None:
    data.causal_model(root / "model")
    data.texts_as_json(root / "texts")


def _play(root: Path) -> None:
    file = root / "projects" / "chargpt" / "input.txt"
    data.text(file, 20_000)
    file.write_text("O God, O God!\n" + file.read_text())


def _sine_waves(root: Path) -> None:
    import numpy as np
    import torch

    waves = np.sin(np.arange(24)[None, :] / 20 + np.arange(12)[:, None])
    torch.save(waves, root / "time_sequence_prediction" / "traindata.pt")


CASES = (
    Case(
        "mnist", EXAMPLES, "mnist", "main.py", ("--epochs", "2", "--no-accel"),
        _in("data", data.mnist, 4800), steps=150, odd="a round of validation after every epoch",
    ),
    Case(
        "vae", EXAMPLES, "vae", "main.py",
        ("--epochs", "4", "--batch-size", "100", "--no-accel"), _in("data", data.mnist, 4800),
        steps=192,
        odd="writes pictures after every epoch",
    ),
    Case(
        "siamese", EXAMPLES, "siamese_network", "main.py",
        ("--epochs", "1", "--batch-size", "2", "--no-accel"),
        _in("data", data.mnist, 320, 100), steps=160, odd="its data set draws random pairs",
    ),
    Case(
        "imagenet", EXAMPLES, "imagenet", "main.py",
        ("-a", "squeezenet1_1", "--epochs", "1", "-b", "2", "-j", "1", "--lr", "0.0001",
         "--no-accel", "photos"),
        _in("imagenet/photos", data.images, 320, 8, 128), steps=160,
        odd="saves a checkpoint after every epoch; no seed",
    ),
    Case(
        "dcgan", EXAMPLES, "dcgan", "main.py",
        ("--dataset", "fake", "--ngf", "4", "--ndf", "4", "--batchSize", "4", "--niter", "1"),
        steps=500, odd="two optimizers, a seed drawn anew in each start",
    ),
    Case(
        "actor-critic", EXAMPLES, "reinforcement_learning", "actor_critic.py",
        odd="no DataLoader; steps as long as an episode; ends when it has learned",
    ),
    Case(
        "word-lm", EXAMPLES, "word_language_model", "main.py",
        ("--data", "data/small", "--model", "GRU", "--emsize", "64", "--nhid", "64",
         "--epochs", "2", "--batch_size", "10"),
        _word_language_model,
        paths=tuple(f"word_language_model/{name}.py" for name in ("main", "data", "model")),
        steps=370, refusal=r"optimizer", odd="no optimizer: it adds gradients to parameters itself",
    ),
    Case(
        "word-lm-adamw", EXAMPLES, "word_language_model", "main.py",
        ("--data", "data/small", "--model", "GRU", "--emsize", "64", "--nhid", "64",
         "--epochs", "2", "--batch_size", "10", "--use-optimizer"),
        _word_language_model,
        paths=tuple(f"word_language_model/{name}.py" for name in ("main", "data", "model")),
        steps=370, odd="no DataLoader; saves the whole model where validation is better",
    ),
    Case(
        "hogwild", EXAMPLES, "mnist_hogwild", "main.py",
        ("--epochs", "1", "--batch-size", "32"), _in("data", data.mnist, 1600, 200),
        refusal=r"in processes that it starts itself",
        odd="trains in child processes",
    ),
    Case(
        "ddp-tutorial", EXAMPLES, "distributed/ddp-tutorial-series", "multigpu_torchrun.py",
        ("10", "5"), processes=2, plain_fails=r"_cuda_setDevice|NVIDIA|NCCL|No CUDA GPUs",
        refusal=r"_cuda_setDevice|NVIDIA|NCCL|No CUDA GPUs",
        odd="needs GPUs, so that it fails here as it is",
    ),
    Case(
        "ddp-example", EXAMPLES, "distributed/ddp", "example.py", processes=2,
        refusal=r"made no step.*Unable to locate sufficient",
        odd="says that it needs GPUs, and ends well without a step",
    ),
    Case(
        "time-sequence", EXAMPLES, "time_sequence_prediction", "train.py", ("--steps", "20"),
        _sine_waves, steps=20, environment=("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1",),
        odd="LBFGS with a closure; no DataLoader; a plot after each of its few steps",
    ),
    Case(
        "nanogpt", NANOGPT, ".", "train.py",
        ("config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--dtype=float32",
         "--eval_iters=5", "--eval_interval=100", "--log_interval=10", "--block_size=32",
         "--batch_size=8", "--n_layer=2", "--n_head=2", "--n_embd=64", "--max_iters=300",
         "--dropout=0.0", "--always_save_checkpoint=True"),
        _in("data/shakespeare_char", data.tokens),
        paths=("train.py", "model.py", "configurator.py", "config"), steps=301,
        odd="no DataLoader; a branch on RANK that needs GPUs; checkpoints",
    ),
    Case(
        "chargpt", MINGPT, "projects/chargpt", "chargpt.py",
        ("--model.model_type=gpt-nano", "--data.block_size=32", "--trainer.batch_size=16",
         "--trainer.num_workers=1", "--trainer.max_iters=300"),
        _play, paths=("projects/chargpt", "mingpt"), environment=("PYTHONPATH={root}",), steps=300,
        odd="an endless sampler; writes a sample of text and a checkpoint in step 0",
    ),
    Case(
        "makemore", MAKEMORE, ".", "makemore.py",
        ("--max-steps", "400", "--n-layer", "1", "--n-embd", "32", "--num-workers", "1"),
        _in("names.txt", data.names), paths=("makemore.py",), steps=400,
        odd="evaluates and saves at step 500; TensorBoard",
    ),
    Case(
        "dlrm", DLRM, ".", "dlrm_s_pytorch.py",
        ("--mini-batch-size=32", "--num-batches=400", "--arch-embedding-size=1000-1000-1000",
         "--arch-sparse-feature-size=16", "--arch-mlp-bot=13-64-16", "--arch-mlp-top=64-32-1",
         "--print-freq=100", "--print-time"),
        paths=("dlrm_s_pytorch.py", "dlrm_data_pytorch.py", "data_utils.py", "mlperf_logger.py",
               "extend_distributed.py", "data_loader_terabyte.py", "optim", "tricks"),
        steps=400, odd="batches of lists of tensors, made by the data set itself",
    ),
    Case(
        "cleanrl-ppo", CLEANRL, ".", "cleanrl/ppo.py",
        ("--total-timesteps", "8192", "--no-cuda"), paths=("cleanrl/ppo.py", "cleanrl_utils"),
        steps=256, odd="no DataLoader; 16 quick steps, then a rollout; TensorBoard",
    ),
    Case(
        "cleanrl-dqn", CLEANRL, ".", "cleanrl/dqn.py",
        ("--total-timesteps", "8000", "--learning-starts", "1000", "--no-cuda"),
        paths=("cleanrl/dqn.py", "cleanrl_utils"), environment=("PYTHONPATH={root}",), steps=700,
        odd="no DataLoader; a step after every tenth move",
    ),
    Case(
        "timm", TIMM, ".", "train.py",
        ("photos", "--model", "test_resnet", "--device", "cpu", "--img-size", "32",
         "--num-classes", "2", "-b", "4", "--epochs", "2", "--workers", "1", "--log-interval", "40",
         "--warmup-epochs", "0", "--no-prefetcher"),
        _in("photos", data.images, 400, 8, 48), paths=("train.py",), steps=200,
        odd="random augmentation in loader workers; checkpoints in output/",
    ),
    Case(
        "trl-sft", TRL, ".", "trl/scripts/sft.py",
        ("--model_name_or_path", "model", "--dataset_name", "texts", "--output_dir", "trained",
         "--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--max_length", "128",
         "--report_to", "none", "--use_cpu", "--bf16", "False", "--logging_steps", "40"),
        _language_model, paths=("trl/scripts/sft.py",), steps=320,
        options=("--preset", "hf-trainer"),
        odd="a Trainer; texts of uneven length",
    ),
    Case(
        "trl-sft-2", TRL, ".", "trl/scripts/sft.py",
        ("--model_name_or_path", "model", "--dataset_name", "texts", "--output_dir", "trained",
         "--per_device_train_batch_size", "4", "--num_train_epochs", "1", "--max_length", "128",
         "--report_to", "none", "--use_cpu", "--bf16", "False", "--logging_steps", "40"),
        _language_model, paths=("trl/scripts/sft.py",), steps=160, processes=2,
        options=("--preset", "hf-trainer"), odd="the same, two ranks with DistributedDataParallel",
    ),
    Case(
        "mutag-gin", PYG, "examples", "mutag_gin.py", ("--batch_size", "16", "--epochs", "12"),
        _in("data/TU", data.mutag, 240), paths=("examples/mutag_gin.py",), steps=168,
        odd="batches of graphs, a class of their own; no seed",
    ),
    Case(
        "fabric-mnist", LIGHTNING, "examples/fabric/image_classifier", "train_fabric.py",
        ("--epochs", "1", "--batch-size", "32"),
        _in("Datasets", data.mnist, 4800, 200), steps=150,
        odd="Lightning Fabric: the loop is the script's own",
    ),
    Case(
        "lightning-mnist", LIGHTNING, "examples/pytorch/basics", "autoencoder.py",
        ("--trainer.max_epochs", "2", "--trainer.limit_train_batches", "100",
         "--trainer.limit_val_batches", "10", "--trainer.accelerator", "cpu"),
        _in("examples/Datasets", data.mnist_tensors, 60_000, 320),
        environment=("PL_USE_MOCKED_MNIST=1",),
        paths=("examples/pytorch/basics/autoencoder.py",), steps=200,
        options=("--preset", "lightning"),
        odd="Lightning's Trainer by its command line; validation, pictures and checkpoints",
    ),
)  # fmt: skip
