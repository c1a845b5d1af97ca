"""Whether a head's probabilities are what they say: how often the first choice is right, by its probability."""

from dataclasses import dataclass

import numpy as np


BINS = 10


@dataclass(frozen=True)
class CalibrationBin:
    """The first choices whose probability is in a tenth of 0 to 1.

    Attributes:
        low, high: The ends of the tenth.
        count: Number of choices.
        probability: Their mean probability.
        accuracy: Share of them that were right.
    """

    low: float
    high: float
    count: int
    probability: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Calibration at depth 1.

    Attributes:
        bins: Those that are not empty.
        error: Expected calibration error: the mean difference of probability and accuracy, weighted by count.
        bias: Mean probability minus accuracy; above 0, the head is too sure.
    """

    bins: list[CalibrationBin]
    error: float
    bias: float


def calibration(probabilities: np.ndarray, hits: np.ndarray) -> Calibration:
    """Compare probabilities (n,) of first choices with whether they were right (n,)."""
    place = np.clip((probabilities * BINS).astype(int), 0, BINS - 1)
    bins = []
    for index in range(BINS):
        own = place == index
        if own.any():
            bins.append(
                CalibrationBin(
                    index / BINS,
                    (index + 1) / BINS,
                    int(own.sum()),
                    float(probabilities[own].mean()),
                    float(hits[own].mean()),
                )
            )
    total = max(1, len(hits))
    error = sum(each.count * abs(each.probability - each.accuracy) for each in bins) / total
    bias = float(probabilities.mean() - hits.mean()) if len(hits) else 0.0
    return Calibration(bins, error, bias)


__all__ = ["Calibration", "CalibrationBin", "calibration"]
