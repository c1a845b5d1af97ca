"""Cuts the visible pairs of query and step-0 key into blocks for a fused kernel: causal, full, or banded.

Documents, windows and sampled positions would each need a mask of queries by keys. Cut into blocks they need none, or
a small one, and pairs that are not visible are not computed.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch


QUERIES = 128  # queries in a block with a mask

Span = tuple[int, int]  # first, and one past the last


@dataclass(frozen=True)
class Block:
    """Queries and keys of one kernel call. Every query of a block sees at least one of its keys.

    Attributes:
        batch: Sequences of the batch.
        queries: Indices among the positions that run.
        keys: Positions of step 0.
        causal: Query and key number `i` have the same position, and a query sees the keys up to its own.
        masked: Whether a mask is needed; it shows the `width` keys up to the query's position.
        more: An earlier block has the same queries and other keys.
    """

    batch: slice
    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False
    more: bool = False

    def cut(self, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return this block's part of query, key and value (B, heads, Q or T, width)."""
        parts = (self.queries, self.keys, self.keys)
        return tuple(state[self.batch, :, part] for state, part in zip(states, parts, strict=True))

    def mask(self, positions: torch.Tensor, width: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a mask to add to the scores, or `None` where this block needs none.

        Args:
            positions: (B or 1, Q) the positions of all queries.
            width: Keys that a query sees, see [`blocks_of`].
            dtype: The dtype of the mask.

        Returns:
            (b, 1, queries, keys), 0 or minus infinity.
        """
        if not self.masked:
            return None
        query = (positions if len(positions) == 1 else positions[self.batch])[:, None, self.queries, None]
        key = torch.arange(self.keys.start, self.keys.stop, device=positions.device)
        hidden = key > query
        if width is not None:
            hidden = hidden | (key <= query - width)
        return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


def blocks_of(
    length: int,
    documents: list[list[Span]] | None = None,
    sampled: list[list[int]] | None = None,
    width: int | None = None,
) -> list[Block]:
    """Return blocks that together hold every visible pair of query and step-0 key exactly once.

    Args:
        length: The number of positions `T` of step 0.
        documents: For each sequence of the batch, its documents in order; each sequence is one when `None`.
        sampled: For each sequence of the batch, the ascending positions that run; all when `None`.
        width: How many keys a query sees, its own included; its whole document when `None`. With 0 or less, none.
    """
    if width is not None and width <= 0:
        return []
    if documents is None and sampled is None:
        return list(_whole(slice(None), (0, length), width))
    number = len(documents or sampled or ())
    blocks: list[Block] = []
    for b in range(number):
        for span in documents[b] if documents is not None else [(0, length)]:
            batch = slice(b, b + 1)
            blocks += _whole(batch, span, width) if sampled is None else _sampled(batch, span, sampled[b], width)
    return blocks


def _whole(batch: slice, document: Span, width: int | None) -> Iterator[Block]:
    """Yield the blocks of a document all of whose positions run."""
    start, end = document
    edge = end if width is None else min(end, start + width)  # a query before this position sees its whole past
    yield Block(batch, slice(start, edge), slice(start, edge), causal=True)
    for first in range(edge, end, QUERIES):
        last = min(first + QUERIES, end)
        yield Block(batch, slice(first, last), slice(first - (width or 0) + 1, last), masked=True)


def _sampled(batch: slice, document: Span, positions: list[int], width: int | None) -> Iterator[Block]:
    """Yield the blocks of a document some of whose positions run; keys that a whole block sees need no mask."""
    start, end = document
    stop = bisect_left(positions, end)
    for first in range(bisect_left(positions, start), stop, QUERIES):
        queries = slice(first, min(first + QUERIES, stop))
        nearest, farthest = positions[queries.start], positions[queries.stop - 1]
        if width is not None and farthest - width >= start:
            yield Block(batch, queries, slice(max(start, nearest - width + 1), farthest + 1), masked=True)
            continue
        if nearest > start:
            yield Block(batch, queries, slice(start, nearest))
        yield Block(batch, queries, slice(nearest, farthest + 1), masked=True, more=nearest > start)


def documents_of(position_ids: torch.Tensor) -> list[list[Span]]:
    """Return where documents start and end in packed sequences.

    This waits for the device once.

    Args:
        position_ids: (B, T), 0 where a document starts.
    """
    length = position_ids.shape[1]
    starts: list[list[int]] = [[0] for _ in position_ids]
    for sequence, before in (position_ids[:, 1:] == 0).nonzero().tolist():
        starts[sequence].append(before + 1)
    return [list(zip(begun, [*begun[1:], length], strict=True)) for begun in starts]
