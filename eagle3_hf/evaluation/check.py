"""Is it the same text? Where two greedy runs part, was it a tie that rounding decides, or an error?

Verifying several tokens at once uses other matrix shapes than one step does, so logits differ in their last bits. That
can flip the choice between two tokens that the plain run itself could not tell apart, and nothing else may.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """Where two greedy texts part, judged by the plain run's own scores.

    Attributes:
        index: First new token that differs.
        plain, assisted: The two tokens.
        margin: How much higher the plain run scored its own.
        bound: The largest margin that rounding explains: 1e-5 of the greatest |score| in float32, two units in the
            last place of it in half precision.
    """

    index: int
    plain: int
    assisted: int
    margin: float
    bound: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= self.bound

    def __str__(self) -> str:
        kind = "a near-tie" if self.is_near_tie else "NOT a near-tie"
        return (
            f"first difference at new token {self.index} ({self.plain} or {self.assisted}), {kind}: the plain run's "
            f"scores are {self.margin:.4g} apart, rounding explains {self.bound:.4g}"
        )


def near_tie_bound(scores: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest margin between two of these scores (V,) that rounding in `dtype` explains."""
    largest = float(scores[scores.isfinite()].abs().max())
    if dtype == torch.float32:
        return 1e-5 * largest
    return 2 * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(largest, 1e-30)))


def first_difference(
    plain: Sequence[int], assisted: Sequence[int], plain_scores: Sequence[torch.Tensor], dtype: torch.dtype
) -> Difference | None:
    """Compare two greedy continuations; `None` when they are equal.

    Args:
        plain, assisted: New tokens of the two runs.
        plain_scores: The plain run's scores, one (1, V) or (V,) tensor a token (`output_scores=True`).
        dtype: The target's.

    Raises:
        ValueError: one text is the beginning of the other; no tie explains that.
    """
    for index, (ours, theirs) in enumerate(zip(plain, assisted, strict=False)):
        if ours != theirs:
            scores = plain_scores[index].flatten().float()
            margin = float(scores[ours] - scores[theirs])
            return Difference(index, ours, theirs, margin, near_tie_bound(scores, dtype))
    if len(plain) != len(assisted):
        raise ValueError(f"the plain run wrote {len(plain)} tokens and the assisted one {len(assisted)}, alike so far")
    return None
