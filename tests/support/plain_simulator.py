"""The simulated step written down plainly, for comparison: no tables, no deltas, no compilation."""

import math

from perfsearch.soap import plan as redistribute
from perfsearch.soap.graph import intersection, volume
from perfsearch.soap.parts import gradients, item_bytes, layout_of, owned_keys
from perfsearch.soap.plan import part_rectangles
from perfsearch.soap.rules.base import input_rectangle
from perfsearch.soap.simulator import machine as machines
from perfsearch.soap.simulator.problem import bucket_bytes, pack_us, sync_us


def simulate(graph, machine, cost_of, plan):
    """Nanoseconds of a step, and bytes on each device."""
    return _Step(graph, machine, cost_of, plan).run()


class _Step:
    def __init__(self, graph, machine, cost_of, plan):
        self.graph, self.machine, self.cost_of, self.plan = graph, machine, cost_of, plan
        names = ("host", "device", "link", "sync")
        self.lines = {name: [0] * machine.devices for name in names}
        self.memory = [0] * machine.devices
        self.arrived = {}
        order = {o.name: i for i, o in enumerate(graph.planned)}
        self.edges = sorted(graph.edges, key=lambda e: (order[e[1]], e[2]))

    def run(self):
        graph, machine, owned = self.graph, self.machine, owned_keys(self.graph)
        optimizer = [0] * machine.devices
        for edge in self.edges:
            for source, target, size in messages(graph, self.plan, *edge):
                self.memory[target] += size if source != target else 0
        for operator in graph.planned:
            for edge in self.moved(1, operator):
                self.wait(edge, False)
            self.compute(operator, "forward")
            for edge in self.moved(0, operator):
                if not self.is_exchange(edge):
                    self.send([edge], False)
                elif edge == self.last_exchange(edge[1]):
                    self.send(self.exchanges(edge[1]), False)
        for operator in reversed(graph.planned):
            for edge in self.moved(0, operator):
                self.wait(edge, True)
            self.compute(operator, "backward")
            for edge in self.moved(1, operator):
                if not self.is_exchange(edge):
                    self.send([edge], True)
            if self.exchanges(operator.name):
                self.send(self.exchanges(operator.name), True)
            chosen = self.plan[operator.name]
            known = layout_of(
                operator,
                chosen.degrees,
                owned[operator.name],
                machine.state_per_weight,
                sums=chosen.sums,
            )
            for place, device in enumerate(chosen.devices):
                self.memory[device] += known.resident_bytes[place]
                mib = known.weight_bytes[place] / 2**20
                per_mib = machine.optimizer_us_per_mib / machine.speed(device)
                optimizer[device] += round(1e3 * per_mib * mib)
            for group, size in known.syncs:
                self.synchronise(tuple(chosen.devices[m] for m in group), size)
        ends = []
        for device in range(machine.devices):
            end = max(line[device] for line in self.lines.values())
            if optimizer[device]:
                end += optimizer[device] + round(1e3 * machine.optimizer_us)
            ends.append(end)
        whole = max(ends) + round(1e3 * machine.step_us)
        hosts = max(self.lines["host"]) + round(1e3 * machine.host_us)
        return (hosts - (hosts - whole) // 1000 if hosts > whole else whole), self.memory

    def moved(self, side, operator):
        """Edges that something is moved over, those that share a transfer once."""
        seen, found = set(), []
        for edge in self.edges:
            target = edge[1]
            parts = part_rectangles(self.graph.by_name[target], self.plan[target])
            needs = tuple(
                input_rectangle(self.graph.by_name[target], edge[2], part) for part in parts
            )
            key = (edge[0], needs, self.plan[target].devices)
            remote = any(a != b for a, b, _ in messages(self.graph, self.plan, *edge))
            if remote and key not in seen and edge[side] == operator.name:
                found.append(edge)
            seen.add(key)
        return found

    def is_exchange(self, edge):
        return collective(self.graph, self.plan, edge) in ("exchange", "all_to_all")

    def exchanges(self, name):
        return [e for e in self.moved(1, self.graph.by_name[name]) if self.is_exchange(e)]

    def last_exchange(self, name):
        """Of the last producer's edges the first."""
        order = {o.name: i for i, o in enumerate(self.graph.planned)}
        last = max(order[e[0]] for e in self.exchanges(name))
        return next(e for e in self.exchanges(name) if order[e[0]] == last)

    def compute(self, operator, side):
        chosen, lines = self.plan[operator.name], self.lines
        parts = part_rectangles(operator, chosen)
        for place, (device, part) in enumerate(zip(chosen.devices, parts, strict=True)):
            cost = self.cost_of(operator, part, gradients(self.graph, operator))
            summed = self.summing_us(operator, parts, place, side)
            host = getattr(cost, f"{side}_host_us") + (self.machine.sync_host_us if summed else 0)
            lines["host"][device] += round(1e3 * host)
            begin = max(lines["device"][device], lines["host"][device])
            own = getattr(cost, f"{side}_us") / self.machine.speed(device)
            own += summed + self.machine.task_us
            lines["device"][device] = begin + round(1e3 * own)

    def summing_us(self, operator, parts, place, side):
        """Of shared sums; of a batch norm, whose parts of a channel sum two numbers of it."""
        chosen = self.plan[operator.name]
        if chosen.sums > 1:
            first = place - place % chosen.sums
            size = sum(4 * volume(p) for p in parts[first : first + chosen.sums])
            members = chosen.devices[first : first + chosen.sums]
            curves = self.machine.curves_among(members)
            way = "reduce_scatter" if side == "forward" else "all_gather"
            return machines.at_size(machines.at_members(curves[way], len(members)), size)
        if operator.kind != "batch_norm":
            return 0.0
        chosen, mine = self.plan[operator.name].devices, parts[place][1]
        members = [d for d, part in zip(chosen, parts, strict=True) if part[1] == mine]
        if len(members) == 1 or (side == "backward" and not gradients(self.graph, operator)[0]):
            return 0.0
        size = 2 * (mine[1] - mine[0]) * (8 if side == "forward" else 4)
        curves = self.machine.curves_among(members)
        curve = machines.at_members(curves["all_reduce"], len(members))
        return machines.at_size(curve, size)

    def synchronise(self, members, size):
        lines, machine = self.lines, self.machine
        sync = "link" if machine.sync_on_link else "sync"
        for device in members:
            lines["host"][device] += round(1e3 * machine.sync_host_us)
            lines["device"][device] += round(1e3 * pack_us(machine, size))
        begin = max(lines[n][d] for n in ("device", "host", sync) for d in members)
        bucket = bucket_bytes(self.graph, machine)
        for device in members:
            lines[sync][device] = begin + round(1e3 * sync_us(machine, members, size, bucket))

    def flows_back(self, edge):
        return gradients(self.graph, self.graph.by_name[edge[1]])[edge[2]]

    def copy_ns(self, size):
        first, slope = round(1e3 * self.machine.copy_us), round(1e3 * self.machine.copy_us_per_mib)
        return math.floor(first + slope * size / 2**20 + 0.5)

    def wait(self, edge, backward):
        if backward and not self.flows_back(edge):
            return
        for device, (time, size) in self.arrived[edge, backward].items():
            line = self.lines["device"]
            line[device] = max(line[device], time) + self.copy_ns(size)

    def send(self, edges, backward):
        lines, machine = self.lines, self.machine
        edges = [e for e in edges if not backward or self.flows_back(e)]
        sides = [_Side(self, edge, backward) for edge in edges]
        for side in sides:
            for device, to in side.going.items():
                lines["device"][device] += self.copy_ns(sum(to.values()))
        into, out, ready = {}, {}, {}
        for side in sides:
            for device, waits in side.waits.items():
                if device in side.coming:
                    time, least = side.time(device)
                    into[device] = into[device] + time - least if device in into else time
                    before = max(lines["device"][a] for a in waits)
                    ready[device] = max(ready.get(device, 0), before)
            for device in side.going:
                if device not in side.coming:
                    time, least = side.time(device)
                    out[device] = out[device] + time - least if device in out else time
        for device in sorted({*into, *out}):
            lines["host"][device] += round(1e3 * machine.transfer_host_us)
            begin = max(lines[name][device] for name in ("device", "link", "host"))
            begin = max(begin, ready.get(device, 0))
            lines["link"][device] = begin + max(into.get(device, 0), out.get(device, 0))
        for edge, side in zip(edges, sides, strict=True):
            self.arrived[edge, backward] = {
                device: (lines["link"][device], side.whole[device]) for device in side.coming
            }


class _Side:
    """One edge's messages in one direction."""

    def __init__(self, step, edge, backward):
        machine = step.machine
        sent = messages(step.graph, step.plan, *edge)
        self.kind = collective(step.graph, step.plan, edge)
        source, target = step.plan[edge[0]], step.plan[edge[1]]
        if backward:
            back = {"all_gather": "reduce_scatter", "all_to_all": "all_to_all"}
            self.kind = back.get(self.kind, "exchange")
            sent = [(b, a, size) for a, b, size in sent]
        self.waits, self.whole, self.coming, self.going = {}, {}, {}, {}
        for a, b, size in sent:
            self.waits.setdefault(b, set()).add(a)
            self.whole[b] = self.whole.get(b, 0) + size
            if a != b:
                self.coming.setdefault(b, {})[a] = size
                self.going.setdefault(a, {})[b] = size
        self.most = max(len(source.devices), len(target.devices))
        pairs = [(a, b) for b, found in self.coming.items() for a in found]
        self.curves = machine.levels[max((machine.level(a, b) for a, b in pairs), default=0)]

    def time(self, device):
        """Nanoseconds that a device takes part, and of a message without content."""
        if self.kind == "exchange":
            coming, going = self.coming.get(device, {}), self.going.get(device, {})
            members = max(len(coming), len(going))
            size = max(sum(coming.values()), sum(going.values()))
        elif self.kind in ("all_gather", "broadcast"):
            members, size = self.most, max(self.whole.values())
        else:
            members, size = self.most, sum(self.whole.values()) / self.most
        curves = self.curves[self.kind]
        return time_ns(curves, members, size), time_ns(curves, members, 0)


def collective(graph, plan, edge):
    """What the execution makes of an edge's messages, forward."""
    source, target, index = edge
    producer, consumer = graph.by_name[source], graph.by_name[target]
    owned = dict(zip(plan[source].devices, part_rectangles(producer, plan[source]), strict=True))
    needed = {}
    parts = part_rectangles(consumer, plan[target])
    for device, part in zip(plan[target].devices, parts, strict=True):
        need = input_rectangle(consumer, index, part)
        if need is not None:
            needed[device] = need
    moved = redistribute.messages(owned, needed)
    found = redistribute.pattern(redistribute.Redistribution(source, owned, needed, moved))
    return {
        redistribute.Pattern.ALL_GATHER: "all_gather",
        redistribute.Pattern.BROADCAST: "broadcast",
        redistribute.Pattern.ALL_TO_ALL: "all_to_all",
    }.get(found, "exchange")


def messages(graph, plan, source, target, index):
    """Sender, receiver and bytes, also where both are one device."""
    producer, consumer = graph.by_name[source], graph.by_name[target]
    own = list(zip(plan[source].devices, part_rectangles(producer, plan[source]), strict=True))
    found = []
    for device, part in zip(
        plan[target].devices, part_rectangles(consumer, plan[target]), strict=True
    ):
        need = input_rectangle(consumer, index, part)
        for at, held in own:
            common = intersection(need, held) if need is not None else None
            if common is not None and volume(common):
                found.append((at, device, volume(common) * item_bytes(producer.dtype)))
    return found


def time_ns(curves, members, size):
    return math.floor(1e3 * machines.at_size(machines.at_members(curves, members), size) + 0.5)
