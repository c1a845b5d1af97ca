"""The loss of training-time test, on plain tensors.

Everything is indexed by `u = t + s`, position plus step: position `t` at step `s` reads token `x[u + 1]` and is taught
the target's distribution of `x[u + 2]`. Every step `s <= u` therefore uses a supervised `u`, at position `u - s`, as
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
_NUMBERS = 2**23  # teacher logits at a time, where float32 copies of them are needed
_CACHED = 2**18  # numbers of which a few float32 copies fit a CPU core's cache


def supervised_mask(labels: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Return (B, T) bool over `u`: true where the token two ahead is a supervised target (`labels != -100`).

    For a prompt at 0-3 and an answer at 4-6 the labels are set at 5 and 6 (the first answer token is always the
    target's own), so `u` is 3 and 4: step 0 trains positions 3 and 4, step 1 positions 2 and 3. In packed sequences,
    whose `position_ids` (B, T) start at 0 in every document, no `u` is taught a token of the next document.
    """
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-2] = labels[:, 2:] != IGNORE_INDEX
    if position_ids is not None:
        mask[:, :-2] &= position_ids[:, 2:] >= 2
    return mask


@dataclass
class Supervision:
    """What the target says about every supervised `u`, computed once and used by all steps.

    The teacher's logits stay in the target's dtype. With the largest logit of an entry and its sum of exponentials
    relative to that, its softmax takes one exponential, and equals torch's exactly.

    Attributes:
        index: (B, T) int64, which entry of the other tensors belongs to a `u`; -1 where `u` is not supervised.
        teacher: (n, D), the target's logits over the draft vocabulary for the token after `u + 1`.
        peak: (n,) float32, the largest logit of an entry.
        mass: (n,) float32, the sum of `exp(teacher - peak)`.
        entropy: (n,) float32, the entropy of the softmax.
        choice: (n,) int64, the draft token with the largest logit.
        in_vocab: (n,) bool, whether the target's own first choice is in the draft vocabulary; others have no loss.
        position_ids: (B, T) of packed sequences, starting at 0 in every document; each sequence is one document
            when `None`.
        features: (n, Ht), the target's last feature at `u + 1`, for the feature regression.
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
        """Build the supervision from the teacher's logits.

        Args:
            mask: (B, T) bool over `u`, see [`supervised_mask`].
            teacher_logits: (n, D), for the true entries of `mask` in order.
            in_vocab: (n,), see the class.
            position_ids: (B, T), see the class.
            features: (n, Ht), see the class.

        Raises:
            ValueError: the number of teacher logits is not that of supervised entries.
        """
        index = torch.where(mask, mask.flatten().cumsum(0).view_as(mask) - 1, -1)
        if len(teacher_logits) != (count := int(mask.sum())):
            raise ValueError(f"expected teacher logits for {count} supervised pairs, got {len(teacher_logits)}")
        size = max(1, _NUMBERS // max(teacher_logits.shape[1], 1))
        parts = [_statistics(logits) for logits in teacher_logits.detach().split(size)]
        peak, mass, entropy, choice = (torch.cat(part) for part in zip(*parts, strict=True))
        return cls(index, teacher_logits, peak, mass, entropy, choice, in_vocab, position_ids, features)

    def log_probabilities(self, entries: torch.Tensor) -> torch.Tensor:
        """Return (m, D) float32, the log-softmax of these entries."""
        return (self.teacher[entries].float() - self.peak[entries, None]).sub_(self.mass[entries, None].log())

    def probabilities(self, entries: torch.Tensor) -> torch.Tensor:
        """Return (m, D) float32, the softmax of these entries."""
        return (self.teacher[entries].float() - self.peak[entries, None]).exp_().div_(self.mass[entries, None])

    def pairs(self, positions: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the supervised pairs of position and entry at one step.

        A position pairs only with a `u` of its own document.

        Args:
            positions: (B, Q), the positions that run.
            step: The step.

        Returns:
            Sequence of the batch, column of `positions`, and entry; (m,) each.
        """
        entry = self._entries(positions, step)
        sequence, column = (entry >= 0).nonzero(as_tuple=True)
        return sequence, column, entry[sequence, column]

    def pairs_of_steps(
        self, positions: torch.Tensor, steps: range
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return the `pairs` of several steps by step; this waits for the device twice, not once per step."""
        entries = torch.stack([self._entries(positions, step) for step in steps])
        which, sequence, column = (entries >= 0).nonzero(as_tuple=True)
        sizes = torch.bincount(which, minlength=len(steps)).tolist()
        parts = (found.split(sizes) for found in (sequence, column, entries[which, sequence, column]))
        return dict(zip(steps, zip(*parts, strict=True), strict=True))

    def _entries(self, positions: torch.Tensor, step: int) -> torch.Tensor:
        """Return (B, Q), the entry that each position is taught at a step, -1 where there is none."""
        length = self.index.shape[1]
        ahead = positions + step
        last = ahead.clamp(max=length - 1)
        outside = ahead >= length
        if self.position_ids is not None:  # position ids start again at the next document
            outside = outside | (self.position_ids.gather(1, last) != self.position_ids.gather(1, positions) + step)
        return self.index.gather(1, last).masked_fill(outside, -1)

    def taught_later(self, num_steps: int) -> torch.Tensor:
        """Return (B, T) bool, the positions that have a supervised pair at any step after the first."""
        positions = torch.arange(self.index.shape[1], device=self.index.device).expand_as(self.index)
        taught = torch.zeros_like(self.index, dtype=torch.bool)
        for step in range(1, num_steps):
            taught |= self._entries(positions, step) >= 0
        return taught

    def sample_positions(self, share: float, num_steps: int = 2) -> torch.Tensor:
        """Draw positions for the steps after the first, those with a supervised pair before others.

        Args:
            share: Share of the positions to draw.
            num_steps: Number of steps.

        Returns:
            (B, Q), ascending; Q is `share` of T.
        """
        taught = self.taught_later(num_steps)
        order = torch.rand(taught.shape, device=taught.device) + taught
        return order.topk(max(1, round(share * taught.shape[1])), dim=1).indices.sort(dim=1).values

    def sample_weights(self, num_sampled: int, num_steps: int) -> torch.Tensor:
        """Return (B,), the weight of a loss when `num_sampled` positions of each sequence were drawn.

        The weight is the inverse of the probability with which a taught position is drawn. All taught positions of a
        sequence have the same, so the weighted sum over those drawn is in expectation the sum over all, at every
        step.
        """
        return (self.taught_later(num_steps).sum(1) / num_sampled).clamp(min=1)


def _statistics(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the largest logit of (r, D), the sum of exponentials relative to it, entropy and first choice."""
    peak, choice = logits.max(-1)
    exponentials = (logits.float() - peak[:, None]).exp_()
    mass = exponentials.sum(-1)
    return peak.float(), mass, torch.special.entr(exponentials.div_(mass[:, None])).sum(-1), choice


@dataclass
class StepLoss:
    """Results over the supervised pairs of one step; the caller divides them by a count.

    Attributes:
        loss_sum: () float32, weighted up to all pairs of the step if only some positions ran.
        entries: (m,), the supervision's entry of each pair that ran.
        hits: (m,) bool, whether the draft's first choice is the target's.
    """

    loss_sum: torch.Tensor
    entries: torch.Tensor
    hits: torch.Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """Computes the gradient together with the loss and keeps only that, in the logits' dtype."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, probabilities: Callable[[slice], torch.Tensor]) -> torch.Tensor:
        losses = logits.new_empty(len(logits), dtype=torch.float32)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        # On a CPU, parts that fit its cache are several times faster than passes over all logits.
        size = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(len(logits), 1)
        for start in range(0, len(logits), size):
            part = slice(start, start + size)
            teacher, scores = probabilities(part), logits[part].float()
            norm = scores.logsumexp(-1)
            losses[part] = norm - torch.linalg.vecdot(teacher, scores)
            if gradient is not None:
                gradient[part] = scores.sub(norm[:, None]).exp_().sub_(teacher)
        ctx.save_for_backward(*[gradient] if gradient is not None else [])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None].to(gradient.dtype), None


def soft_cross_entropy(logits: torch.Tensor, teacher: torch.Tensor | Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Return -sum_v P(v) log softmax(logits)(v), (n,) float32.

    Args:
        logits: (n, D), the draft's logits.
        teacher: (n, D), the probabilities P, which get no gradient; or a function that returns those of a slice.
    """
    return _SoftCrossEntropy.apply(logits, teacher.__getitem__ if isinstance(teacher, torch.Tensor) else teacher)


def acceptance_loss(logits: torch.Tensor, log_teacher: torch.Tensor) -> torch.Tensor:
    """Return -log sum_v min(P(v), softmax(logits)(v)), (n,) float32.

    The sum is the probability that a token drawn from the head is accepted, one minus the total variation distance.
    The loss is its logarithm, because a chain is accepted with the product over its tokens, and because the sum
    itself has almost no gradient where the head is confidently wrong. It is computed by log-sum-exp, which does not
    underflow.

    Args:
        logits: (n, D), the draft's logits.
        log_teacher: (n, D), log P.
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
    """Compute loss and hits of one step.

    The logits of only `settings.loss_chunk` pairs exist at a time; the backward pass computes them again.

    Args:
        hidden: (m, H), the draft's output for each pair before the final norm.
        head: Maps (r, H) to logits (r, D), final norm included.
        entries: (m,), the supervision's entry of each pair.
        supervision: What the target says.
        settings: Loss and chunk size.
        weights: (m,), the weight of each pair; 1 when `None`.
    """

    def run(hidden: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden)
        counted = supervision.in_vocab[entries]
        losses = torch.where(counted, _pair_losses(logits, entries, supervision, settings.loss_type), 0.0)
        if settings.feature_loss_weight:
            losses = losses + settings.feature_loss_weight * _feature_losses(hidden, entries, supervision)
        return losses, (logits.detach().max(-1).indices == supervision.choice[entries]) & counted

    size = settings.loss_chunk or max(len(entries), 1)
    chunks = zip(hidden.split(size), entries.split(size), strict=True)
    again = settings.loss_chunk is not None and torch.is_grad_enabled()
    parts = [checkpoint(run, *chunk, use_reentrant=False) if again else run(*chunk) for chunk in chunks]
    losses, hits = (torch.cat(part) for part in zip(*parts, strict=True))
    return StepLoss((losses if weights is None else losses * weights).sum(), entries, hits)


def _pair_losses(
    logits: torch.Tensor, entries: torch.Tensor, supervision: Supervision, loss_type: str
) -> torch.Tensor:
    """Return (m,) float32 from logits (m, D)."""
    if loss_type == "acceptance":
        return acceptance_loss(logits, supervision.log_probabilities(entries))
    losses = soft_cross_entropy(logits, lambda part: supervision.probabilities(entries[part]))
    return losses - supervision.entropy[entries] if loss_type == "kl" else losses


def _feature_losses(hidden: torch.Tensor, entries: torch.Tensor, supervision: Supervision) -> torch.Tensor:
    """Return (m,) float32, the smooth L1 distance between the draft's output and the target's feature it stands for.

    The unit is that feature's root mean square, since residual streams of different targets differ in size a
    hundredfold.
    """
    if supervision.features is None:
        raise ValueError("feature_loss_weight needs the target's features one position ahead: pass teacher_features")
    wanted = supervision.features[entries].float()
    unit = wanted.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return nn.functional.smooth_l1_loss(hidden.float() / unit, wanted / unit, reduction="none").mean(-1)


def weighted_loss(
    step_losses: list[StepLoss], normalizer: float | torch.Tensor, settings: TTTSettings
) -> torch.Tensor:
    """Return sum_s weight_s loss_s / normalizer (paper section 3.2; the reference's weights are 0.8^s)."""
    weighted = [weight * item.loss_sum for weight, item in zip(settings.weights, step_losses, strict=True)]
    total = torch.stack(weighted).sum()
    return total / torch.as_tensor(normalizer, device=total.device).clamp(min=1)  # nothing supervised: loss 0, not NaN
