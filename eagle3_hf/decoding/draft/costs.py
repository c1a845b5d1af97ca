"""Seconds of a round by its size: running medians, and between and beyond them the shape of a known machine."""

import math
from collections import deque
from collections.abc import Callable
from statistics import median


_KEPT = 7  # measurements of each size, so that the median ignores disturbed ones
# Measurements of all sizes after which one is forgotten. A size that looked dear while the machine did other work is
# otherwise never tried again.
_AGE = 64
_ENOUGH = 3  # of them, to need no others
_NARROW = 1.5  # how fast a measurement's weight falls with the distance in octaves


class Curve:
    """Seconds as a function of a size, measured at some sizes.

    What is measured is the ratio of the seconds to a curve of known shape. The ratios vary slowly, so that those of
    nearby sizes tell the others.

    Args:
        shape: The expected seconds, up to a factor, of each size from 0 on.
        scale: Seconds of one unit of `shape`, until something is measured; `None` if it is not known.
    """

    def __init__(self, shape: Callable[[int], float], scale: float | None = None):
        self._shape = shape
        self._scale = scale
        self._ratios: dict[int, deque[float]] = {}
        self._newest: dict[int, int] = {}  # size -> number of its newest measurement
        self._count = 0
        self._estimates: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._ratios) or self._scale is not None

    def count(self, size: int) -> int:
        """Return the number of kept measurements of a size."""
        return len(self._ratios.get(size, ()))

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        self._count += 1
        self._ratios.setdefault(size, deque(maxlen=_KEPT)).append(seconds / self._shape(size))
        self._newest[size] = self._count
        for other in [other for other, newest in list(self._newest.items()) if self._count - newest > _AGE]:
            self._ratios.pop(other, None)
            self._newest.pop(other, None)
        self._estimates.clear()

    def seconds(self, size: int) -> float:
        """Return the expected seconds of a size.

        Raises:
            ValueError: nothing is known yet.
        """
        estimate = self._estimates.get(size)
        if estimate is None:
            estimate = self._estimates[size] = self._ratio(size) * self._shape(size)
        return estimate

    def _ratio(self, size: int) -> float:
        if not self._ratios:
            if self._scale is None:
                raise ValueError("no measurement and no scale")
            return self._scale
        if self.count(size) >= _ENOUGH:
            return median(self._ratios[size])
        total = weights = 0.0
        for other, ratios in list(self._ratios.items()):  # another thread may add a size
            distance = abs(math.log2((size + 1) / (other + 1)))
            weight = len(ratios) * math.exp(-_NARROW * distance)
            total += weight * median(ratios)
            weights += weight
        return total / weights

    def like(self) -> "Curve":
        """Return a curve that begins with these ratios, each as one measurement."""
        curve = Curve(self._shape, self._scale)
        for size, ratios in list(self._ratios.items()):
            curve._ratios[size] = deque([median(ratios)], _KEPT)
            curve._newest[size] = 0
        return curve


class LevelCosts:
    """Seconds of drafting by number of levels.

    Args:
        first: Expected seconds of feeding the head and growing one level, in any unit.
        further: Expected seconds of each further level, in the same unit.
    """

    def __init__(self, first: float, further: float):
        self._first = first
        self._further = further
        self._kept: dict[int, deque[float]] = {}

    def add(self, levels: int, seconds: float) -> None:
        """Add a measurement."""
        self._kept.setdefault(levels, deque(maxlen=_KEPT)).append(seconds)

    def forget(self) -> None:
        """Forget all measurements."""
        self._kept.clear()

    def another(self, levels: int, unit: float) -> float:
        """Return the seconds of one more level than `levels`; feeding the head is part of the first one.

        Args:
            levels: Number of levels.
            unit: Seconds of one unit, used until something is measured.
        """
        if not self._kept:
            return unit * (self._further if levels else self._first)
        medians = {count: median(kept) for count, kept in list(self._kept.items())}
        near = min(medians, key=lambda count: abs(count - max(1, levels)))
        others = [count for count in medians if count != near]
        if others:
            # Neighbours tell it; else the nearest two that are known.
            other = (
                levels + 1 if near == levels and levels + 1 in medians else min(others, key=lambda c: abs(c - near))
            )
            step = max(0.0, (medians[other] - medians[near]) / (other - near))
        else:
            step = medians[near] * self._further / (self._first + self._further * (near - 1))
        return step if levels else max(0.0, medians[near] - step * (near - 1))
