"""Loss of training-time test, on plain tensors.

Everything is indexed by `u = t + s`, the row plus the step: row `t` at step `s` reads token `x[u + 1]` and is taught
the target's distribution of `x[u + 2]`. A supervised `u` is therefore used by every step `s <= u`, at row `u - s`.
"""

from dataclasses import dataclass

import torch
from torch import nn


IGNORE_INDEX = -100


def supervised_mask(labels: torch.Tensor) -> torch.Tensor:
    """(B, T) bool over `u`: true where the token two ahead is a supervised target (`labels != -100`).

    For a prompt at 0-3 and an answer at 4-6 the labels are set at 5 and 6 (the first answer token is always the
    target's own), so `u` is 3 and 4: step 0 trains rows 3 and 4, step 1 rows 2 and 3.
    """
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-2] = labels[:, 2:] != IGNORE_INDEX
    return mask


@dataclass
class Supervision:
    """What the target says about every supervised `u`, computed once and used by all steps.

    Attributes:
        index: (B, T) int64: which entry of the others belongs to a `u`; -1 where `u` is not supervised.
        teacher: (n, D) target probabilities of the token after `u + 1`, renormalised over the draft vocabulary.
        in_vocab: (n,) bool: the target's own first choice is in the draft vocabulary; others carry no loss.
    """

    index: torch.Tensor
    teacher: torch.Tensor
    in_vocab: torch.Tensor

    @classmethod
    def build(cls, mask: torch.Tensor, teacher_logits: torch.Tensor, in_vocab: torch.Tensor) -> "Supervision":
        """From a mask (B, T) over `u` and, for its true entries in order, teacher logits (n, D) and in_vocab (n,)."""
        index = torch.where(mask, mask.flatten().cumsum(0).view_as(mask) - 1, -1)
        if len(teacher_logits) != (count := int(mask.sum())):
            raise ValueError(f"{count} supervised pairs, but teacher logits for {len(teacher_logits)}")
        return cls(index, teacher_logits.softmax(-1, dtype=torch.float32), in_vocab)

    def pairs(self, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The supervised pairs among `rows` (B, R) at a step: batch row, place in `rows`, entry; (m,) each."""
        length = self.index.shape[1]
        position = rows + step
        entry = self.index.gather(1, position.clamp(max=length - 1)).masked_fill(position >= length, -1)
        batch, place = (entry >= 0).nonzero(as_tuple=True)
        return batch, place, entry[batch, place]

    def taught_later(self, num_steps: int) -> torch.Tensor:
        """(B, T) bool: rows that have a supervised pair at any step after the first."""
        windows = nn.functional.pad(self.index >= 0, (0, num_steps - 1)).unfold(1, num_steps - 1, 1)
        return windows[:, 1 : self.index.shape[1] + 1].any(-1)

    def sample_rows(self, share: float, num_steps: int = 2) -> torch.Tensor:
        """(B, R) random rows for the steps after the first, ascending; R is `share` of T. Rows taught there first."""
        taught = self.taught_later(num_steps)
        order = torch.rand(taught.shape, device=taught.device) + taught
        return order.topk(max(1, round(share * taught.shape[1])), dim=1).indices.sort(dim=1).values

    def row_weights(self, num_rows: int, num_steps: int) -> torch.Tensor:
        """(B,) what a loss counts when `num_rows` rows were sampled: the inverse of a taught row's chance.

        All taught rows of a batch row have the same chance, so the weighted sum over the sampled ones is in
        expectation the sum over all, at every step.
        """
        return (self.taught_later(num_steps).sum(1) / num_rows).clamp(min=1)


@dataclass
class StepLoss:
    """Sums over the supervised pairs of one step; divide by a count of your choice."""

    loss_sum: torch.Tensor  # () float32, scaled up to all pairs of the step where only some rows ran
    entries: torch.Tensor  # (m,) entry of the supervision of each pair that ran
    hits: torch.Tensor  # (m,) bool: the draft's first choice is the target's


class _SoftCrossEntropy(torch.autograd.Function):
    """Keeps the half-precision logits and one number a row for the backward pass, not a float copy of the logits."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        scores = logits.float()
        norm = scores.logsumexp(-1)
        ctx.save_for_backward(logits, teacher, norm)
        return norm - torch.linalg.vecdot(teacher, scores)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        logits, teacher, norm = ctx.saved_tensors
        student = (logits.float() - norm[:, None]).exp_()
        return student.sub_(teacher).mul_(grad[:, None]).to(logits.dtype), None


def soft_cross_entropy(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """-sum_v P(v) log softmax(logits)(v) for each row: (n, D), (n, D) -> (n,) float32.

    `teacher` rows sum to one and take no gradient.
    """
    return _SoftCrossEntropy.apply(logits, teacher)


def step_loss(
    logits: torch.Tensor, entries: torch.Tensor, supervision: Supervision, weights: torch.Tensor | None = None
) -> StepLoss:
    """Loss and hits of one step from the draft's logits (m, D) of the pairs with these entries and weights (m,)."""
    teacher, counted = supervision.teacher[entries], supervision.in_vocab[entries]
    losses = torch.where(counted, soft_cross_entropy(logits, teacher), 0.0)
    hits = (logits.detach().max(-1).indices == teacher.max(-1).indices) & counted
    return StepLoss((losses if weights is None else losses * weights).sum(), entries, hits)


def weighted_loss(step_losses: list[StepLoss], normalizer: float | torch.Tensor, decay: float = 0.8) -> torch.Tensor:
    """sum_s decay^s loss_s / normalizer (paper section 3.2; the reference's weights)."""
    total = torch.stack([decay**step * item.loss_sum for step, item in enumerate(step_losses)]).sum()
    return total / torch.as_tensor(normalizer, device=total.device).clamp(min=1)  # nothing supervised: loss 0, not NaN
