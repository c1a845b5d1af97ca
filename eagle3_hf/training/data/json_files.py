"""Rows of a JSON file, however it was written: lines, an array, indented.

The ending of a file's name promises too little: `.jsonl` files hold arrays, `.json` files hold lines. A file that is
not JSON is an error with the line; a value that is no chat is left to whoever reads the chats.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .text_files import Unreadable, read_lines


def read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """The number of the line in which a row begins, and the row: whatever JSON value stands there.

    The elements of an array are rows, unless they are the turns of one chat.

    Raises:
        ValueError: not JSON or not Unicode; names the line.
    """
    lines = ((number, text) for number, text in read_lines(path) if not text.isspace() and text)
    head = list(itertools.islice(lines, 2))
    if head and _spans_lines(head):
        values = _document(path, itertools.chain(head, lines))
    else:
        values = ((number, _parsed(path, number, text)) for number, text in itertools.chain(head, lines))
    for number, value in values:
        for row in value if _is_array_of_rows(value) else [value]:
            yield number, row


def _spans_lines(head: list[tuple[int, str]]) -> bool:
    """Whether a value goes on behind its first line, as it does where JSON was indented."""
    first, *others = (text.strip() for _, text in head)
    if first in ("[", "{"):
        return True
    # If the second line is a whole row, the file has one in every line, and the first is broken.
    return not _is_row(first) and not any(_is_row(text) for text in others)


def _is_row(text: str) -> bool:
    """Whether a line is a value of its own, and not a turn on a line of its own."""
    try:
        return not _is_turn(json.loads(text))
    except (ValueError, RecursionError) as error:
        return not isinstance(error, json.JSONDecodeError)  # JSON it is, but of thousands of levels or digits


def _is_array_of_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and not any(_is_turn(item) for item in value) and _objects(value)


def _objects(values: list[Any]) -> bool:
    return all(isinstance(value, (dict, list)) for value in values)


def _is_turn(value: Any) -> bool:
    return isinstance(value, dict) and ("role" in value or "from" in value)


def _parsed(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _not_json(path, number, text, error) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets in brackets
        return Unreadable(_why(error))


def _document(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
    """Values that span lines, one behind the other."""
    numbered = list(lines)
    text = "".join(part if part.endswith("\n") else part + "\n" for _, part in numbered)
    decoder = json.JSONDecoder()
    end, row = 0, 0
    while (start := _skip_space(text, end)) < len(text):
        row += text.count("\n", end, start)
        number = numbered[row][0]
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            # Positions count the text from its beginning; blank lines were left out of it.
            number = numbered[min(error.lineno, len(numbered)) - 1][0]
            raise _not_json(path, number, numbered[min(error.lineno, len(numbered)) - 1][1], error) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {_why(error)}: leave that value out") from error
        row += text.count("\n", start, end)
        yield number, value


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and (text[start].isspace() or text[start] == ","):
        start += 1
    return start


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _not_json(path: Path, number: int, text: str, error: json.JSONDecodeError) -> ValueError:
    place = f"{path}, line {number}"
    if "\0" in text:
        return ValueError(
            f"{place}: NUL bytes where JSON was expected; was the file written to its end? Write it again"
        )
    return ValueError(f"{place}: not JSON ({error.msg}: column {error.colno}); was the file cut off?")
