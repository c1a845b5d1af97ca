"""Attention of training-time test: causal over the prefix at step 0, one more key of its own at each later step.

Position `t` at step `s` stands for a draft that left the prefix at `t` and is `s` tokens deep. It attends to the
step-0 keys of positions `j <= t` and to its own keys of steps `1..s`, exactly as drafting with a cache does (paper
section 3.2). Its rotary position is `t + s`, that of its own key of step `k` is `t + k`; a window counts from there.
"""

import torch

from .blocks import Block, Span, blocks_of, documents_of
from .eager import ttt_attention
from .fused import Prefix, can_fuse, fused_attention


class _Queries:
    """The positions that a step runs on, and the blocks of keys that they see."""

    def __init__(self, positions: torch.Tensor, starts: torch.Tensor | None, sampled: list[list[int]] | None = None):
        self.positions = positions  # (B or 1, Q)
        self.starts = starts  # like positions: where the document of each one starts
        self._sampled = sampled  # the positions as numbers, unless the step runs on all
        self._blocks: dict[int | None, list[Block]] = {}

    def prefix(self, length: int, documents: list[list[Span]] | None, width: int | None) -> Prefix:
        """Return the prefix of a step that sees `width` step-0 keys. Steps with equal widths share their blocks."""
        if width not in self._blocks:
            self._blocks[width] = blocks_of(length, documents, self._sampled, width)
        return Prefix(self._blocks[width], self.positions, width)


class TTTAttention:
    """The `attend` function of a training-time-test unroll. It keeps every step's keys and values, per draft layer.

    Args:
        positions: (B or 1, T) all positions, `0..T - 1`, which step 0 runs on.
        position_ids: (B, T), 0 where a document starts; each sequence is one document when `None`.
        attention: "fused", whose memory is linear in T, or "eager".

    Attributes:
        step: The step that is running. A step may run again, in the backward pass of a checkpoint.
    """

    def __init__(
        self, positions: torch.Tensor, position_ids: torch.Tensor | None = None, attention: str = "fused"
    ) -> None:
        self.step = 0
        self._fused = attention == "fused"
        self._length = positions.shape[1]
        self._documents = documents_of(position_ids) if position_ids is not None and self._fused else None
        self._first = self._later = _Queries(positions, None if position_ids is None else positions - position_ids)
        self._steps: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def sample(self, positions: torch.Tensor) -> None:
        """Run the steps after the first only on these positions (B, Q), which ascend; 0 < Q <= T."""
        starts = self._first.starts
        starts = None if starts is None else starts.gather(1, positions)
        self._later = _Queries(positions, starts, positions.tolist() if self._fused else None)

    def __call__(
        self,
        module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one layer's output at this step. `position_ids` are ignored: positions and step determine them."""
        keys, values = self._steps.setdefault(module.layer_idx, ([], []))
        if len(keys) == self.step:
            keys.append(key)
            values.append(value)
        keys, values = [*keys[: self.step], key], [*values[: self.step], value]
        window, queries = module.sliding_window, self._later if self.step else self._first
        if not (self._fused and can_fuse(query, value)):
            return ttt_attention(query, keys, values, module.scaling, queries.positions, window, queries.starts)
        width = None if window is None else window - self.step
        first = 1 if width is None else max(1, 1 - width)
        prefix = queries.prefix(self._length, self._documents, width)
        return fused_attention(query, keys, values, module.scaling, prefix, first)
