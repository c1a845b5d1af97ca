"""The training-time-test unroll: a head run on its own output, step by step (paper section 3.2).

Row `t` of step `s` sits at position `t + s` of its document and learns the token two further on. With several
documents in a row of the batch (packing) a document starts wherever `position_ids` is 0; nothing crosses its ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..model.features import Borrowed
from .attention import TTTAttention
from .loss import StepLoss, Supervision, step_loss
from .settings import TTTSettings


class Unrolled(Protocol):
    """What the unroll calls of a head; [`Eagle3DraftModel`] says what each does."""

    def fuse(self, features: torch.Tensor) -> torch.Tensor: ...
    def run_layers(
        self, hidden: torch.Tensor, embeds: torch.Tensor, position_ids: torch.Tensor, attend: Callable
    ) -> torch.Tensor: ...
    def feedback(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def compute_logits(self, hidden: torch.Tensor, borrowed: Borrowed | None = None) -> torch.Tensor: ...


def training_time_test(
    draft: Unrolled,
    input_ids: torch.Tensor,
    features: torch.Tensor,
    supervision: Supervision,
    settings: TTTSettings,
    borrowed: Borrowed,
) -> list[StepLoss]:
    """Unroll the draft on its own output: features fed back and not detached, tokens teacher-forced.

    With `position_share` < 1 the steps after the first run on that share of the positions, drawn at random: positions
    of these steps do not see one another, so each is exact, and the loss is scaled up to all positions.

    Args:
        input_ids: (B, T).
        features: (B, T, A * Ht) target features of the same tokens.
        supervision: Says where documents start, too.
    """
    unroll = _Unroll(draft, input_ids, supervision, settings, borrowed)
    hidden, rows, losses = draft.fuse(features), unroll.all_rows(), []
    for step in range(settings.num_steps):
        if step == 1 and settings.position_share < 1:
            rows = unroll.sampled_rows(rows)
            hidden = _take_rows(hidden, rows.rows)
        if settings.checkpoint_steps and torch.is_grad_enabled():
            output = checkpoint(unroll.run, hidden, step, rows, use_reentrant=False)
        else:
            output = unroll.run(hidden, step, rows)
        losses.append(unroll.loss(output, step, rows))  # outside: it sees to its own memory
        hidden = draft.feedback(output)
    return losses


@dataclass
class _Rows:
    """Rows that some steps run on and their positions at step 0, (B, R); (B,) what the loss of one counts.

    `pairs` are the supervised ones of these steps, found at once: it takes a wait for the device.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    weights: torch.Tensor | None = None


class _Unroll:
    """What all steps share. `run` may be called again for a step, by the backward pass of a checkpoint."""

    def __init__(self, draft, input_ids, supervision, settings, borrowed):
        self.draft, self.supervision, self.settings = draft, supervision, settings
        self.head = partial(draft.compute_logits, borrowed=borrowed)
        self.embeds = borrowed.embed(nn.functional.pad(input_ids, (0, settings.num_steps)))  # (B, T + S, H)
        self.everything = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        self.attend = TTTAttention(self.everything, supervision.position_ids, settings.attention)

    def run(self, hidden: torch.Tensor, step: int, rows: _Rows) -> torch.Tensor:
        """The layers of one step: (B, R, H) in and out."""
        self.attend.step = step
        return self.draft.run_layers(hidden, self._embeds(step, rows), rows.positions + step, self.attend)

    def loss(self, output: torch.Tensor, step: int, rows: _Rows) -> StepLoss:
        """Of the layers' output (B, R, H) of one step."""
        in_batch, place, entries = rows.pairs[step]
        taught = output.flatten(0, 1).index_select(0, in_batch * output.shape[1] + place)
        weights = None if rows.weights is None else rows.weights[in_batch]
        return step_loss(taught, self.head, entries, self.supervision, self.settings, weights)

    def all_rows(self) -> _Rows:
        given, sampled = self.supervision.position_ids, self.settings.position_share < 1
        pairs = self.supervision.pairs_of_steps(self.everything, range(1 if sampled else self.settings.num_steps))
        return _Rows(self.everything, self.everything if given is None else given, pairs)

    def sampled_rows(self, before: _Rows) -> _Rows:
        """Only some rows from here on."""
        steps = self.settings.num_steps
        rows = self.supervision.sample_rows(self.settings.position_share, steps)
        self.attend.sample(rows)
        pairs = self.supervision.pairs_of_steps(rows, range(1, steps))
        weights = self.supervision.row_weights(rows.shape[1], steps)
        return _Rows(rows, before.positions.gather(1, rows), pairs, weights)

    def _embeds(self, step: int, rows: _Rows) -> torch.Tensor:
        """(B, R, H) of the tokens that the rows read at a step."""
        if rows.rows is self.everything:
            return self.embeds[:, step + 1 : step + 1 + rows.rows.shape[1]]
        return _take_rows(self.embeds, rows.rows + step + 1)


def _take_rows(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(B, T, H) at rows (B, R) -> (B, R, H)."""
    return tokens.gather(1, rows[..., None].expand(-1, -1, tokens.shape[-1]))
