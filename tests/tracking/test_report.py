from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
from support.search_runs import measurement, trial

from perfsearch.core.knob import Kind, Knob
from perfsearch.core.objective import Metric, Objective
from perfsearch.core.trial import Purpose, Status
from perfsearch.core.verdict import Interval
from perfsearch.tracking.canvas import Axis, number
from perfsearch.tracking.pictures import phase_parts
from perfsearch.tracking.report import write_report


def test_ticks_are_round_and_inside():
    assert Axis(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    ticks = Axis(54.0, 205.0, 0, 100).ticks()
    assert all(54 <= t <= 205 for t in ticks)
    assert 3 <= len(ticks) <= 7


def test_ticks_of_what_is_counted_are_whole():
    assert Axis(-0.06, 3.06, 0, 100, whole=True).ticks() == [0, 1, 2, 3]
    assert Axis(-0.5, 0.5, 0, 100, whole=True).ticks() == [0]
    assert Axis.around([0, 9], 0, 100, whole=True).ticks() == [0, 3, 6, 9]


@pytest.mark.parametrize("values", [[], [5.0], [0.0], [3.0, 3.0], [float("nan")]])
def test_a_scale_always_has_an_extent(values):
    axis = Axis.around(values, 0, 100)
    assert axis.low < axis.high
    assert axis.ticks()


def test_numbers_are_short():
    assert [number(v) for v in (0, 0.12345, 12.0, 1234.5, 1.5e7)] == [
        "0",
        "0.1235",
        "12",
        "1,234",
        "1.5e+07",
    ]


VERDICT = SimpleNamespace(
    intervals={5: Interval(1.31, 1.28, 1.34, 6)}, winner=5, reason="1.31x faster"
)
NOTHING = SimpleNamespace(intervals={}, winner=None, reason="no gain beyond the noise")


def searched():
    trials = [
        trial(n, configuration={"bucket_cap_mb": 25 + n % 3, "algorithm": ["Ring", "Tree"][n % 2]})
        for n in range(10)
    ]
    trials[3] = trial(3, Status.OOM, reason="needs <b>more</b> & more")
    trials[4].purpose = Purpose.SENTINEL
    trials.append(trial(10, purpose=Purpose.CONFIRM))
    return trials


def page(tmp_path, trials, verdict=VERDICT, **changes):
    path = tmp_path / "report.html"
    write_report(path, trials, verdict, Objective(), **changes)
    return path.read_text()


def test_it_shows_every_part_and_loads_nothing(tmp_path):
    series = [
        {"time_s": 5.0 + i, "node": 0, "cpu_utilization_percentage": i, "interface/eth0/x": 1.0}
        for i in range(9)
    ]
    text = page(
        tmp_path,
        searched(),
        system_series=series,
        memory_limit_gib=2.0,
        title="gpt <1>",
        job={"devices": "2 H100", "command": "perfsearch runner=ddp"},
        snippets=[("best/apply/env.sh", "export A='<1>'")],
        ended_s={n: 100.0 + 3 * n for n in range(11)},
    )
    headings = re.findall("<h2>(.*?)</h2>", text)
    assert headings == [
        "Best configuration",
        "Baseline against the finalists",
        "How long steps take",
        "Progress",
        "Where the time of the search went",
        "Where the time of a step goes",
        "What holds the job back",
        "Effect of each setting",
        "Memory",
        "System",
        "Trials",
    ]
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert "gpt &lt;1&gt;" in text
    assert "<b>more</b>" not in text
    assert "+31.0% (+28.0% to +34.0%)" in text
    assert "11 trials: 10 ok, 1 oom." in text
    assert ">failed</text>" in text  # what the colour of such a trial in the timeline means
    assert "<dt>devices</dt><dd>2 H100</dd>" in text
    assert "<pre>export A=&#39;&lt;1&gt;&#39;</pre>" in text


def test_lines_of_processors_and_of_gpus_are_named(tmp_path):
    series = [
        {"time_s": 5.0 + i, "cpu_utilization_percentage": i, "disk_read_megabytes_per_s": 1.0}
        for i in range(9)
    ]
    text = page(tmp_path, searched(), system_series=series)
    assert text.count(">cpu</text>") == 1


def test_no_burst_is_left_out_of_a_long_search(tmp_path):
    """One sample in 1,001 is above zero: it shows, wherever it lies, and the line stays short."""
    for burst in (500, 501, 503):
        series = [
            {"time_s": float(i), "disk_read_megabytes_per_s": 900.0 * (i == burst)}
            for i in range(1001)
        ]
        text = page(tmp_path, searched(), system_series=series)
        line = re.findall('class="line c0" points="([^"]*)"', text)[-1].split()
        assert len(line) <= 240
        assert len({point.split(",")[1] for point in line}) == 2


def test_what_a_trial_says_is_escaped_wherever_it_stands(tmp_path):
    said = """<script>alert("1")</script> & 'more'"""
    trials = [*searched(), trial(11, Status.CRASH, reason=said)]
    text = page(tmp_path, trials, title=said)
    assert text.count("<script") == 1  # the page's own
    assert "<script>alert" not in text
    pictures = map(ElementTree.fromstring, re.findall("<svg.*?</svg>", text, re.S))
    titles = [e.text or "" for each in pictures for e in each.iter() if e.tag == "title"]
    assert any(title.endswith(said) for title in titles)


def test_there_is_no_picture_of_nothing(tmp_path):
    """One trial, networks that nothing goes through, memory that is all the same, no time."""
    series = [{"time_s": float(i), "network_receive_megabytes_per_s": 0.0003} for i in range(9)]
    text = page(tmp_path, [trial(0)], NOTHING, system_series=series, ended_s={0: 5.0})
    assert re.findall("<h2>(.*?)</h2>", text) == [
        "How long steps take",
        "Where the time of a step goes",
        "What holds the job back",
        "Trials",
    ]


def test_a_knob_of_many_values_has_a_picture_of_them_and_short_values(tmp_path):
    values = [1.7156475350125309 * 1.5**n for n in range(12)]
    trials = [trial(n, configuration={"bucket_cap_mb": v}) for n, v in enumerate(values)]
    text = page(tmp_path, trials)
    assert "objective over bucket_cap_mb" in text
    assert "bucket_cap_mb=1.72" in text and "1.7156475" not in text


def test_a_pause_before_a_resume_is_left_out_of_the_timeline(tmp_path):
    trials = [trial(n) for n in range(4)]
    text = page(tmp_path, trials, NOTHING, ended_s={0: 2.0, 1: 4.0, 2: 90000.0, 3: 90002.0})
    picture = re.findall("<svg[^>]*when each trial ran.*?</svg>", text, re.S)[0]
    assert "a pause left out" in picture
    assert re.findall(">([0-9]+)</text>", picture)[-1] == "8"


def test_the_steps_of_the_confirmation_come_before_those_of_the_search(tmp_path):
    trials = searched()
    for n, step_s in ((11, 0.2), (12, 0.3)):
        one = trials[0] if n == 11 else trials[5]
        again = trial(n, purpose=Purpose.CONFIRM, configuration=one.configuration)
        again.measurement = measurement(step_s, step_seconds=[step_s + i / 1e4 for i in range(31)])
        trials.append(again)
    text = page(tmp_path, trials)
    assert "baseline: 201.5 ms, half of the steps 200.8 to 202.2" in text
    assert "trial 5: 301.5 ms" in text


def test_where_knobs_matter_is_asked_of_the_knobs(tmp_path):
    trials = [
        trial(n, configuration={"workers": n % 2, "prefetch": 2 + 2 * (n % 4 == 3)})
        for n in range(12)
    ]
    knob = Knob("prefetch", Kind.ORDINAL, 2, (2, 4), when={"workers": (1,)})
    assert "9 trials" in page(tmp_path, trials)
    assert "9 trials" not in page(tmp_path, trials, knobs=[knob])


def test_a_value_tried_once_has_a_dot_and_no_interval(tmp_path):
    trials = [
        trial(n, configuration={"bucket_cap_mb": 25, "algorithm": "Tree" if n == 3 else "Ring"})
        for n in range(9)
    ]
    text = page(tmp_path, trials)
    assert re.search(r"[+-]\d+\.\d%, 8 trials", text)
    assert re.search(r"[+-]\d+\.\d%, 1 trial<", text)
    assert len(re.findall('class="(?:trial|sentinel)-interval"', text)) == 2  # one in each width


def test_every_picture_is_well_formed(tmp_path):
    pictures = re.findall("<svg.*?</svg>", page(tmp_path, searched()), re.S)
    assert len(pictures) == 2 * 6  # for a screen and for a telephone
    for picture in pictures:
        ElementTree.fromstring(picture)


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [trial(0, Status.CRASH)],
        [trial(0, measurement=measurement(step_seconds=[]), objective=None)],
        [trial(0, measurement=measurement(phases_ms={}, peak_allocated_gib=None))],
    ],
)
def test_what_is_not_there_is_left_out(tmp_path, trials):
    text = page(tmp_path, trials, NOTHING)
    assert "no gain beyond the noise" in text
    assert "Baseline against" not in text
    assert "Where the time" not in text
    assert "Effect of" not in text


