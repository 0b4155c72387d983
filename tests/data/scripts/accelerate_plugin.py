"""A script with Accelerate's FSDP plugin, of version 2; it prints its losses and what it made."""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--whole", action="store_true", help="keep parameters after the forward pass")
arguments = parser.parse_args()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 16)
        self.blocks = torch.nn.Sequential(*[Block() for _ in range(3)])
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 64)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens)))) * 1.0


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    reshard_after_forward=not arguments.whole,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Block"],
)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
torch.manual_seed(0)
tokens = torch.randint(64, (2048, 8), generator=torch.Generator().manual_seed(1))
model, loader = Model(), DataLoader(TensorDataset(tokens), 8, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

made = 0
while made < arguments.steps:
    for (batch,) in loader:
        loss = torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        made += 1
        accelerator.print(f"loss {loss.item():.6f}")
        if made == arguments.steps:
            break

units = [module for module in model.modules() if isinstance(module, FSDPModule)]
whole = [unit._get_fsdp_state()._fsdp_param_groups[0].post_forward_mesh_info is None
         for unit in units if unit._get_fsdp_state()._fsdp_param_groups]  # fmt: skip
ahead = [len(unit._get_fsdp_state()._states_to_forward_prefetch) for unit in units]
accelerator.print(f"units {len(units)} whole {sum(whole)} ahead {ahead}")
accelerator.end_training()
