"""Attention of training-time test: causal over the prefix at step 0, one own-row key a step after that.

Row `t` of step `s` plays the draft that left the prefix at row `t` and is `s` tokens deep: it sees the step-0 keys of
rows `j <= t` and its own keys of steps `1..s`, exactly what cached drafting sees (paper section 3.2). It sits at
position `t + s`, a key of step `k` at its row plus `k`: a window counts from there.
"""

import torch

from .blocks import Block, Span, blocks_of, documents_of
from .eager import ttt_attention
from .fused import Prefix, can_fuse, fused_attention


class _Rows:
    """Rows that a step runs on, and their blocks."""

    def __init__(self, rows: torch.Tensor, starts: torch.Tensor | None, chosen: list[list[int]] | None = None):
        self.rows = rows  # (B or 1, R)
        self.starts = starts  # like rows: first row of each one's document
        self._chosen = chosen  # the rows themselves, if not all
        self._blocks: dict[int | None, list[Block]] = {}

    def prefix(self, length: int, documents: list[list[Span]] | None, width: int | None) -> Prefix:
        """Of a step that sees `width` step-0 keys; a step without a window has the blocks of the one before."""
        if width not in self._blocks:
            self._blocks[width] = blocks_of(length, documents, self._chosen, width)
        return Prefix(self._blocks[width], self.rows, width)


class TTTAttention:
    """The `attend` of a training-time-test unroll: remembers every step's keys and values, per draft layer.

    Args:
        rows: (B or 1, T) all rows, which step 0 runs on.
        position_ids: (B, T), 0 where a document starts; one document a row when `None`.
        attention: "fused", in memory linear in T, or "eager".

    Attributes:
        step: The step that runs now. A step may run again, in the backward pass of a checkpoint.
    """

    def __init__(self, rows: torch.Tensor, position_ids: torch.Tensor | None = None, attention: str = "fused") -> None:
        self.step = 0
        self._fused = attention == "fused"
        self._length = rows.shape[1]
        self._documents = documents_of(position_ids) if position_ids is not None and self._fused else None
        self._first = self._later = _Rows(rows, None if position_ids is None else rows - position_ids)
        self._steps: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def sample(self, rows: torch.Tensor) -> None:
        """The steps after the first run on these rows (B, R) alone, ascending, 0 < R <= T."""
        starts = self._first.starts
        starts = None if starts is None else starts.gather(1, rows)
        self._later = _Rows(rows, starts, rows.tolist() if self._fused else None)

    def __call__(
        self,
        module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of one layer at this step; rows and step already say where the queries and keys sit."""
        keys, values = self._steps.setdefault(module.layer_idx, ([], []))
        if len(keys) == self.step:
            keys.append(key)
            values.append(value)
        keys, values = [*keys[: self.step], key], [*values[: self.step], value]
        window, where = module.sliding_window, self._later if self.step else self._first
        if not (self._fused and can_fuse(query, value)):
            return ttt_attention(query, keys, values, module.scaling, where.rows, window, where.starts)
        width = None if window is None else window - self.step
        first = 1 if width is None else max(1, 1 - width)
        prefix = where.prefix(self._length, self._documents, width)
        return fused_attention(query, keys, values, module.scaling, prefix, first)
