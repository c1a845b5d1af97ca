"""Intervals for ratios of sums, by a paired bootstrap over questions.

A figure such as a speed-up is a ratio of sums over questions: tokens per second of one column, divided by those of
another on the same questions. Questions are drawn again with replacement, all their sums together, and the spread of
the figure's logarithm over the draws is its standard error. The interval is the figure times and divided by
`exp(t * standard error)`, with Student's t for the number of questions. Percentiles of the draws would be too narrow
for the few questions of a benchmark: with five, they miss the truth in about one of six runs, not in one of twenty.

A sum in which few questions have most of the weight tells as little as those few alone, so that `n` is the effective
number of questions (Kish): `1 / sum of squared shares`, of the sum in which it is smallest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


DRAWS = 2000
_LARGEST = 100.0  # of a logarithm, where nothing is known
_FEW = (12.7062, 4.3027, 3.1824, 2.7764)  # quantiles of t for 1 to 4, where its expansion is not exact enough


@dataclass(frozen=True)
class Interval:
    """A figure and the ends of its 95% interval, which are `None` where a single question decides."""

    value: float
    low: float | None = None
    high: float | None = None

    def contains(self, value: float) -> bool:
        """Whether a value is inside; without ends, any is."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def __str__(self) -> str:
        ends = "" if self.low is None or self.high is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{ends}"


def ratio_interval(
    numerators: Sequence[Sequence[float]], denominators: Sequence[Sequence[float]], seed: int = 0, draws: int = DRAWS
) -> Interval:
    """Return a product of sums divided by another product of sums, and its interval.

    Args:
        numerators: Values of each question, one sequence for each sum of the numerator.
        denominators: The same for the denominator. All sums must be positive.
        seed: Seed of the draws.
        draws: Number of draws.
    """
    above, below = np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)
    value = float(above.sum(axis=1).prod() / below.sum(axis=1).prod())
    sums = np.concatenate([above, below])
    count = _effective_count(sums)
    if count <= 1:
        return Interval(value)
    drawn = np.random.default_rng(seed).integers(sums.shape[1], size=(draws, sums.shape[1]))
    # A draw may consist of questions without any of something, such as drafted rounds.
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(above[:, drawn].sum(axis=2)).sum(axis=0) - np.log(below[:, drawn].sum(axis=2)).sum(axis=0)
    # The draws vary less than samples do. The square root of this factor would suffice for questions of equal weight.
    error = float(np.std(logs[np.isfinite(logs)])) * count / (count - 1)
    width = math.exp(min(t_quantile(count - 1) * error, _LARGEST))
    return Interval(value, value / width, value * width)


def _effective_count(sums: np.ndarray) -> float:
    """Return the smallest effective number of questions of any of these sums (sums, questions)."""
    shares = sums / sums.sum(axis=1, keepdims=True)
    return float((1 / (shares**2).sum(axis=1)).min())


def t_quantile(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t distribution, exact to 0.01 for whole degrees of freedom."""
    if freedom <= 1:
        return _FEW[0] / freedom  # its tail is that of 1 / freedom
    if freedom < len(_FEW):
        low = int(freedom)
        share = (1 / low - 1 / freedom) / (1 / low - 1 / (low + 1))
        return _FEW[low - 1] ** (1 - share) * _FEW[low] ** share
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def spread(seconds: Sequence[float]) -> float:
    """Return how far repeated times of the same work lie apart: their 90th percentile over their 10th, minus 1."""
    if len(seconds) < 3:
        return 0.0
    low, high = np.percentile(seconds, [10, 90])
    return float(high / low - 1)
