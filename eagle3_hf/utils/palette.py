"""Colours of plots on light and on dark ground, as variables of a style sheet."""

from collections.abc import Sequence


LIGHT = ("#0072b2", "#d55e00", "#009e73", "#a0458a", "#2b8cc4", "#b07800", "#6a51a3", "#666666")
DARK = ("#56a8e0", "#ff8c42", "#2fc79a", "#e39ad0", "#8fd0f5", "#f0b93a", "#b39ddb", "#aaaaaa")
INK = ("#1b1b1b", "#e6e6e6")  # light, dark
GRID = ("#dddddd", "#3a3a3a")


def series_variables(colours: Sequence[str]) -> str:
    """Return the declarations of a palette's variables."""
    return " ".join(f"--series-{index}: {colour};" for index, colour in enumerate(colours))


__all__ = ["DARK", "GRID", "INK", "LIGHT", "series_variables"]
