"""What the benchmark of strategies counts and writes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("_races", "_surfaces", "_peers", "_strategies_report"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def made(contender: str, seed: int, quality: list[float]):
    from _races import Race

    seconds = [float(i) for i in range(1, len(quality) + 1)]
    return Race("s", contender, seed, 0.02, quality, seconds, 0, len(quality), (0.1, 0.1), "")


def test_trials_count_from_where_the_quality_stays() -> None:
    from _races import BUDGET, trials_needed

    assert trials_needed(made("a", 0, [0.5, 0.99, 0.9, 0.985, 1.0])) == 4
    assert trials_needed(made("a", 0, [0.99, 0.99])) == 1
    assert trials_needed(made("a", 0, [0.99, 0.9])) == BUDGET + 1


def test_a_torn_line_of_the_store_is_left_out(tmp_path: Path) -> None:
    from _races import read

    store = tmp_path / "store.jsonl"
    store.write_text(json.dumps(asdict(made("a", 0, [1.0]))) + '\n{"surface": "s", ')
    assert [r.contender for r in read(store)] == ["a"]


def test_the_report_sets_ours_against_the_best_peer_that_adapts() -> None:
    from _strategies_report import report

    races = []
    for seed in range(6):
        races += [
            made("bayes", seed, [0.5, 1.0, 1.0]),
            made("optuna_tpe", seed, [0.5] * 7 + [1.0]),
            made("ds_model", seed, [0.5] * 9 + [1.0]),
            made("horovod", seed, [1.0]),
        ]
    text = report(races)
    assert "| s | `optuna_tpe` | 8 | 2 | 0.25 | - | - |" in text
    assert "the best adaptive peer, `optuna_tpe`: 0.25 of its median trials" in text
    assert "paired difference -6.0 trials (95% -6.0 to -6.0)" in text
    assert "the best fixed peer, `horovod`: 2.00 of its median trials" in text


def test_own_contenders_are_told_what_the_runner_knows_unless_unhinted() -> None:
    from _peers import OwnPeer, contender
    from _surfaces import surfaces

    table = surfaces()["zero_gpt2large_4xh100"]()
    hinted, plain = (contender(n, table, 0, 60) for n in ("bayes", "bayes_unhinted"))
    assert isinstance(hinted, OwnPeer) and isinstance(plain, OwnPeer)
    assert hinted.strategy.hints.memory_limit_gib == pytest.approx(75.2, abs=0.1)
    assert hinted.strategy.hints.predict(table.baseline).peak_gib is not None
    assert plain.strategy.hints.memory_limit_gib is None
    assert plain.strategy.hints.monotonic == {}


def test_a_searchs_own_trials_are_no_surface() -> None:
    from _surfaces import surfaces

    assert set(surfaces()) == {
        "ddp_gpt2small_4xh100_tcp",
        "zero_gpt2large_4xh100",
        "interactions",
        "half_space",
        "ridge",
        "ridge_tuning",
        "ddp_gpt2small_4xh100_tcp_priced",
        "zero_gpt2large_4xh100_priced",
        "interactions_priced",
        "half_space_priced",
        "ridge_priced",
    }


def test_a_priced_surface_charges_for_what_must_restart() -> None:
    from _surfaces import SECONDS, surfaces

    surface = surfaces()["interactions_priced"]()
    start = surface.baseline

    def price(point: dict[str, object], number: int) -> float:
        trial = surface.measure({**start, **point}, number, 0)
        assert trial.seconds > trial.overhead_seconds
        return trial.overhead_seconds

    points = [{}, {"static": True}, {"protocol": "ll"}, {"threads": 2}, {"threads": 2}]
    scopes = ["process", "step", "group", "process", "step"]
    assert [price(p, n) for n, p in enumerate(points)] == [SECONDS[s] for s in scopes]
    assert price({"threads": 2}, 0) == SECONDS["process"]  # another race


def test_after_a_failure_the_next_trial_pays_for_a_start() -> None:
    from _surfaces import SECONDS, surfaces

    surface = surfaces()["half_space_priced"]()
    assert surface.measure(surface.baseline, 0, 0).overhead_seconds == SECONDS["process"]
    largest = {**surface.baseline, "width": 128.0, "depth": 128.0}
    assert surface.measure(largest, 1, 0).overhead_seconds == SECONDS["step"]
    assert surface.measure(surface.baseline, 2, 0).overhead_seconds == SECONDS["process"]


def test_seconds_with_and_without_prices_stand_beside_each_other() -> None:
    from _races import BUDGET_SECONDS, seconds_needed
    from _strategies_report import report

    never = made("bayes", 0, [0.5] * 80)
    assert seconds_needed(never) == BUDGET_SECONDS
    races = []
    for seed in range(5):
        races += [made("bayes", seed, [0.5, 1.0]), made("bayes_unpriced", seed, [0.5] * 3 + [1.0])]
    for race in races:
        race.surface = "s_priced"
    row = "| s | `bayes` | 5 | 2 | 2 | 4 | 4 | 0.50 | 0.50 | -2 s (-2 to -2) |"
    assert row in report(races)


def test_an_unpriced_contender_is_told_no_seconds() -> None:
    from _peers import OwnPeer, contender
    from _surfaces import surfaces

    surface = surfaces()["interactions_priced"]()
    for name, told in (("bayes", 1), ("bayes_unhinted", 1), ("bayes_unhinted_unpriced", 0)):
        peer = contender(name, surface, 0, 60)
        assert isinstance(peer, OwnPeer)
        peer.tell(surface.measure(surface.baseline, 0, 0))
        assert bool(peer._trials[0].seconds) == told
