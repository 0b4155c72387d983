from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfsearch.core.hardware import Environment
from perfsearch.core.trial import Purpose, Trial
from perfsearch.runners import replay as _known_knobs
from perfsearch.runners.base import Plan
from perfsearch.runners.replay import Replay

DATA = Path(__file__).parents[1] / "data"
ZERO = str(DATA / "zero_gpt2large_4xh100.csv")
FACTS = str(DATA / "zero_gpt2large_facts.json")
TCP = str(DATA / "ddp_gpt2small_4xh100_tcp.csv")
LARGEST = {
    "zero_stage": 2,
    "micro_batch": 32,
    "activation_checkpointing": False,
    "gradient_accumulation": 1,
}


def replay(table: str, **options: object) -> Replay:
    return Replay(Replay.Options(table=table, **options), Environment(Path()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "runner"),
    [
        (["bucket_cap_mb", "nccl_socket_nthreads"], "ddp"),
        (["zero_stage", "micro_batch", "forward_prefetch"], "zero"),
        (["zero_stage", "overlap_comm", "sub_group_size"], "deepspeed"),
        (["zero_stage"], None),
        (["zero_stage", "micro_batch", "width", "depth"], None),
        (["width", "depth"], None),
    ],
)
def test_the_runner_that_knows_most_of_the_knobs_speaks_for_them(
    names: list[str], runner: str | None
) -> None:
    assert _known_knobs.owning_runner(names) == runner


def test_a_table_over_sockets_gets_the_starts_of_the_ddp_runner() -> None:
    runner = replay(TCP)
    hints = runner.hints([])
    assert hints.effect_order[0] == "nccl_nsocks_perthread"
    assert "hierarchical_allreduce" not in hints.effect_order
    first = hints.starts[0]
    assert (first["nccl_nsocks_perthread"], first["nccl_socket_nthreads"]) == (4, 2)
    assert first["hierarchical_allreduce"] == runner.baseline["hierarchical_allreduce"]
    assert hints.predict(first).peak_gib is None


def test_without_facts_a_table_of_stages_gets_names_only() -> None:
    hints = replay(ZERO, device_memory_gib=79.2).hints([])
    assert (hints.stage_knob, hints.monotonic) == ("zero_stage", {"micro_batch": 1})
    assert hints.memory_limit_gib is None
    assert hints.predict(LARGEST).peak_gib is None


def test_with_facts_peaks_are_predicted_and_trials_correct_them() -> None:
    runner = replay(ZERO, model_facts=FACTS, device_memory_gib=79.2)
    trials: list[Trial] = []
    hints = runner.hints(trials)
    assert hints.memory_limit_gib == pytest.approx(0.95 * 79.2)
    assert hints.predict(LARGEST).peak_gib == pytest.approx(70.466, rel=0.06)
    smaller = {**LARGEST, "micro_batch": 16}
    outcome = runner.measure(smaller, Plan(number=1))
    trials.append(Trial(1, smaller, Purpose.SEARCH, outcome.status, outcome.measurement))
    assert hints.predict(LARGEST).peak_gib == pytest.approx(70.466, rel=0.02)


def test_facts_beside_the_table_are_found(tmp_path: Path) -> None:
    table = tmp_path / "trials.csv"
    table.write_text(Path(ZERO).read_text())
    (tmp_path / "model_facts.json").write_text(Path(FACTS).read_text())
    assert replay(str(table)).hints([]).predict(LARGEST).peak_gib is not None


def test_knobs_of_another_runner_get_no_memory_model() -> None:
    assert replay(TCP, model_facts=FACTS).hints([]).predict({}).peak_gib is None


@pytest.mark.parametrize("content", ["{", json.dumps({"key": "k"}), json.dumps({"facts": {}})])
def test_facts_that_cannot_be_read_are_refused_by_key(tmp_path: Path, content: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"runner\.model_facts=.*facts\.json"):
        replay(ZERO, model_facts=str(path))
    with pytest.raises(ValueError, match=r"runner\.model_facts=.*none\.json"):
        replay(ZERO, model_facts=str(tmp_path / "none.json"))
