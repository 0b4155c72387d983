"""A DeepSpeed job as people write them: GPT-2 on tokens made on the spot, until it is ended.

deepspeed --num_gpus 4 benchmarks/_deepspeed_train.py --size large --deepspeed_config ds.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
import torch

from perfsearch.workloads import gpt
from perfsearch.workloads.spec import WorkloadSpec


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
    parser.add_argument("--size", default="large")
    parser.add_argument("--steps", type=int, default=10_000)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    job = gpt.build(WorkloadSpec(name="gpt", size=arguments.size), seed=0)
    fused = {"fused": True} if torch.cuda.is_available() else {}
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-4, weight_decay=0.1, **fused)
    engine, _, loader, _ = deepspeed.initialize(
        args=arguments, model=job.model, optimizer=optimizer, training_data=job.data
    )
    batches = iter(loader)
    for _ in range(arguments.steps):
        for _ in range(engine.gradient_accumulation_steps()):
            try:
                tokens = next(batches)
            except StopIteration:
                batches = iter(loader)
                tokens = next(batches)
            engine.backward(gpt.next_token_loss(engine, tokens.to(engine.device)))
            engine.step()


if __name__ == "__main__":
    main()
