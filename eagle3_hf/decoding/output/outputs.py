"""What `generate` returns besides ids, step by step: scores, logits, hidden states, attentions; row by row."""

from collections.abc import Sequence

import torch


class LayerSteps:
    """Tensors of every layer for each step."""

    def __init__(self) -> None:
        self._steps: list[tuple[torch.Tensor, ...]] = []

    def put(self, step: int, row: int, parts: Sequence[torch.Tensor], rows: int) -> None:
        """One row's (1, ...) tensors of all layers; rows of a step have the same shapes."""
        while len(self._steps) <= step:
            self._steps.append(())
        if not self._steps[step]:
            self._steps[step] = tuple(part.new_zeros(rows, *part.shape[1:]) for part in parts)
        for whole, part in zip(self._steps[step], parts, strict=True):
            whole[row : row + 1] = part

    def put_all(self, parts: Sequence[torch.Tensor]) -> None:
        """The tensors (B, ...) of the next step as a forward gave them."""
        self._steps.append(tuple(parts))

    def until(self, step: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple(self._steps[:step])


class StepRecord:
    """Collects the outputs of each step in vanilla's shapes, whichever row reaches the step first.

    Args:
        keep_scores, keep_logits, keep_states, keep_attentions: What the call asks for; the rest is `None`, as in
            vanilla.

    Attributes:
        states, attentions: Per step and layer; `None` where not asked for.
    """

    def __init__(self, keep_scores: bool, keep_logits: bool, keep_states: bool, keep_attentions: bool = False):
        self.keep_scores, self.keep_logits = keep_scores, keep_logits
        self.states = LayerSteps() if keep_states else None
        self.attentions = LayerSteps() if keep_attentions else None
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []

    @property
    def keeps_logits(self) -> bool:
        """Whether the logits themselves are wanted, and not only what follows from them."""
        return self.keep_scores or self.keep_logits

    @property
    def keeps_layers(self) -> bool:
        return self.states is not None or self.attentions is not None

    @property
    def keeps_anything(self) -> bool:
        return self.keeps_logits or self.keeps_layers

    def put_logits(self, steps: dict[int, int], scores: torch.Tensor, raw: torch.Tensor) -> None:
        """(B, V) processed scores and raw logits, of which each row belongs to its own step."""
        if self.keep_scores:
            _put(self._scores, steps, scores)
        if self.keep_logits:
            _put(self._logits, steps, raw)

    def scores_until(self, step: int) -> tuple[torch.Tensor, ...] | None:
        return tuple(self._scores[:step]) if self.keep_scores else None

    def logits_until(self, step: int) -> tuple[torch.Tensor, ...] | None:
        return tuple(self._logits[:step]) if self.keep_logits else None


def _put(kept: list[torch.Tensor], steps: dict[int, int], values: torch.Tensor) -> None:
    if len(steps) == values.shape[0] and set(steps.values()) == {len(kept)}:
        kept.append(values)  # every row at once: the usual step of a batch of one
        return
    for row, step in steps.items():
        while len(kept) <= step:
            kept.append(torch.zeros_like(values))
        kept[step][row] = values[row]
