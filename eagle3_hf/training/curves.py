"""Curves of a training run for the head's card: losses, accuracies, and tau against the data."""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils.logging import get_logger


logger = get_logger(__name__)

CURVES_FILE = "training_curves.svg"
_FEWEST = 2  # points of a curve
_LINES = 7  # height of a plot
_STEPS = ("accuracy_step_0", "accuracy_step_1", "accuracy_step_2")

Points = tuple[list[float], list[float]]


def write_curves(
    folder: str | os.PathLike, log_history: Sequence[Mapping[str, Any]], sequences_per_step: int
) -> Path | None:
    """Write the curves of a run into a folder.

    This function never raises, since a missing picture is no reason to lose a save; errors are logged.

    Args:
        folder: The folder.
        log_history: What `Trainer` has logged.
        sequences_per_step: Number of sequences of an optimizer step.

    Returns:
        The path of the picture. `None` if there are too few points, or without matplotlib (the extra `plot`).
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    path = Path(folder) / CURVES_FILE
    try:
        picture = training_curves(log_history, sequences_per_step)
        if picture is None:
            return None
        path.write_text(picture, encoding="utf-8")
    except Exception as error:
        logger.warning(f"No training curves were written to {path}: {error}")
        return None
    return path


def training_curves(log_history: Sequence[Mapping[str, Any]], sequences_per_step: int) -> str | None:
    """Return the curves as SVG; `None` if no curve has two points. For the arguments see [`write_curves`]."""
    from ..utils.drawing import standalone

    plots = [
        ("loss", {"training": "loss", "held out": "eval_loss"}, None),
        ("first choice right", _accuracies(log_history), 1.0),
        ("tau on held-out prompts", {"tau": "eval_tau"}, None),
    ]
    draws = []
    for label, names, top in plots:
        series = {name: _points(log_history, key, sequences_per_step) for name, key in names.items()}
        series = {name: points for name, points in series.items() if len(points[0]) >= _FEWEST}
        if series:
            draws.append(_panel(label, series, top))
    return standalone(draws, _LINES, "Training curves") if draws else None


def _accuracies(log_history: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the accuracies of the first steps to show: those of held-out chats, or else those of training."""
    prefix = "eval_" if len(_points(log_history, f"eval_{_STEPS[0]}", 1)[0]) >= _FEWEST else ""
    return {f"depth {at + 1}{', held out' if prefix else ''}": f"{prefix}{name}" for at, name in enumerate(_STEPS)}


def _points(log_history: Sequence[Mapping[str, Any]], key: str, sequences_per_step: int) -> Points:
    """Return the sequences seen and the values of a logged number; of several at a step, the last."""
    values = {entry["step"]: float(entry[key]) for entry in log_history if key in entry and "step" in entry}
    return [step * sequences_per_step for step in values], list(values.values())


def _panel(label: str, series: Mapping[str, Points], top: float | None) -> Callable[[Any], None]:
    """Return what draws the series on axes."""
    from ..utils.drawing import SERIES, legend

    colours = dict(zip(series, SERIES, strict=False))

    def draw(axes: Any) -> None:
        for name, (seen, values) in series.items():
            axes.plot(seen, values, marker="o" if len(seen) <= 20 else None, markersize=3, color=colours[name])
        axes.set_xlabel("sequences seen")
        axes.set_ylabel(label)
        axes.set_xlim(left=0)
        if top is not None:
            axes.set_ylim(0, top)
        axes.grid(axis="y")
        if len(series) > 1:
            legend(axes, colours)

    return draw


__all__ = ["CURVES_FILE", "training_curves", "write_curves"]
