"""Results of a benchmark as one HTML page that needs no other file, readable on a phone, light and dark."""

from collections.abc import Iterator, Sequence
from html import escape

from . import plots
from .cells import Setting
from .report import column_table, depth_table, figures_of, header_lines, length_table, task_table
from .results import BenchResult


_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#a0458a", "#2b8cc4", "#b07800", "#6a51a3", "#666666")
_DARK = ("#56a8e0", "#ff8c42", "#2fc79a", "#e39ad0", "#8fd0f5", "#f0b93a", "#b39ddb", "#aaaaaa")
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


def to_html(result: BenchResult) -> str:
    """Return the page."""
    target, *heads = result.models.values()
    title = f"{', '.join(heads) or 'Decoding'} on {target}"
    style = _STYLE.replace("LIGHT", _series(_LIGHT)).replace("DARK", _series(_DARK))
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
            f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in header_lines(result))}</ul>",
            *(f'<p class="warning">{escape(warning)}</p>' for warning in result.warnings),
            *(part for setting in _settings(result) for part in _section(result, setting)),
            *_machine(result),
            *_differences(result),
            "</html>",
            "",
        ]
    )


def _settings(result: BenchResult) -> list[Setting]:
    return list(dict.fromkeys(figures.setting for figures in result.figures))


def _section(result: BenchResult, setting: Setting) -> Iterator[str]:
    """Yield the tables and plots of a setting."""
    whole = figures_of(result, setting, None)
    tasks = [each.task for each in result.figures if each.setting == setting and each.task is not None]
    by_task = {task: figures_of(result, setting, task) for task in dict.fromkeys(tasks)}
    drafting = [each for each in whole if each.stats is not None and each.stats.rounds]
    yield f"<h2>{escape(str(setting))}, {whole[0].conversations} conversations</h2>"
    yield _table(*column_table(whole))
    yield '<div class="plots">'
    yield _figure("Speed-up, with 95% intervals", plots.speedups(whole))
    yield _figure("Time per token", plots.time_split(whole))
    if drafting:
        yield _figure("Acceptance by depth", plots.acceptance_by_depth(drafting, result.columns))
        yield _figure("Accepted tokens per round", plots.accepted_lengths(drafting, result.columns))
    if len(by_task) > 1:
        yield _figure("Speed-up by task", plots.speedups_by_task(by_task, result.columns))
    yield "</div>"
    if len(by_task) > 1:
        yield _table(*task_table(result, setting, list(by_task)))
    if drafting:
        yield _table(*depth_table(drafting, result.chains))
        yield _table(*length_table(drafting))


def _machine(result: BenchResult) -> Iterator[str]:
    if len(result.quietness.seconds) > 2:
        yield "<h2>The machine</h2>"
        yield _figure(
            "Times of the same work, between conversations", plots.machine_over_time(result.quietness.seconds)
        )


def _differences(result: BenchResult) -> Iterator[str]:
    if not result.differences:
        return
    yield "<h2>Differences</h2>"
    yield f"<details><summary>{len(result.differences)} answers differ from those of ordinary decoding</summary><ul>"
    for each in result.differences:
        judged = (
            "" if each.margin is None else f", scores {each.margin:.4g} apart (rounding explains {each.bound:.4g})"
        )
        yield (
            f"<li>{escape(each.column)}, {escape(each.question)}: {each.kind} at new token {each.index}{judged}: "
            f"<code>{escape(each.before)}</code> then <code>{escape(each.plain)}</code> or "
            f"<code>{escape(each.other)}</code></li>"
        )
    yield "</ul></details>"


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'


def _series(colours: Sequence[str]) -> str:
    return " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(colours))