def test_the_best_so_far_of_a_latency_goes_down(tmp_path):
    trials = [trial(n, objective=value) for n, value in enumerate([10.0, 8.0, 12.0, 6.0])]
    path = tmp_path / "report.html"
    write_report(path, trials, NOTHING, Objective(Metric.LATENCY))
    line = re.search(r'class="best-line" points="([^"]*)"', path.read_text())
    heights = [float(point.split(",")[1]) for point in line[1].split()]
    assert heights == sorted(heights)
    assert len(set(heights)) == 3


def test_phases_sum_to_the_step():
    found = measurement(
        phases_ms={"train_batch": 80.0, "forward": 30.0, "backward": 30.0, "comm_exposed": 20.0}
    )
    parts = phase_parts(found)
    assert parts == pytest.approx(
        {"forward": 30.0, "backward": 30.0, "comm_exposed": 20.0, "rest": 20.0}
    )
    assert sum(parts.values()) == pytest.approx(100.0)
    named = phase_parts(measurement(phases_ms={"forward": 60.0, "other": 30.0}))  # by a script
    assert named == pytest.approx({"forward": 60.0, "other": 40.0})


def test_what_there_was_to_gain_stands_beside_what_was_found(tmp_path):
    trials = searched()
    measured = trials[0].measurement
    measured.phases_ms = {"forward": 30.0, "comm_exposed": 25.0, "backward": 45.0}
    measured.bottleneck_evidence = {"with_everything_ms": 100.0, "detailed_step_ms": 100.0}
    # The baseline measured again beside the finalists is not what the search was decided by.
    again = trial(11, purpose=Purpose.CONFIRM, configuration=trials[0].configuration, objective=1.0)
    again.measurement.phases_ms = {"forward": 90.0, "comm_exposed": 5.0, "backward": 5.0}
    again.measurement.bottleneck_evidence = dict(measured.bottleneck_evidence)
    text = page(tmp_path, [*trials, again], headroom=0.5)
    assert "<td>communication</td><td>+33.3%</td><td>25.00 ms of a 100.00 ms step wait" in text
    assert "<td>all that is searched</td><td>+50.0%</td>" in text
    assert "What there was to gain" not in page(tmp_path, searched())


def test_an_interval_that_says_nothing_is_not_drawn(tmp_path):
    path = tmp_path / "report.html"
    intervals = {5: Interval(1.3, 1e-5, 9e4, 2), 6: Interval(1.1, 1.05, 1.15, 6)}
    verdict = SimpleNamespace(intervals=intervals, winner=None, reason="no gain beyond the noise")
    write_report(path, searched(), verdict, Objective())
    text = path.read_text()
    assert "+30.0% (inconclusive, 2 pairs)" in text
    assert "90000" not in text


def test_phases_stand_in_the_order_of_a_step():
    shuffled = {"optimizer": 1.0, "backward": 2.0, "strange": 1.0, "dataloader_next": 3.0}
    parts = phase_parts(measurement(phases_ms=shuffled))
    assert list(parts)[:3] == ["dataloader_next", "backward", "optimizer"]
