"""Intervals: against a bootstrap written the obvious way, and by how often they miss in simulated benchmarks."""

import math
import statistics as standard

import numpy as np
import pytest

from eagle3_hf.evaluation.statistics import Interval, ratio_interval, spread, t_quantile


# From tables of Student's distribution.
QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 29: 2.045, 99: 1.984}


@pytest.mark.parametrize(("freedom", "expected"), QUANTILES.items())
def test_quantiles(freedom, expected):
    assert t_quantile(freedom) == pytest.approx(expected, abs=0.01)


def test_quantiles_fall_between_whole_degrees_of_freedom():
    grid = np.arange(0.5, 8, 0.1)
    values = [t_quantile(freedom) for freedom in grid]
    assert values == sorted(values, reverse=True)


def slow_interval(numerators, denominators, seed: int, draws: int) -> tuple[float, float, float]:
    """The definition in the module's docstring, one draw and one question at a time."""
    count = len(numerators[0])
    generator = np.random.default_rng(seed)
    drawn = generator.integers(count, size=(draws, count)).tolist()

    def figure(questions) -> float:
        value = 1.0
        for sums, power in ((numerators, 1), (denominators, -1)):
            for values in sums:
                value *= sum(values[question] for question in questions) ** power
        return value

    effective = min(sum(values) ** 2 / sum(value**2 for value in values) for values in (*numerators, *denominators))
    error = standard.pstdev(math.log(figure(questions)) for questions in drawn)
    width = math.exp(t_quantile(effective - 1) * error * effective / (effective - 1))
    value = figure(range(count))
    return value, value / width, value * width


@pytest.mark.parametrize("count", [2, 5, 12])
def test_interval_is_that_of_the_slow_bootstrap(count):
    generator = np.random.default_rng(count)
    tokens, other = generator.integers(10, 99, (2, count)).tolist()
    seconds, plain = generator.lognormal(0, 0.3, (2, count)).tolist()
    found = ratio_interval([tokens, plain], [seconds, other], seed=3, draws=200)
    expected = slow_interval([tokens, plain], [seconds, other], seed=3, draws=200)
    assert (found.value, found.low, found.high) == pytest.approx(expected, rel=1e-9)


def test_one_question_has_no_interval():
    found = ratio_interval([[30.0]], [[20.0]])
    assert found == Interval(1.5)
    assert str(found) == "1.50"
    assert found.contains(1e9)


def test_draws_without_any_pass_of_the_target_are_left_out():
    """A question whose text ends with the prefill has no rounds; a draw of nothing else has no figure."""
    found = ratio_interval([[8, 9, 0]], [[4, 4, 0]], draws=500)
    assert found.low < found.value < found.high < 100


def test_questions_of_the_same_ratio_leave_no_doubt():
    found = ratio_interval([[10, 20, 30]], [[5, 10, 15]])
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_equal_questions_and_more_of_them_tell_more():
    def width(seconds) -> float:
        found = ratio_interval([[50.0] * len(seconds)], [seconds])
        return found.high / found.low

    few = [0.9, 1.0, 1.1, 1.2]
    assert width(few * 4) < width(few)
    assert width([*few, 20.0]) > 10 * width(few)  # one question decides alone


NOISE = {
    "steady": lambda generator, count: generator.lognormal(0, 0.05, count),
    "spikes": lambda generator, count: (
        generator.lognormal(0, 0.02, count) + (generator.random(count) < 0.1) * generator.exponential(1, count)
    ),
    "bursts": lambda generator, count: 1 + generator.exponential(0.1, count),
}


def simulated(generator, count: int, noise, gain: float = 1.0):
    """Tokens, and the seconds of two columns, of which the second is `gain` times as fast."""
    tokens = generator.integers(20, 129, count).astype(float)
    work = tokens * generator.lognormal(0, 0.2, count) * 0.04
    return tokens, work * noise(generator, count), work * noise(generator, count) / gain


@pytest.mark.statistical
def test_identical_columns_are_told_apart_in_at_most_one_of_twenty_runs():
    missed, percentiles_missed, runs = 0, 0, 0
    for count in (2, 4, 8, 20):
        for kind, noise in NOISE.items():
            generator = np.random.default_rng([count, *kind.encode()])
            for run in range(150):
                tokens, plain, same = simulated(generator, count, noise)
                missed += not ratio_interval([tokens, plain], [same, tokens], seed=run, draws=400).contains(1.0)
                drawn = generator.integers(count, size=(400, count))
                low, high = np.percentile(plain[drawn].sum(1) / same[drawn].sum(1), [2.5, 97.5])
                percentiles_missed += not low <= 1 <= high
                runs += 1
    assert missed / runs <= 1 / 20
    assert missed > 0, "an interval that never misses tells nothing"
    assert percentiles_missed / runs > 2 / 20, "the usual interval, for which this test is no formality"


@pytest.mark.statistical
def test_a_real_difference_is_found():
    generator = np.random.default_rng(0)
    found = 0
    for run in range(100):
        tokens, plain, faster = simulated(generator, 20, NOISE["steady"], gain=1.1)
        found += ratio_interval([tokens, plain], [faster, tokens], seed=run, draws=400).low > 1.0
    assert found > 90


def test_spread_of_repeated_times():
    assert spread([1.0, 2.0]) == 0.0
    assert spread([1.0] * 10) == 0.0
    assert spread([1.0] * 8 + [1.5] * 4) == pytest.approx(0.5)
