"""What each of several gloo ranks runs: plans one after another, each against one process."""

import faulthandler
import random
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing
from support import ranks, soap_models, soap_odd_models
from torch.utils._pytree import tree_flatten, tree_map

from perfsearch.soap.capture.capture import capture
from perfsearch.soap.executor import rank_plan
from perfsearch.soap.executor.exchange import Communicators, PieceExchange
from perfsearch.soap.executor.execute import Execution, Recording, make_capturable
from perfsearch.soap.executor.passes import OperatorClock
from perfsearch.soap.named import tensor_parallel
from perfsearch.soap.plan import (
    OperatorConfiguration,
    choices,
    data_parallel,
    part_rectangles,
    sums_of,
)

STEPS = 3
SEED = 11
HANG_S = 60.0
"""A model's plans on GPUs take a few seconds."""


CPU = torch.device("cpu")


def single(name, device=CPU, steps=STEPS):
    """Losses, gradients of each step and the weights at the end, by one process."""
    model, loss, optimizer, batches = soap_models.make(name, steps)
    model.to(device)
    batches = tree_map(lambda tensor: tensor.to(device), batches)
    stepper = optimizer(model.parameters())
    if device.type == "cuda":  # counts its steps in float32 then, which the weights show
        make_capturable(stepper)
    torch.manual_seed(SEED)
    losses, gradients = [], []
    for batch in batches:
        stepper.zero_grad()
        value = loss(model, batch)
        value.backward()
        losses.append(value.detach())
        gradients.append({k: p.grad.to_dense().clone() for k, p in model.named_parameters()})
        stepper.step()
    weights = {k: p.detach().clone() for k, p in model.named_parameters()}
    buffers = {k: b.clone() for k, b in model.named_buffers()}
    return losses, gradients, weights, buffers


def random_plan(graph, devices, rng):
    """Random degrees, on random devices in random order."""
    plan = {}
    for operator in graph.planned:
        degrees = rng.choice(choices(operator, devices))
        parts = len(part_rectangles(operator, OperatorConfiguration(degrees, ())))
        sums = rng.choice([1, *sums_of(operator, degrees)])
        plan[operator.name] = OperatorConfiguration(
            degrees, tuple(rng.sample(range(devices), parts)), sums
        )
    return plan


def error_of(captured, plan, name, reference, by_rows=False, timed=False):
    """The largest difference from one process, relative to the tensor's largest element."""
    losses, gradients, weights, buffers = reference
    model, _, optimizer, batches = soap_models.make(name, STEPS)
    execution = Execution(captured, plan, model, torch.device("cpu"), error_of.groups)
    stepper = optimizer(execution.parameters.values()) if execution.parameters else None
    rows = execution.update_rows(stepper) if by_rows else []
    error_of.tables_by_rows += len(rows)
    torch.manual_seed(SEED)
    worst = 0.0

    def differ(mine, key, whole):
        rectangle, whole = execution.stored(key), whole.view(execution.shapes[key])
        theirs = whole[tuple(slice(*span) for span in rectangle)]
        return ((mine - theirs).abs().max() / whole.abs().max().clamp(min=1e-30)).item()

    low, high = execution.samples
    clock = OperatorClock(len(execution.operators), CPU)
    for step, batch in enumerate(batches):
        leaves = [leaf[low:high] for leaf in tree_flatten(batch)[0]]
        with execution.timed(clock) if timed and step else nullcontext():
            share = execution.step(leaves)
            found = dict(execution.gradients)
            if stepper is not None:
                execution.apply_gradients(stepper)
        dist.all_reduce(share)
        worst = max(worst, abs(share - losses[step]).item())
        for key, gradient in found.items():
            worst = max(worst, differ(gradient, key, gradients[step][key]))
        assert set(found) == set(execution.parameters) - set(rows)
    for key, parameter in execution.parameters.items():
        worst = max(worst, differ(parameter.detach(), key, weights[key]))
    for mine, theirs in _statistics(captured, plan, dict(model.named_buffers()), buffers):
        worst = max(worst, (mine - theirs).abs().max().item())
    total = torch.tensor([worst, float(worst != worst)])
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return total[0].item() if not total[1].item() else float("nan")


