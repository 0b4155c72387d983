"""The simulated step written down plainly, for comparison: no tables, no deltas, no compilation."""

import math

from perfsearch.parallel.soap import machine as machines
from perfsearch.parallel.soap.configuration import part_rectangles
from perfsearch.parallel.soap.layouts import gradients, item_bytes, layout, owned_keys
from perfsearch.parallel.soap.rectangles import intersection, volume
from perfsearch.parallel.soap.rules import input_rectangle
from perfsearch.parallel.soap.tasks import sync_us


def simulate(graph, machine, cost_of, plan):
    """Nanoseconds of a step, and bytes on each device."""
    owned = owned_keys(graph)
    lines = {name: [0] * machine.devices for name in ("host", "device", "link", "sync")}
    optimizer = [0] * machine.devices
    memory = [0] * machine.devices
    done = {"forward": {}, "backward": {}}

    def move(edge, source, target, ready, backward):
        receiving, sending = {}, {}
        sent = messages(graph, plan, *edge)
        kind = collective(graph, plan, edge, sent)
        if backward:
            kind = {"all_gather": "reduce_scatter", "all_to_all": "all_to_all"}.get(
                kind, "exchange"
            )
        for a, b, size in sent:
            if backward:
                a, b = b, a
            receiving.setdefault(b, {})[a] = size
            sending.setdefault(a, {})[b] = size
        whole = [sum(found.values()) for found in receiving.values()]
        most = max(len(source.devices), len(target.devices))
        size_of = {
            "all_gather": max(whole),
            "broadcast": max(whole),
            "reduce_scatter": sum(whole) / most,
            "all_to_all": sum(whole) / most,
        }

        def time(peers, size):
            if kind == "exchange":
                return time_ns(curves["exchange"], peers, size)
            return time_ns(curves[kind], most, size_of[kind])

        waits = {b: set(found) for b, found in receiving.items()}
        for device, remote in receiving.items():
            remote.pop(device, None)
        receiving = {b: found for b, found in receiving.items() if found}
        for device in sending:
            sending[device].pop(device, None)
        order = [d for d in target.devices if d in receiving]
        spread = any(
            machine.devices_per_node
            and a // machine.devices_per_node != b // machine.devices_per_node
            for b, found in receiving.items()
            for a in found
        )
        curves = machine.across if spread else machine.within
        for device in order:
            coming, going = receiving[device], sending.get(device, {})
            members = max(len(coming), len(going))
            size = max(sum(coming.values()), sum(going.values()))
            lines["host"][device] += round(1e3 * machine.transfer_host_us)
            begin = max(
                *(ready[a] for a in waits[device]),
                *(lines[name][device] for name in ("device", "link", "host")),
            )
            end = begin + time(members, size)
            lines["link"][device] = end
            lines["device"][device] = max(lines["device"][device], end)
            if not backward:
                memory[device] += sum(coming.values())
        for device in source.devices:
            going = sending.get(device, {})
            if not going or device in receiving:
                continue
            lines["host"][device] += round(1e3 * machine.transfer_host_us)
            begin = max(lines[name][device] for name in ("device", "link", "host"))
            end = begin + time(len(going), sum(going.values()))
            lines["link"][device] = end
            if machine.sender_waits:
                lines["device"][device] = max(lines["device"][device], end)

    def compute(operator, side):
        chosen = plan[operator.name]
        parts = part_rectangles(operator, chosen)
        done[side][operator.name] = {}
        for device, part in zip(chosen.devices, parts, strict=True):
            cost = cost_of(operator, part, gradients(graph, operator))
            lines["host"][device] += round(1e3 * getattr(cost, f"{side}_host_us"))
            begin = max(lines["device"][device], lines["host"][device])
            lines["device"][device] = begin + round(1e3 * getattr(cost, f"{side}_us"))
            done[side][operator.name][device] = lines["device"][device]

    for operator in graph.planned:
        for source, target, index in graph.edges:
            if target == operator.name:
                ready = done["forward"][source]
                move((source, target, index), plan[source], plan[target], ready, False)
        compute(operator, "forward")
    for operator in reversed(graph.planned):
        order = {o.name: i for i, o in enumerate(graph.planned)}
        outs = [e for e in graph.edges if e[0] == operator.name]
        for source, target, index in sorted(outs, key=lambda e: (order[e[1]], e[2])):
            if gradients(graph, graph.by_name[target])[index]:
                ready = done["backward"][target]
                move((source, target, index), plan[target], plan[source], ready, True)
        compute(operator, "backward")
        chosen = plan[operator.name]
        known = layout(operator, chosen.degrees, owned[operator.name], machine.state_per_weight)
        sync = "link" if machine.sync_on_link else "sync"
        for place, device in enumerate(chosen.devices):
            memory[device] += known.resident_bytes[place]
            mib = known.weight_bytes[place] / 2**20
            optimizer[device] += round(1e3 * machine.optimizer_us_per_mib * mib)
        for group, size in known.syncs:
            members = tuple(chosen.devices[m] for m in group)
            for device in members:
                lines["host"][device] += round(1e3 * machine.sync_host_us)
            begin = max(lines[n][d] for n in ("device", "host", sync) for d in members)
            for device in members:
                lines[sync][device] = begin + round(1e3 * sync_us(machine, members, size))
    ends = []
    for device in range(machine.devices):
        end = max(line[device] for line in lines.values())
        if optimizer[device]:
            end += optimizer[device] + round(1e3 * machine.optimizer_us)
        ends.append(end)
    return max(ends) + round(1e3 * machine.step_us), memory


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
