"""Packing: several chats in one sequence, so that no sequence is mostly padding.

Packing happens in the dataset: `PackedDataset` wraps any map-style dataset (`datasets.Dataset`, `StoredFeatures`, a
list) and has a length of its own, so that samplers, the sharding of `accelerate`, grouping by length and the way in
which Trainer resumes (it skips the batches already seen) work on packed sequences as they do on chats. The seed alone
decides which chats share a sequence. A stream has no length to plan with; there the collator packs the chats of each
batch.

In a packed sequence `position_ids` restart at 0 with every chat, which is the convention of transformers, and no
position of training-time test attends across such a border.
"""

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


def plan_packing(lengths: Sequence[int], packing_length: int, seed: int = 0) -> list[list[int]]:
    """Return the indices of the chats of each packed sequence.

    The longest chat comes first, and each goes into the fullest sequence that still has room for it. Chats of equal
    length, and the sequences at the end, are in an order drawn from `seed`. A chat longer than `packing_length` fills
    a sequence: it is cut when the sequence is read.
    """
    check_packing_length(packing_length)
    draw = random.Random(seed)
    order = draw.sample(range(len(lengths)), len(lengths))
    order.sort(key=lambda i: -lengths[i])
    sequences: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room left -> numbers of the sequences that have just that
    rooms: list[int] = []  # the keys of by_room, ascending
    for i in order:
        length = min(lengths[i], packing_length)
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number, room = len(sequences), packing_length
            sequences.append([])
        else:
            room = rooms[place]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        sequences[number].append(i)
        left = room - length
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(number)
    draw.shuffle(sequences)
    return sequences


def check_packing_length(packing_length: int) -> None:
    if packing_length < 3:
        raise ValueError(
            f"packing_length is {packing_length}; it must be at least 3, since the third token is the first to learn"
        )


def join_chats(chats: Sequence[Mapping[str, Any]], packing_length: int | None = None) -> dict[str, Tensor]:
    """Join chats to one sequence: every column along the tokens, and `position_ids` that restart with each chat.

    Chats longer than `packing_length` are cut to it; sequences that are packed already keep their positions.

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
    """Return a column of the i-th example as a tensor.

    Raises:
        ValueError: the column is absent or not `length` long.
    """
    if name not in example:
        raise ValueError(f"example {i} of the batch has no `{name}`; encode chats with `prepare_dataset`")
    value = example[name]
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=None if name in ("features", "last_hidden") else torch.int64)
    if len(value) != length:
        raise ValueError(f"example {i} has {length} input_ids, but {len(value)} `{name}`")
    return value


def pack_examples(
    examples: Sequence[Mapping[str, Any]], packing_length: int, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Pack examples into as few sequences of at most `packing_length` tokens as best fit finds (see `join_chats`)."""
    lengths = [len(example["input_ids"]) for example in examples]
    groups = plan_packing(lengths, packing_length, seed)
    return [join_chats([examples[i] for i in group], packing_length) for group in groups]


class PackedDataset(torch.utils.data.Dataset):
    """A map-style dataset whose items are packed sequences of several chats.

    Items have `input_ids`, `labels`, `position_ids` `(T,)` int64, T at most `packing_length`, and where the chats have
    them `features (T, A * Ht)`, `last_hidden (T, Ht)` and `top1 (T,)`.

    Args:
        dataset: examples with `input_ids` and `labels`; anything with a length and numbered items.
        packing_length: number of tokens of a full sequence. Longer chats are cut to it; a warning tells how many, and
            how many of them had nothing to learn left and were dropped.
        seed: seed of the order among chats of one length, and of the order of the sequences.

    Attributes:
        groups: indices in `dataset` of the chats of each sequence.
        lengths: number of tokens of each sequence, for grouping by length.
        num_cut: number of chats that were longer than `packing_length`.
        num_dropped: number of those that had no token to learn within `packing_length`, and were left out.

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
        planned = plan_packing([lengths[i] for i in kept], packing_length, seed)
        self.groups = [[kept[i] for i in group] for group in planned]
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
            "Packed %d chats into %d sequences of up to %d tokens, which are %.1f%% full.",
            chats,
            len(self),
            self.packing_length,
            100 * share,
        )

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return join_chats([self.dataset[j] for j in self.groups[i]], self.packing_length)

    def iter_labels(self) -> Iterator[dict[str, Tensor]]:
        """Yield only the `labels` of every chat, so that tokens are counted without reading anything else."""
        wanted = {i for group in self.groups for i in group}
        for i, example in enumerate(only_labels(self.dataset)):
            if i in wanted:
                yield {"labels": torch.as_tensor(example["labels"])[: self.packing_length]}


def only_labels(dataset: Any) -> Any:
    """Return the examples with nothing but their `labels`, if the dataset offers a way to leave out the rest."""
    if hasattr(dataset, "iter_labels"):
        return dataset.iter_labels()
    return dataset.select_columns("labels") if hasattr(dataset, "select_columns") else dataset


def token_lengths(dataset: Any) -> list[int]:
    """Return the number of tokens of every example, from `dataset.lengths` or the offsets of an Arrow table if any."""
    lengths = getattr(dataset, "lengths", None)
    if lengths is not None:
        return list(lengths)
    if not hasattr(dataset, "with_format"):
        return [len(example["input_ids"]) for example in dataset]
    tables = dataset.select_columns("input_ids").with_format("arrow").iter(batch_size=10_000)
    return [length for table in tables for length in table["input_ids"].combine_chunks().value_lengths().to_pylist()]


def _has_target(labels: Any, length: int) -> bool:
    return bool((torch.as_tensor(labels)[2:length] != IGNORE_INDEX).any())
