"""Records of a JSON file, however it was written: lines, an array, indented.

The extension of a file does not tell how it was written: `.jsonl` files hold arrays, `.json` files hold lines. A file
that is not JSON is an error that names the line; values that are no chats are handled where chats are read.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .text_files import Unreadable, read_lines


def read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of the line in which a record begins, and the record, which may be any JSON value.

    The elements of an array are records, unless they are the turns of one chat.

    Raises:
        ValueError: the file is not JSON or not Unicode; the message names the line.
    """
    lines = ((number, text) for number, text in read_lines(path) if not text.isspace() and text)
    head = list(itertools.islice(lines, 2))
    if head and _spans_lines(head):
        values = _document(path, itertools.chain(head, lines))
    else:
        values = ((number, _parsed(path, number, text)) for number, text in itertools.chain(head, lines))
    for number, value in values:
        for record in value if _is_array_of_records(value) else [value]:
            yield number, record


def _spans_lines(head: list[tuple[int, str]]) -> bool:
    """Whether a value continues after its first line, as in indented JSON."""
    first, *others = (text.strip() for _, text in head)
    if first in ("[", "{"):
        return True
    # If the second line is a complete record, the file has one in every line, and the first is broken.
    return not _is_record(first) and not any(_is_record(text) for text in others)


def _is_record(text: str) -> bool:
    """Whether a line is a complete value, and not a turn on a line of its own."""
    try:
        return not _is_turn(json.loads(text))
    except (ValueError, RecursionError) as error:
        return not isinstance(error, json.JSONDecodeError)  # JSON it is, but of thousands of levels or digits


def _is_array_of_records(value: Any) -> bool:
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
    """Yield values that span lines, one after the other."""
    numbered = list(lines)
    text = "".join(part if part.endswith("\n") else part + "\n" for _, part in numbered)
    decoder = json.JSONDecoder()
    end, index = 0, 0
    while (start := _skip_space(text, end)) < len(text):
        index += text.count("\n", end, start)
        number = numbered[index][0]
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            # Positions count the text from its beginning; blank lines were left out of it.
            number = numbered[min(error.lineno, len(numbered)) - 1][0]
            raise _not_json(path, number, numbered[min(error.lineno, len(numbered)) - 1][1], error) from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {_why(error)}: leave that value out") from error
        index += text.count("\n", start, end)
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
