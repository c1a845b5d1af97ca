"""Loss of training-time test, on plain tensors.

Everything is indexed by `u = t + s`, the row plus the step: row `t` at step `s` reads token `x[u + 1]` and is taught
the target's distribution of `x[u + 2]`. A supervised `u` is therefore used by every step `s <= u`, at row `u - s`, as
far back as its document reaches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from .settings import TTTSettings


IGNORE_INDEX = -100
_NUMBERS = 2**23  # of teacher logits at a time, where float32 copies of them are needed
_CACHED = 2**18  # numbers of which a few float32 copies fit a CPU core's cache


def supervised_mask(labels: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """(B, T) bool over `u`: true where the token two ahead is a supervised target (`labels != -100`).

    For a prompt at 0-3 and an answer at 4-6 the labels are set at 5 and 6 (the first answer token is always the
    target's own), so `u` is 3 and 4: step 0 trains rows 3 and 4, step 1 rows 2 and 3. In packed rows, whose positions
    (B, T) start at 0 in every document, no `u` is taught a token of the next document.
    """
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-2] = labels[:, 2:] != IGNORE_INDEX
    if position_ids is not None:
        mask[:, :-2] &= position_ids[:, 2:] >= 2
    return mask


@dataclass
class Supervision:
    """What the target says about every supervised `u`, computed once and used by all steps.

    The teacher's rows stay in the target's dtype; with a row's largest logit and its sum of exponentials above that,
    its softmax is one exponential away, and exactly torch's.

    Attributes:
        index: (B, T) int64: which entry of the others belongs to a `u`; -1 where `u` is not supervised.
        teacher: (n, D) the target's logits over the draft vocabulary, of the token after `u + 1`.
        peak, mass: (n,) float32: the largest logit of a row, and the sum of `exp(teacher - peak)`.
        entropy: (n,) float32, of the row's softmax.
        choice: (n,) int64: the row's first choice.
        in_vocab: (n,) bool: the target's own first choice is in the draft vocabulary; others carry no loss.
        position_ids: (B, T) of packed rows, starting at 0 in every document; `None`: one document a row.
        features: (n, Ht) the target's last feature at `u + 1`, for the feature regression.
    """

    index: torch.Tensor
    teacher: torch.Tensor
    peak: torch.Tensor
    mass: torch.Tensor
    entropy: torch.Tensor
    choice: torch.Tensor
    in_vocab: torch.Tensor
    position_ids: torch.Tensor | None = None
    features: torch.Tensor | None = None

    @classmethod
    def build(
        cls,
        mask: torch.Tensor,
        teacher_logits: torch.Tensor,
        in_vocab: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> "Supervision":
        """From a mask (B, T) over `u` and, for its true entries in order, teacher logits (n, D) and in_vocab (n,)."""
        index = torch.where(mask, mask.flatten().cumsum(0).view_as(mask) - 1, -1)
        if len(teacher_logits) != (count := int(mask.sum())):
            raise ValueError(f"{count} supervised pairs, but teacher logits for {len(teacher_logits)}")
        size = max(1, _NUMBERS // max(teacher_logits.shape[1], 1))
        parts = [_statistics(rows) for rows in teacher_logits.detach().split(size)]
        peak, mass, entropy, choice = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(index, teacher_logits, peak, mass, entropy, choice, in_vocab, position_ids, features)

    def log_probabilities(self, entries: torch.Tensor) -> torch.Tensor:
        """(m, D) float32: the log-softmax of these entries' rows."""
        return (self.teacher[entries].float() - self.peak[entries, None]).sub_(self.mass[entries, None].log())

    def probabilities(self, entries: torch.Tensor) -> torch.Tensor:
        """(m, D) float32: the softmax of these entries' rows."""
        return (self.teacher[entries].float() - self.peak[entries, None]).exp_().div_(self.mass[entries, None])

    def pairs(self, rows: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The supervised pairs among `rows` (B, R) at a step: batch row, place in `rows`, entry; (m,) each.

        A row pairs with a `u` of its own document only.
        """
        entry = self._entries(rows, step)
        batch, place = (entry >= 0).nonzero(as_tuple=True)
        return batch, place, entry[batch, place]

    def pairs_of_steps(
        self, rows: torch.Tensor, steps: range
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """What `pairs` gives for each of some steps, found at once: the device is waited for twice, not per step."""
        entries = torch.stack([self._entries(rows, step) for step in steps])
        which, batch, place = (entries >= 0).nonzero(as_tuple=True)
        sizes = torch.bincount(which, minlength=len(steps)).tolist()
        parts = (found.split(sizes) for found in (batch, place, entries[which, batch, place]))
        return dict(zip(steps, zip(*parts, strict=True), strict=True))

    def _entries(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """(B, R): the entry that each row is taught at a step, else -1."""
        length = self.index.shape[1]
        ahead = rows + step
        last = ahead.clamp(max=length - 1)
        outside = ahead >= length
        if self.position_ids is not None:  # behind the end of a document the positions start again
            outside = outside | (self.position_ids.gather(1, last) != self.position_ids.gather(1, rows) + step)
        return self.index.gather(1, last).masked_fill(outside, -1)

    def taught_later(self, num_steps: int) -> torch.Tensor:
        """(B, T) bool: rows that have a supervised pair at any step after the first."""
        rows = torch.arange(self.index.shape[1], device=self.index.device).expand_as(self.index)
        taught = torch.zeros_like(self.index, dtype=torch.bool)
        for step in range(1, num_steps):
            taught |= self._entries(rows, step) >= 0
        return taught

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


def _statistics(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of rows (r, D): largest logit, sum of exponentials above it, entropy of the softmax, first choice."""
    peak, choice = logits.max(-1)
    exponentials = (logits.float() - peak[:, None]).exp_()
    mass = exponentials.sum(-1)
    return peak.float(), mass, torch.special.entr(exponentials.div_(mass[:, None])).sum(-1), choice


@dataclass
class StepLoss:
    """Sums over the supervised pairs of one step; divide by a count of your choice."""

    loss_sum: torch.Tensor  # () float32, scaled up to all pairs of the step where only some rows ran
    entries: torch.Tensor  # (m,) entry of the supervision of each pair that ran
    hits: torch.Tensor  # (m,) bool: the draft's first choice is the target's


class _SoftCrossEntropy(torch.autograd.Function):
    """Takes the gradient while it has the exponentials, and keeps it alone, in the logits' dtype."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, probabilities: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        # A CPU goes through its caches: rows that stay there are several times faster than all rows at every turn.
        size = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(len(logits), 1)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            teacher, scores = probabilities(rows), logits[rows].float()
            norm = scores.logsumexp(-1)
            losses[rows] = norm - torch.linalg.vecdot(teacher, scores)
            if gradient is not None:
                gradient[rows] = scores.sub(norm[:, None]).exp_().sub_(teacher)
        ctx.save_for_backward(*[gradient] if gradient is not None else [])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None].to(gradient.dtype), None


def soft_cross_entropy(logits: torch.Tensor, teacher: torch.Tensor | Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """-sum_v P(v) log softmax(logits)(v) for each row: (n, D), (n, D) -> (n,) float32.

    `teacher` rows sum to one and take no gradient; a function gives those of some rows.
    """
    return _SoftCrossEntropy.apply(logits, teacher.__getitem__ if isinstance(teacher, torch.Tensor) else teacher)


def acceptance_loss(logits: torch.Tensor, log_teacher: torch.Tensor) -> torch.Tensor:
    """-log sum_v min(P(v), softmax(logits)(v)) for each row: (n, D), (n, D) -> (n,) float32.

    The sum is the chance that a token drawn from the head is accepted, one minus the total variation. Its logarithm,
    because a chain is accepted with the product over its tokens, and because the sum itself hardly has a gradient
    where the head is confidently wrong; by log-sum-exp, so that it underflows nowhere.
    """
    return -torch.minimum(logits.float().log_softmax(-1), log_teacher).logsumexp(-1)


def step_loss(
    hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    entries: torch.Tensor,
    supervision: Supervision,
    settings: TTTSettings,
    weights: torch.Tensor | None = None,
) -> StepLoss:
    """Loss and hits of one step from the draft's output of the pairs with these entries.

    Only `settings.loss_chunk` rows of logits exist at a time: the backward pass computes them again.

    Args:
        hidden: (m, H) before the final norm.
        head: (r, H) -> (r, D) logits, final norm included; any callable.
        entries: (m,) entry of each pair.
        weights: (m,) what each pair counts; 1 when `None`.
    """

    def run(hidden: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden)
        counted = supervision.in_vocab[entries]
        losses = torch.where(counted, _row_losses(logits, entries, supervision, settings.loss_type), 0.0)
        if settings.feature_loss_weight:
            losses = losses + settings.feature_loss_weight * _feature_losses(hidden, entries, supervision)
        return losses, (logits.detach().max(-1).indices == supervision.choice[entries]) & counted

    size = settings.loss_chunk or max(len(entries), 1)
    chunks = zip(hidden.split(size), entries.split(size), strict=True)
    again = settings.loss_chunk is not None and torch.is_grad_enabled()
    parts = [checkpoint(run, *chunk, use_reentrant=False) if again else run(*chunk) for chunk in chunks]
    losses, hits = (torch.cat(part) for part in zip(*parts, strict=True))
    return StepLoss((losses if weights is None else losses * weights).sum(), entries, hits)


def _row_losses(logits: torch.Tensor, entries: torch.Tensor, supervision: Supervision, loss_type: str) -> torch.Tensor:
    """(m,) float32 from logits (m, D)."""
    if loss_type == "acceptance":
        return acceptance_loss(logits, supervision.log_probabilities(entries))
    losses = soft_cross_entropy(logits, lambda rows: supervision.probabilities(entries[rows]))
    return losses - supervision.entropy[entries] if loss_type == "kl" else losses


def _feature_losses(hidden: torch.Tensor, entries: torch.Tensor, supervision: Supervision) -> torch.Tensor:
    """(m,) float32: smooth L1 between the draft's output and the target's feature that it stands for.

    In units of that feature's root mean square: residual streams of different targets differ in size a hundredfold.
    """
    if supervision.features is None:
        raise ValueError("feature_loss_weight needs the target's features one ahead: pass teacher_features")
    wanted = supervision.features[entries].float()
    unit = wanted.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return nn.functional.smooth_l1_loss(hidden.float() / unit, wanted / unit, reduction="none").mean(-1)


def weighted_loss(
    step_losses: list[StepLoss], normalizer: float | torch.Tensor, settings: TTTSettings
) -> torch.Tensor:
    """sum_s weight_s loss_s / normalizer (paper section 3.2; the reference's weights are 0.8^s)."""
    weighted = [weight * item.loss_sum for weight, item in zip(settings.weights, step_losses, strict=True)]
    total = torch.stack(weighted).sum()
    return total / torch.as_tensor(normalizer, device=total.device).clamp(min=1)  # nothing supervised: loss 0, not NaN
