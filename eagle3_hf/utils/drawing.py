"""Drawing of plots as SVG that takes the colours of the page around it."""

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure as Canvas

from .palette import DARK, LIGHT, series_variables
from .palette import GRID as GRIDS
from .palette import INK as INKS


NUM_SERIES = 8
_WIDTH, _LINE = 4.6, 0.34  # inches: at this width the text of a plot is as large as that of the page on a phone
# Colours that stand for variables of the page's style sheet, so that one plot serves a light and a dark page.
INK, GRID = "#000001", "#000002"
SERIES = [f"#0000a{index}" for index in range(NUM_SERIES)]
_VARIABLES = {INK: "var(--ink)", GRID: "var(--grid)"}
_VARIABLES |= {colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)}
_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle3_hf",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


def drawn(draw: Callable[[Any], None], lines: float, label: str) -> str:
    """Return what `draw` puts on axes of so many lines' height as SVG, to be put into a page."""
    svg = _svg([draw], lines)
    return _inline(svg, label, f"plot-{hashlib.sha256(svg.encode()).hexdigest()[:8]}")


def standalone(draws: Sequence[Callable[[Any], None]], lines: float, label: str) -> str:
    """Return plots below each other as the text of an SVG file, which is light or dark as its viewer prefers."""
    svg = _svg(draws, lines)
    light, dark = (
        f":root {{ --ink: {INKS[at]}; --grid: {GRIDS[at]}; {series_variables(series)} }}"
        for at, series in enumerate((LIGHT, DARK))
    )
    style = (
        f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }} text {{ font-family: sans-serif }}</style>"
    )
    svg = _METADATA.sub("", svg[svg.index("<svg") :])
    begin = svg.index(">") + 1
    named = svg[:begin].replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    return _with_variables(named + style + svg[begin:])


def _svg(draws: Sequence[Callable[[Any], None]], lines: float) -> str:
    """Return plots below each other, each of so many lines' height, as matplotlib writes them."""
    with rc_context(_STYLE):
        canvas = Canvas(figsize=(_WIDTH, len(draws) * (_LINE * lines + 0.7)), layout="constrained")
        for place, draw in enumerate(draws):
            draw(canvas.add_subplot(len(draws), 1, place + 1))
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def _with_variables(svg: str) -> str:
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg


def _inline(svg: str, label: str, prefix: str) -> str:
    """Return SVG without what only a file needs, and with ids that no different plot of a page has."""
    svg = svg[svg.index("<svg") :]
    svg = _METADATA.sub("", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    return _with_variables(svg).replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def legend(axes: Any, colours: Mapping[str, str]) -> None:
    """Put a legend above the axes, where it covers nothing."""
    for name, colour in colours.items():
        axes.plot([], [], "s", markersize=6, color=colour, label=name)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handletextpad=0.2, fontsize=8)


__all__ = ["GRID", "INK", "NUM_SERIES", "SERIES", "drawn", "legend", "standalone"]
