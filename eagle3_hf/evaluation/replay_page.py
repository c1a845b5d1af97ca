"""A replay as one HTML page: tau and modelled speed-up against the size of the tree."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..utils.drawing import INK, SERIES, drawn, legend
from .html import bullets, document, figure, table
from .tree_sizes import MeasuredSize, SizePoint


Modelled = Mapping[str, Sequence[SizePoint]]
Measured = Mapping[str, Sequence[MeasuredSize]]


def to_html(title: str, about: Sequence[str], modelled: Modelled, measured: Measured) -> str:
    """Return the page.

    Args:
        title: Its title.
        about: What was replayed, with which costs.
        modelled: Points of each family of trees, by its name such as "depth 3, top_k 4".
        measured: Columns of a benchmark, by the same names.
    """
    lines = [
        [name, str(point.nodes), f"{point.tau:.2f}", f"{point.speedup:.2f}"]
        for name, points in modelled.items()
        for point in points
    ]
    return document(
        title,
        [
            bullets(about),
            '<div class="plots">',
            figure("Speed-up by size of the tree", speedup_by_size(modelled, measured)),
            figure("Mean acceptance length (tau)", tau_by_size(modelled, measured)),
            "</div>",
            table(["trees", "nodes", "tau", "modelled speed-up"], lines),
        ],
    )


def speedup_by_size(modelled: Modelled, measured: Measured) -> str:
    """Return a plot of the cost model's curves, with measured speed-ups as dots with their intervals."""

    def dots(axes: Any, points: Sequence[MeasuredSize], colour: str) -> None:
        for point in points:
            found = point.speedup
            if found.low is not None and found.high is not None:
                axes.plot([point.nodes] * 2, [found.low, found.high], color=colour, linewidth=1.6)
            axes.plot([point.nodes], [found.value], "o", markersize=5, color=colour)

    return _by_size(modelled, measured, lambda point: point.speedup, dots, "speed-up (line: model, dot: measured)")


def tau_by_size(modelled: Modelled, measured: Measured) -> str:
    """Return a plot of tau, replayed as curves and measured as dots."""

    def dots(axes: Any, points: Sequence[MeasuredSize], colour: str) -> None:
        known = [point for point in points if point.tau is not None]
        axes.plot([point.nodes for point in known], [point.tau for point in known], "o", markersize=5, color=colour)

    return _by_size(modelled, measured, lambda point: point.tau, dots, "tau (line: replay, dot: measured)")


def _by_size(
    modelled: Modelled,
    measured: Measured,
    value: Callable[[SizePoint], float],
    dots: Callable[[Any, Sequence[MeasuredSize], str], None],
    label: str,
) -> str:
    colours = {name: SERIES[at % len(SERIES)] for at, name in enumerate(modelled)}

    def draw(axes: Any) -> None:
        for name, points in modelled.items():
            axes.plot([point.nodes for point in points], [value(point) for point in points], color=colours[name])
            dots(axes, measured.get(name, ()), colours[name])
        axes.axhline(1.0, color=INK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:g}")
        axes.set_xlabel("drafted nodes")
        axes.set_ylabel(label)
        axes.grid(axis="y")
        legend(axes, colours)

    return drawn(draw, 8, label)


__all__ = ["speedup_by_size", "tau_by_size", "to_html"]
