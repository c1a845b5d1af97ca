"""The training-time-test unroll: runs a head on its own output, step by step (paper section 3.2).

Position `t` at step `s` has the rotary position `t + s` and learns the token two further on. In packed sequences a
document starts wherever `position_ids` is 0, and nothing crosses its ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..model.borrowed import Borrowed
from .attention import TTTAttention
from .loss import StepLoss, Supervision, step_loss
from .settings import TTTSettings


class Unrolled(Protocol):
    """The methods of a head that the unroll calls, see [`Eagle3DraftModel`]."""

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
    """Unroll the draft on its own output, which is fed back without detaching; the tokens are teacher-forced.

    With `position_share` < 1 the steps after the first run on that share of the positions, drawn at random: positions
    of these steps do not see one another, so each result is exact, and the loss is weighted up to all positions.

    Args:
        draft: The head.
        input_ids: (B, T).
        features: (B, T, A * Ht), the target's features of the same tokens.
        supervision: What the target says, and where documents start.
        settings: Steps and loss.
        borrowed: The target's modules that the head uses.

    Returns:
        The loss of each step.
    """
    unroll = _Unroll(draft, input_ids, supervision, settings, borrowed)
    hidden, queries, losses = draft.fuse(features), unroll.all_positions(), []  # hidden (B, T, H)
    for step in range(settings.num_steps):
        if step == 1 and settings.position_share < 1:
            queries = unroll.sampled_positions(queries)
            hidden = _gathered(hidden, queries.positions)  # (B, Q, H)
        if settings.checkpoint_steps and torch.is_grad_enabled():
            output = checkpoint(unroll.run, hidden, step, queries, use_reentrant=False)
        else:
            output = unroll.run(hidden, step, queries)
        losses.append(unroll.loss(output, step, queries))  # not checkpointed here: it has checkpoints of its own
        hidden = draft.feedback(output)
    return losses


@dataclass
class _Queries:
    """The positions that some steps run on.

    Attributes:
        positions: (B, Q), where they are in their sequences.
        position_ids: (B, Q), their rotary positions at step 0.
        pairs: The supervised pairs of each step, found for all steps at once, since that waits for the device.
        weights: (B,), the weight of a loss in each sequence; 1 when `None`.
    """

    positions: torch.Tensor
    position_ids: torch.Tensor
    pairs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    weights: torch.Tensor | None = None


class _Unroll:
    """What all steps share. The backward pass of a checkpoint may call `run` again."""

    def __init__(self, draft, input_ids, supervision, settings, borrowed):
        self.draft, self.supervision, self.settings = draft, supervision, settings
        self.head = partial(draft.compute_logits, borrowed=borrowed)
        self.embeds = borrowed.embed(nn.functional.pad(input_ids, (0, settings.num_steps)))  # (B, T + S, H)
        self.everything = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        self.attend = TTTAttention(self.everything, supervision.position_ids, settings.attention)

    def run(self, hidden: torch.Tensor, step: int, queries: _Queries) -> torch.Tensor:
        """Run the layers of one step; input and output are (B, Q, H)."""
        self.attend.step = step
        return self.draft.run_layers(hidden, self._embeds(step, queries), queries.position_ids + step, self.attend)

    def loss(self, output: torch.Tensor, step: int, queries: _Queries) -> StepLoss:
        """Return the loss of one step from the layers' output (B, Q, H)."""
        sequence, column, entries = queries.pairs[step]
        taught = output.flatten(0, 1).index_select(0, sequence * output.shape[1] + column)
        weights = None if queries.weights is None else queries.weights[sequence]
        return step_loss(taught, self.head, entries, self.supervision, self.settings, weights)

    def all_positions(self) -> _Queries:
        """Return every position, for step 0 and, without sampling, for all steps."""
        given, sampled = self.supervision.position_ids, self.settings.position_share < 1
        pairs = self.supervision.pairs_of_steps(self.everything, range(1 if sampled else self.settings.num_steps))
        return _Queries(self.everything, self.everything if given is None else given, pairs)

    def sampled_positions(self, before: _Queries) -> _Queries:
        """Draw the positions for the steps after the first."""
        steps = self.settings.num_steps
        positions = self.supervision.sample_positions(self.settings.position_share, steps)
        self.attend.sample(positions)
        pairs = self.supervision.pairs_of_steps(positions, range(1, steps))
        weights = self.supervision.sample_weights(positions.shape[1], steps)
        return _Queries(positions, before.position_ids.gather(1, positions), pairs, weights)

    def _embeds(self, step: int, queries: _Queries) -> torch.Tensor:
        """Return (B, Q, H), the embeddings of the tokens that the positions read at a step."""
        if queries.positions is self.everything:
            return self.embeds[:, step + 1 : step + 1 + queries.positions.shape[1]]
        return _gathered(self.embeds, queries.positions + step + 1)


def _gathered(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return (B, Q, H), the states (B, T, H) at positions (B, Q)."""
    return states.gather(1, positions[..., None].expand(-1, -1, states.shape[-1]))
