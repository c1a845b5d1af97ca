"""What rounds cost, in plain steps of the target: learnt from rounds beside each other.

A machine that does other work is slower for a while. So seconds are compared only with those of the same round or the
one before it, in units of the plain step that the machine would have made at that moment. Such ratios stay right
however the machine's speed changes, and what they tell can be kept for later processes (see `cost_table.py`).
"""

import math
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from statistics import median
from typing import Any

import numpy as np


_PAIRS = 64  # rounds beside each other that are remembered
_KNOTS = 7  # deviations are known at 0, 1, 3, 7, ... drafted nodes, and lie on straight lines between
_OUTLIER = 1.5  # a pair counts less the further it is off, beyond so many times what half of them are off
_LEAST_OUTLIER = 0.15  # and beyond this logarithm of a ratio
_EACH = 4  # pairs after which they are fitted again; the first ones are at once
_FITS = 2  # times that the weights of outliers are found anew with each pair
_SMOOTH = 0.5  # pairs for which it counts that neighbouring knots deviate alike
_EXPECTED = 0.03  # pairs for which it counts that a knot is as expected
_REMEMBERED = 2.0  # the same, if what is expected was measured by an earlier process
_RECENT_DRAFTS = 16  # rounds of the head
_PRIOR_SLOPES = 8  # pairs of them for which the expected cost of a further level counts


