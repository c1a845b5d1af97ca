"""Results of a benchmark as text: Markdown for a terminal, CSV for a spreadsheet."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .cells import Setting
from .differences import DIFFERENT, EQUAL, NEAR_TIE
from .results import BenchResult, Figures
from .statistics import Interval


_SHOWN_DIFFERENCES = 5
_UNKNOWN = "-"


def to_markdown(result: BenchResult, differences: int = _SHOWN_DIFFERENCES) -> str:
    """Return the header, the warnings and the tables.

    Args:
        result: The results.
        differences: Number of differences between texts that are shown.
    """
    parts = ["\n".join(header_lines(result))]
    parts += [f"Warning: {warning}" for warning in result.warnings]
    for setting in dict.fromkeys(figures.setting for figures in result.figures):
        whole = figures_of(result, setting, None)
        parts += [f"{setting}, {whole[0].conversations} conversations:", table(*column_table(whole))]
        tasks = list(dict.fromkeys(each.task for each in result.figures if each.setting == setting and each.task))
        if len(tasks) > 1:
            parts.append(table(*task_table(result, setting, tasks)))
        drafting = [each for each in whole if each.stats is not None and each.stats.rounds]
        if drafting:
            parts.append(table(*depth_table(drafting, result.chains)))
            parts.append(table(*length_table(drafting)))
    found = sorted(result.differences, key=lambda each: (each.kind != DIFFERENT, -(each.margin or 0)))
    if found and differences:
        parts.append("\n".join(map(str, found[:differences])))
    if len(found) > differences:
        parts.append(f"and {len(found) - differences} more differences, all of which --json writes")
    return "\n\n".join(parts)


def to_csv(result: BenchResult) -> str:
    """Return a line for every setting, task and column."""
    file = io.StringIO()
    rows = [_csv_row(figures) for figures in result.figures]
    writer = csv.DictWriter(file, list(rows[0]) if rows else ["column"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def header_lines(result: BenchResult) -> Iterator[str]:
    """Yield on what the figures were measured."""
    machine, quiet = result.machine, result.quietness
    yield "; ".join(f"{name}: {model}" for name, model in result.models.items())
    yield f"device: {machine['device']}; processor: {machine['processor']}, {machine['cores']} cores"
    yield ", ".join(f"{name} {machine[name]}" for name in ("eagle3_hf", "transformers", "torch", "python"))
    others = "unknown" if quiet.others is None else f"{quiet.others:.2f} cores"
    yield f"used by other processes: {others}; times of the same work differed by {quiet.spread:.1%}"
    yield f"seed {result.settings['seed']}; questions: {result.settings['questions']}"
    measured, every = result.cells
    if measured < every:
        yield f"measured so far: {measured} of {every} turns"
    for name, tree in result.settings["trees"].items():
        yield f"tree of {name} (nodes/levels/children): {tree}"


def figures_of(result: BenchResult, setting: Setting, task: str | None) -> list[Figures]:
    """Return the figures of all columns under a setting, in one task or in all."""
    return [figures for figures in result.figures if (figures.setting, figures.task) == (setting, task)]


def column_table(figures: Sequence[Figures]) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines of the table of all columns."""
    heading = ["column", "tokens/s", "speed-up", "median", "tau", "prefill", "draft", "verify", "host", "peak memory"]
    heading += ["equal", "near-tie", "different"]
    lines = []
    for each in figures:
        shares = each.split.shares()
        split = [
            f"{shares[name]:.0%}" if name in shares else _UNKNOWN for name in ("prefill", "draft", "verify", "host")
        ]
        texts = [str(each.texts[kind]) for kind in (EQUAL, NEAR_TIE, DIFFERENT)]
        lines.append(
            [
                heading_of(each),
                f"{each.tokens_per_second:.1f}",
                str(each.speedup),
                f"{each.median_speedup:.2f}",
                _UNKNOWN if each.tau is None else str(each.tau),
                *split,
                memory_in_words(each.peak_memory),
                *texts,
            ]
        )
    return heading, lines


