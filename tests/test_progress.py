"""What a search from Python shows while it runs."""

import types

import pytest
from support.search_runs import trial
from support.small_search import make_settings

import perfsearch
from perfsearch import progress
from perfsearch.core.trial import Purpose, Status

TABLE = "bucket,status,samples_per_s,step_ms\n1,ok,10,9 9 9\n2,ok,12,5 5 5\n4,oom,,\n"


@pytest.fixture
def search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text(TABLE)

    def run(**keys):
        quiet = {"tracking": {"enabled": False}, "confirm": {"finalists": 0}}
        table = {"name": "replay", "table": "table.csv"}
        return perfsearch.search(runner=table, strategy="grid", **{**quiet, **keys})

    return run


def test_quiet_prints_nothing_and_the_callback_is_told_of_each_trial(search, capsys):
    told = []
    result = search(quiet=True, on_trial=told.append)
    assert capsys.readouterr().out == ""
    assert told == result.trials
    search(seed=1)
    assert "    0        " in capsys.readouterr().out


def test_quiet_keeps_warnings(capsys):
    with progress.opener(quiet=True)(make_settings()) as view:
        view.stage("search")
        view.note("by the way")
        view.warning("look\x1b here")
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "perfsearch: warning: look\\x1b here\n"


def test_what_the_callback_raises_ends_the_search_and_it_goes_on_from_there(search):
    class EnoughError(Exception):
        pass

    def enough(trial):
        if trial.number == 1:
            raise EnoughError

    with pytest.raises(EnoughError):
        search(on_trial=enough, run_dir="run", quiet=True)
    later = []
    result = search(on_trial=later.append, run_dir="run", quiet=True)
    assert [t.number for t in result.trials] == [0, 1, 2]
    assert [t.number for t in later] == [2]


class Notebook:
    """IPython in a kernel, as far as it is asked."""

    def __init__(self):
        self.shown = []

    def get_ipython(self):
        return types.SimpleNamespace(kernel=self)

    def display(self, shown, display_id):
        self.update(shown)
        return self

    def update(self, shown):
        self.shown.append(shown._repr_html_())


def test_a_notebook_has_a_bar_that_changes(monkeypatch, capsys):
    notebook = Notebook()
    monkeypatch.setitem(progress.sys.modules, "IPython", notebook)
    monkeypatch.setitem(progress.sys.modules, "IPython.display", notebook)
    baseline, faster = trial(0), trial(1)
    with progress.opener()(make_settings(budget={"trials": 4})) as view:
        view.stage("search")
        view.trial_started(0, Purpose.BASELINE, baseline.configuration)
        view.trial_finished(baseline, None, baseline, None)
        view.trial_started(1, Purpose.SEARCH, faster.configuration)
        assert "0 of 4 trials, search, trial 1 runs" in notebook.shown[-1]
        view.trial_finished(faster, faster, baseline, None)
        view.trial_finished(trial(2, Status.OOM), faster, baseline, None)
        assert '<progress value="2" max="4">' in notebook.shown[-1]
        assert "best so far 640.0 samples/s, +100.0%, one reading" in notebook.shown[-1]
    assert notebook.shown[-1] == ""
    assert "    1        640.0" in capsys.readouterr().out


def test_ipython_in_a_terminal_is_no_notebook(monkeypatch):
    shell = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace())
    monkeypatch.setitem(progress.sys.modules, "IPython", shell)
    assert progress.notebook_display() is None
