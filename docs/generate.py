"""Renders the reference pages from the code, so that they cannot say otherwise.

``python docs/generate.py`` writes ``docs/keys.md``, ``docs/strategies.md``, ``docs/runners.md``,
a page for each strategy and runner in the directories of these names, ``docs/advice.md``, the
settings in ``conf/config.yaml``, and the comments beside the knobs in ``conf/runner/*.yaml`` (which
``--help`` shows);
``--check`` writes nothing and exits with 1 where one of them is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path

from perfsearch import runners, strategies
from perfsearch.cli.help import settings_keys
from perfsearch.config.options import describe_type, show
from perfsearch.config.schema import GROUPS
from perfsearch.core.docstrings import attribute_help, summary
from perfsearch.core.knob import Knob

if typing.TYPE_CHECKING:
    from perfsearch.metrics.advice import Advice

ROOT = Path(__file__).parent.parent
_SETTINGS = "# Written by docs/generate.py from perfsearch/config/schema.py.\n"
_HYDRAS = "# Hydra composes"
"""What stands before and after the settings in ``conf/config.yaml``."""

_RESULT = r"[\1](../../benchmarks/results/\1.md)"
_MADE = "<!-- Written by docs/generate.py; edit the code instead. -->\n"


def pages() -> dict[Path, str]:
    """Every generated file with what it should hold."""
    docs = ROOT / "docs"
    made = {
        docs / "keys.md": keys_page(),
        docs / "strategies.md": strategies_page(),
        docs / "runners.md": runners_page(),
        docs / "advice.md": advice_page(),
        docs / "runners" / "script.md": script_page(),
    }
    made |= {docs / "strategies" / f"{n}.md": strategy_page(n) for n in strategies.names()}
    made |= {docs / "runners" / f"{n}.md": runner_page(n) for n in runners.names()}
    defaults = ROOT / "conf" / "config.yaml"
    if defaults.exists():
        made[defaults] = with_settings(defaults.read_text())
    for name in runners.names():
        file = ROOT / "conf" / "runner" / f"{name}.yaml"
        knobs = declared_knobs(name)
        if file.exists() and knobs:
            made[file] = with_comments(file.read_text(), knobs)
    return made


def keys_page() -> str:
    """The top-level keys."""
    rows = [
        (f"`{key}`", allowed, f"`{default}`", plain(text))
        for key, allowed, default, text in settings_keys()
        if key not in GROUPS
    ]
    intro = "Every key outside the groups `runner`, `strategy`, `workload` and `launcher`.\n"
    return f"# Keys\n\n{_MADE}\n{intro}\n{table(('key', 'allowed', 'default', 'meaning'), rows)}"


_STRATEGIES = """\
A strategy chooses what is tried next. `strategy=NAME` picks one, `strategy.KEY=VALUE` sets its
keys. Leave it at `auto` unless you know better; [their trials until good, against
others'](../benchmarks/results/strategies.md), were counted.
"""


def strategies_page() -> str:
    """All strategies, a line each."""
    rows = [
        (f"[`{name}`](strategies/{name}.md)", plain(summary(strategies.load(name))))
        for name in strategies.names()
    ]
    return "\n".join(
        ["# Strategies\n", _MADE, _STRATEGIES, table(("strategy", "what it does"), rows)]
    )


def strategy_page(name: str) -> str:
    """A strategy with its options."""
    strategy = strategies.load(name)
    parts = [f"# `strategy={name}`\n", _MADE, f"{plain(paragraphs(strategy))}\n"]
    return "\n".join([*parts, options_table(strategy.Options, "strategy")])


_ADVICE = """\
What the [diagnosis](metrics.md) advises on each finding, as it stands in
`perfsearch/metrics/advice.py`. The sentences behind a finding are made of it; where a knob is
searched, `strategy=fast`, `bayes` and `auto` try what is advised first, all of it together and then
each alone; a [program that proposes](external.md) is told it as `advice`.

- **Here**: the knob (`runner.knobs.NAME`) and its value; "more" and "less" are steps from today's.
  Without one it is yours to do.
- **Result**: `exact`: the same numbers; `reordered`: sums in another order, or other kernels;
  `altering`: another computation, off unless `numerics=altering`.
- **Seen elsewhere**: what the source, or a benchmark of perfsearch, found in its own job. Gains do
  not multiply, and none is promised: a search measures yours.
"""


def advice_page() -> str:
    """What is advised on each finding."""
    from perfsearch.metrics.advice import ADVICE

    head = ("do", "cause", "switch", "here", "result", "seen elsewhere", "trap", "source")
    parts = ["# What to do about it\n", _MADE, _ADVICE]
    for findings in dict.fromkeys(advice.findings for advice in ADVICE):
        rows = [advice_row(advice) for advice in ADVICE if advice.findings == findings]
        parts.append(f"## {', '.join(f'`{name}`' for name in findings)}\n\n{table(head, rows)}")
    return "\n".join(parts)


def advice_row(advice: Advice) -> tuple[str, ...]:
    """A row of its page."""
    from perfsearch.metrics.advice import Turn

    here = ""
    if advice.knob is not None:
        name, to = advice.knob.name, advice.to
        here = f"`{name}`: {to.value}" if isinstance(to, Turn) else f"`{name}={show(to)}`"
    switch = "" if not advice.switch else f"`{advice.switch}`"
    result = "" if advice.numerics is None else advice.numerics.value
    first = (advice.do, advice.cause.replace("_", " "), switch, here, result)
    return (*first, advice.gain, advice.trap, advice.source)


_RUNNERS = """\
A runner says what can be tuned, and measures it. `runner=NAME` picks one, `runner.KEY=VALUE` sets
its keys, and `runner.knobs.NAME` its parameters ([how](commands.md#narrow-what-is-searched)). A
script of your own (`perfsearch-run --search`, `workload=script`) gets the parameters of the runner
that fits it.
"""
_KNOBS = ("parameter", "values", "default", "scope", "numerics", "what it is")
_COLUMNS = """\
**Scope** says what must start anew for another value: `step` nothing, `group` the process group,
`process` the processes. **Numerics**: `exact` gives the same numbers, `reordered` sums in another
order, `altering` another computation, which is off unless `numerics=altering`.
"""


def runners_page() -> str:
    """All runners, a line each."""
    from perfsearch.runners._script.runner import Script

    items = [(f"runner={name}", name, runners.load(name)) for name in runners.names()]
    rows = [
        (f"[`{shown}`](runners/{page}.md)", plain(summary(cls)))
        for shown, page, cls in [*items, ("workload=script", "script", Script)]
    ]
    head = ("runner", "what it searches")
    return "\n".join(["# Runners and their parameters\n", _MADE, _RUNNERS, table(head, rows)])


def runner_page(name: str) -> str:
    """A runner with its keys and its knobs."""
    runner = runners.load(name)
    parts = [f"# `runner={name}`\n", _MADE, f"{plain(paragraphs(runner))}\n"]
    parts += ["## Keys\n", options_table(runner.Options, "runner")]
    knobs = declared_knobs(name)
    if knobs:
        parts += [
            "## Parameters\n",
            "As `runner.knobs.NAME`, on two nodes of eight GPUs with every feature; what a machine "
            "or a torch version lacks is left out there.\n",
            _COLUMNS,
            table(_KNOBS, [knob_row(k) for k in knobs]),
        ]
    return "\n".join(parts)


def script_page() -> str:
    """The user's own script, whose knobs depend on what it builds."""
    from perfsearch.runners._script.runner import Script

    parts = ["# `workload=script`\n", _MADE, f"{plain(paragraphs(Script))}\n"]
    parts += [
        "## Keys\n",
        options_table(Script.Options, "workload"),
        "## Parameters\n",
        "As far as the script builds what they belong to; defaults are the script's own "
        "values. NCCL's are those of [`runner=ddp`](ddp.md).\n",
        _COLUMNS,
        table(_KNOBS, [knob_row(k) for k in _script_knobs()]),
    ]
    return "\n".join(parts)


def _script_knobs() -> list[Knob]:
    from perfsearch.core.hardware import Hardware
    from perfsearch.instrument.facts import Facts
    from perfsearch.knobs.script import ScriptJob, declare
    from perfsearch.knobs.transport import Mapped

    values = {"find_unused_parameters": True}
    facts = Facts(["ddp", "fully_shard", "fsdp1"], 1, ["torch optimizer"], values)
    maps = [
        Mapped("micro_batch", "--batch-size", default=8),
        Mapped("gradient_accumulation", "--accumulation", default=1),
        Mapped("activation_checkpointing", "--checkpointing", default=False),
    ]
    found: dict[str, Knob] = {}
    whole = dataclasses.replace(facts, wrappers=["ddp"], modules=1)
    for device, seen in (("cuda", facts), ("cpu", facts), ("cuda", whole)):
        machine = Hardware(device, nproc=8, nnodes=1, gpus=(), cores=64)
        job = ScriptJob(machine, {}, _constructor(), facts=seen, maps=maps)
        for knob in declare(job)[0]:
            found.setdefault(knob.name, knob)
    return [knob for knob in found.values() if not knob.name.startswith("nccl_")]


def declared_knobs(runner: str) -> list[Knob]:
    """Every knob that a runner can have, on machines that have everything; the GPUs' first."""
    makers = {"ddp": _ddp_knobs, "zero": _zero_knobs, "deepspeed": _deepspeed_knobs}
    return makers[runner]() if runner in makers else []


def _zero_knobs() -> list[Knob]:
    from perfsearch.knobs import zero
    from perfsearch.knobs.batch import Batch

    found: dict[str, Knob] = {}
    for rule in ("fixed", "free"):
        batch = Batch(rule, global_batch=64, world_size=16, micro_batch=4)
        for knob in zero.declare(batch, on_gpu=True)[0]:
            found.setdefault(knob.name, knob)
    order = {name: place for place, name in enumerate(zero.EFFECT_ORDER)}
    return sorted(found.values(), key=lambda k: order[k.name])


def _deepspeed_knobs() -> list[Knob]:
    from perfsearch.knobs.batch import Batch
    from perfsearch.runners.deepspeed import config as deepspeed
    from perfsearch.runners.deepspeed.autotuning import Autotuning

    batch = Batch("free", global_batch=64, world_size=16, micro_batch=4)
    return deepspeed.declare({}, batch, Autotuning())[0]


def _ddp_knobs() -> list[Knob]:
    from perfsearch.core.hardware import Hardware
    from perfsearch.knobs import of
    from perfsearch.knobs.base import Job, Use, declare

    found: dict[str, Knob] = {}
    for device, cores in (("cuda", 64), ("cpu", 64)):
        hardware = Hardware(device, nproc=8, nnodes=2, gpus=(), cores=cores)
        job = Job(hardware, {}, _constructor(), convolutional=True, attends=True, repeats=True)
        for knob in declare(of(Use.DDP), job)[0]:
            found.setdefault(knob.name, knob)
    return list(found.values())


def _constructor() -> frozenset[str]:
    """What a ``DistributedDataParallel`` with every feature takes."""
    from perfsearch.knobs.ddp import constructor_records

    return frozenset(record.parameter for record in constructor_records())


def options_table(cls: type, prefix: str) -> str:
    """The fields of an options dataclass."""
    hints, texts = typing.get_type_hints(cls), attribute_help(cls)
    rows = []
    for spec in dataclasses.fields(cls):
        if spec.default is not dataclasses.MISSING:
            default = f"`{show(spec.default)}`"
        else:
            made = spec.default_factory is not dataclasses.MISSING
            default = "see below" if made else "needed"
        allowed = describe_type(hints[spec.name], spec.metadata)
        text = plain(texts.get(spec.name, ""))
        rows.append((f"`{prefix}.{spec.name}`", allowed, default, text))
    if not rows:
        return "It has no options.\n"
    return table(("key", "allowed", "default", "meaning"), rows)


def knob_row(knob: Knob) -> tuple[str, ...]:
    """A knob as a row of the runners' table."""
    if knob.is_range:
        values = f"{knob.low:g} to {knob.high:g}"
    else:
        values = ", ".join(f"`{show(v)}`" for v in knob.values)
    unit = f" {knob.unit}" if knob.unit else ""
    unit += ", log scale" if knob.log else ""
    text = knob.help
    for other, allowed in knob.when.items():
        text += f"; matters where `{other}` is {' or '.join(show(v) for v in allowed)}"
    default = f"`{show(knob.default)}`"
    return (f"`{knob.name}`", values + unit, default, knob.scope.value, knob.numerics.value, text)


def with_settings(text: str) -> str:
    """The file of all defaults with each setting as the schema has it, under its meaning."""
    head, below = text.split(_SETTINGS, 1)
    tail = below[below.index(_HYDRAS) :]
    lines: list[str] = []
    above: list[str] = []
    for key, allowed, default, meaning in settings_keys():
        if key in GROUPS:
            continue
        *groups, name = key.split(".")
        pairs = zip(above, groups, strict=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if not groups or not shared:
            lines.append("")
        lines += [f"{'  ' * depth}{groups[depth]}:" for depth in range(shared, len(groups))]
        above, indent = groups, "  " * len(groups)
        says = f"{plain(meaning).rstrip('.')} [{allowed}]"
        lines += textwrap.wrap(
            says, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        lines.append(f"{indent}{name}: {default}")
    return f"{head}{_SETTINGS}" + "\n".join(lines) + f"\n\n{tail}"


def with_comments(text: str, knobs: Sequence[Knob]) -> str:
    """An option file with each knob's own words beside it."""
    helps = {k.name: k.help for k in knobs}
    for knob in knobs:
        if knob.unit and knob.unit.rstrip("s") not in knob.help:
            helps[knob.name] += f" ({knob.unit})"

    def line_of(match: re.Match[str]) -> str:
        head, name = match.group(1).rstrip(), match.group(2)
        return f"{head}  # {helps[name]}" if name in helps else match.group(0)

    return re.sub(r"^(  (\w+): [^#\n]*?) *(?:#.*)?$", line_of, text, flags=re.MULTILINE)


def paragraphs(item: object) -> str:
    """A docstring up to its first section, with links to the pages that it names."""
    import inspect

    text = inspect.getdoc(item) or ""
    text = re.split(r"\n\n(?:Args|Attributes|Raises|Returns):", text)[0].strip() or summary(item)
    text = re.sub(r"`*docs/(\w+)\.md`*", r"[\1](../\1.md)", text)
    return re.sub(r"`*benchmarks/results/(\w+)\.md`*", _RESULT, text)


def plain(text: str) -> str:
    """Docstring markup as Markdown."""
    return text.replace("``None``", "`null`").replace("``", "`")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    check = parser.parse_args(argv).check
    stale = []
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    if stale and check:
        print(f"out of date: {', '.join(stale)}. Run: python docs/generate.py", file=sys.stderr)
        return 1
    for name in stale:
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
