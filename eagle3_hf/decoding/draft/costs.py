"""Seconds of a round by its size: running medians, and between and beyond them the shape of a known machine."""

import math
from collections import deque
from collections.abc import Callable
from statistics import median


_KEPT = 7  # measurements of each size, so that the median ignores disturbed ones
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
        self._estimates: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        return bool(self._ratios) or self._scale is not None

    def count(self, size: int) -> int:
        """Return the number of kept measurements of a size."""
        return len(self._ratios.get(size, ()))

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        self._ratios.setdefault(size, deque(maxlen=_KEPT)).append(seconds / self._shape(size))
        self._estimates.clear()

    def seconds(self, size: int) -> float:
        """Return the expected seconds of a size.

        Raises:
            ValueError: nothing is known yet.
        """
        if size not in self._estimates:
            self._estimates[size] = self._ratio(size) * self._shape(size)
        return self._estimates[size]

    def _ratio(self, size: int) -> float:
        if not self._ratios:
            if self._scale is None:
                raise ValueError("no measurement and no scale")
            return self._scale
        total = weights = 0.0
        for other, ratios in self._ratios.items():
            distance = abs(math.log2((size + 1) / (other + 1)))
            weight = len(ratios) * math.exp(-_NARROW * distance)
            total += weight * median(ratios)
            weights += weight
        return total / weights

    def like(self) -> "Curve":
        """Return a curve that begins with these ratios, each as one measurement."""
        curve = Curve(self._shape, self._scale)
        for size, ratios in self._ratios.items():
            curve._ratios[size] = deque([median(ratios)], _KEPT)
        return curve
