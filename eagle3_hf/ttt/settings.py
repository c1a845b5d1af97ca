"""Settings of training-time test: its steps, their weights, and the loss of a step."""

import math
from dataclasses import dataclass
from typing import Any


LOSS_TYPES = ("soft_cross_entropy", "kl", "acceptance")
ATTENTIONS = ("fused", "eager")


@dataclass(frozen=True)
class TTTSettings:
    """Settings of [`Eagle3DraftModel.forward`] with labels.

    Args:
        num_steps: Steps of training-time test; a head drafts well about as deep as it was trained. 1 trains on the
            target's features only, as EAGLE-2 does.
        step_decay: The weight of step `s` is `decay^s`, unless `step_weights` are given.
        step_weights: A weight for each step, instead of the decay.
        position_share: Share of the positions that the steps after the first run on, drawn anew for every batch.
        loss_type: `"soft_cross_entropy"` (the paper's), `"kl"` (the same minus the teacher's entropy: the same
            gradients, zero at the optimum) or `"acceptance"` (minus the logarithm of the probability that a token
            drawn from the head is accepted), see `ttt.loss`.
        feature_loss_weight: Weight of EAGLE-2's regression of the target's last feature, added to the loss above.
        attention: `"fused"`, or `"eager"`, its slow reference form.
        checkpoint_steps: Run each step again in the backward pass instead of keeping its activations.
        loss_chunk: How many positions' draft logits exist at a time; the backward pass computes them again. With
            `None` all logits are computed at once and kept, which is faster and takes the most memory.

    Raises:
        ValueError: a value is invalid; the message names the field.
    """

    num_steps: int = 7
    step_decay: float = 0.8
    step_weights: tuple[float, ...] | None = None
    position_share: float = 1.0
    loss_type: str = "soft_cross_entropy"
    feature_loss_weight: float = 0.0
    attention: str = "fused"
    checkpoint_steps: bool = False
    loss_chunk: int | None = 512

    def __post_init__(self) -> None:
        if self.step_weights is not None:
            object.__setattr__(self, "step_weights", tuple(float(weight) for weight in self.step_weights))
        self._check_steps()
        if not 0 < self.position_share <= 1:
            raise ValueError(f"position_share must be above 0 and at most 1, got {self.position_share}")
        if not (math.isfinite(self.feature_loss_weight) and self.feature_loss_weight >= 0):
            raise ValueError(f"feature_loss_weight must be 0 or more, got {self.feature_loss_weight}")
        if self.loss_chunk is not None and self.loss_chunk < 1:
            raise ValueError(
                f"loss_chunk must be at least 1, or None for all positions at once, got {self.loss_chunk}"
            )
        for name, allowed in (("loss_type", LOSS_TYPES), ("attention", ATTENTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def _check_steps(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if not (math.isfinite(self.step_decay) and self.step_decay > 0):
            raise ValueError(f"step_decay must be above 0, got {self.step_decay}")
        if self.step_weights is None:
            return
        if len(self.step_weights) != self.num_steps:
            raise ValueError(
                f"step_weights has {len(self.step_weights)} weights, but there are {self.num_steps} steps"
            )
        if min(self.step_weights) < 0 or not 0 < sum(self.step_weights) < math.inf:
            raise ValueError(f"step_weights must be 0 or more, and not all 0, got {self.step_weights}")

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weight of every step."""
        return self.step_weights or tuple(self.step_decay**step for step in range(self.num_steps))

    def check_fits(self, config: Any) -> None:
        """Check that a head with this `Eagle3DraftConfig` can be trained with these settings.

        Raises:
            ValueError: the feature loss cannot be computed for this head.
        """
        if not self.feature_loss_weight:
            return
        if config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"feature_loss_weight compares the head's output of width {config.hidden_size} with the target's "
                f"feature of width {config.target_hidden_size}: give the head the target's hidden_size, or set "
                "feature_loss_weight to 0"
            )
        if not config.use_aux_hidden_state:
            raise ValueError(
                "feature_loss_weight compares with the target's last feature before its final norm, which a head "
                "that reads the normed output (use_aux_hidden_state=False) does not have: set feature_loss_weight to 0"
            )
