"""Which step-0 keys the rows of a later step see, as blocks that a fused kernel takes: causal, whole, or banded.

Documents, windows and sampled rows would each need a mask of rows by keys. Cut into blocks they need none, or a small
one, and what is invisible is not computed.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch


QUERIES = 128  # of a block with a mask

Span = tuple[int, int]  # first, and one past the last


@dataclass(frozen=True)
class Block:
    """Queries and keys of one call of a kernel. Every query of a block sees at least one of its keys.

    Attributes:
        batch: Rows of the batch.
        queries: Places among the rows that run.
        keys: Rows of step 0.
        causal: Query and key number `i` are the same row, and a query sees the keys up to itself.
        masked: The visible keys need a mask: those up to the query's row, `width` of them.
        more: An earlier block has the same queries and other keys.
    """

    batch: slice
    queries: slice
    keys: slice
    causal: bool = False
    masked: bool = False
    more: bool = False

    def cut(self, states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """This block's part of query, key and value (B, heads, R or T, width)."""
        places = (self.queries, self.keys, self.keys)
        return tuple(state[self.batch, :, place] for state, place in zip(states, places, strict=True))

    def mask(self, rows: torch.Tensor, width: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """(b, 1, queries, keys) to be added to the scores, from all rows (B or 1, R); `None` if nothing is hidden."""
        if not self.masked:
            return None
        row = (rows if len(rows) == 1 else rows[self.batch])[:, None, self.queries, None]
        place = torch.arange(self.keys.start, self.keys.stop, device=rows.device)
        hidden = place > row
        if width is not None:
            hidden = hidden | (place <= row - width)
        return torch.zeros(hidden.shape, dtype=dtype, device=rows.device).masked_fill_(hidden, float("-inf"))


def blocks_of(
    length: int,
    documents: list[list[Span]] | None = None,
    rows: list[list[int]] | None = None,
    width: int | None = None,
) -> list[Block]:
    """Blocks that together hold every visible pair of query and step-0 key once.

    Args:
        length: Rows `T` of step 0.
        documents: Of every row of the batch, in order; one document that fills the row when `None`.
        rows: Of every row of the batch, the ascending rows that run; all when `None`.
        width: Keys that a query sees, its own row's included; all of its document when `None`. 0 or less: none.
    """
    if width is not None and width <= 0:
        return []
    if documents is None and rows is None:
        return list(_whole(slice(None), (0, length), width))
    number = len(documents or rows or ())
    blocks: list[Block] = []
    for b in range(number):
        for span in documents[b] if documents is not None else [(0, length)]:
            batch = slice(b, b + 1)
            blocks += _whole(batch, span, width) if rows is None else _sampled(batch, span, rows[b], width)
    return blocks


def _whole(batch: slice, document: Span, width: int | None) -> Iterator[Block]:
    """Of a document all of whose rows run."""
    start, end = document
    edge = end if width is None else min(end, start + width)  # up to here a query sees its whole past
    yield Block(batch, slice(start, edge), slice(start, edge), causal=True)
    for first in range(edge, end, QUERIES):
        last = min(first + QUERIES, end)
        yield Block(batch, slice(first, last), slice(first - (width or 0) + 1, last), masked=True)


def _sampled(batch: slice, document: Span, rows: list[int], width: int | None) -> Iterator[Block]:
    """Of a document some of whose rows run: what a block of queries all see needs no mask."""
    start, end = document
    stop = bisect_left(rows, end)
    for first in range(bisect_left(rows, start), stop, QUERIES):
        queries = slice(first, min(first + QUERIES, stop))
        nearest, farthest = rows[queries.start], rows[queries.stop - 1]
        if width is not None and farthest - width >= start:
            yield Block(batch, queries, slice(max(start, nearest - width + 1), farthest + 1), masked=True)
            continue
        if nearest > start:
            yield Block(batch, queries, slice(start, nearest))
        yield Block(batch, queries, slice(nearest, farthest + 1), masked=True, more=nearest > start)


def documents_of(position_ids: torch.Tensor) -> list[list[Span]]:
    """Where documents start (position 0) and end in packed rows (B, T). Reads from the device, once."""
    length = position_ids.shape[1]
    starts: list[list[int]] = [[0] for _ in position_ids]
    for row, place in (position_ids[:, 1:] == 0).nonzero().tolist():
        starts[row].append(place + 1)
    return [list(zip(places, [*places[1:], length], strict=True)) for places in starts]
