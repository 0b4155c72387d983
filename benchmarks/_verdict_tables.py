"""Tables of how often comparisons of simulated readings are right, by rule and by noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from _verdict_noise import (
    ONE_ARM,
    STARTS,
    STEPS,
    Floats,
    Orders,
    StepNoise,
    block_scores,
    blocks_of_steps,
    chosen_orders,
    free_orders,
    logs_of_starts,
    offsets,
    two_kinds,
)
from scipy.special import stdtrit

from perfsearch.core.verdict import (
    Answer,
    Course,
    Plan,
    follow,
    plan_of_starts,
    plan_of_steps,
    read,
)
from perfsearch.core.verdict import two_kinds as found_two_kinds

GAINS = (0.0, 0.01, 0.02, 0.03, 0.05)
LEAST_SPREAD = 2e-3

Rule = Callable[[Floats], Course]
"""From the pairs of many comparisons, a row each, to how each of them went."""


def at_fixed_looks(
    logs: Floats, looks: tuple[int, ...], alpha: float, precision: float | None
) -> Course:
    """Student's interval at each look, its error the same at each.

    Args:
        logs: of pairs.
        looks: numbers of pairs.
        alpha: error of each interval.
        precision: half-width at which it ends early, as it does where the baseline is faster;
            ``None``: only at the last look.

    """
    count = len(logs)
    course = Course(
        np.full(count, "open", dtype="<U8"), np.zeros(count, int), np.zeros(count), np.zeros(count)
    )
    going = np.ones(count, dtype=bool)
    for look in looks:
        mean = logs[:, :look].mean(axis=1)
        deviation = np.maximum(logs[:, :look].std(axis=1, ddof=1), LEAST_SPREAD)
        half = float(stdtrit(look - 1, 1 - alpha / 2)) * deviation / math.sqrt(look)
        answer = np.where(mean - half > 0, "faster", np.where(mean + half < 0, "slower", "open"))
        course.answers[going], course.pairs[going] = answer[going], look
        course.mean[going], course.half_width[going] = mean[going], half[going]
        if precision is not None:
            going = going & (half > precision) & (mean + half >= 0)
    return course


def confirmation_before(logs: Floats, finalists: int = 1) -> Course:
    """The search's confirmation as it was: three looks, equally strict."""
    return at_fixed_looks(logs, (3, 5, 6), 0.05 / 3 / finalists, 0.01)


def six_pairs(logs: Floats) -> Course:
    """Six pairs, and Student's interval once."""
    return at_fixed_looks(logs, (6,), 0.05, None)


def claims(course: Course) -> Floats:
    """Which comparisons claim a difference."""
    return np.isin(course.answers, [Answer.FASTER.value, Answer.SLOWER.value])


def covers(course: Course, gain: float) -> float:
    """Share of comparisons whose interval has the truth."""
    return float((np.abs(course.mean - math.log1p(gain)) <= course.half_width).mean())


