"""From the answers of a benchmark to its figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median
from typing import Any

from ..acceptance import SpeculationStats
from .cells import Cell, Conversation, Setting
from .columns import PLAIN, Column
from .differences import DIFFERENT, EQUAL, NEAR_TIE, TextDifference
from .measure import Answer
from .results import BenchResult, Call, Figures, Quietness, TimeSplit
from .statistics import Interval, ratio_interval, spread


_LOUD_SPREAD = 0.10  # of repeated times of the same work, from which a machine is called not quiet


@dataclass(frozen=True)
class MeasuredCell:
    """What is known of a cell.

    Attributes:
        cell: The cell.
        answers: Answers by column.
        differences: Differences of the answers; `None` if they have not been compared yet.
    """

    cell: Cell
    answers: Mapping[str, Answer]
    differences: Sequence[TextDifference] | None

    @property
    def conversation(self) -> Conversation:
        """The conversation of the cell."""
        return self.cell.conversation


@dataclass
class _Unit:
    """Sums over the turns of one conversation: drawn again as a whole, since its turns depend on each other."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(answer.num_tokens for answer in self.answers)

    @property
    def seconds(self) -> float:
        return sum(answer.seconds for answer in self.answers)

    @property
    def rounds(self) -> int:
        """Passes of the target after the prefill, times the sequences that took part, where these were counted."""
        return sum(answer.passes or 0 if answer.stats is None else answer.stats.rounds for answer in self.answers)

    @property
    def emitted(self) -> int:
        """Tokens that these passes gave."""
        return sum(_emitted(answer) for answer in self.answers)


def _emitted(answer: Answer) -> int:
    if answer.stats is not None:
        return answer.stats.emitted
    return 0 if answer.passes is None else answer.num_tokens - len(answer.tokens)


def summarize(
    cells: Sequence[MeasuredCell],
    columns: Sequence[Column],
    *,
    header: Mapping[str, Mapping[str, Any]],
    models: Mapping[str, str],
    chains: Sequence[str],
    probes: Sequence[Mapping[str, float | None]],
    progress: tuple[int, int],
    seed: int,
) -> BenchResult:
    """Return the figures of all that has been measured.

    Args:
        cells: Measured cells.
        columns: What was compared.
        header: Settings and machine.
        models: Names of the target and the heads.
        chains: Names of columns that draft chains.
        probes: What was seen of the machine.
        progress: Number of measured turns, and of all.
        seed: Seed of the intervals.
    """
    figures = []
    for setting, of_setting in _by_setting(cells).items():
        chosen = _best(columns, of_setting)
        for task in (None, *sorted({cell.conversation.task for cell in of_setting})):
            of_task = [cell for cell in of_setting if task in (None, cell.conversation.task)]
            found = [_figures(setting, task, column, of_task, seed) for column in chosen]
            figures += [each for each in found if each is not None]
    quietness = _quietness(probes)
    return BenchResult(
        settings=header["settings"],
        machine=header["machine"],
        models=models,
        columns=list(dict.fromkeys(column.best_of or column.name for column in columns)),
        figures=figures,
        calls=[call for setting in _by_setting(cells).values() for cell in setting for call in _calls(cell)],
        differences=[each for cell in cells for each in cell.differences or ()],
        quietness=quietness,
        chains=chains,
        cells=progress,
        warnings=list(_warnings(quietness, header["machine"])),
        _ratio=partial(_ratio, _by_setting(cells), seed),
    )


def running(cells: Sequence[MeasuredCell], columns: Sequence[Column]) -> str:
    """Return speed-up and tau of the columns so far, under the setting that was measured last, in a few words."""
    if not cells:
        return ""
    measured = [cell for cell in cells if cell.conversation.setting == cells[-1].conversation.setting]
    parts = []
    for column in _best(columns, measured):
        mine, plain = _paired(measured, column.name, PLAIN.name)
        if column != PLAIN and mine:
            rounds = sum(unit.rounds for unit in mine)
            tau = f" (tau {sum(unit.emitted for unit in mine) / rounds:.2f})" if rounds else ""
            parts.append(f"{column.best_of or column.name} {_rate(mine) / _rate(plain):.2f}x{tau}")
    return ", ".join(parts)


def _by_setting(cells: Sequence[MeasuredCell]) -> dict[Setting, list[MeasuredCell]]:
    found: dict[Setting, list[MeasuredCell]] = {}
    for cell in cells:
        found.setdefault(cell.conversation.setting, []).append(cell)
    order = sorted(found, key=lambda each: (each.temperature, each.batch_size, each.max_new_tokens))
    return {setting: found[setting] for setting in order}


def _paired(cells: Sequence[MeasuredCell], column: str, over: str) -> tuple[list[_Unit], list[_Unit]]:
    """Return sums of two columns by conversation, over the turns that both have answered."""
    pairs: dict[str, tuple[_Unit, _Unit]] = {}
    for cell in cells:
        if column in cell.answers and over in cell.answers:
            mine, theirs = pairs.setdefault(cell.conversation.key, (_Unit(), _Unit()))
            mine.answers.append(cell.answers[column])
            theirs.answers.append(cell.answers[over])
    return [mine for mine, _ in pairs.values()], [theirs for _, theirs in pairs.values()]


def _rate(units: Sequence[_Unit]) -> float:
    return sum(unit.tokens for unit in units) / sum(unit.seconds for unit in units)


