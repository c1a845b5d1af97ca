"""Rows of any type as a dataset of Arrow, where each column has one type.

A column holds the texts, and beside it a column of the same name with `.json` behind it holds what else there was, as
JSON: messages, numbers, objects of which no two have the same keys. So one row never decides what another may be.
Columns that nobody reads are dropped first.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, Value

from .dropped_chats import OddChatError
from .text_files import Unreadable


_JSON = ".json"
_UNREADABLE = "eagle3_unreadable"  # why, where a row cannot be read at all

_BATCH = 1000  # rows of a batch on disk

StoredRow = dict[str, Any]


def plain_name(column: str) -> str:
    """Name of what a column holds."""
    return column.removesuffix(_JSON)


def decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it was before it was stored; rows of other datasets stay as they are.

    Raises:
        OddChatError: it could not be read then.
    """
    if row.get(_UNREADABLE):
        reason, _, detail = row[_UNREADABLE].partition("\n")
        raise OddChatError(reason, detail or reason)
    values = dict(row)
    for column in row:
        if column.endswith(_JSON) and (text := values.pop(column)) is not None:
            values[plain_name(column)] = json.loads(text)
    return values


def is_own(column: str) -> bool:
    """Whether a column is one of those that tell of a stored row, and not of the chat in it."""
    return column == _UNREADABLE


def features_of(columns: Iterable[str]) -> Features:
    """The types of all that a stored row can have. Texts of a column may be more than 2 GB together."""
    names = [name for column in sorted(columns) for name in (column, column + _JSON)]
    types = {name: Value("large_string") for name in (*names, _UNREADABLE)}
    return Features(types | {"finished": Value("bool")})


def stored_rows(
    rows: Iterable[tuple[str, Any]], columns: frozenset[str], column_for: Callable[[str], str]
) -> Iterator[StoredRow]:
    """Rows as they are stored.

    Args:
        rows: where a row stands, in words, and the row.
        columns: what is kept.
        column_for: the column that a name means.
    """
    for place, row in rows:
        try:
            yield _stored(row, columns, column_for)
        except OddChatError as error:
            yield {_UNREADABLE: f"{error.reason}\n{place}: {error}"}


def _stored(row: Any, columns: frozenset[str], column_for: Callable[[str], str]) -> StoredRow:
    if isinstance(row, Unreadable):
        raise OddChatError("a row that cannot be read", row.why)
    if isinstance(row, list) and all(isinstance(turn, Mapping) for turn in row):
        row = {"messages": row}  # a chat of nothing but its turns
    if not isinstance(row, Mapping):
        raise OddChatError("no object with named columns", f"a {type(row).__name__}, not an object with named columns")
    stored: StoredRow = {}
    for name, value in row.items():
        column = column_for(str(name))
        if value is not None and column in columns and (column == name or column not in row):
            native = isinstance(value, bool) if column == "finished" else _is_text(value)
            stored[column if native else column + _JSON] = value if native else _as_json(value)
    return stored


def _is_text(value: Any) -> bool:
    """Whether Arrow can keep it as text: half of a character (a lone surrogate) has no UTF-8."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise OddChatError("a value that is no JSON", why) from error


def _plain(value: Any) -> Any:
    """What other libraries have in place of JSON's types."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    if hasattr(value, "isoformat"):  # times
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} ({str(value)[:80]!r}) is no JSON")


def in_memory(rows: Iterable[StoredRow], columns: frozenset[str]) -> Dataset:
    """A dataset of stored rows that is not written to disk."""
    listed = list(rows)
    features = features_of(columns)
    used = {name: features[name] for name in features if any(name in row for row in listed)}
    return Dataset.from_dict({name: [row.get(name) for row in listed] for name in used}, features=Features(used))


def on_disk(rows: Iterable[StoredRow], columns: frozenset[str], path: Path) -> Dataset:
    """A dataset of stored rows in an Arrow file, of which only what is read is in memory.

    The file is written where it is not there yet; several processes may do so side by side.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            _write(rows, features_of(columns).arrow_schema, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    dataset = Dataset.from_file(str(path))
    empty = [name for name in dataset.column_names if dataset.data.column(name).null_count == len(dataset)]
    return dataset.remove_columns(empty)


def _write(rows: Iterable[StoredRow], schema: pa.Schema, path: Path) -> None:
    rows = iter(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while batch := list(itertools.islice(rows, _BATCH)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