def row(name: str, rule: str, courses: dict[float, Course]) -> str:
    """False claims, the worst coverage, power, and pairs: of no difference, and of 3%."""
    power = [f"{np.mean(courses[g].answers == Answer.FASTER.value):.0%}" for g in GAINS[1:]]
    cells = [
        name,
        rule,
        f"{claims(courses[0.0]).mean():.1%}",
        f"{min(covers(course, gain) for gain, course in courses.items()):.1%}",
        *power,
        f"{np.median(courses[0.0].pairs):.0f}",
        f"{np.median(courses[0.03].pairs):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| noise | rule | false claims | coverage | 1% | 2% | 3% | 5% | {unit}, none | {unit}, 3% |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def starts(count: int) -> Iterator[str]:
    """Each noise between starts, and each rule."""
    rules: dict[str, tuple[Rule, Orders]] = {
        "before": (confirmation_before, free_orders(6, reversed_pairs=True)),
        "six pairs": (six_pairs, free_orders(6)),
    }
    for most in (6, 8):
        plan = plan_of_starts(most)
        rules[f"at most {most}"] = (
            lambda logs, plan=plan: follow(logs, plan),
            chosen_orders(plan.most),
        )
    yield HEAD.format(unit="starts an arm")
    for name, noise in {**STARTS, **ONE_ARM}.items():
        for rule, (end, orders) in rules.items():
            courses = {g: end(logs_of_starts(noise, g, count, orders, 3)) for g in GAINS}
            yield row(name, rule, courses)


def time_ends(count: int) -> Iterator[str]:
    """Time is over after three blocks, where starts vary by 1%."""
    noise, orders = offsets(0.01), free_orders(3)
    yield "| rule | finalists | false claims | 3% | 5% | 10% |\n|---|---|---|---|---|---|"
    for finalists in (1, 2):
        plan = plan_of_starts(8, comparisons=finalists)
        rules: dict[str, Callable[[Floats], object]] = {
            "before": lambda logs, n=finalists: (
                at_fixed_looks(logs, (3,), 0.05 / 3 / n, None).answers
            ),
            "the error that is left": lambda logs, plan=plan: read(logs, plan, last=True).answers,
        }
        for name, answers in rules.items():
            seen = {
                gain: answers(logs_of_starts(noise, gain, count, orders, 3))
                for gain in (0.0, 0.03, 0.05, 0.10)
            }
            false = np.isin(seen[0.0], ["faster", "slower"]).mean()
            power = " | ".join(f"{np.mean(seen[g] == 'faster'):.0%}" for g in (0.03, 0.05, 0.10))
            yield f"| {name} | {finalists} | {false:.1%} | {power} |"


def overstated(count: int) -> Iterator[str]:
    """What is said of a gain of 3% where one is claimed."""
    plan = plan_of_starts(8)
    yield (
        '| starts vary by | ends | claimed | estimate, mean | "at least", mean | starts an arm |\n'
        "|---|---|---|---|---|---|"
    )
    for noise in (0.01, 0.02, 0.03):
        for ends, sharpness in (("once shown", 1.0), ("once half is sure", 0.5)):
            how = replace(plan, sharpness=sharpness)
            logs = logs_of_starts(offsets(noise), 0.03, count, chosen_orders(plan.most), 3)
            course = follow(logs, how)
            won = course.answers == Answer.FASTER.value
            low = np.expm1(course.mean - course.half_width)[won].mean()
            estimate = np.expm1(course.mean)[won].mean()
            yield (
                f"| {noise:.0%} | {ends} | {won.mean():.0%} | {estimate:.1%} | {low:.1%} | "
                f"{np.median(course.pairs):.0f} |"
            )


def kinds(count: int) -> Iterator[str]:
    """How often the starts of an arm are said to be of two kinds."""
    truths = {
        "one kind, 1%": offsets(0.01),
        "30% slower by 8%": two_kinds(0.3, 0.08),
        "10% slower by 15%": two_kinds(0.1, 0.15),
    }
    yield "| truth | of 6 starts | of 8 | of 12 |\n|---|---|---|---|"
    for name, noise in truths.items():
        shares = []
        for blocks in (6, 8, 12):
            generator = np.random.default_rng(4)
            places = free_orders(blocks)[generator.integers(0, 200, count)] + 2 * np.arange(blocks)
            costs = np.exp(noise(generator, places)[:, 0])
            shares.append(f"{np.mean([found_two_kinds(arm) is not None for arm in costs]):.1%}")
        yield f"| {name} | " + " | ".join(shares) + " |"


def steps_alone(baseline: Floats, other: Floats) -> Course:
    """All steps of 100 pairs taken as independent: Welch's interval of their logs."""
    count = len(baseline)
    one, two = (np.log(x).reshape(count, -1) for x in (baseline, other))
    mean = one.mean(axis=1) - two.mean(axis=1)
    half = 1.96 * np.sqrt((one.var(axis=1) + two.var(axis=1)) / one.shape[1])
    answer = np.where(mean > half, "faster", np.where(mean < -half, "slower", "open"))
    return Course(answer, np.full(count, 100), mean, half)


def steps(count: int) -> Iterator[str]:
    """Each noise inside one start, and each rule."""
    plan = plan_of_steps(100)
    turns = np.tile(np.array([[[0], [1]]]), (1, 1, 100))
    chosen = chosen_orders(plan.most, 50)
    yield HEAD.format(unit="pairs")
    for name, noise in STEPS.items():
        drawn = {g: blocks_of_steps(noise, g, count, 10, chosen, 3) for g in GAINS}
        fixed = {g: blocks_of_steps(noise, g, count, 10, turns, 3) for g in GAINS}
        yield row(name, "steps taken alone, in turns", {g: steps_alone(*fixed[g]) for g in GAINS})
        yield row(name, "pairs of blocks", {g: follow(scores(*drawn[g]), plan) for g in GAINS})


def scores(baseline: Floats, other: Floats) -> Floats:
    """Pairs of blocks, from the seconds of their steps."""
    return block_scores(baseline) - block_scores(other)


def lengths(count: int) -> Iterator[str]:
    """How often a difference of 1% is shown, by the length of a block and the number of pairs."""
    names = [
        "steps vary by 5%",
        "neighbours go together (0.8, 5%)",
        "load of 5%, period 40 steps",
        "load of 5%, period 20 steps",
    ]
    shapes = ((5, 100), (10, 100), (20, 100), (40, 100), (10, 200), (5, 400), (2, 1000))
    yield "| noise | " + " | ".join(f"{s} steps, {p} pairs" for s, p in shapes) + " |"
    yield "|---|" + "---|" * len(shapes)
    for name in names:
        yield f"| {name} | " + " | ".join(_power(STEPS[name], *s, count) for s in shapes) + " |"


def _power(noise: StepNoise, steps_in_block: int, pairs: int, count: int) -> str:
    plan = plan_of_steps(pairs)
    course = follow(
        scores(
            *blocks_of_steps(noise, 0.01, count, steps_in_block, chosen_orders(plan.most, 20), 3)
        ),
        plan,
    )
    return f"{np.mean(course.answers == Answer.FASTER.value):.0%}"


def comes_and_goes(count: int) -> Iterator[str]:
    """Claims of equal arms between which a difference comes and goes."""
    aware = plan_of_steps(100)
    yield "| neighbouring pairs go together by | pairs taken alone | as they are |\n|---|---|---|"
    for together in (0.0, 0.3, 0.5, 0.8):
        logs = np.random.default_rng(6).standard_normal((count, 100))
        for pair in range(1, 100):
            logs[:, pair] *= math.sqrt(1 - together**2)
            logs[:, pair] += together * logs[:, pair - 1]
        shares = [f"{claims(follow(logs, plan)).mean():.1%}" for plan in (Plan(aware.looks), aware)]
        yield f"| {together} | " + " | ".join(shares) + " |"
