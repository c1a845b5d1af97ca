"""Results of a benchmark, with the types of all figures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..acceptance import SpeculationStats
from .cells import Setting
from .differences import TextDifference
from .statistics import Interval


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of a column went, in seconds; `None` where it is not known.

    Attributes:
        prefill: In the target's pass over the prompt.
        draft: In the head.
        verify: In the target's other passes.
        host: Elsewhere, with a head.
        rest: Everything after the prefill, without a head.
    """

    prefill: float
    draft: float | None
    verify: float | None
    host: float | None
    rest: float | None = None

    def shares(self) -> dict[str, float]:
        """Return the known parts as shares of their sum."""
        parts = {name: value for name, value in asdict(self).items() if value is not None}
        total = sum(parts.values()) or 1.0
        return {name: value / total for name, value in parts.items()}


@dataclass(frozen=True)
class Figures:
    """What was measured of one column under one setting, in one task or in all.

    Attributes:
        setting: Temperature, batch size and length.
        task: The task; `None` for all.
        column: Name of the column.
        chosen: Of several columns of which the best is reported, the name of that one.
        conversations: Number of conversations; a batch is one.
        answers: Number of answers.
        tokens: New tokens, the first and the end of text included.
        seconds: Time of all calls.
        speedup: Tokens per second, divided by those of ordinary decoding on the same turns.
        median_speedup: Median over conversations of their own speed-ups.
        tau: Mean acceptance length; `None` where passes were not counted.
        stats: Sum of the head's statistics; `None` without a head.
        split: Where the time went.
        peak_memory: Largest memory in use, in bytes.
        texts: Number of answers that are `equal` to those of ordinary decoding, differ by a `near-tie`, or are
            `different`. Sampled texts are not judged, so that all that are not equal are different.
    """

    setting: Setting
    task: str | None
    column: str
    chosen: str
    conversations: int
    answers: int
    tokens: int
    seconds: float
    speedup: Interval
    median_speedup: float
    tau: Interval | None
    stats: SpeculationStats | None
    split: TimeSplit
    peak_memory: int | None
    texts: Mapping[str, int]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of all calls."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        values = asdict(self)
        values["tokens_per_second"] = self.tokens_per_second
        values["split"] = self.split.shares()
        values["stats"] = None if self.stats is None else self.stats.as_dict()
        return values


@dataclass(frozen=True)
class Call:
    """What was measured in one call of `generate`.

    Attributes:
        setting: The setting.
        task: The questions' task.
        questions: Ids of the questions, as many as the batch has.
        turn: Turn of the conversation, from 1 on.
        column: Name of the column.
        tokens: New tokens of all sequences.
        seconds: Time of the call.
        tau: Mean acceptance length; `None` where passes were not counted.
        per_depth: Acceptance by depth; `None` without a head.
    """

    setting: Setting
    task: str
    questions: Sequence[str]
    turn: int
    column: str
    tokens: int
    seconds: float
    tau: float | None
    per_depth: Sequence[float] | None


@dataclass(frozen=True)
class Quietness:
    """How quiet the machine was.

    Attributes:
        seconds: Times of the same short piece of work, repeated between the conversations.
        others: Mean number of cores that other processes used; `None` where it is unknown.
        spread: 90th percentile of those times over their 10th, minus 1.
    """

    seconds: Sequence[float]
    others: float | None
    spread: float


@dataclass(frozen=True)
class BenchResult:
    """Results of a benchmark, in all and by task.

    Attributes:
        settings: Settings of the benchmark, by name.
        machine: Device, dtype, threads and versions.
        models: Names of the target (`target`) and of each head.
        columns: Names of the columns, in order.
        figures: Figures of every setting, task (`None` first) and column.
        calls: What was measured in each call.
        differences: Where texts differ.
        quietness: How quiet the machine was.
        chains: Columns whose drafts are chains, so that their acceptance by depth is n-alpha.
        cells: Number of measured turns, and of all.
        warnings: What a reader should know before believing a figure.
    """

    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    models: Mapping[str, str]
    columns: Sequence[str]
    figures: Sequence[Figures]
    calls: Sequence[Call]
    differences: Sequence[TextDifference]
    quietness: Quietness
    chains: Sequence[str]
    cells: tuple[int, int]
    warnings: Sequence[str]
    _ratio: Callable[[Setting, str, str], Interval] = field(repr=False, compare=False)

    def of(self, column: str, task: str | None = None, setting: Setting | None = None) -> Figures:
        """Return the figures of a column; without a setting, those of the first.

        Raises:
            KeyError: there are none.
        """
        for figures in self.figures:
            if (figures.column, figures.task) == (column, task) and setting in (None, figures.setting):
                return figures
        raise KeyError(f"no figures of {column} in {task or 'all tasks'}; columns: {', '.join(self.columns)}")

    def ratio(self, column: str, over: str, setting: Setting | None = None) -> Interval:
        """Return tokens per second of one column divided by those of another, on the turns that both answered."""
        one = self.of(column, setting=setting)
        return self._ratio(one.setting, one.chosen, self.of(over, setting=one.setting).chosen)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = {
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "models": dict(self.models),
            "columns": list(self.columns),
            "chains": list(self.chains),
            "cells": dict(zip(("measured", "all"), self.cells, strict=True)),
            "warnings": list(self.warnings),
            "quietness": asdict(self.quietness),
            "figures": [figures.as_dict() for figures in self.figures],
            "calls": [asdict(call) for call in self.calls],
            "differences": [asdict(each) for each in self.differences],
        }
        return _finite(values)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have, such as the margin of a token that a processor has excluded."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
