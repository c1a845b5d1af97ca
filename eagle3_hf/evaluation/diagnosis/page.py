"""A diagnosis as one HTML page."""

from collections.abc import Iterator
from html import escape

from ..html import bullets, document, figure, table
from . import plots
from .report import (
    calibration_table,
    cause_table,
    depth_table,
    group_table,
    header_lines,
    sweep_table,
    temperature_table,
)
from .result import Diagnosis


def to_html(result: Diagnosis) -> str:
    """Return the page; the conclusion comes first."""
    return document(f"Diagnosis of {result.head} on {result.target}", _parts(result))


def _parts(result: Diagnosis) -> Iterator[str]:
    kind = ' class="warning"' if result.findings else ""
    yield f"<p{kind}>{escape(result.conclusion)}</p>"
    if len(result.findings) > 1:
        yield f"<p>Also found:</p>{bullets(map(str, result.findings[1:]))}"
    yield bullets(header_lines(result))
    yield '<div class="plots">'
    yield figure("Misses by cause", plots.misses(result))
    yield figure("Acceptance by depth", plots.by_depth(result))
    yield figure("Calibration, at depth 1", plots.calibration(result))
    if result.sweep:
        yield figure("Other settings", plots.settings(result))
    yield "</div>"
    yield f"<h2>Misses by cause</h2>{table(*cause_table(result))}"
    yield f"<h2>Acceptance</h2>{table(*depth_table(result))}"
    if len(result.by_task) > 1:
        yield table(*group_table(result.by_task, "task"))
    yield table(*group_table(result.by_prompt_length, "tokens of prompt"))
    yield f"<h2>In sampling, at depth 1</h2>{table(*temperature_table(result))}"
    yield f"<h2>Probability of the first choice</h2>{table(*calibration_table(result))}"
    if result.sweep:
        yield f"<h2>Other settings</h2>{table(*sweep_table(result, len(result.sweep)))}"


__all__ = ["to_html"]