error_of.tables_by_rows = 0


def _statistics(captured, plan, mine, theirs):
    """Running statistics, where this rank keeps them."""
    for operator in captured.graph.planned:
        configuration = plan[operator.name]
        if operator.kind != "batch_norm" or dist.get_rank() not in configuration.devices:
            continue
        part = configuration.devices.index(dist.get_rank())
        channels = slice(*part_rectangles(operator, configuration)[part][1])
        for place in operator.attributes["running"]:
            name = captured.buffers[place]
            yield mine[name][channels], theirs[name][channels]
    for name, _ in captured.counters:
        yield mine[name], theirs[name]


def launch_gpu(directory, world, names, count):
    arguments = (str(directory), world, names, count)
    torch.multiprocessing.spawn(run_gpu, arguments, nprocs=world)
    return torch.load(f"{directory}/found.pt")


def run_gpu(rank, directory, world, names, count):
    """On NCCL: some steps launched, then as many replayed; the error of the weights at the end."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    soap_odd_models.Rare.in_place = False
    dist.init_process_group(
        "nccl", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    groups = Communicators(device)
    found = {}
    for name in names:
        faulthandler.dump_traceback_later(HANG_S, exit=True)  # and the test shows where
        model, loss, _, batches = soap_models.make(name, 2 * STEPS)
        captured = capture(model, loss, batches[0])
        reference = single(name, device, 2 * STEPS)
        rng = random.Random(9)
        plans = [data_parallel(captured.graph, range(world))]
        plans += [random_plan(captured.graph, world, rng) for _ in range(count)]
        found[name] = [replayed(captured, plan, name, reference, device, groups) for plan in plans]
    if rank == 0:
        torch.save(found, f"{directory}/found.pt")
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py


def replayed(captured, plan, name, reference, device, groups):
    """The error, whether later steps were replays, and whether the last one's times make sense."""
    model, _, optimizer, batches = soap_models.make(name, 2 * STEPS)
    execution = Execution(captured, plan, model, device, groups)
    stepper = optimizer(execution.parameters.values()) if execution.parameters else None
    if name == "tables":
        execution.update_rows(stepper)
    capturable = make_capturable(stepper)
    clock = OperatorClock(len(execution.operators), device)
    torch.manual_seed(SEED)
    low, high = execution.samples
    recording, replays = None, False
    losses = []
    for step, batch in enumerate(batches):
        leaves = [leaf[low:high].to(device) for leaf in tree_flatten(batch)[0]]
        last = step == len(batches) - 1
        if step == STEPS and capturable:
            recording, kept = _recorded(execution, stepper, leaves, device)
            replays = recording is not None
        if last and recording is not None:
            torch.cuda.synchronize(device)
            recording.close()
            recording = None
        if recording is not None:
            recording.give(leaves)
            for phase in range(3):
                recording.replay(phase)
            share = kept[0].clone()
        else:
            with execution.timed(clock) if last else nullcontext():
                share = execution.step(leaves)
                execution.apply_gradients(stepper)
        dist.all_reduce(share)
        losses.append(share)
    times_ms = clock.read()
    worst = max(abs(a - b).item() for a, b in zip(losses, reference[0], strict=True))
    for key, parameter in execution.parameters.items():
        whole = reference[2][key].view(execution.shapes[key])
        theirs = whole[tuple(slice(*span) for span in execution.stored(key))]
        worst = max(worst, ((parameter.detach() - theirs).abs().max() / whole.abs().max()).item())
    odd = not bool((times_ms >= 0).all() and times_ms.sum() < 1e4)
    flags = [float(not replays), float(worst != worst), float(odd), times_ms.sum().item()]
    total = torch.tensor([worst, *flags], device=device)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    error, launched, undefined, odd, busiest_ms = total.tolist()
    timed = not odd and busiest_ms > 0
    return (float("nan") if undefined else error), not launched, timed


