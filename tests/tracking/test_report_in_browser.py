"""The pages as a real browser shows them. The screenshots are kept where
``PERFSEARCH_SCREENSHOTS`` names a directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.browser import Browser, Page
from support.search_runs import measurement, trial
from support.sweep_runs import of, searched

from perfsearch.core.objective import Objective
from perfsearch.core.trial import Purpose, Status
from perfsearch.core.verdict import Interval
from perfsearch.tracking.report import write_report
from perfsearch.tracking.sweep import write_sweep

pytestmark = pytest.mark.slow

SCREENS = {"desktop": (1280, False), "phone": (390, False), "dark": (1280, True)}

SMALLEST_TEXT = """
(() => {
  const sizes = [];
  for (const text of document.querySelectorAll("svg text, p, td, th, li, dt, dd, pre, button")) {
    if (!text.textContent.trim() || !text.getClientRects().length) continue;
    const size = parseFloat(getComputedStyle(text).fontSize);
    const picture = text.closest("svg");
    const drawn = picture ? picture.viewBox.baseVal.width : 1;
    const scale = picture ? picture.getBoundingClientRect().width / drawn : 1;
    sizes.push([size * scale, text.textContent]);
  }
  return sizes.sort((a, b) => a[0] - b[0])[0];
})()
"""

OVERLAPPING = """
(() => {
  const found = [];
  for (const picture of document.querySelectorAll("svg")) {
    const frame = picture.getBoundingClientRect();
    const key = [...picture.querySelectorAll("rect")].map(r => r.getBoundingClientRect())
      .filter(box => box.width && Math.abs(box.width - box.height) < 0.1);
    for (const text of picture.querySelectorAll("text")) {
      const box = text.getBoundingClientRect();
      const meets = other => other.left < box.right && other.right > box.left &&
        other.top < box.bottom && other.bottom > box.top;
      if (box.width && (box.left < frame.left - 1 || box.right > frame.right + 1))
        found.push(text.textContent);
      if (box.width && key.some(meets)) found.push(text.textContent);
    }
  }
  return found;
})()
"""
"""Words that stand out of their picture, or on a colour of its key."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it, of a search with a gain."""
    trials = []
    for n in range(40):
        values = {"bucket_cap_mb": 25.0 if n == 0 else 1.7156475350125309 * 1.13**n}
        values |= {"optimizer_implementation": ["default", "fused", "foreach"][n % 3]}
        values |= {"dataloader_workers": n % 4}
        step_s = 0.1 / (1 + n / 40) * (1 + 0.02 * (n * 7 % 5))
        steps = [step_s * (1 + 0.03 * (i * 13 % 11)) for i in range(60)]
        found = measurement(
            step_s,
            step_seconds=steps,
            phases_ms={
                "dataloader_next": step_s * 50,
                "forward": step_s * 300,
                "backward": step_s * 450,
                "comm_exposed": step_s * 100,
                "rank_wait": step_s * 20,
                "optimizer": step_s * 80,
                "step_lr_schedulers": step_s * 5,
            },
            bottleneck_evidence={"with_everything_ms": 100.0, "detailed_step_ms": 100.0},
            peak_allocated_gib=4.0 + 3 * (n % 5) / 5,
        )
        trials.append(trial(n, configuration=values, measurement=found, objective=32 / step_s))
    trials[9] = trial(9, Status.OOM, configuration=trials[9].configuration)
    for n, measured in enumerate((0, 39, 39, 0), start=40):
        again = trials[measured]
        trials.append(
            trial(
                n,
                purpose=Purpose.CONFIRM,
                configuration=again.configuration,
                measurement=again.measurement,
            )
        )
    intervals = {38: Interval(1.31, 1.08, 1.54, 6), 39: Interval(1.62, 1.58, 1.66, 6)}
    reason = "trial 39 is at least 58% faster than the baseline (about 62%; 6 pairs of starts)"
    series = [
        {
            "time_s": float(i),
            "cpu_utilization_percentage": 40.0 + i % 7,
            "system_memory_available_megabytes": 20000.0 - 9 * i,
            "disk_read_megabytes_per_s": float(i % 17),
            **{f"gpu_{g}_utilization_percentage": 80.0 + (i + g) % 20 for g in range(8)},
            **{f"gpu_{g}_memory_usage_megabytes": 4000.0 + 10 * g for g in range(8)},
        }
        for i in range(120)
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(
        path,
        trials,
        SimpleNamespace(intervals=intervals, winner=39, reason=reason),
        Objective(),
        title="perfsearch ddp-bayes-498d166a",
        job={
            "search": "runner=ddp strategy=bayes",
            "job": "gpt/small",
            "devices": "8 NVIDIA H100 80GB HBM3",
            "torch": "2.13.0",
            "command": "perfsearch-run --search --nproc-per-node 8 -o budget.trials=40 -o seed=1 "
            "train.py --epochs 3",
            "begun": "2026-11-30 12:25 UTC",
        },
        snippets=[("best/apply/env.sh", "export OMP_NUM_THREADS=1\nexport NCCL_ALGO='Ring'")],
        ended_s={t.number: 1000.0 + 2.5 * t.number for t in trials},
        system_series=series,
        memory_limit_gib=8.0,
        headroom=0.8,
    )
    return path


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of three strategies by three seeds."""
    directory = tmp_path_factory.mktemp("sweep")
    runs = []
    for place, strategy in enumerate(("bayes", "random", "nevergrad")):
        for seed in (1, 2, 3):
            costs = [1.0 + 0.01 * seed]
            costs += [1.3 - 0.03 * (n * (5 + place) * seed % 17) - 0.01 * n for n in range(20)]
            speed_up = None if (place, seed) == (1, 2) else 1.3 + 0.1 * seed
            name = f"{strategy}-{seed}"
            runs.append(searched(directory / name, costs, of(strategy, seed), speed_up))
    write_sweep(directory / "sweep.html", runs)
    return directory / "sweep.html"


def shown(browser: Browser, path: Path, screen: str) -> Page:
    """The page on a screen, whose picture is kept where that is asked for."""
    width, dark = SCREENS[screen]
    page = browser.open(path.as_uri(), width, dark=dark)
    if directory := os.environ.get("PERFSEARCH_SCREENSHOTS"):
        page.screenshot(Path(directory) / f"{path.stem}_{screen}.png")
    return page


# seven pictures, one of a knob of many values, and four of the system; two kinds of curves
@pytest.mark.parametrize(("name", "pictures"), [("report", 7 + 1 + 4), ("sweep", 2)])
@pytest.mark.parametrize("screen", SCREENS)
def test_a_browser_shows_it_whole_and_legible_and_asks_for_nothing(
    request, browser, name, pictures, screen
):
    path = request.getfixturevalue(name)
    page = shown(browser, path, screen)
    width = SCREENS[screen][0]
    assert page.requests == [path.as_uri()]
    assert page.errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    size, words = page.evaluate(SMALLEST_TEXT)
    assert size >= 11.9, f"{words!r} has {size:.1f} px"
    assert page.evaluate(OVERLAPPING) == []
    rows = "[...document.querySelectorAll('.card dd span')].map(s => s.getClientRects().length)"
    assert set(page.evaluate(rows)) <= {1}, "a word of the command is on two lines"
    visible = "[...document.querySelectorAll('svg')].filter(s => s.getClientRects().length).length"
    assert page.evaluate(visible) == pictures
    page.close()


def test_it_is_dark_where_the_user_likes_it_dark(browser, report):
    grounds = []
    for screen in ("desktop", "dark"):
        page = shown(browser, report, screen)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        text = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
        grounds.append([sum(json.loads(f"[{c[4:-1]}]")) for c in (colour, text)])
        page.close()
    (light, dark_text), (dark, light_text) = grounds
    assert light > 700 and dark < 150
    assert dark_text < 350 and light_text > 450


def test_the_best_configuration_is_copied_by_a_button(browser, report):
    page = shown(browser, report, "desktop")
    said = page.evaluate(
        """(async () => {
          let copied = "";
          Object.defineProperty(navigator, "clipboard",
            {value: {writeText: async text => { copied = text; }}});
          const button = document.querySelector(".copied button");
          button.click();
          await new Promise(done => setTimeout(done, 50));
          return [copied, button.textContent];
        })()"""
    )
    assert said == ["export OMP_NUM_THREADS=1\nexport NCCL_ALGO='Ring'", "Copied"]
    page.close()


def test_a_telephone_scrolls_tables_and_not_the_page(browser, report):
    page = shown(browser, report, "phone")
    page.evaluate("document.querySelector('details').open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    inside = "document.querySelector('details .scrolled')"
    assert page.evaluate(f"{inside}.scrollWidth > {inside}.clientWidth")
    page.close()
