"""Rows of a CSV file, whose cells stay texts: `4`, `NA` and `None` may be answers."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .text_files import Unreadable, read_lines


_LARGEST_CELL = (1 << 31) - 1  # the module's own limit is 128 KiB


def read_table(path: Path, separator: str) -> Iterator[tuple[int, Any]]:
    """Yield the number of the line in which a row ends, and the row by the names of the heading; empty cells are null.

    A row with more or fewer cells than the heading is unreadable: it has a text with a comma and without quotes.

    Raises:
        ValueError: quotes have no end, or the file is not Unicode; the message names the line.
    """
    csv.field_size_limit(_LARGEST_CELL)
    reader = csv.reader((text for _, text in read_lines(path)), delimiter=separator, strict=True)
    heading: list[str] = []
    try:
        for cells in reader:
            if not heading:
                heading = cells
            elif cells and len(cells) != len(heading):
                why = f"{len(cells)} cells under a heading of {len(heading)}"
                yield reader.line_num, Unreadable(f"{why}; texts with a {separator!r} in them need quotes")
            elif cells:
                yield reader.line_num, {name: cell or None for name, cell in zip(heading, cells, strict=True)}
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: no row of a table ({error})") from error
