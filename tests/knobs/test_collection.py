import gc
import sys

import pytest
import torch

from perfsearch.knobs import collection
from perfsearch.knobs.collection import COLLECT_EACH, Collection


@pytest.fixture
def collected():
    """Generations that were collected since."""
    found = []

    def note(phase, info):
        if phase == "stop":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()


def garbage(count=2000):
    for _ in range(count):
        one = []
        one.append(one)


def test_garbage_is_collected_at_set_steps_and_at_no_other_time(collected):
    made = Collection()
    made.put({COLLECT_EACH.name: 3})
    collected.clear()
    found = []
    for _ in range(7):
        garbage()
        made.end_step()
        found.append(list(collected))
    assert found == [[], [], [1], [1], [1], [1, 1], [1, 1]]
    for _ in range(53):
        made.end_step()
    assert collected == [1] * 19 + [2]
    assert made.values() == {COLLECT_EACH.name: 3}


def test_pythons_own_way_is_put_back(collected):
    made = Collection()
    made.put({COLLECT_EACH.name: 10})
    made.put({})
    assert gc.isenabled() and made.values() == {COLLECT_EACH.name: 0}
    collected.clear()
    garbage()
    assert collected


def test_a_script_that_turns_it_off_keeps_it_off_and_one_that_turns_it_on_is_told(collected):
    made = Collection()
    gc.disable()
    made.put({COLLECT_EACH.name: None})
    assert not gc.isenabled() and made.values() == {COLLECT_EACH.name: 0}
    made.put({COLLECT_EACH.name: 10})
    gc.enable()
    assert made.values() == {COLLECT_EACH.name: 0}


def test_it_is_handed_over(collected, monkeypatch):
    assert collection.code_lines({}) == [] and collection.script_program({}) == ""
    hooks = []
    monkeypatch.setattr(
        sys.modules[torch.optim.Optimizer.__module__],
        "register_optimizer_step_post_hook",
        lambda hook: hooks.append(hook),
    )
    exec(collection.script_program({COLLECT_EACH.name: 2}), {})
    first, second = object(), object()
    collected.clear()
    for optimizer in (first, second, first, second):
        hooks[0](optimizer, (), {})
    assert collected == [1] and not gc.isenabled()
