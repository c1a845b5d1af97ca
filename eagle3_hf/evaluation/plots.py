"""Plots of a benchmark's figures, as SVG that takes the colours of the page around it."""

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas

from .results import Figures


NUM_SERIES = 8
_WIDTH, _LINE = 4.6, 0.34  # inches: at this width the text of a plot is as large as that of the page on a phone
# Colours that stand for variables of the page's style sheet, so that one plot serves a light and a dark page.
_INK, _GRID = "#000001", "#000002"
_SERIES = [f"#0000a{index}" for index in range(NUM_SERIES)]
_VARIABLES = {_INK: "var(--ink)", _GRID: "var(--grid)"}
_VARIABLES |= {colour: f"var(--series-{index})" for index, colour in enumerate(_SERIES)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle3_hf",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "grid.color": _GRID,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}
_SPLIT = {"prefill": "prefill", "draft": "draft", "verify": "verify", "host": "host", "rest": "decoding, not split"}


def speedups(figures: Sequence[Figures]) -> str:
    """Return a plot of the speed-up of each column, with its interval."""

    def draw(axes: Any) -> None:
        for place, each in enumerate(figures):
            _interval(axes, each, place, _SERIES[place % NUM_SERIES])
        axes.set_yticks(range(len(figures)), [each.column for each in figures])
        _ratio_axis(axes)

    return _drawn(draw, len(figures), "Speed-up of each column with its 95% interval")


def speedups_by_task(by_task: Mapping[str, Sequence[Figures]], columns: Sequence[str]) -> str:
    """Return a plot of the speed-ups in each task; the columns keep the colours that they have elsewhere."""
    shown = [column for column in columns if column != "plain"]

    def draw(axes: Any) -> None:
        for place, figures in enumerate(by_task.values()):
            for each in figures:
                if each.column in shown:
                    offset = (shown.index(each.column) - (len(shown) - 1) / 2) * 0.7 / max(1, len(shown))
                    _interval(axes, each, place + offset, _colour(each.column, columns))
        axes.set_yticks(range(len(by_task)), list(by_task))
        _ratio_axis(axes)
        _legend(axes, {column: _colour(column, columns) for column in shown})

    return _drawn(draw, len(by_task) * max(1.0, 0.5 * len(shown)) + 1, "Speed-up of each column by task")


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
        _legend(axes, {each.column: _colour(each.column, columns) for each in figures})

    return _drawn(draw, 8, "Acceptance by depth")


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
        _legend(axes, {each.column: _colour(each.column, columns) for each in figures})

    return _drawn(draw, 8, "Rounds by number of accepted tokens")


def time_split(figures: Sequence[Figures]) -> str:
    """Return a plot of where the time of each column went, for as many tokens as all have written."""

    def draw(axes: Any) -> None:
        for place, each in enumerate(figures):
            start = 0.0
            for index, name in enumerate(_SPLIT):
                share = each.split.shares().get(name, 0.0)
                length = 1000 * share * each.seconds / each.tokens
                axes.barh(place, length, left=start, color=_SERIES[index], height=0.6)
                start += length
        axes.set_yticks(range(len(figures)), [each.column for each in figures])
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per token")
        axes.grid(axis="x")
        known = [name for name in _SPLIT if any(name in each.split.shares() for each in figures)]
        _legend(axes, {_SPLIT[name]: _SERIES[list(_SPLIT).index(name)] for name in known})

    return _drawn(draw, len(figures) + 2, "Where the time of each column went")


def machine_over_time(seconds: Sequence[float]) -> str:
    """Return a plot of the times of the same work, repeated over the benchmark, relative to their median."""

    def draw(axes: Any) -> None:
        middle = median(seconds)
        axes.plot(
            range(1, len(seconds) + 1), [value / middle for value in seconds], ".", markersize=4, color=_SERIES[0]
        )
        axes.axhline(1.0, color=_INK, linewidth=0.8)
        axes.set_ylim(0, 1.1 * max(seconds) / middle)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("conversation")
        axes.set_ylabel("time / median")
        axes.grid(axis="y")

    return _drawn(draw, 5, "Times of the same work over the benchmark")


def _drawn(draw: Callable[[Any], None], lines: float, label: str) -> str:
    """Return what `draw` puts on axes of so many lines' height as SVG, to be put into a page."""
    with rc_context(_STYLE):
        canvas = Canvas(figsize=(_WIDTH, _LINE * lines + 0.7), layout="constrained")
        draw(canvas.add_subplot())
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    return _inline(svg, label, f"plot-{hashlib.sha256(svg.encode()).hexdigest()[:8]}")


def _inline(svg: str, label: str, prefix: str) -> str:
    """Return SVG without what only a file needs, and with ids that no different plot of a page has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _interval(axes: Any, figures: Figures, place: float, colour: str) -> None:
    """Draw a speed-up as a dot with a line from end to end of its interval."""
    found = figures.speedup
    if found.low is not None and found.high is not None:
        axes.plot([found.low, found.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([found.value], [place], "o", markersize=5, color=colour)


def _ratio_axis(axes: Any) -> None:
    axes.invert_yaxis()
    axes.axvline(1.0, color=_INK, linewidth=0.8)
    axes.set_xlabel("speed-up over ordinary decoding")
    axes.grid(axis="x")


def _colour(column: str, columns: Sequence[str]) -> str:
    return _SERIES[list(columns).index(column) % NUM_SERIES]


def _legend(axes: Any, colours: Mapping[str, str]) -> None:
    """Put a legend above the axes, where it covers nothing."""
    for name, colour in colours.items():
        axes.plot([], [], "s", markersize=6, color=colour, label=name)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handletextpad=0.2, fontsize=8)