def _best(columns: Sequence[Column], cells: Sequence[MeasuredCell]) -> list[Column]:
    """Return the columns that were measured, and of a set of which only the best counts, the fastest."""
    best: dict[str, tuple[float, Column]] = {}
    for column in columns:
        mine, plain = _paired(cells, column.name, PLAIN.name)
        if mine:
            gain, group = _rate(mine) / _rate(plain), column.best_of or column.name
            if group not in best or gain > best[group][0]:
                best[group] = gain, column
    return [column for _, column in best.values()]


def _speedup(mine: Sequence[_Unit], plain: Sequence[_Unit], seed: int) -> Interval:
    return ratio_interval(
        [[unit.tokens for unit in mine], [unit.seconds for unit in plain]],
        [[unit.seconds for unit in mine], [unit.tokens for unit in plain]],
        seed,
    )


def _ratio(cells: Mapping[Setting, Sequence[MeasuredCell]], seed: int, setting: Setting, one: str, other: str):
    return _speedup(*_paired(cells[setting], one, other), seed)


def _tau(units: Sequence[_Unit], seed: int) -> Interval | None:
    """Return tau over all passes; `None` where none was counted."""
    if not sum(unit.rounds for unit in units) or not sum(unit.emitted for unit in units):
        return None
    found = ratio_interval([[unit.emitted for unit in units]], [[unit.rounds for unit in units]], seed)
    return Interval(found.value, None if found.low is None else max(1.0, found.low), found.high)


def _figures(
    setting: Setting, task: str | None, column: Column, cells: Sequence[MeasuredCell], seed: int
) -> Figures | None:
    """Return the figures of a column on these cells; `None` if it has answered none of them."""
    mine, plain = _paired(cells, column.name, PLAIN.name)
    if not mine:
        return None
    answers = [answer for unit in mine for answer in unit.answers]
    stats = [answer.stats for answer in answers if answer.stats is not None]
    return Figures(
        setting=setting,
        task=task,
        column=column.best_of or column.name,
        chosen=column.name,
        conversations=len(mine),
        answers=sum(len(answer.tokens) for answer in answers),
        tokens=sum(unit.tokens for unit in mine),
        seconds=sum(unit.seconds for unit in mine),
        speedup=Interval(1.0) if column == PLAIN else _speedup(mine, plain, seed),
        median_speedup=median(_rate([own]) / _rate([other]) for own, other in zip(mine, plain, strict=True)),
        tau=Interval(1.0) if column == PLAIN else _tau(mine, seed),
        stats=SpeculationStats.total(stats) if stats else None,
        split=_split(answers),
        peak_memory=max((answer.peak_memory for answer in answers if answer.peak_memory is not None), default=None),
        texts=_texts(cells, column.name),
    )


def _calls(cell: MeasuredCell) -> list[Call]:
    """Return what was measured in each call of a cell."""
    questions = [question.id for question in cell.conversation.questions]
    place = (cell.conversation.setting, cell.conversation.task, questions, cell.cell.turn + 1)
    found = []
    for column, answer in cell.answers.items():
        unit = _Unit([answer])
        tau = unit.emitted / unit.rounds if unit.rounds else None
        per_depth = None if answer.stats is None else answer.stats.per_depth
        found.append(Call(*place, column, unit.tokens, unit.seconds, tau, per_depth))
    return found


def _split(answers: Sequence[Answer]) -> TimeSplit:
    """Return where the time went. Without a head, only the prefill can be told from the rest."""
    prefill, total = sum(answer.prefill_seconds for answer in answers), sum(answer.seconds for answer in answers)
    stats = [answer.stats for answer in answers if answer.stats is not None]
    if not stats:
        return TimeSplit(prefill, None, None, None, total - prefill)
    draft, verify = sum(each.draft_seconds for each in stats), sum(each.verify_seconds for each in stats)
    return TimeSplit(prefill, draft, verify, total - prefill - draft - verify, None)


def _texts(cells: Sequence[MeasuredCell], column: str) -> dict[str, int]:
    """Return how many answers are equal to those of ordinary decoding, and how the others differ."""
    counts = {EQUAL: 0, NEAR_TIE: 0, DIFFERENT: 0}
    for cell in cells:
        if column in cell.answers and cell.differences is not None:
            kinds = [each.kind for each in cell.differences if each.column == column]
            counts[EQUAL] += len(cell.answers[column].tokens) - len(kinds)
            for kind in kinds:
                counts[kind] += 1
    return counts


def _quietness(probes: Sequence[Mapping[str, float | None]]) -> Quietness:
    seconds = [probe["seconds"] for probe in probes if probe["seconds"] is not None]
    others = [probe["others"] for probe in probes if probe["others"] is not None]
    return Quietness(seconds, mean(others) if others else None, spread(seconds))


def _warnings(quietness: Quietness, machine: Mapping[str, Any]):
    """Yield what a reader should know before believing a figure."""
    if quietness.spread > _LOUD_SPREAD:
        yield (
            f"The machine was not quiet: times of the same work differed by {quietness.spread:.0%} (90th percentile "
            "over 10th). Ratios of columns are reliable within their intervals, times and tokens per second are not."
        )
    cores, threads = machine["cores"], machine["threads"]
    if quietness.others is not None and quietness.others > 0.1 and cores - quietness.others < threads:
        yield (
            f"Other processes used {quietness.others:.1f} of {cores} cores on average, so that not each of this run's "
            f"threads ({threads}) had a core of its own."
        )
