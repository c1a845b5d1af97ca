"""Records of any type as an Arrow dataset, in which each column has one type.

A column holds the texts, and a second column with the same name and `.json` at its end holds all other values as JSON:
messages, numbers, objects with different keys. So no record restricts the types of another. Columns that are never
read are dropped first.
"""

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
_UNREADABLE = "eagle3_unreadable"  # why a record cannot be read at all

_BATCH = 1000  # number of records in a batch on disk

StoredRecord = dict[str, Any]


def plain_name(column: str) -> str:
    """Return the name of what a column holds."""
    return column.removesuffix(_JSON)


def decoded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as it was before it was stored; records of other datasets stay as they are.

    Raises:
        OddChatError: the record could not be read when it was stored.
    """
    if record.get(_UNREADABLE):
        reason, _, detail = record[_UNREADABLE].partition("\n")
        raise OddChatError(reason, detail or reason)
    values = dict(record)
    for column in record:
        if column.endswith(_JSON) and (text := values.pop(column)) is not None:
            values[plain_name(column)] = json.loads(text)
    return values


def is_own(column: str) -> bool:
    """Whether a column describes a stored record, and not the chat in it."""
    return column == _UNREADABLE


def features_of(columns: Iterable[str]) -> Features:
    """Return the types of all columns that a stored record can have. The texts of a column may exceed 2 GB."""
    names = [name for column in sorted(columns) for name in (column, column + _JSON)]
    types = {name: Value("large_string") for name in (*names, _UNREADABLE)}
    return Features(types | {"finished": Value("bool")})


def stored_records(
    records: Iterable[tuple[str, Any]], columns: frozenset[str], column_for: Callable[[str], str]
) -> Iterator[StoredRecord]:
    """Yield records as they are stored.

    Args:
        records: pairs of the place of a record, in words, and the record.
        columns: names of the columns that are kept.
        column_for: returns the column that a name means.
    """
    for place, record in records:
        try:
            yield _stored(record, columns, column_for)
        except OddChatError as error:
            yield {_UNREADABLE: f"{error.reason}\n{place}: {error}"}


def _stored(record: Any, columns: frozenset[str], column_for: Callable[[str], str]) -> StoredRecord:
    if isinstance(record, Unreadable):
        raise OddChatError("a record that cannot be read", record.why)
    if isinstance(record, list) and all(isinstance(turn, Mapping) for turn in record):
        record = {"messages": record}  # a chat that consists of its turns alone
    if not isinstance(record, Mapping):
        raise OddChatError(
            "no object with named columns", f"a {type(record).__name__}, not an object with named columns"
        )
    stored: StoredRecord = {}
    for name, value in record.items():
        column = column_for(str(name))
        if value is not None and column in columns and (column == name or column not in record):
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
    """Convert what other libraries have in place of JSON's types."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    if hasattr(value, "isoformat"):  # times
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} ({str(value)[:80]!r}) is no JSON")


def in_memory(records: Iterable[StoredRecord], columns: frozenset[str]) -> Dataset:
    """Make a dataset of stored records that is not written to disk."""
    listed = list(records)
    features = features_of(columns)
    used = {name: features[name] for name in features if any(name in record for record in listed)}
    return Dataset.from_dict({name: [record.get(name) for record in listed] for name in used}, features=Features(used))


def on_disk(records: Iterable[StoredRecord], columns: frozenset[str], path: Path) -> Dataset:
    """Make a dataset of stored records in an Arrow file, of which only what is read is in memory.

    The file is written unless it exists; several processes may do so side by side.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            _write(records, features_of(columns).arrow_schema, partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    dataset = Dataset.from_file(str(path))
    empty = [name for name in dataset.column_names if dataset.data.column(name).null_count == len(dataset)]
    return dataset.remove_columns(empty)


def _write(records: Iterable[StoredRecord], schema: pa.Schema, path: Path) -> None:
    records = iter(records)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        while batch := list(itertools.islice(records, _BATCH)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
