"""Several chats in one row, so that no row is mostly padding.

Packing happens in the dataset: `PackedDataset` wraps any map-style dataset (`datasets.Dataset`, `StoredFeatures`, a
list) and has a length of its own, so samplers, `accelerate`'s sharding, grouping by length and Trainer's way of
resuming (skip the batches already seen) work on rows of chats as they do on chats. Which chats share a row is settled
once, by the seed. A stream has no length to plan with; there the collator packs what each batch happens to hold.

In a packed row `position_ids` restart at 0 with every chat, the convention of transformers, and no row of
training-time test ever looks across such a border.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ttt.loss import IGNORE_INDEX
from ...utils.logging import get_logger


logger = get_logger(__name__)

# Columns of an example that run along its tokens.
TOKEN_COLUMNS = ("input_ids", "labels", "position_ids", "features", "last_hidden", "top1")


def fit_rows(lengths: Sequence[int], packing_length: int, seed: int = 0) -> list[list[int]]:
    """Indices of the chats of each row: longest first, each into the fullest row that still has room for it.

    Chats of equal length, and the rows at the end, are in an order drawn from `seed`. A chat longer than a row counts
    as one of exactly a row: it is cut when the row is read.
    """
    check_packing_length(packing_length)
    draw = random.Random(seed)
    order = draw.sample(range(len(lengths)), len(lengths))
    order.sort(key=lambda i: -lengths[i])
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left -> rows that have just that
    rooms: list[int] = []  # the keys of by_room, ascending
    for i in order:
        length = min(lengths[i], packing_length)
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), packing_length
            rows.append([])
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(i)
        left = room - length
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(row)
    draw.shuffle(rows)
    return rows


def check_packing_length(packing_length: int) -> None:
    if packing_length < 3:
        raise ValueError(f"packing_length is {packing_length}; a row needs at least 3 tokens to have one to learn")


def join_chats(chats: Sequence[Mapping[str, Any]], packing_length: int | None = None) -> dict[str, Tensor]:
    """One row of several chats: every column joined along the tokens, and `position_ids` that restart with each chat.

    Chats longer than `packing_length` are cut to it; chats that are rows already keep their positions.

    Raises:
        ValueError: a chat lacks a column that another one has, or one of its columns is not as long as its ids.
    """
    names = [name for name in TOKEN_COLUMNS if any(name in chat for chat in chats)]
    parts: dict[str, list[Tensor]] = {name: [] for name in (*names, "position_ids")}
    for i, chat in enumerate(chats):
        length = len(chat["input_ids"])
        for name in parts:
            if name == "position_ids" and name not in chat:
                column = torch.arange(length)
            else:
                column = token_column(chat, name, i, length)
            parts[name].append(column[:packing_length])
    return {name: torch.cat(columns) for name, columns in parts.items()}


def token_column(example: Mapping[str, Any], name: str, i: int, length: int) -> Tensor:
    """A column of the i-th example as a tensor; ValueError when it is absent or not `length` long."""
    if name not in example:
        raise ValueError(f"example {i} of the batch has no `{name}`; encode chats with `prepare_dataset`")
    value = example[name]
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=None if name in ("features", "last_hidden") else torch.int64)
    if len(value) != length:
        raise ValueError(f"example {i} has {length} input_ids, but {len(value)} `{name}`")
    return value


def pack_rows(examples: Sequence[Mapping[str, Any]], packing_length: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Examples packed into as few rows of at most `packing_length` tokens as best fit finds (see `join_chats`)."""
    lengths = [len(example["input_ids"]) for example in examples]
    groups = fit_rows(lengths, packing_length, seed)
    return [join_chats([examples[i] for i in group], packing_length) for group in groups]


class PackedDataset(torch.utils.data.Dataset):
    """A map-style dataset whose items are rows of several chats.

    Items have `input_ids`, `labels`, `position_ids` `(T,)` int64, T at most `packing_length`, and where the chats have
    them `features (T, A * Ht)`, `last_hidden (T, Ht)` and `top1 (T,)`.

    Args:
        dataset: examples with `input_ids` and `labels`; anything with a length and numbered items.
        packing_length: tokens of a full row. Longer chats are cut to it; how many, and how many of them had nothing to
            learn left and were dropped, is said once.
        seed: of the order among chats of one length, and of the order of the rows.

    Attributes:
        groups: indices of each row's chats in `dataset`.
        lengths: tokens of each row, for grouping by length.
        num_cut: chats that were longer than a row.
        num_dropped: those of them without a token to learn within a row's length, left out.

    Raises:
        ValueError: `packing_length` below 3, or no chat is left.
    """

    def __init__(self, dataset: Any, packing_length: int, seed: int = 0) -> None:
        check_packing_length(packing_length)
        self.dataset = dataset
        self.packing_length = packing_length
        lengths = token_lengths(dataset)
        long = [i for i, length in enumerate(lengths) if length > packing_length]
        empty = {i for i in long if not _has_target(dataset[i]["labels"], packing_length)}
        kept = [i for i in range(len(lengths)) if i not in empty]
        if not kept:
            raise ValueError(f"no chat of {len(lengths)} has a token to learn among its first {packing_length} tokens")
        rows = fit_rows([lengths[i] for i in kept], packing_length, seed)
        self.groups = [[kept[i] for i in row] for row in rows]
        self.lengths = [sum(min(lengths[i], packing_length) for i in group) for group in self.groups]
        self.num_cut, self.num_dropped = len(long), len(empty)
        self._report(len(kept))

    def _report(self, chats: int) -> None:
        if self.num_cut:
            logger.warning(
                "%d of %d chats are longer than packing_length (%d) and are cut to it; %d of them have no token to "
                "learn there and are left out.",
                self.num_cut,
                chats + self.num_dropped,
                self.packing_length,
                self.num_dropped,
            )
        share = sum(self.lengths) / (len(self) * self.packing_length)
        logger.info(
            "Packed %d chats into %d rows of %d, %.1f%% full.", chats, len(self), self.packing_length, 100 * share
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return join_chats([self.dataset[j] for j in self.groups[i]], self.packing_length)

    def label_rows(self) -> Iterator[dict[str, Tensor]]:
        """The `labels` of every chat, one after the other, without reading anything else; for counting tokens."""
        labels = only_labels(self.dataset)
        wanted = {i for group in self.groups for i in group}
        for i, row in enumerate(labels):
            if i in wanted:
                yield {"labels": torch.as_tensor(row["labels"])[: self.packing_length]}


def only_labels(dataset: Any) -> Any:
    """The rows of a dataset with nothing but their `labels`, where it can be told not to read the rest."""
    if hasattr(dataset, "label_rows"):
        return dataset.label_rows()
    return dataset.select_columns("labels") if hasattr(dataset, "select_columns") else dataset


def token_lengths(dataset: Any) -> list[int]:
    """Tokens of every example: `dataset.lengths` where there is such; of an Arrow table, read off its offsets."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None:
        return list(lengths)
    if not hasattr(dataset, "with_format"):
        return [len(example["input_ids"]) for example in dataset]
    tables = dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=10_000)
    return [length for table in tables for length in table["input_ids"].combine_chunks().value_lengths().to_pylist()]


def _has_target(labels: Any, length: int) -> bool:
    return bool((torch.as_tensor(labels)[2:length] != IGNORE_INDEX).any())
