"""Results of a benchmark as one HTML page."""

from collections.abc import Iterator, Sequence
from html import escape

from . import plots
from .cells import Setting
from .html import bullets, document, figure, table
from .report import column_table, depth_table, figures_of, header_lines, length_table, task_table
from .results import BenchResult, Figures


def to_html(result: BenchResult) -> str:
    """Return the page."""
    target, *heads = result.models.values()
    title = f"{', '.join(heads) or 'Decoding'} on {target}"
    return document(
        title,
        [
            bullets(header_lines(result)),
            *(f'<p class="warning">{escape(warning)}</p>' for warning in result.warnings),
            *(part for setting in _settings(result) for part in _section(result, setting)),
            *by_batch(result),
            *_machine(result),
            *_differences(result),
        ],
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
    yield table(*column_table(whole))
    yield '<div class="plots">'
    yield figure("Speed-up, with 95% intervals", plots.speedups(whole, result.columns))
    yield figure("Time per token", plots.time_split(whole))
    if drafting:
        yield figure("Acceptance by depth", plots.acceptance_by_depth(drafting, result.columns))
        yield figure("Accepted tokens per round", plots.accepted_lengths(drafting, result.columns))
    if len(by_task) > 1:
        yield figure("Speed-up by task", plots.speedups_by_task(by_task, result.columns))
    yield "</div>"
    if len(by_task) > 1:
        yield table(*task_table(result, setting, list(by_task)))
    if drafting:
        yield table(*depth_table(drafting, result.chains))
        yield table(*length_table(drafting))


def by_batch(result: BenchResult) -> Iterator[str]:
    """Yield a plot for each temperature and length that was measured with several batch sizes."""
    groups: dict[tuple[float, int], dict[int, Sequence[Figures]]] = {}
    for setting in _settings(result):
        sizes = groups.setdefault((setting.temperature, setting.max_new_tokens), {})
        sizes[setting.batch_size] = figures_of(result, setting, None)
    for (temperature, length), sizes in groups.items():
        if len(sizes) > 1:
            caption = f"Speed-up by batch size (temperature {temperature:g}, {length} new tokens)"
            yield figure(caption, plots.speedups_by_batch(dict(sorted(sizes.items())), result.columns))


def _machine(result: BenchResult) -> Iterator[str]:
    if len(result.quietness.seconds) > 2:
        yield "<h2>The machine</h2>"
        yield figure(
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
        where = escape(f"{each.column}, {each.question} ({each.setting})")
        texts = [f"<code>{escape(text)}</code>" for text in (each.before, each.plain, each.other)]
        yield f"<li>{where}: {each.kind} at new token {each.index}{judged}: "
        yield f"{texts[0]} then {texts[1]} or {texts[2]}</li>"
    yield "</ul></details>"
