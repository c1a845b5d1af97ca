"""Compares two greedy texts, and tells near-ties, which rounding decides, from errors.

The command `eagle3-hf check` is in `lossless/`.

Verification of several tokens uses other matrix shapes than a single step, so logits differ in their last bits. This
may change the choice between two tokens whose scores are equal up to rounding, and must not change anything else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """The first difference of two greedy texts, judged by the scores of the run without a draft.

    Attributes:
        index: Index of the first new token that differs.
        plain: The token of the run without a draft.
        assisted: The token of the run with a draft.
        margin: How much higher the run without a draft scored its own token.
        bound: The largest margin that rounding explains: 1e-5 of the largest |score| in float32, two units in the
            last place of it in half precision.
    """

    index: int
    plain: int
    assisted: int
    margin: float
    bound: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.margin <= self.bound

    def __str__(self) -> str:
        kind = "a near-tie" if self.is_near_tie else "NOT a near-tie"
        return (
            f"first difference at new token {self.index} ({self.plain} or {self.assisted}), {kind}: the plain run's "
            f"scores are {self.margin:.4g} apart, rounding explains {self.bound:.4g}"
        )


def near_tie_bound(scores: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest margin between two of these scores (V,) that rounding in `dtype` explains."""
    largest = float(scores[scores.isfinite()].abs().max())
    if dtype == torch.float32:
        return 1e-5 * largest
    return 2 * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30)))


def first_difference(
    plain: Sequence[int], assisted: Sequence[int], plain_scores: Sequence[torch.Tensor], dtype: torch.dtype
) -> Difference | None:
    """Compare two greedy continuations.

    Args:
        plain: New tokens of the run without a draft.
        assisted: New tokens of the run with a draft.
        plain_scores: Scores of the run without a draft, one (1, V) or (V,) tensor per token (`output_scores=True`).
        dtype: The target's dtype.

    Returns:
        The first difference, or `None` if the texts are equal.

    Raises:
        ValueError: one text is the beginning of the other, which no tie explains.
    """
    for index, (ours, theirs) in enumerate(zip(plain, assisted, strict=False)):
        if ours != theirs:
            scores = plain_scores[index].flatten().float()
            margin = float(scores[ours] - scores[theirs])
            return Difference(index, ours, theirs, margin, near_tie_bound(scores, dtype))
    if len(plain) != len(assisted):
        raise ValueError(f"the plain run wrote {len(plain)} tokens and the assisted one {len(assisted)}, alike so far")
    return None