def _recorded(execution, stepper, leaves, device):
    """The recording, if it could be made, and where replays leave the loss."""
    kept = []
    phases = [
        lambda: kept.append(execution.passes.forward(recording.inputs)),
        execution.passes.backward,
        lambda: execution.apply_gradients(stepper),
    ]
    recording = Recording(phases, leaves, device)
    execution.release()
    if recording.record():
        return recording, kept
    print(f"not recorded: {recording.reason}", flush=True)
    execution.passes.reset()
    return None, kept


def forked(run, directory, world, names, count):
    """Have ranks run, forked from a process that has captured the models; what they found.

    Args:
        run: of a rank: its number, the directory, how many there are, what was captured of each
            model and what one process gives for it, by name, and ``count``.

    """
    arguments = (run, str(directory), world, names, count)
    ranks.start(_capture_and_fork, arguments, nprocs=1)
    return torch.load(f"{directory}/found.pt")


def _capture_and_fork(_, run, directory, world, names, count):
    torch.set_num_threads(1)
    known = {}
    for name in names:
        model, loss, _, batches = soap_models.make(name, STEPS)
        known[name] = capture(model, loss, batches[0]), single(name)
    torch.multiprocessing.start_processes(
        run, (directory, world, known, count), nprocs=world, start_method="fork"
    )


def launch_odd(directory, world, names, count):
    return forked(run_odd, directory, world, names, count)


def run_odd(rank, directory, world, known, count):
    """Errors by model; of data parallelism first."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    error_of.groups = Communicators(torch.device("cpu"))
    found = {}
    for name, (captured, reference) in known.items():
        rng = random.Random(9)
        plans = [data_parallel(captured.graph, range(world))]
        plans += [random_plan(captured.graph, world, rng) for _ in range(count)]
        found[name] = [error_of(captured, plan, name, reference) for plan in plans]
    if rank == 0:
        torch.save(found, f"{directory}/found.pt")
    dist.destroy_process_group()
    time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py


def launch(directory, world, name, count):
    return forked(run, directory, world, [name], count)


def run(rank, directory, world, known, count):
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world
    )
    try:
        error_of.groups = Communicators(torch.device("cpu"))
        ((name, (captured, reference)),) = known.items()
        rng = random.Random(3)
        plans = [data_parallel(captured.graph, range(world))]
        plans += [random_plan(captured.graph, world, rng) for _ in range(count)]
        plans.append(tensor_parallel(captured.graph, world))
        by_rows = name == "tables"
        errors = [error_of(captured, plan, name, reference, by_rows) for plan in plans]
        # with everything timed it is the same again
        errors += [error_of(captured, plan, name, reference, by_rows, True) for plan in plans[:9]]
        controls = {
            "dropped message": _without_messages(captured, plans[1], name, reference),
            "missing all-reduce": _without_sums(captured, plans[0], name, reference),
        }
        if rank == 0:
            torch.save((errors, controls, error_of.tables_by_rows), f"{directory}/found.pt")
    finally:
        dist.destroy_process_group()
        time.sleep(0.1)  # pytorch#190489: see perfsearch/training/process_groups.py


def _without_messages(captured, plan, name, reference):
    """Gradients that others send do not arrive."""
    original = PieceExchange.finish_back

    def broken(self):
        self.batch.wait()
        self.incoming = [torch.zeros_like(piece) for piece in self.incoming]
        return original(self)

    PieceExchange.finish_back = broken
    try:
        return error_of(captured, plan, name, reference)
    finally:
        PieceExchange.finish_back = original


def _without_sums(captured, plan, name, reference):
    """Gradients of what is replicated are not summed."""
    original = rank_plan.Synchroniser.after
    rank_plan.Synchroniser.after = lambda self, place, gradients: None
    try:
        return error_of(captured, plan, name, reference)
    finally:
        rank_plan.Synchroniser.after = original