class VerifyCosts:
    """The cost of verifying a tree by its number of drafted nodes, in plain steps.

    What is learnt is by how much the logarithms of the costs deviate from those of an expected curve: of two rounds
    beside each other that verified different numbers, the ratio of their seconds tells the difference of two
    deviations. They are fitted to the last pairs by least squares, in which outliers count less.

    Args:
        shape: The expected cost of each number of nodes from 0 on, 1.0 for 0.
    """

    def __init__(self, shape: Callable[[int], float]):
        self._shape = shape
        # Of each pair: the difference of its weights of the knots, and of its deviations. The oldest are written over.
        self._rows, self._ratios = np.zeros((_PAIRS, _KNOTS)), np.zeros(_PAIRS)
        self._plain = deque[bool](maxlen=_PAIRS)  # whether one of a pair was a plain step
        self._added = 0
        # Of the round before: its nodes, and the logarithm of its seconds divided by the expected cost.
        self._last: tuple[int, float] | None = None
        self._expected = np.zeros(_KNOTS)
        self._weight = _EXPECTED
        self._deviations = np.zeros(_KNOTS)
        self._costs: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether anything was measured, or remembered."""
        return self._last is not None or self._weight > _EXPECTED

    @property
    def num_plain(self) -> int:
        """Number of remembered pairs that compare a tree with a plain step."""
        return sum(self._plain)

    def add(self, nodes: int, seconds: float) -> None:
        """Compare a round with the one before, if that had another number of nodes.

        That is the newest round that was added here. The first round of a call is compared with the last of a call
        before; if the machine's speed has changed meanwhile, the pair is an outlier, which counts less.
        """
        log = math.log(max(seconds, 1e-9) / self._shape(nodes))
        if self._last is not None and self._last[0] != nodes:
            before, then = self._last
            slot = self._added % _PAIRS
            self._rows[slot], self._ratios[slot] = _at_knots(nodes) - _at_knots(before), log - then
            self._plain.append(not (nodes and before))
            self._added += 1
            if self._added <= _EACH or self._added % _EACH == 0:
                self._fit()
        self._last = nodes, log

    def forget(self) -> None:
        """Forget all that was measured or remembered."""
        self._added, self._last, self._weight = 0, None, _EXPECTED
        self._plain.clear()
        self._expected, self._deviations = np.zeros(_KNOTS), np.zeros(_KNOTS)
        self._costs = {}

    def of(self, nodes: int) -> float:
        """Return the cost of verifying a tree, in plain steps."""
        cost = self._costs.get(nodes)
        if cost is None:
            deviation = float(_at_knots(nodes) @ self._deviations)
            cost = self._costs[nodes] = self._shape(nodes) * math.exp(deviation)
        return cost

    def _fit(self) -> None:
        """Move the deviations to those that fit the pairs best."""
        rows, ratios = self._rows[: self._added], self._ratios[: self._added]
        prior = _SMOOTH * _ROUGHNESS + self._weight * np.eye(_KNOTS)
        for _ in range(_FITS):
            off = np.abs(rows @ self._deviations - ratios)
            bound = max(_LEAST_OUTLIER, _OUTLIER * float(np.partition(off, len(off) // 2)[len(off) // 2]))
            weighted = (1 / (1 + (off / bound) ** 2))[:, None] * rows
            left, right = weighted.T @ rows + prior, weighted.T @ ratios + prior @ self._expected
            self._deviations[1:] = np.linalg.solve(left[1:, 1:], right[1:])  # a plain step is the unit
        self._costs = {}

    def like(self) -> "VerifyCosts":
        """Return costs that begin with what these know, and then go their own way."""
        return deepcopy(self)

    def state(self) -> list[float]:
        """Return what is known as numbers that JSON can hold."""
        return [round(float(deviation), 4) for deviation in self._deviations]

    def restore(self, state: Any) -> None:
        """Begin with what `state` returned.

        Raises:
            ValueError, TypeError: the state has another form.
        """
        deviations = np.asarray(state, dtype=np.float64)
        if deviations.shape != (_KNOTS,) or not (np.abs(deviations) < 5).all() or deviations[0]:
            raise ValueError(f"no costs of trees: {state!r}")
        self._expected, self._deviations, self._weight = deviations, deviations.copy(), _REMEMBERED
        self._costs = {}


@cache
def _at_knots(nodes: int) -> np.ndarray:
    """Return the weights (K,) of the knots at a number of nodes."""
    place = min(math.log2(nodes + 1), _KNOTS - 1)
    return np.maximum(0.0, 1.0 - np.abs(np.arange(_KNOTS) - place))


def _roughness() -> np.ndarray:
    """Return the matrix (K, K) of the sum of squared differences of neighbouring knots, the first one left out."""
    steps = np.diff(np.eye(_KNOTS), axis=0)[1:]
    return steps.T @ steps


_ROUGHNESS = _roughness()


class DraftCosts:
    """The cost of drafting by number of levels, in plain steps: a straight line through the last measurements.

    Args:
        first: Expected cost of feeding the head and growing one level.
        further: Expected cost of each further level.
    """

    def __init__(self, first: float, further: float):
        self._expected = first, further
        self._is_restored = False
        self._kept: deque[tuple[int, float]] = deque(maxlen=_RECENT_DRAFTS)
        self._line: tuple[float, float] | None = None

    def add(self, levels: int, cost: float) -> None:
        """Add the cost of a round's drafting."""
        self._kept.append((levels, cost))
        self._line = None

    def forget(self) -> None:
        """Forget all measurements."""
        self._kept.clear()
        self._line = None

    def another(self, levels: int) -> float:
        """Return the cost of one more level than `levels`; feeding the head is part of the first one."""
        if self._line is None:
            self._line = self._fit(list(self._kept))
        return self._line[1 if levels else 0]

    def _fit(self, kept: list[tuple[int, float]]) -> tuple[float, float]:
        """Return the line whose slope is the median of all pairs' (Theil and Sen), and of the expected one as some."""
        first, further = self._expected
        if not kept:
            return first, further
        scale = median(cost / (first + further * (levels - 1)) for levels, cost in kept)
        slopes = [(high - low) / (more - less) for less, low in kept for more, high in kept if more > less]
        slope = max(0.0, median([*slopes, *[scale * further] * _PRIOR_SLOPES]))
        return max(0.0, median(cost - slope * (levels - 1) for levels, cost in kept)), slope

    def state(self) -> list[float]:
        """Return what is known as numbers that JSON can hold: the first level's cost and that of each further one."""
        return (
            [max(1e-5, round(self.another(0), 5)), round(self.another(1), 5)]
            if self._kept or self._is_restored
            else []
        )

    def restore(self, state: Any) -> None:
        """Begin with what `state` returned as what is expected.

        Raises:
            ValueError, TypeError: the state has another form.
        """
        if not state:
            return
        first, further = state
        if not (0 < first < 1000 and 0 <= further < 1000):
            raise ValueError(f"no costs of drafting: {first!r}, {further!r}")
        self._expected, self._is_restored = (float(first), float(further)), True
        self._line = None
