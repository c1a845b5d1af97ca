"""HTML pages that need no other file, readable on a phone, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

from ..utils.palette import DARK, LIGHT, series_variables


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --grid: #dddddd; --soft: #f3f3f3; LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #161616; --grid: #3a3a3a; --soft: #222222; DARK }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; }
@media (max-width: 40rem) {
  th:first-child, td:first-child { white-space: normal; min-width: 6rem; max-width: 7rem; position: sticky; left: 0;
    background: var(--paper); }
}
.warning { padding: 0.6rem 0.9rem; border-left: 4px solid var(--series-1); background: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: 0.3rem; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
ul { padding-left: 1.2rem; } code { background: var(--soft); padding: 0 0.2rem; white-space: pre-wrap; }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page.

    Args:
        title: Title and heading, as text.
        parts: What follows, as HTML.
    """
    style = _STYLE.replace("LIGHT", series_variables(LIGHT)).replace("DARK", series_variables(DARK))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
            f"<h1>{escape(title)}</h1>",
            *parts,
            "</html>",
            "",
        ]
    )


def bullets(lines: Iterable[str]) -> str:
    """Return a list of texts."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def figure(caption: str, svg: str) -> str:
    """Return a plot below its caption."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table of texts."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'


__all__ = ["bullets", "document", "figure", "table"]
