"""Plots of a benchmark's figures."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ..utils.drawing import INK, NUM_SERIES, SERIES, drawn, legend
from .results import Figures


_SPLIT = {"prefill": "prefill", "draft": "draft", "verify": "verify", "host": "host", "rest": "decoding, not split"}


def speedups(figures: Sequence[Figures], columns: Sequence[str]) -> str:
    """Return a plot of the speed-up of each column, with its interval."""

    def draw(axes: Any) -> None:
        for place, each in enumerate(figures):
            _interval(axes, each, place, _colour(each.column, columns))
        axes.set_yticks(range(len(figures)), [each.column for each in figures])
        _ratio_axis(axes, len(figures))

    return drawn(draw, len(figures), "Speed-up of each column with its 95% interval")


def speedups_by_task(by_task: Mapping[str, Sequence[Figures]], columns: Sequence[str]) -> str:
    """Return a plot of the speed-ups in each task; the columns keep the colours that they have elsewhere."""
    measured = {each.column for figures in by_task.values() for each in figures}
    shown = [column for column in columns if column != "plain" and column in measured]

    def draw(axes: Any) -> None:
        for place, figures in enumerate(by_task.values()):
            for each in figures:
                if each.column in shown:
                    offset = (shown.index(each.column) - (len(shown) - 1) / 2) * 0.7 / max(1, len(shown))
                    _interval(axes, each, place + offset, _colour(each.column, columns))
        axes.set_yticks(range(len(by_task)), list(by_task))
        _ratio_axis(axes, len(by_task))
        legend(axes, {column: _colour(column, columns) for column in shown})

    return drawn(draw, len(by_task) * max(1.0, 0.5 * len(shown)) + 1, "Speed-up of each column by task")


def speedups_by_batch(by_batch: Mapping[int, Sequence[Figures]], columns: Sequence[str]) -> str:
    """Return a plot of the speed-up of each column against the batch size, with its intervals."""
    measured = {each.column for figures in by_batch.values() for each in figures}
    shown = [column for column in columns if column != "plain" and column in measured]

    def draw(axes: Any) -> None:
        for column in shown:
            colour = _colour(column, columns)
            found = {size: each.speedup for size, own in by_batch.items() for each in own if each.column == column}
            for size, speedup in found.items():
                if speedup.low is not None and speedup.high is not None:
                    axes.plot([size, size], [speedup.low, speedup.high], color=colour, linewidth=1.2)
            axes.plot(list(found), [each.value for each in found.values()], "o-", markersize=4, color=colour)
        axes.axhline(1.0, color=INK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(by_batch), list(map(str, by_batch)))
        axes.set_xlabel("batch size")
        axes.set_ylabel("speed-up over ordinary decoding")
        axes.grid(axis="y")
        legend(axes, {column: _colour(column, columns) for column in shown})

    return drawn(draw, 8, "Speed-up of each column by batch size")


def acceptance_by_depth(figures: Sequence[Figures], columns: Sequence[str]) -> str:
    """Return a plot of the share of drafted tokens that are accepted at each depth."""

    def draw(axes: Any) -> None:
        for each in figures:
            shares = [] if each.stats is None else each.stats.per_depth
            axes.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=_colour(each.column, columns))
        axes.set_ylim(0, 1)
        axes.set_xlabel("depth")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
        legend(axes, {each.column: _colour(each.column, columns) for each in figures})

    return drawn(draw, 8, "Acceptance by depth")


def accepted_lengths(figures: Sequence[Figures], columns: Sequence[str]) -> str:
    """Return a plot of the share of rounds that accepted each number of drafted tokens."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(figures)
        for place, each in enumerate(figures):
            counts = [] if each.stats is None else each.stats.histogram
            offset = (place - (len(figures) - 1) / 2) * width
            shares = [100 * number / sum(counts) for number in counts]
            axes.bar(
                [index + offset for index in range(len(counts))], shares, width, color=_colour(each.column, columns)
            )
        axes.set_xlabel("accepted tokens of a round")
        axes.set_ylabel("% of rounds")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
        legend(axes, {each.column: _colour(each.column, columns) for each in figures})

    return drawn(draw, 8, "Rounds by number of accepted tokens")


def time_split(figures: Sequence[Figures]) -> str:
    """Return a plot of where the time of each column went, for as many tokens as all have written."""

    def draw(axes: Any) -> None:
        for place, each in enumerate(figures):
            start = 0.0
            for index, name in enumerate(_SPLIT):
                share = each.split.shares().get(name, 0.0)
                length = 1000 * share * each.seconds / each.tokens
                axes.barh(place, length, left=start, color=SERIES[index], height=0.6)
                start += length
        axes.set_yticks(range(len(figures)), [each.column for each in figures])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per token")
        axes.grid(axis="x")
        known = [name for name in _SPLIT if any(name in each.split.shares() for each in figures)]
        legend(axes, {_SPLIT[name]: SERIES[list(_SPLIT).index(name)] for name in known})

    return drawn(draw, len(figures) + 2, "Where the time of each column went")


def machine_over_time(seconds: Sequence[float]) -> str:
    """Return a plot of the times of the same work, repeated over the benchmark, relative to their median."""

    def draw(axes: Any) -> None:
        middle = median(seconds)
        axes.plot(
            range(1, len(seconds) + 1), [value / middle for value in seconds], ".", markersize=4, color=SERIES[0]
        )
        axes.axhline(1.0, color=INK, linewidth=0.8)
        axes.set_ylim(0, 1.1 * max(seconds) / middle)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("conversation")
        axes.set_ylabel("time / median")
        axes.grid(axis="y")

    return drawn(draw, 5, "Times of the same work over the benchmark")


def _interval(axes: Any, figures: Figures, place: float, colour: str) -> None:
    """Draw a speed-up as a dot with a line from end to end of its interval."""
    found = figures.speedup
    if found.low is not None and found.high is not None:
        axes.plot([found.low, found.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([found.value], [place], "o", markersize=5, color=colour)


def _ratio_axis(axes: Any, lines: int) -> None:
    axes.set_ylim(lines - 0.5, -0.5)
    axes.axvline(1.0, color=INK, linewidth=0.8)
    axes.set_xlabel("speed-up over ordinary decoding")
    axes.grid(axis="x")


def _colour(column: str, columns: Sequence[str]) -> str:
    return SERIES[list(columns).index(column) % NUM_SERIES]
