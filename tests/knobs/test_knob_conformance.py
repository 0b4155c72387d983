"""Every knob, wherever it exists: declared, put into force by real ranks, and read back."""

import pytest
from support.knob_ranks import NOT_READ, job_for, launch, other_value

from perfsearch import knobs
from perfsearch.core.hardware import Hardware, wrapper_parameters
from perfsearch.core.knob import Kind, Knob
from perfsearch.knobs import nccl, transport
from perfsearch.knobs.base import Job, Use
from perfsearch.knobs.script import ScriptJob, declare
from perfsearch.knobs.transport import Mapped

ON_GPU = Hardware("cuda", 4, 2, (), cores=64)

NOT_READ_BACK = {"forward_prefetch", "backward_prefetch", "reshard_group_size", "mixed_precision"}
"""Of ``runner=zero``: it looks at what its units do, not at what each of them was told."""

ARGUMENTS = ["micro_batch", "gradient_accumulation", "activation_checkpointing"]
"""What no script can be given but by its own arguments."""

EVERYWHERE = [
    pytest.param(record, use, id=f"{record.name}-{use}")
    for record in knobs.RECORDS
    for use in Use
    if use in record.uses
    and not isinstance(record, nccl.NcclVariable)
    and not (use is Use.SCRIPT and record.name in ARGUMENTS)
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("knobs"))


@pytest.mark.slow
@pytest.mark.parametrize(("record", "use"), EVERYWHERE)
def test_what_is_asked_for_is_in_force(found, record, use):
    one = found[use][record.name]
    if isinstance(one, str):
        pytest.skip(one)
    asked, read = one
    if use is Use.ZERO and record.name in NOT_READ_BACK:
        assert read == NOT_READ
    else:
        assert read == asked


@pytest.mark.parametrize("record", nccl.RECORDS, ids=lambda record: record.name)
def test_a_variable_says_what_was_asked_for(record):
    """A communicator needs a GPU; what reaches it and what is read back are the environment."""
    for use in (Use.DDP, Use.SCRIPT):
        job = Job(ON_GPU, {}, frozenset(), use=use)
        knob = record.declare(job)
        asked = {record.name: other_value(knob)}
        if use is Use.DDP:
            environ = nccl.environment(asked, record.of_communicator)
            assert nccl.environment(asked, not record.of_communicator) == {}
        else:
            environ = transport.plan(asked, []).environment
        assert set(environ) == {record.variable}
        assert nccl.read_back(environ, asked) == asked


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_says_what_was_asked_for(tmp_path, name):
    mapped = Mapped(name, f"--{name}", default=1)
    given, _ = transport.apply(["--lr", "1"], [mapped], {name: 4}, tmp_path)
    assert transport.current(given, mapped) == 4
    assert transport.plan({name: 4}, []).unreachable == {name: 4}
    micro = Mapped("micro_batch", "--micro", default=2)
    accumulation = Mapped("gradient_accumulation", "--times", default=2)
    others = [m for m in (micro, accumulation) if m.name != name]
    job = ScriptJob(ON_GPU, {}, frozenset(), facts=None, maps=[mapped, *others])
    there, absent = declare(job)
    assert name in {knob.name for knob in there} | absent.keys()


@pytest.mark.parametrize(("record", "use"), EVERYWHERE)
def test_it_is_declared_or_its_absence_has_a_reason(record, use):
    made = record.declare(job_for(use))
    if isinstance(made, Knob):
        assert made.name == record.name and made.help and made.contains(made.default)
        assert made.shortens == record.knob.shortens
    else:
        assert made


def test_names_are_given_once():
    assert len(knobs.by_name) == len(knobs.RECORDS)


def test_what_a_script_can_be_given_says_why_another_cannot():
    for record in knobs.of(Use.SCRIPT):
        assert bool(record.missing) == bool(record.takers and record.takers != ("process",))
        if record.promise is not None:
            assert record.knob.kind is Kind.BOOLEAN


def test_the_installed_constructor_has_every_argument():
    assert {r.parameter for r in knobs.ddp.constructor_records()} <= wrapper_parameters()
