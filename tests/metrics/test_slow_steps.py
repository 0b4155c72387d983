"""What slow steps are."""

from __future__ import annotations

import pytest

from perfsearch.metrics.slow_steps import (
    Cause,
    blame_quota,
    merge_ranks,
    parts_of,
    slow_steps,
    told,
    told_shortly,
)
from perfsearch.metrics.system import cgroup_throttled_s


def window(cause, extra=0.2, period=10):
    """Sixty steps of which one in so many is slow, as each rank tells its parts."""
    slow = [place % period == 3 for place in range(60)]
    seconds = [0.02 + extra * s for s in slow]
    parts = [{"own_work": 0.01, "backward": 0.01} for _ in slow]
    for part, is_slow in zip(parts, slow, strict=True):
        if is_slow:
            part[cause] = part.get(cause, 0.0) + extra
    return seconds, parts


@pytest.mark.parametrize("cause", ["loading", "saving", "compiling", "garbage_collection",
                                   "own_work", "backward", "optimizer"])  # fmt: skip
def test_the_part_that_grows_is_the_cause(cause):
    seconds, parts = window(cause)
    (kind,) = slow_steps(seconds, parts)
    assert (kind["cause"], kind["times"], kind["period_steps"]) == (cause, 6, 10)
    assert kind["extra_ms"] == pytest.approx(200) and kind["scored"]
    assert kind["share"] == pytest.approx(6 * 0.2 / sum(seconds))


def test_a_round_of_validation_is_one_whatever_it_spends_its_time_on():
    seconds, parts = window("loading")
    assert slow_steps(seconds, parts, range(3, 60, 10))[0]["cause"] == "validation"
    assert slow_steps(seconds, parts, [3])[0]["cause"] == "loading"


def test_even_steps_have_none_and_what_nobody_timed_has_no_cause():
    assert slow_steps([0.1] * 20) == []
    assert slow_steps(window("loading")[0])[0]["cause"] == "unknown"


def test_a_rank_that_waits_for_another_does_not_decide():
    seconds, waiting = window("backward")
    ranks = [slow_steps(seconds, waiting), slow_steps(seconds, window("loading")[1])]
    assert merge_ranks(ranks)[0]["cause"] == "loading"
    assert merge_ranks([[], []]) == []


def test_phases_of_a_built_in_step_are_parts():
    phases = {"dataloader_next": 1.0, "to_device": 2.0, "forward": 3.0, "backward": 4.0}
    assert parts_of(phases) == {"loading": 3.0, "own_work": 3.0, "backward": 4.0}


def test_a_quota_is_blamed_for_what_nothing_else_explains():
    seconds, parts = window("backward")
    kinds = slow_steps(seconds, parts) + slow_steps(seconds, window("loading")[1])
    blame_quota(kinds, 0.1)
    assert [kind["cause"] for kind in kinds] == ["backward", "loading"]
    blame_quota(kinds, 0.4)
    assert [kind["cause"] for kind in kinds] == ["cpu_quota", "loading"]


def test_they_are_told():
    (kind,) = slow_steps(*window("own_work"))
    words = "work outside of the backward pass and the optimizer"
    assert told(kind) == f"6 of 60 steps take 200 ms longer, one in 10 (50% of the time: {words})"
    assert told_shortly([kind]) == f"50% of the baseline's time is slow steps: {words}"
    assert told({**kind, "extra_ms": 2093.4}).startswith("6 of 60 steps take 2,090 ms longer")
    once = {**kind, "scored": False}
    assert told_shortly([once]).endswith(", not in the score") and told_shortly([]) == ""
    assert all(cause.words for cause in Cause)


def test_seconds_in_which_a_quota_was_used_up(tmp_path):
    group = tmp_path / "cgroup" / "job" / "step"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    assert cgroup_throttled_s(tmp_path / "cgroup", membership) is None
    (group / "cpu.stat").write_text("nr_throttled 0\nthrottled_usec 0\n")
    (group.parent / "cpu.stat").write_text("nr_throttled 7\nthrottled_usec 2500000\n")
    assert cgroup_throttled_s(tmp_path / "cgroup", membership) == 2.5
    membership.write_text("4:cpu,cpuacct:/old\n")
    old = tmp_path / "cgroup" / "cpu" / "old"
    old.mkdir(parents=True)
    (old / "cpu.stat").write_text("nr_throttled 7\nthrottled_time 3000000000\n")
    assert cgroup_throttled_s(tmp_path / "cgroup", membership) == 3.0
    assert cgroup_throttled_s(tmp_path / "cgroup", tmp_path / "none") is None
