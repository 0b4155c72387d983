"""Hugging Face's Trainer on a small Llama with random weights; no download.

    torchrun --nproc-per-node 2 examples/scripts/hf_trainer.py --output_dir out --max_steps 20
    perfsearch-run --search --preset hf-trainer --nproc-per-node 2 \
        examples/scripts/hf_trainer.py --output_dir out --max_steps 1000000

On a CPU add ``--use_cpu True --ddp_backend gloo``; on GPUs ``--fsdp full_shard`` shards it.
"""

# ruff: noqa: D101, D103

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


@dataclass
class ModelArguments:
    hidden_size: int = 64
    layers: int = 2
    heads: int = 4
    vocabulary: int = 512
    sequence_length: int = 64


class Tokens(Dataset):
    def __init__(self, arguments):
        generator = torch.Generator().manual_seed(0)
        shape = (4096, arguments.sequence_length)
        self.tokens = torch.randint(arguments.vocabulary, shape, generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    parser = HfArgumentParser((TrainingArguments, ModelArguments))
    training, shape = parser.parse_args_into_dataclasses()
    torch.manual_seed(training.seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.sequence_length,
    )
    Trainer(model=LlamaForCausalLM(config), args=training, train_dataset=Tokens(shape)).train()


if __name__ == "__main__":
    main()
