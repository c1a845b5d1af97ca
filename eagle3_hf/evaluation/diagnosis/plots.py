"""Plots of a diagnosis."""

from typing import Any

from ...utils.drawing import INK, SERIES, drawn, legend
from .result import Diagnosis


def misses(result: Diagnosis) -> str:
    """Return a plot of the number of misses of each cause."""
    causes = list(result.causes)

    def draw(axes: Any) -> None:
        axes.barh(range(len(causes)), [result.causes[cause] for cause in causes], color=SERIES[1], height=0.6)
        axes.set_yticks(range(len(causes)), [cause.value.replace("_", " ") for cause in causes])
        axes.invert_yaxis()
        axes.set_xlabel("misses")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="x")

    return drawn(draw, len(causes), "Misses by cause")


def by_depth(result: Diagnosis) -> str:
    """Return a plot of acceptance in trees, and of the accuracy of first choices, at each depth."""
    series = {"accepted in trees": result.stats.per_depth, "first choice right": result.accuracy_by_depth}
    colours = dict(zip(series, SERIES, strict=False))

    def draw(axes: Any) -> None:
        for name, shares in series.items():
            axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=colours[name])
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("depth")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
        legend(axes, colours)

    return drawn(draw, 8, "Acceptance by depth")


def calibration(result: Diagnosis) -> str:
    """Return a plot of how often the first choice is right, by its probability; the area of a dot is their number."""
    bins, largest = result.calibration.bins, max((each.count for each in result.calibration.bins), default=1)

    def draw(axes: Any) -> None:
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.8)
        sizes = [8 + 80 * each.count / largest for each in bins]
        axes.scatter([each.probability for each in bins], [each.accuracy for each in bins], s=sizes, color=SERIES[0])
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("probability of the first choice")
        axes.set_ylabel("share that is right")
        axes.grid()

    return drawn(draw, 8, "Calibration of the head's probabilities")


def settings(result: Diagnosis) -> str:
    """Return a plot of the accuracy under other settings; those that beat the present one have another colour."""
    tried = result.sweep

    def draw(axes: Any) -> None:
        for place, each in enumerate(tried):
            axes.plot([each.accuracy], [place], "o", markersize=5, color=SERIES[1 if each.is_better else 7])
        axes.axvline(tried[0].accuracy - tried[0].gain, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(tried)), [str(each.setting) for each in tried])
        axes.set_ylim(len(tried) - 0.5, -0.5)
        axes.set_xlim(0, min(1.02, 1.1 * max(axes.get_xlim())))
        axes.set_xlabel("first choice right (line: present setting)")
        axes.grid(axis="x")

    return drawn(draw, len(tried), "Accuracy under other settings")
