"""A DeepSpeed job as people write them; nothing in it knows of perfsearch."""

import argparse

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--bs", type=int, help="samples at once; the configuration's own by default")
parser.add_argument("--fail", default="", help="what to do wrong in the third step")
parser.add_argument("--own-config", help="a configuration that the script itself names")
parser.add_argument("--deepspeed_config")
parser.add_argument("--deepspeed", action="store_true")
arguments = parser.parse_args()

if arguments.fail == "no engine":
    raise SystemExit
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
deepspeed.init_distributed()
where = {"config": arguments.own_config} if arguments.own_config else {"args": arguments}
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), **where)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
micro = arguments.bs or engine.train_micro_batch_size_per_gpu()
times = engine.gradient_accumulation_steps()
data = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
place = 0
for step in range(arguments.steps):
    if arguments.fail and step == 2:
        if arguments.fail == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if arguments.fail == "crash" and rank == 1:
            raise KeyError("labels")
        if arguments.fail == "part" and rank == 1:
            raise SystemExit
        if arguments.fail == "files":  # an earlier start's would be an error
            torch.save(step, "mine.pt")
            assert rank or not __import__("os").path.exists("made.pt")
            torch.distributed.barrier()
            torch.save(step, "made.pt")
        if arguments.fail in ("hang", "part"):
            __import__("time").sleep(600)
    for _ in range(times):
        rows = (torch.arange(micro) * ranks + rank + place) % len(data)
        place += micro * ranks
        inputs = data[rows].to(engine.device)
        loss = torch.nn.functional.mse_loss(engine(inputs), inputs.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
torch.distributed.destroy_process_group()
