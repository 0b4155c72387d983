"""The simulated step written down plainly, for comparison: no tables, no deltas, no compilation."""

import math

from perfsearch.parallel.soap import machine as machines
from perfsearch.parallel.soap.configuration import part_rectangles
from perfsearch.parallel.soap.layouts import gradients, item_bytes, layout, owned_keys
from perfsearch.parallel.soap.rectangles import intersection, volume
from perfsearch.parallel.soap.rules import input_rectangle
from perfsearch.parallel.soap.tasks import pack_us, sync_us


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
                self.send(edge, False)
        for operator in reversed(graph.planned):
            for edge in self.moved(0, operator):
                self.wait(edge, True)
            self.compute(operator, "backward")
            for edge in self.moved(1, operator):
                self.send(edge, True)
            chosen = self.plan[operator.name]
            known = layout(operator, chosen.degrees, owned[operator.name], machine.state_per_weight)
            for place, device in enumerate(chosen.devices):
                self.memory[device] += known.resident_bytes[place]
                mib = known.weight_bytes[place] / 2**20
                optimizer[device] += round(1e3 * machine.optimizer_us_per_mib * mib)
            for group, size in known.syncs:
                self.synchronise(tuple(chosen.devices[m] for m in group), size)
        ends = []
        for device in range(machine.devices):
            end = max(line[device] for line in self.lines.values())
            if optimizer[device]:
                end += optimizer[device] + round(1e3 * machine.optimizer_us)
            ends.append(end)
        return max(ends) + round(1e3 * machine.step_us), self.memory

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

    def compute(self, operator, side):
        chosen, lines = self.plan[operator.name], self.lines
        parts = part_rectangles(operator, chosen)
        for device, part in zip(chosen.devices, parts, strict=True):
            cost = self.cost_of(operator, part, gradients(self.graph, operator))
            lines["host"][device] += round(1e3 * getattr(cost, f"{side}_host_us"))
            begin = max(lines["device"][device], lines["host"][device])
            own = getattr(cost, f"{side}_us") + self.machine.task_us
            lines["device"][device] = begin + round(1e3 * own)

    def synchronise(self, members, size):
        lines, machine = self.lines, self.machine
        sync = "link" if machine.sync_on_link else "sync"
        for device in members:
            lines["host"][device] += round(1e3 * machine.sync_host_us)
            lines["device"][device] += round(1e3 * pack_us(machine, size))
        begin = max(lines[n][d] for n in ("device", "host", sync) for d in members)
        for device in members:
            lines[sync][device] = begin + round(1e3 * sync_us(machine, members, size))

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

    def send(self, edge, backward):
        if backward and not self.flows_back(edge):
            return
        machine, lines = self.machine, self.lines
        sent = messages(self.graph, self.plan, *edge)
        kind = collective(self.graph, self.plan, edge, sent)
        source, target = self.plan[edge[0]], self.plan[edge[1]]
        if backward:
            kind = {"all_gather": "reduce_scatter", "all_to_all": "all_to_all"}.get(
                kind, "exchange"
            )
            sent = [(b, a, size) for a, b, size in sent]
            source, target = target, source
        waits, whole, coming, going = {}, {}, {}, {}
        for a, b, size in sent:
            waits.setdefault(b, set()).add(a)
            whole[b] = whole.get(b, 0) + size
            if a != b:
                coming.setdefault(b, {})[a] = size
                going.setdefault(a, {})[b] = size
        most = max(len(source.devices), len(target.devices))
        size_of = {
            "all_gather": max(whole.values()),
            "broadcast": max(whole.values()),
            "reduce_scatter": sum(whole.values()) / most,
            "all_to_all": sum(whole.values()) / most,
        }
        node = machine.devices_per_node
        spread = any(a // node != b // node for b, found in coming.items() for a in found)
        curves = machine.across if spread else machine.within

        def time(peers, size):
            if kind == "exchange":
                return time_ns(curves["exchange"], peers, size)
            return time_ns(curves[kind], most, size_of[kind])

        for device, to in going.items():
            lines["device"][device] += self.copy_ns(sum(to.values()))
        there = self.arrived[edge, backward] = {}
        groups = []
        for device in target.devices:
            if device in coming and waits[device] not in groups:
                groups.append(waits[device])
        for group in groups:
            for device in target.devices:
                if device in coming and waits[device] == group:
                    out = going.get(device, {})
                    peers = max(len(coming[device]), len(out))
                    size = max(sum(coming[device].values()), sum(out.values()))
                    lines["host"][device] += round(1e3 * machine.transfer_host_us)
                    begin = max(
                        *(lines["device"][a] for a in group),
                        *(lines[name][device] for name in ("device", "link", "host")),
                    )
                    lines["link"][device] = begin + time(peers, size)
                    there[device] = lines["link"][device], whole[device]
        for device in source.devices:
            if device in going and device not in coming:
                lines["host"][device] += round(1e3 * machine.transfer_host_us)
                begin = max(lines[name][device] for name in ("device", "link", "host"))
                out = going[device]
                lines["link"][device] = begin + time(len(out), sum(out.values()))


def collective(graph, plan, edge, sent):
    """Name of the collective that an edge's messages are, forward."""
    source, target, index = edge
    senders, receivers = plan[source].devices, plan[target].devices
    if len(sent) < len(senders) * len(receivers):
        return "exchange"
    if len(senders) == 1:
        alike = len({size for _, _, size in sent}) == 1
        return "broadcast" if alike and len(receivers) > 1 else "exchange"
    if len(senders) != len(receivers) or set(senders) != set(receivers):
        return "exchange"
    consumer = graph.by_name[target]
    parts = part_rectangles(consumer, plan[target])
    needs = {input_rectangle(consumer, index, part) for part in parts}
    return "all_gather" if len(needs) == 1 else "all_to_all"


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
