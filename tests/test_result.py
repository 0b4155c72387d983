"""What a search from Python returns, and how it shows itself."""

from pathlib import Path

import pytest
import yaml
from support.search_runs import trial

import perfsearch
from perfsearch.core.errors import BadInputError
from perfsearch.core.signals import ExitCode
from perfsearch.core.trial import Purpose, Status
from perfsearch.core.verdict import Interval
from perfsearch.pipeline.session import Result, Verdict
from perfsearch.result import SearchResult

STEADY = "bucket_cap_mb,status,samples_per_s,step_ms\n1,ok,10,9 9 9\n2,ok,12,5 5 5\n4,oom,,\n"


def made(winner=1, **changes):
    """A search of three trials of which one won, or none did."""
    trials = [trial(0), trial(1), trial(2, Status.OOM)]
    intervals = {1: Interval(1.5, 1.4, 1.6, 4)}
    best = trials[winner or 0].configuration
    values = {
        "exit_code": ExitCode.DONE,
        "run_dir": Path("outputs/run"),
        "trials": trials,
        "verdict": Verdict(intervals, winner, "trial 1 is faster <by far>"),
        "best": {**best, "fixed": True},
        "handed_over": dict(best),
    }
    return SearchResult.of(Result(**{**values, **changes}))


def test_a_gain_is_said_with_what_changed():
    result = made()
    assert result.speed_up == 1.5
    assert (result.interval.low, result.interval.high) == (1.4, 1.6)
    assert result.changed == {"bucket_cap_mb": 26}
    assert not result.is_baseline
    assert repr(result) == (
        "<SearchResult gain of +50.0% (95% interval +40.0% to +60.0%): bucket_cap_mb=26; "
        "3 trials in outputs/run>"
    )


def test_the_baseline_is_no_silent_best():
    result = made(winner=None)
    assert result.is_baseline
    assert result.changed == {}
    assert result.speed_up == 1.0
    assert result.interval is None
    assert result.verdict.interval.ratio == 1.5  # of what came closest
    assert "no gain shown, so that best is the baseline" in repr(result)


def test_what_cannot_be_compared_has_no_speed_up():
    rescued = made(verdict=Verdict({}, 1, "the baseline does not run"))
    assert rescued.speed_up is None
    assert "the baseline does not run; best does" in repr(rescued)
    why = Verdict(reason="no trial succeeded: 2 crash")
    nothing = made(winner=None, exit_code=ExitCode.NO_TRIAL_SUCCEEDED, verdict=why)
    broken_off = made(None, exit_code=ExitCode.CIRCUIT_BREAKER, best={}, reason="no space left")
    for result, text in ((nothing, "no trial succeeded: 2 crash"), (broken_off, "no space left")):
        assert result.speed_up is None
        assert text in repr(result)
        with pytest.raises(BadInputError, match=f"there is nothing to apply: .*{text}"):
            result.apply()


def test_a_notebook_is_shown_text_and_no_markup_of_others(tmp_path, monkeypatch):
    (tmp_path / "report.html").touch()
    shown = made(run_dir=tmp_path)._repr_html_()
    assert "trial 1 is faster &lt;by far&gt;" in shown
    assert "<tr><td>bucket_cap_mb</td><td>25</td><td>26</td></tr>" in shown
    assert f'href="{(tmp_path / "report.html").as_uri()}"' in shown
    monkeypatch.chdir(tmp_path.parent)  # where a notebook's server finds files
    assert f'href="{tmp_path.name}/report.html"' in made(run_dir=tmp_path)._repr_html_()
    assert "report" not in made(run_dir=tmp_path / "elsewhere")._repr_html_()


def test_a_model_is_wrapped_with_what_was_found(tmp_path):
    import torch
    import torch.distributed as dist

    knobs = {"bucket_cap_mb": 8, "gradient_as_bucket_view": True}
    (tmp_path / "best").mkdir()
    settings = {"runner": {"name": "ddp", "knobs": knobs}}
    (tmp_path / "best" / "config.yaml").write_text(yaml.safe_dump(settings))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = made(run_dir=tmp_path).apply(torch.nn.Linear(2, 2))
        assert model.bucket_bytes_cap == 8 * 2**20
        assert model.gradient_as_bucket_view
    finally:
        dist.destroy_process_group()


def test_trials_are_rows_of_a_dataframe():
    frame = made().to_dataframe()
    assert list(frame.index) == [0, 1, 2]
    assert list(frame["bucket_cap_mb"]) == [25, 26, 27]
    assert list(frame["status"]) == ["ok", "ok", "oom"]
    assert frame.loc[1, "step_ms"] == pytest.approx(50)
    assert frame.loc[1, "samples_per_s"] == pytest.approx(640)
    assert frame["objective"].isna().tolist() == [False, False, True]
    assert frame.attrs["unit"] == "samples/s"
    assert made(trials=[]).to_dataframe().empty


def test_readings_and_the_best_so_far_are_drawn():
    import matplotlib

    matplotlib.use("agg")
    trials = [trial(0), trial(1), trial(2, Status.OOM), trial(3, objective=100.0)]
    axes = made(trials=trials).plot()
    readings, best, baseline = axes.get_lines()
    assert list(readings.get_ydata()) == [320, 640, 100]
    assert (list(best.get_xdata()), list(best.get_ydata())) == ([0, 1, 3], [320, 640, 640])
    assert list(baseline.get_ydata()) == [320, 320]
    assert axes.get_ylabel() == "samples/s"
    assert axes.get_title().startswith("gain of +50.0%")
    assert made(trials=trials).plot(axes) is axes
    assert made(trials=[]).plot().get_lines()


def test_a_search_fills_it_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(STEADY)
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    result = perfsearch.search(
        "runner=replay", "runner.table=table.csv", "strategy=grid", tracking={"uri": store}
    )
    assert result.report == result.run_dir / "report.html"
    assert len(result.to_dataframe()) == len(result.trials)
    assert result.baseline.purpose is Purpose.BASELINE
    from mlflow import MlflowClient

    run = MlflowClient(store).get_run(result.mlflow_run_id)
    assert run.info.run_name.startswith(result.run_dir.name[:4])
    assert run.data.tags["perfsearch.role"] == "search"
    with pytest.raises(BadInputError, match="runner=replay does not wrap"):
        result.apply()
