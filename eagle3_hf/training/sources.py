"""Where training data comes from: the Hub, a folder, a file, a list, a dataset that is loaded already."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset, load_from_disk

from .formats import recognise


Source: TypeAlias = str | os.PathLike[str] | Dataset | DatasetDict | Sequence[Mapping[str, Any]]

# Builders of `datasets` by the ending of a file; what ends otherwise is read as JSON lines.
_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".txt": "text", ".json": "json", ".gz": "json", ".zst": "json"}
_SUFFIXES = {".jsonl", *_BUILDERS}

# name, name:split, name:config:split; a split may be sliced: train[:1000]
_HUB_NAME = re.compile(r"(?P<name>[^:\[\]]+)(?::(?P<config>[^:\[\]]+))??(?::(?P<split>[^:\[\]]+(?:\[[^\]]*\])?))?")


def load_chats(source: Source, *, split: str | None = None) -> Dataset:
    """Training data of any known shape (see `eagle3_hf.training.formats`) as one dataset.

    Args:
        source: a dataset; a list of rows; a file (JSON lines, JSON, parquet, CSV, text); a folder that
            `Dataset.save_to_disk` wrote or that holds data files; or the name of a dataset on the Hub, maybe with its
            split and a slice of it (`name:train_sft[:1000]`) or with a configuration too (`name:config:split`).
        split: which one, where there are several (`train` if there is one of that name). May be a slice.

    Raises:
        ValueError: nothing there, a stream, a line that is not JSON, columns of no known shape, or a split to choose.
        FileNotFoundError: neither a file, nor a folder, nor a name that the Hub may know.
    """
    chats = _load(source, split)
    if isinstance(chats, Mapping):
        chats = _one_split(chats, split)
    if len(chats) == 0:
        raise ValueError(f"{_name(source)}: there are no chats in it, the file or dataset is empty")
    try:
        recognise(chats.column_names)
    except ValueError as error:
        raise ValueError(f"{_name(source)}: {error}") from None
    return chats


def _name(source: Source) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else f"this {type(source).__name__}"


def _load(source: Source, split: str | None) -> Dataset | Mapping[str, Dataset]:
    if isinstance(source, (Dataset, DatasetDict)):
        return source
    if isinstance(source, (IterableDataset, IterableDatasetDict)):
        raise ValueError(
            "a streamed dataset has no length, and chats are counted before training: load it without streaming, or "
            "take a part of it, `Dataset.from_list(list(stream.take(50000)))`"
        )
    if not isinstance(source, (str, os.PathLike)):
        return _from_rows([dict(row) for row in source], "the list")
    path = Path(source)
    if path.is_dir():
        return _load_folder(path, split)
    if path.is_file():
        return _load_file(path, split)
    return _load_from_hub(os.fspath(source), split)


def _load_folder(path: Path, split: str | None) -> Dataset | Mapping[str, Dataset]:
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        return load_from_disk(str(path))
    return load_dataset(str(path), split=split)


def _load_file(path: Path, split: str | None) -> Dataset | Mapping[str, Dataset]:
    builder = _BUILDERS.get(path.suffix.lower())
    if builder is None and split is None:
        return _from_rows(_read_json_lines(path), str(path))
    return load_dataset(builder or "json", data_files=str(path), split=split or "train")


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
    wanted = split or "train"
    if wanted not in splits:
        raise ValueError(f"the dataset has the splits {', '.join(splits)}: say which, as NAME:SPLIT or split=")
    return splits[wanted]


def _from_rows(rows: list[dict[str, Any]], name: str) -> Dataset:
    # Arrow takes the columns from the first row alone.
    columns = list(dict.fromkeys(column for row in rows for column in row))
    try:
        return Dataset.from_list([{column: row.get(column) for column in columns} for row in rows])
    except (ValueError, TypeError, NotImplementedError) as error:  # as Arrow says it
        raise ValueError(
            f"the rows of {name} do not have columns of one type each ({error}); a turn's content, for one, must be "
            "text in all of them or a list of parts in all of them"
        ) from error


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); was the file cut off?") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a {type(row).__name__}, not an object with named columns")
            rows.append(row)
    return rows
