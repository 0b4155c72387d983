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
    }
