"""What the ranks of the tests of tuning do: SCENARIO DIRECTORY.

Started by torch's launcher; or by ``launch``: the launcher is a fork, and ranks are forks of it.
"""

import contextlib
import copy
import faulthandler
import json
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from support import ranks
from torch.distributed import run
from torch.distributed.launcher.api import elastic_launch
from torch.nn.parallel import DistributedDataParallel

import perfsearch
from perfsearch.online import ddp as wrapping
from perfsearch.online import enable, rank
from perfsearch.online.ddp import configuration_of, rewrap
from perfsearch.online.optimizer import ImplementationSwitch
from perfsearch.online.proposer import ProposerProcess
from perfsearch.training.ddp import HierarchicalAllReduce

WIDTH = 96
LONGEST_S = 400


def make(seed=0, width=WIDTH, **arguments):
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(width), *layers, torch.nn.Linear(width, 1))
    return DistributedDataParallel(model, **arguments)


def generator_of(seed):
    return torch.Generator().manual_seed(1000 * seed + dist.get_rank())


def train(net, optimizer, steps, accumulate=2, between=None, clip=True, seed=0, generator=None):
    """Losses and weights of training with accumulated and clipped gradients."""
    generator = generator or generator_of(seed)
    losses = []
    for step in range(steps):
        for place in range(accumulate):
            x = torch.randn(16, WIDTH, generator=generator)
            last = place == accumulate - 1
            with contextlib.nullcontext() if last else net.no_sync():
                loss = (net(x) - x.sum(1, keepdim=True)).square().mean() / accumulate
                loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 != 0)
        losses.append(float(loss.detach()))
        if between is not None:
            between(step)
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return losses, weights


def differs(one, two):
    """Largest relative difference of losses, and of weights."""
    losses = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(one[0], two[0], strict=True))
    weights = float((one[1] - two[1]).norm() / one[1].norm())
    return losses, weights


def wait_for_proposals():
    """Wait for each answer: a short training would be over before the proposer has its imports."""
    answer = ProposerProcess.answer
    ProposerProcess.answer = lambda proposer, within_s: answer(proposer, max(within_s, 120.0))


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


SETTINGS = [
    {"bucket_cap_mb": 0.05, "first_bucket_mb": 0.01},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1.0, "first_bucket_mb": 1.0},
    {"bucket_cap_mb": 25.0, "first_bucket_mb": 1.0},
    {"gradient_as_bucket_view": False},
]


def rewrapped(directory):
    """Through many settings by hand, with everything that has to go on."""
    untouched = make()
    plain = train(untouched, adam(untouched), 30)
    found = {"asked": [], "got": []}
    net = make()
    wrapping.make_tunable(net)
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    optimizer = adam(net)
    switch = ImplementationSwitch(optimizer)
    names = ["fused", "foreach", "default"]
    groups = [g["params"] for g in optimizer.param_groups]

    def between(step):
        if step % 4 == 1:
            number = step // 4
            rewrap(net, SETTINGS[number % len(SETTINGS)])
            switch.apply(names[number % 3])
            found["asked"].append(SETTINGS[number % len(SETTINGS)])
            found["got"].append(configuration_of(net))

    tuned = train(net, optimizer, 30, between=between)
    found["differs"] = differs(plain, tuned)
    found["hook_calls"] = len(calls)
    found["static_graph"] = wrapping.why_not_each(net).get("static_graph", "")
    found["same_parameters"] = groups == [g["params"] for g in optimizer.param_groups]
    found["is_ddp"] = isinstance(net, DistributedDataParallel)
    found["state_keys"] = list(net.state_dict()) == list(untouched.state_dict())
    found["copied"] = isinstance(copy.deepcopy(net), DistributedDataParallel)
    return found


def static_graph(directory):
    """On and off again, where every backward pass reduces."""
    untouched = make()
    plain = train(untouched, adam(untouched), 16, accumulate=1)
    net = make()
    wrapping.make_tunable(net)
    values = []

    def between(step):
        if step % 4 == 1:
            rewrap(net, {"static_graph": step % 8 == 1})
            values.append(configuration_of(net)["static_graph"])

    result = train(net, adam(net), 16, accumulate=1, between=between)
    return {"differs": differs(plain, result), "values": values}


