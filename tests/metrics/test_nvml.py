from __future__ import annotations

import sys

import pytest
from support.fake_nvml import install

from perfsearch.metrics.gpu import NvmlUnavailable, job_devices, open_nvml

MIG_CARDS = [
    {"uuid": "GPU-a0"},
    {"uuid": "GPU-b0", "mig": [{"uuid": "MIG-b1"}, {"uuid": "MIG-b2"}]},
]


def seen(visible=None, uuids=None):
    devices, missing = job_devices(uuids, visible)
    return [(d.uuid, d.index) for d in devices], missing


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("2,0", [("GPU-c0", 2), ("GPU-a0", 0)]),
        ("GPU-d0", [("GPU-d0", 3)]),
        ("GPU-b,3", [("GPU-b0", 1), ("GPU-d0", 3)]),
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_decides_which_cards_are_ours(four_cards, visible, expected):
    assert seen(visible) == (expected, {})


def test_the_environment_is_read_when_nothing_is_given(four_cards, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert seen() == ([("GPU-b0", 1)], {})


def test_entries_after_an_invalid_one_are_ignored_as_cuda_does(four_cards):
    devices, missing = seen("1,9,2")
    assert devices == [("GPU-b0", 1)]
    assert list(missing) == ["gpu 9"]


def test_uuids_with_and_without_prefix_find_remapped_cards(four_cards):
    assert seen(uuids=["d0", "GPU-a0"]) == ([("GPU-d0", 3), ("GPU-a0", 0)], {})
    devices, missing = seen(uuids=["zz"])
    assert devices == []
    assert list(missing) == ["gpu zz"]


def test_mig_instances_are_found_by_uuid_and_numbered_by_place(monkeypatch):
    install(monkeypatch, MIG_CARDS)
    assert seen("MIG-b2,MIG-b1")[0] == [("MIG-b2", 0), ("MIG-b1", 1)]
    assert seen(uuids=["b2"])[0] == [("MIG-b2", 0)]


def test_an_index_of_a_card_with_mig_is_its_first_instance(monkeypatch):
    install(monkeypatch, MIG_CARDS)
    assert seen("1")[0] == [("MIG-b1", 0)]


def test_a_card_that_may_not_be_opened_does_not_hide_the_others(four_cards):
    four_cards.fail("GPU-a0", "open")
    assert [uuid for uuid, _ in seen()[0]] == ["GPU-b0", "GPU-c0", "GPU-d0"]


def test_without_the_module_the_reason_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match="nvidia-ml-py"):
        open_nvml()