def task_table(result: BenchResult, setting: Setting, tasks: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines of the table of speed-up and tau by task."""
    columns = [each.column for each in figures_of(result, setting, None) if each.column != "plain"]
    heading = ["task", *(f"{column}: {kind}" for column in columns for kind in ("tau", "speed-up"))]
    lines = []
    for task in (*tasks, None):
        found = {each.column: each for each in figures_of(result, setting, task)}
        line = ["all" if task is None else task]
        for column in columns:
            each = found.get(column)
            line += [_UNKNOWN, _UNKNOWN] if each is None else [_tau(each.tau), str(each.speedup)]
        lines.append(line)
    return heading, lines


def depth_table(figures: Sequence[Figures], chains: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines of the table of acceptance by depth, which is n-alpha for a chain."""
    deepest = max(len(each.stats.per_depth) for each in figures if each.stats is not None)
    heading = ["acceptance by depth", *(str(depth) for depth in range(1, deepest + 1))]
    lines = []
    for each in figures:
        shares = [] if each.stats is None else each.stats.per_depth
        name = f"{each.column} (chain: n-alpha)" if each.chosen in chains else each.column
        lines.append([name, *(f"{share:.2f}" for share in shares), *[""] * (deepest - len(shares))])
    return heading, lines


def length_table(figures: Sequence[Figures]) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines of the table of rounds by number of accepted tokens, as shares."""
    longest = max(len(each.stats.histogram) for each in figures if each.stats is not None)
    heading = ["rounds with so many accepted", *map(str, range(longest))]
    lines = []
    for each in figures:
        counts = [] if each.stats is None else each.stats.histogram
        shares = [f"{count / sum(counts):.0%}" for count in counts]
        lines.append([each.column, *shares, *[""] * (longest - len(shares))])
    return heading, lines


def table(heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(heading, *lines, strict=True)]
    rows = [heading, ["-" * width for width in widths], *lines]
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows)


def heading_of(figures: Figures) -> str:
    """Return the column's name, and which of several it stands for."""
    return figures.column if figures.chosen == figures.column else f"{figures.column} (best: {figures.chosen})"


def memory_in_words(count: int | None) -> str:
    """Return bytes in MiB or GiB."""
    if count is None:
        return _UNKNOWN
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _tau(tau: Interval | None) -> str:
    return _UNKNOWN if tau is None else str(tau)


def _csv_row(figures: Figures) -> dict[str, Any]:
    shares: Mapping[str, float] = figures.split.shares()
    tau = figures.tau or Interval(float("nan"))
    stats = figures.stats
    return {
        "temperature": figures.setting.temperature,
        "batch_size": figures.setting.batch_size,
        "max_new_tokens": figures.setting.max_new_tokens,
        "task": figures.task or "all",
        "column": figures.column,
        "chosen": figures.chosen,
        "conversations": figures.conversations,
        "answers": figures.answers,
        "tokens": figures.tokens,
        "seconds": figures.seconds,
        "tokens_per_second": figures.tokens_per_second,
        "speedup": figures.speedup.value,
        "speedup_low": figures.speedup.low,
        "speedup_high": figures.speedup.high,
        "median_speedup": figures.median_speedup,
        "tau": None if figures.tau is None else tau.value,
        "tau_low": tau.low,
        "tau_high": tau.high,
        "acceptance_by_depth": "" if stats is None else " ".join(f"{share:.4f}" for share in stats.per_depth),
        "accepted_histogram": "" if stats is None else " ".join(map(str, stats.histogram)),
        **{f"{name}_share": shares.get(name) for name in ("prefill", "draft", "verify", "host")},
        "peak_memory_bytes": figures.peak_memory,
        **{name.replace("-", "_"): count for name, count in figures.texts.items()},
    }
