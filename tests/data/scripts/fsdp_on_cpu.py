"""Runs a script with Accelerate made to shard on the CPU, where by itself it takes DDP instead.

``AcceleratorState`` makes FSDP of several GPUs and the like only: with ``MULTI_CPU``
it drops the plugin. Everything after that choice is Accelerate's and torch's own code.
"""

import os
import runpy
import sys

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

make = AcceleratorState.__init__


def make_sharded(self, *args, fsdp_plugin=None, **kwargs):
    make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if self.distributed_type is DistributedType.MULTI_CPU and fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = make_sharded
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # torch's own threads now and then abort a process that takes them down
