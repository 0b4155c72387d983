"""What gloo ranks find when each knob is put into force, in every way that it can be.

Started once for all knobs: ``launch`` gives, for each use and knob, the value that was asked for
and the one that was read back, or why the knob is not there.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.multiprocessing

from perfsearch import knobs
from perfsearch.core.hardware import GroupSpec, Hardware, wrapper_parameters
from perfsearch.knobs import ddp, nccl, transport
from perfsearch.knobs.base import Job, Taker, Use
from perfsearch.knobs.batch import Batch, BatchJob
from perfsearch.knobs.script import ScriptJob
from perfsearch.training.process_groups import Groups
from perfsearch.workers.messages import TrialRequest
from perfsearch.workers.trial import Trainer, run_trial
from perfsearch.workloads.spec import WorkloadSpec

WORLD = 4
SAMPLES = 2 * WORLD
MACHINE = Hardware("cpu", WORLD, 1, (), cores=2 * WORLD)
BATCH = Batch("fixed", SAMPLES, WORLD, 2)
COMPILES = "compiling takes minutes"
NOT_READ = "not read back"


def job_for(use, facts=None):
    """A job with everything that these ranks can have."""
    takes = wrapper_parameters()
    if use is Use.ZERO:
        return BatchJob(MACHINE, {}, takes, batch=BATCH)
    if use is Use.SCRIPT:
        return ScriptJob(MACHINE, {}, takes, facts=facts)
    return Job(MACHINE, {}, takes, convolutional=True, draws_in_loader=False,
               use=use, attends=True, repeats=True)  # fmt: skip


def other_value(knob):
    """One that is not the default."""
    if knob.is_range:
        return 2.0
    return next(v for v in reversed(knob.values) if v != knob.default)


def choose(record, use, facts=None):
    """The value to ask for and those that it needs of other knobs, or why the knob is not there."""
    knob = record.declare(job_for(use, facts))
    if isinstance(knob, str):
        return knob
    needed = {name: values[-1] for name, values in knob.when.items()}
    return {**needed, record.name: other_value(knob)}


def built_in(trainer, use, more):
    """Ask for all at once that goes with ``more``, in a trial of a built-in job."""
    chosen = {r.name: choose(r, use) for r in knobs.of(use) if r.name not in more}
    chosen["compile_mode"] = chosen["compile_scope"] = COMPILES
    asked = dict(more)
    for name, one in chosen.items():
        there = not isinstance(one, str) and name not in nccl.VARIABLES
        if there and all(value == more.get(n, value) for n, value in one.items()):
            asked.update(one)
    asked.update(more)
    groups = {n: v for n, v in asked.items() if knobs.by_name[n].knob.scope == "group"}
    request = TrialRequest(
        serial=0, recipe=f"training.{use}", configuration=asked, group_values=groups,
        samples_per_step=SAMPLES, scored_seconds=0.001, scored_steps=(1, 1),
    )  # fmt: skip
    found = run_trial(trainer, request).in_force
    absent = {name: one for name, one in chosen.items() if isinstance(one, str)}
    return absent | {n: [v, found.get(n, NOT_READ)] for n, v in asked.items()}


def online(record):
    """Change it in a wrapper and an optimizer that are there."""
    from perfsearch.online import ddp as wrapping
    from perfsearch.online.optimizer import ImplementationSwitch

    asked = choose(record, Use.ONLINE)
    if isinstance(asked, str):
        return asked
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    net = torch.nn.parallel.DistributedDataParallel(model)
    wrapping.make_tunable(net)
    optimizer = torch.optim.AdamW(net.parameters())
    step(net, optimizer)
    wrapping.rewrap(net, asked)
    switch = ImplementationSwitch(optimizer)
    switch.apply(asked.get("optimizer_implementation"))
    step(net, optimizer)
    found = wrapping.configuration_of(net)
    found["optimizer_implementation"] = knobs.optimizer.implementation_of(optimizer)
    wrapping.rewrap(net, {ddp.HIERARCHY.name: 0})
    net._remove_autograd_hooks()
    return [asked[record.name], found[record.name]]


def step(net, optimizer):
    net(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def in_a_script(records):
    """Ask for all at once, build everything that takes them, and read back."""
    from torch.utils.data import DataLoader, TensorDataset

    from perfsearch.instrument.facts import Facts
    from perfsearch.instrument.script import Script

    every = Facts([Taker.DDP, Taker.FULLY_SHARD, Taker.FSDP1], 1, ["AdamW"],
                  {"find_unused_parameters": True, "zero_stage": 3}, modules=1)  # fmt: skip
    whole_models = dataclasses.replace(every, wrappers=[Taker.DDP])
    of_models = knobs.names_of_taker(Taker.MODULE)
    chosen = {
        r.name: choose(r, Use.SCRIPT, whole_models if r.name in of_models else every)
        for r in records
    }
    chosen["compile_mode"] = chosen["compile_scope"] = COMPILES
    asked = {}
    for one in chosen.values():
        asked.update({} if isinstance(one, str) else one)
    asked.update({n: one[n] for n, one in chosen.items() if not isinstance(one, str)})
    script = Script(transport.plan(asked, []).objects)
    data = DataLoader(TensorDataset(torch.ones(8, 8)), 4)
    net = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)),
        find_unused_parameters=True,
    )
    optimizer = torch.optim.AdamW(net.parameters())
    from torch.distributed import fsdp
    from torch.distributed.fsdp._fully_shard._fully_shard import fully_shard

    old = fsdp.FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=torch.device("cpu"))
    whole = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    for layer in whole:
        fully_shard(layer)
    fully_shard(whole)
    images = torch.nn.Conv2d(3, 4, 3)
    optimizer.add_param_group({"params": list(images.parameters())})
    script.put_into_force()
    for (batch,) in data:
        (net(batch).sum() + images(torch.ones(1, 3, 4, 4)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    script.models.find()  # as no script would be in which others are sharded
    found = script.facts().values
    assert old is not None  # lives until it was looked at
    script.loaders.close()
    for instrument in (script.wrappers, script.loaders, script.optimizers):
        instrument.undo()
    script.sharding.change({})
    return {
        name: one if isinstance(one, str) else [one[name], found.get(name, "not read back")]
        for name, one in chosen.items()
    }


def run(rank, directory):
    torch.set_num_threads(1)
    workload = WorkloadSpec("resnet", options={"image_size": 16}).resolve("cpu", None, WORLD)
    spec = GroupSpec(workload=asdict(workload), device="cpu", nproc=WORLD)
    groups = Groups(spec, Path(directory), rank, rank, WORLD, torch.device("cpu"))
    trainer = Trainer(groups)
    groups.ensure({}, {}, 60.0)
    # first, since it takes the place of functions before they are imported by others
    found = {Use.SCRIPT: in_a_script([r for r in knobs.of(Use.SCRIPT) if r.takers])}
    found[Use.ONLINE] = {r.name: online(r) for r in knobs.of(Use.ONLINE)}
    found[Use.DDP] = built_in(trainer, Use.DDP, {})
    whole = {"zero_stage": 1, "micro_batch": 1}
    sharded = {"zero_stage": 3, "micro_batch": 1, "blocks_per_unit": 2}  # of three blocks
    sharded["optimizer_implementation"] = "foreach"  # others cannot step over sharded parameters
    found[Use.ZERO] = built_in(trainer, Use.ZERO, whole) | built_in(trainer, Use.ZERO, sharded)
    if rank == 0:
        (Path(directory) / "found.json").write_text(json.dumps(found))
    groups.destroy()
    time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py


def launch(directory):
    """What rank 0 found; the ranks are forks of one process, so that torch is imported once."""
    directory = tempfile.mkdtemp(dir=directory)  # a store of its own
    subprocess.run(
        [sys.executable, __file__, directory],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return json.loads((Path(directory) / "found.json").read_text())


if __name__ == "__main__":
    torch.multiprocessing.start_processes(run, (sys.argv[1],), nprocs=WORLD, start_method="fork")