def users_hook(directory):
    """The script's own communication hook is carried along; ours gives way to a late one."""
    net = make()
    wrapping.make_tunable(net)
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().numel())
        future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return future.get_future().then(lambda f: f.value()[0])

    rewrap(net, {"hierarchical_group_size": dist.get_world_size() // 2})
    size = configuration_of(net)["hierarchical_group_size"]
    net.register_comm_hook(None, hook)
    after = configuration_of(net)["hierarchical_group_size"]
    optimizer = adam(net)
    other = make()
    plain = train(other, adam(other), 12)
    tuned = train(
        net, optimizer, 12, between=lambda step: rewrap(net, {"bucket_cap_mb": 0.05 + step / 10})
    )
    refused = ""
    try:
        rewrap(net, {"hierarchical_group_size": 2})
    except ValueError as error:
        refused = str(error)
    return {
        "size": size, "after": after, "buckets": len(seen), "refused": refused,
        "fixed": wrapping.why_not_each(net), "differs": differs(plain, tuned),
    }  # fmt: skip


def hierarchical(directory):
    """Reduced in stages and flat in turn."""
    untouched = make()
    plain = train(untouched, adam(untouched), 16)
    net = make()
    wrapping.make_tunable(net)
    sizes = []

    def between(step):
        if step % 4 == 1:
            rewrap(net, {"hierarchical_group_size": 2 if step % 8 == 1 else 0})
            sizes.append(configuration_of(net)["hierarchical_group_size"])

    tuned = train(net, adam(net), 16, between=between)
    return {"differs": differs(plain, tuned), "sizes": sizes}


def still_tuned():
    return sum(s.agent.running for s in rank._sessions)


def running():
    return still_tuned() > 0


def train_until_tuned(net, optimizer, least):
    """Losses and weights of training until tuning is over, and how many steps that took."""
    losses, steps, generator = [], 0, generator_of(0)
    while running() or steps < least:
        more, weights = train(net, optimizer, 5, generator=generator)
        losses += more
        steps += 5
        assert steps < 2000
    return (losses, weights), steps


def train_as_long(net, optimizer, steps):
    """The same steps, counted as `train_until_tuned` counts them."""
    losses, generator = [], generator_of(0)
    for _ in range(steps // 5):
        more, weights = train(net, optimizer, 5, generator=generator)
        losses += more
    return losses, weights


def tuned(directory, **options):
    """The whole of it: an unchanged loop, tuned to the end, against the same loop left alone."""
    enable(
        {"log_file": str(directory / "log.csv"), "max_samples": 6, "steps_per_sample": 4, **options}
    )
    net = make()
    optimizer = adam(net)
    result, steps = train_until_tuned(net, optimizer, 10)
    with rank.tuning_paused():
        untouched = make()
    plain = train_as_long(untouched, adam(untouched), steps)
    modules = {name.partition(".")[0] for name in sys.modules}
    return {
        "differs": differs(plain, result),
        "heavy": sorted(
            modules & {"hydra", "omegaconf", "mlflow", "sklearn", "scipy", "nevergrad"}
        ),
        "in_force": configuration_of(net),
        "implementation": [optimizer.param_groups[0][n] for n in ("foreach", "fused")],
        "running": [running()],
    }


def failing(directory):
    """Rank 1 cannot put some settings into force, and takes too long over others."""
    put = wrapping.rewrap

    def faulty(net, changes):
        if dist.get_rank() == 1 and changes.get("bucket_cap_mb") in (1.0, 0.5):
            raise MemoryError("CUDA out of memory (pretended)")
        if dist.get_rank() == 1 and changes.get("bucket_cap_mb") == 2.0:
            time.sleep(1.5)
        put(net, changes)

    rank.ddp.rewrap = faulty
    return tuned(
        directory,
        time_limit_s=1.0,
        knobs={"bucket_cap_mb": [0.25, 0.5, 1, 2, 25], "first_bucket_mb": 0.25,
               "optimizer_implementation": "default", "gradient_as_bucket_view": False},
    )  # fmt: skip


def hanging(directory):
    """The last rank never comes to the first hierarchical all-reduce."""
    if dist.get_rank() == dist.get_world_size() - 1:
        HierarchicalAllReduce.reduce_and_wait = lambda *_: time.sleep(3600)
    begin = time.monotonic()
    found = tuned(
        directory,
        time_limit_s=1.5,
        knobs={"bucket_cap_mb": [1, 25], "hierarchical_group_size": "search", "first_bucket_mb": 1,
               "optimizer_implementation": "default", "gradient_as_bucket_view": False},
    )  # fmt: skip
    return {**found, "seconds": time.monotonic() - begin}


def apart(directory):
    """Rank 1 stops stepping its optimizer: tuning ends, training does not hang."""
    enable({"log_file": str(directory / "log.csv"), "time_limit_s": 0.5})
    net = make()
    optimizer = adam(net)
    if dist.get_rank() == 1:
        train(net, optimizer, 14, clip=False)
        optimizer.step = lambda: None
    else:
        train(net, optimizer, 14, clip=False)
    begin = time.monotonic()
    train(net, optimizer, 30, clip=False)
    return {"seconds": time.monotonic() - begin}


def two_models(directory):
    """Models take turns; each is tuned, each trains the same."""

    def run(goes_on):
        one, two = make(1), make(2)
        first, second = adam(one), torch.optim.SGD(two.parameters(), lr=1e-3, momentum=0.9)
        results = []
        while goes_on(len(results)):
            results.append(train(one, first, 12, seed=1))
            results.append(train(two, second, 12, seed=2))
        return results

    enable({"log_file": str(directory / "log.csv"), "max_samples": 2, "steps_per_sample": 4})
    never_trained = make(3)
    tuned = run(lambda done: done < 100 and (done < 4 or still_tuned() > 1))
    assert still_tuned() == 1
    assert never_trained.module is not None
    with rank.tuning_paused():
        plain = run(lambda done: done < len(tuned))
    return {"differs": [differs(a, b) for a, b in zip(plain, tuned, strict=True)]}


def one_line(directory):
    """perfsearch.autotune in place of DistributedDataParallel."""
    wait_for_proposals()
    torch.manual_seed(0)
    net = perfsearch.autotune(
        torch.nn.Linear(WIDTH, 1), max_samples=1, log_file=directory / "log.csv", bucket_cap_mb=3
    )
    train_until_tuned(net, adam(net), 10)
    return {"type": type(net).__mro__[1].__name__, "rows": len((directory / "log.csv").read_text())}


def stages(directory):
    """A script that lets go of its optimizer, and goes on with another."""
    wait_for_proposals()
    enable({"log_file": str(directory / "log.csv"), "max_samples": 3, "steps_per_sample": 4})
    net = make()
    first = train(net, adam(net), 12)
    second, steps = train_until_tuned(net, adam(net), 10)
    with rank.tuning_paused():
        net = make()
    plain = train(net, adam(net), 12), train_as_long(net, adam(net), steps)
    return {"differs": [differs(a, b) for a, b in zip(plain, (first, second), strict=True)]}


def frozen(directory):
    """The log of one run is frozen in the next, and started from in a third."""
    path = directory / "log.csv"

    def run(**options):
        net = make()
        perfsearch.autotune(net, max_samples=2, steps_per_sample=2, **options)
        optimizer, generator, steps = adam(net), generator_of(0), 0
        while rank._sessions and rank._sessions[-1].agent.running and steps < 1000:
            train(net, optimizer, 5, generator=generator)
            steps += 5
        return configuration_of(net), optimizer.param_groups[0]["fused"], steps

    knobs = {"bucket_cap_mb": [0.1, 25], "first_bucket_mb": 0.1, "gradient_as_bucket_view": True}
    first = run(log_file=path, knobs={**knobs, "optimizer_implementation": "fused"})
    dist.barrier()
    second = run(freeze=path)
    third = run(start_from=path, log_file=directory / "third.csv", knobs=knobs)
    return {"runs": [first, second, third]}


def applied(directory):
    """A found configuration on a model, and on one that is wrapped already."""
    torch.manual_seed(0)
    knobs = {"bucket_cap_mb": 0.1, "first_bucket_mb": 0.1, "gradient_as_bucket_view": True,
             "optimizer_implementation": "foreach", "dataloader_workers": 2}  # fmt: skip
    module = make().module
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = perfsearch.apply(knobs, module, optimizer)
    again = make()
    perfsearch.apply({"gradient_as_bucket_view": True}, again)
    train(net, optimizer, 6)
    return {
        "first": configuration_of(net),
        "second": configuration_of(again),
        "foreach": optimizer.param_groups[0]["foreach"],
        "said": [str(w.message) for w in caught if "perfsearch" in str(w.message)],
    }


def uneven(directory):
    """Under join, ranks with more data go on alone; nobody waits for anybody there."""
    enable({"log_file": str(directory / "log.csv"), "time_limit_s": 20.0, "steps_per_sample": 2})
    net = make(width=WIDTH)
    net.module[0].track_running_stats = False
    optimizer = adam(net)
    begin = time.monotonic()
    with net.join():
        train(net, optimizer, 10 + 15 * dist.get_rank(), accumulate=1, clip=False)
    seconds = time.monotonic() - begin
    return {"seconds": seconds, "steps": rank._sessions[0].agent.train_iter}


def main(scenario, directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory = Path(directory)
    found = globals()[scenario](directory)
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    if scenario == "hanging":
        dist.barrier()
        os._exit(0)  # threads still wait in collectives that will not end
    dist.destroy_process_group()


def launch(scenario, directory, nproc):
    """Launch a scenario. What it says is in ``output.txt``, and its session in ``session``.

    Raises:
        torch.multiprocessing.ProcessException: it failed.

    """
    ranks.start(be_launcher, (scenario, str(directory), nproc), nprocs=1)


def be_launcher(_, scenario, directory, nproc):
    os.setsid()
    (Path(directory) / "session").write_text(str(os.getpid()))
    with (Path(directory) / "output.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    # Through a file: a store of this process has a thread that looks names up while ranks connect,
    # and a rank that is forked meanwhile would wait for ever for the lock that it holds.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.update(OMP_NUM_THREADS="1", PERFSEARCH_TEST_MARK=directory)
    arguments = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-id=tests"]
    arguments += [f"--rdzv-endpoint={directory}/rendezvous", "--local-addr=localhost"]
    arguments += [f"--nproc-per-node={nproc}", "--start-method=fork", __file__]
    config, _, _ = run.config_from_args(run.parse_args(arguments))
    elastic_launch(config, entrypoint=main)(scenario, directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
