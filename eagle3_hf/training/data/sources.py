"""Sources of training data: the Hub, a folder, a file, a list, a dataset that is loaded already.

JSON and CSV are read here (`json_files`, `table_files`, `records`), since other readers convert them to Arrow with one
guessed type for each column. Everything else is left to `datasets`.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import datasets
from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.json.json import Json

from .formats import COLUMNS, TOKENS, column_for, recognise
from .json_files import read_json
from .records import StoredRecord, decoded, in_memory, is_own, on_disk, plain_name, stored_records
from .table_files import read_table
from .text_files import encoding_of, read_lines


Source: TypeAlias = str | os.PathLike[str] | Dataset | DatasetDict | Sequence[Mapping[str, Any]]

# Builders of `datasets` by file extension, and separators of tables; everything else is read as JSON.
_BUILDERS = {".parquet": "parquet", ".arrow": "arrow", ".txt": "text"}
_TABLES = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_SUFFIXES = {".jsonl", ".json", *_BUILDERS, *_TABLES, *_COMPRESSED}

# name, name:split, name:config:split; a split may be sliced: train[:1000]
_HUB_NAME = re.compile(r"(?P<name>[^:\[\]]+)(?::(?P<config>[^:\[\]]+))??(?::(?P<split>[^:\[\]]+(?:\[[^\]]*\])?))?")

# Up to so many bytes of JSON chats are kept in memory; above, in an Arrow file in the cache folder of `datasets`.
_IN_MEMORY = 1 << 28

_CHAT_COLUMNS = COLUMNS.difference(TOKENS)

# What was read from large files is cached under a hash of their names, sizes and times: raise this number with every
# change of how files are read.
_READING = 1


def load_chats(source: Source, *, split: str | None = None) -> Dataset:
    """Load training data of any known shape (see `eagle3_hf.training.data.formats`) as one dataset.

    Only the columns that make a chat are kept. For records from JSON or a list, a column holds the texts and
    `NAME.json` all other values; `eagle3_hf.training.data.formats.read_example` reads either.

    Args:
        source: a dataset; a list of records; a file (JSON in lines or not, parquet, CSV, text); a folder that
            `Dataset.save_to_disk` wrote or that holds data files; or the name of a dataset on the Hub, optionally with
            its split and a slice of it (`name:train_sft[:1000]`) or with a configuration too (`name:config:split`).
        split: split to load, if there are several (default: `train`). It may be a slice.

    Raises:
        ValueError: the source is empty, a stream or not JSON, its columns have no known shape, or a split is missing.
        FileNotFoundError: the source is neither a file, nor a folder, nor a name that the Hub may know.
    """
    with _naming(source):
        chats = _load(source, split)
        if isinstance(chats, Mapping):
            chats = _one_split(chats, split)
        if len(chats) == 0:
            raise ValueError("there are no chats in it, the file or dataset is empty")
        return _with_known_columns(chats)


@contextmanager
def _naming(source: Source) -> Iterator[None]:
    """Make every error name the source, and show the causes that `datasets` hides behind an exception of its own."""
    name = os.fspath(source) if isinstance(source, (str, os.PathLike)) else f"this {type(source).__name__}"
    try:
        yield
    except (DatasetGenerationError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        if isinstance(cause, UnicodeDecodeError) and os.path.isfile(name):
            for _ in read_lines(Path(name)):  # raises with the line
                pass
        raise ValueError(str(cause) if name in str(cause) else f"{name}: {cause}") from error


def _with_known_columns(chats: Dataset) -> Dataset:
    """Select the columns that make a chat, and give them their known names."""
    meant = {name: column_for(name) for name in chats.column_names}
    recognise(meant.values())
    known = {name: column for name, column in meant.items() if plain_name(column) in COLUMNS or is_own(column)}
    # Of `Prompt` and `prompt` the second is meant.
    kept = {name: column for name, column in known.items() if name == column or column not in known}
    if len(kept) < len(meant):
        chats = chats.select_columns(list(kept))
    if chats.format["type"] not in (None, "custom"):  # arrays and tensors; a custom transform stays
        chats = chats.with_format(None)
    renamed = {name: column for name, column in kept.items() if name != column}
    return chats.rename_columns(renamed) if renamed else chats


def _load(source: Source, split: str | None) -> Dataset | Mapping[str, Dataset]:
    if isinstance(source, (Dataset, DatasetDict)):
        return source
    if isinstance(source, (IterableDataset, IterableDatasetDict)):
        raise ValueError(
            "a streamed dataset has no length, and chats are counted before training: load it without streaming, or "
            "take a part of it, `Dataset.from_list(list(stream.take(50000)))`"
        )
    if not isinstance(source, (str, os.PathLike)):
        return _from_list(list(source))
    path = Path(source)
    if path.is_dir():
        return _load_folder(path)
    if path.is_file():
        return {"train": _load_file(path)}
    return _load_from_hub(os.fspath(source), split)


def _load_folder(path: Path) -> Dataset | Mapping[str, Dataset]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return load_from_disk(str(path))
    builder = load_dataset_builder(str(path))
    if not isinstance(builder, (Json, Csv)):
        return load_dataset(str(path))
    splits = builder.config.data_files.items()
    return {str(split): _from_files([Path(file) for file in files]) for split, files in splits}


def _load_file(path: Path) -> Dataset:
    builder = _BUILDERS.get(_ending(path))
    if builder is None:
        return _from_files([path])
    options = {"encoding": encoding_of(path)} if builder == "text" else {}
    return load_dataset(builder, data_files=str(path), split="train", **options)


def _ending(path: Path) -> str:
    """Return the last extension of a file that tells what is in it, leaving out those of compression."""
    endings = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in _COMPRESSED]
    return endings[-1] if endings else ""


def _load_from_hub(source: str, split: str | None) -> Dataset | Mapping[str, Dataset]:
    match = _HUB_NAME.fullmatch(source)
    looks_like_file = source.count("/") > 1 or source.startswith(("/", ".")) or Path(source).suffix in _SUFFIXES
    if match is None or looks_like_file:
        raise FileNotFoundError(f"{source}: no such file or folder, and no name of a dataset on the Hub")
    name, config = match["name"], match["config"]
    return load_dataset(name, config, split=split or match["split"])


def _one_split(splits: Mapping[str, Dataset], split: str | None) -> Dataset:
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    lengths = {name: len(part) for name, part in splits.items()}
    try:
        parts = ReadInstruction.from_spec(split or "train").to_absolute(lengths)
    except (AssertionError, ValueError) as error:
        asked = "" if split is None else f" and {split} is none of them ({error})"
        raise ValueError(
            f"the dataset has the splits {', '.join(splits)}{asked}: say which, as NAME:SPLIT or split="
        ) from error
    chosen = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts]
    return chosen[0] if len(chosen) == 1 else concatenate_datasets(chosen)


# ----- records that are read here ------------------------------------------------------------------------------------


def _from_list(records: list[Any]) -> Dataset:
    if records and _is_tokens(records[0]):
        return Dataset.from_list([{name: record.get(name) for name in TOKENS} for record in records])
    numbered = ((f"item {number} of the list", record) for number, record in enumerate(records))
    return in_memory(_checked(numbered), _CHAT_COLUMNS)


def _from_files(paths: list[Path]) -> Dataset:
    if _is_tokens(next(_records_of(paths), ("", None))[1]):  # numbers alone, of one type
        return load_dataset("json", data_files=[str(path) for path in paths], split="train")
    if sum(path.stat().st_size for path in paths) <= _IN_MEMORY:
        return in_memory(_checked(_records_of(paths)), _CHAT_COLUMNS)
    return on_disk(_checked(_records_of(paths)), _CHAT_COLUMNS, _kept_in(paths))


def _kept_in(paths: list[Path]) -> Path:
    """Return where the records of these files are cached, as long as the files do not change."""
    stamps = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    digest = hashlib.sha256(repr((_READING, stamps)).encode()).hexdigest()[:32]
    return Path(datasets.config.HF_DATASETS_CACHE) / "eagle3_chats" / f"{digest}.arrow"


def _records_of(paths: list[Path]) -> Iterator[tuple[str, Any]]:
    for path in paths:
        separator = _TABLES.get(_ending(path))
        where = f"{path.name}, line" if len(paths) > 1 else "line"
        for number, record in read_json(path) if separator is None else read_table(path, separator):
            yield f"{where} {number}", record


def _is_tokens(record: Any) -> bool:
    return isinstance(record, Mapping) and all(isinstance(record.get(name), list) for name in TOKENS)


def _checked(records: Iterator[tuple[str, Any]]) -> Iterator[StoredRecord]:
    """Yield records as they are stored.

    Raises:
        ValueError: at the end, if none of them had a column of a chat.
    """
    found: dict[str, None] = {}

    def noted() -> Iterator[tuple[str, Any]]:
        for place, record in records:
            # A record that is a list is a chat that consists of its turns alone.
            names = record if isinstance(record, Mapping) else ["messages"] if isinstance(record, list) else []
            found.update((str(name), None) for name in names)
            yield place, record

    stored: StoredRecord | None = None
    for stored in stored_records(noted(), _CHAT_COLUMNS, column_for):
        yield stored
    if stored is not None:
        if not found:
            decoded(stored)  # raises with what is wrong with the last record, as with all before
        recognise(map(column_for, found))
