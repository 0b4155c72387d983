"""Stands in for DeepSpeed where it is not installed: the few names that a job of the tests uses."""

import atexit
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist


class DeepSpeedEngine(torch.nn.Module):
    """Averages gradients over ranks; every stage does the same."""

    def __init__(self, module, parameters, config):
        super().__init__()
        self.module, self.device, self.global_steps = module, torch.device("cpu"), 0
        self._micro = config["train_micro_batch_size_per_gpu"]
        self._times = config.get("gradient_accumulation_steps", 1)
        self._zero = config.get("zero_optimization", {})
        self._config = SimpleNamespace(zero_config=SimpleNamespace(**self._zero))
        self._optimizer = torch.optim.SGD(parameters, lr=0.1)
        self._seen = 0

    def forward(self, *inputs):
        return self.module(*inputs)

    def backward(self, loss, scale_wrt_gas=True):
        (loss / self._times if scale_wrt_gas else loss).backward()

    def step(self):
        self._seen += 1
        if self._seen % self._times:
            return
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.global_steps += 1

    def train_batch_size(self):
        return self._micro * self._times * dist.get_world_size()

    def train_micro_batch_size_per_gpu(self):
        return self._micro

    def gradient_accumulation_steps(self):
        return self._times

    def zero_optimization_stage(self):
        return 1 if self._zero.get("ignored") else self._zero.get("stage", 0)


def init_distributed():
    # gloo's threads drop the last tensors late: where Python has ended by then, torch aborts
    atexit.register(time.sleep, 0.2)
    dist.init_process_group("gloo")


def initialize(args=None, model=None, model_parameters=None, config=None, config_params=None):
    path = config or args.deepspeed_config
    settings = json.loads(Path(path).read_text()) if isinstance(path, str) else path
    if "refuse" in settings:
        raise ValueError(settings["refuse"])
    return DeepSpeedEngine(model, model_parameters, settings), None, None, None
