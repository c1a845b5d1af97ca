"""Judges a call with a draft by the same call without: equal, a near-tie that rounding explains, or a bug.

Verification of several tokens uses other matrix shapes than single steps, so that logits differ by rounding. How much
is measured: the target runs once over the whole text of ordinary decoding, and its logits are compared with those that
the single steps gave. A choice between tokens that are closer than this, or than the bound of `near_tie_bound`, is a
near-tie. Logits that differ by more are a bug, also where the text happens to be the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..check import near_tie_bound
from .observing import Observed


EQUAL, NEAR_TIE, BUG = "equal", "near-tie", "bug"

# Logits may differ by so many times what was measured as rounding, since a maximum over few steps is a low estimate.
_SLACK = 4.0
# The distance of two logits may differ by fewer: the largest difference of all logits is far above the usual one.
_SLACK_OF_MARGIN = 1.5
# But by no more than so many bounds of a near-tie: a target whose two ways differ by more is not merely rounding.
_LARGEST = 16.0


@dataclass(frozen=True)
class Verdict:
    """How a call with a draft compares with ordinary decoding.

    Attributes:
        kind: `"equal"`, `"near-tie"` or `"bug"`.
        detail: What differs, in words.
        index: Index of the new token at which the first difference is.
        plain, assisted: The tokens there.
        margin: How far apart ordinary decoding's scores of the two tokens are.
        bound: The largest margin that rounding explains.
    """

    kind: str
    detail: str = ""
    index: int | None = None
    plain: int | None = None
    assisted: int | None = None
    margin: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Rounding:
    """How much rounding may change of a call.

    Attributes:
        measured: The largest difference of a logit between a pass over the whole text and single steps.
        dtype: The target's dtype.
    """

    measured: float
    dtype: torch.dtype

    def bound(self, values: torch.Tensor) -> float:
        """Return by how much a logit of a step may differ between two calls; `values` (V,) are those of the step."""
        return self._bound(values, _SLACK)

    def margin(self, values: torch.Tensor) -> float:
        """Return the largest distance of two logits of a step whose order rounding may change."""
        return self._bound(values, _SLACK_OF_MARGIN)

    def _bound(self, values: torch.Tensor, slack: float) -> float:
        least = near_tie_bound(values, self.dtype)
        return min(max(least, slack * self.measured), _LARGEST * least)


@torch.no_grad()
def measure_rounding(target: Any, prompts: Sequence[Sequence[int]], plain: Observed) -> Rounding:
    """Measure by how much the logits of one pass over a text differ from those of ordinary decoding.

    Args:
        target: The target model.
        prompts: The prompts without padding.
        plain: The call without a draft.
    """
    largest = 0.0
    steps = len(plain.logits)
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *plain.ids[index, : steps - 1].tolist()]], device=target.device)
        logits = target(ids, use_cache=False).logits[0, len(prompt) - 1 :].float().cpu()
        own = torch.stack([step[index] for step in plain.logits])
        largest = max(largest, _largest((logits - own).abs()))
    return Rounding(largest, target.dtype)


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def judge(plain: Observed, assisted: Observed, rounding: Rounding, noise: Sequence[torch.Tensor] | None) -> Verdict:
    """Compare two calls.

    Args:
        plain: The call without a draft, with scores and logits.
        assisted: The call with a draft; its scores and logits are compared if it has any.
        rounding: How much rounding may change.
        noise: The noise of each step if tokens were sampled (see `noise_of`); `None` for greedy decoding.
    """
    found = [
        verdict
        for index in range(len(plain.ids))
        if (verdict := _of_sequence(index, plain, assisted, rounding, noise)) is not None
    ]
    bugs = [verdict for verdict in found if verdict.kind == BUG]
    if bugs:
        return bugs[0]
    if found:  # what follows a near-tie is another text
        return found[0]
    if plain.ids.shape != assisted.ids.shape:
        return Verdict(BUG, f"{assisted.ids.shape[1]} new tokens instead of {plain.ids.shape[1]}, alike so far")
    if not torch.equal(plain.generator, assisted.generator):
        return Verdict(BUG, "the text is the same, but the random generator was left in another state")
    if plain.log != assisted.log:
        return Verdict(BUG, f"the text is the same, but {_first_call(plain.log, assisted.log)}")
    return Verdict(EQUAL)


def _of_sequence(
    index: int, plain: Observed, assisted: Observed, rounding: Rounding, noise: Sequence[torch.Tensor] | None
) -> Verdict | None:
    """Return the first difference of one sequence, or `None`."""
    mine, theirs = assisted.ids[index].tolist(), plain.ids[index].tolist()
    both = min(len(mine), len(theirs))
    at = next((step for step in range(both) if mine[step] != theirs[step]), None)
    # Up to the first different token, the context is the same: so are the logits.
    for step in range(both if at is None else at + 1):
        verdict = _of_step(index, step, plain, assisted, rounding)
        if verdict is not None:
            return verdict
    return None if at is None else _of_choice(index, at, plain, assisted, rounding, noise)


def _of_step(index: int, step: int, plain: Observed, assisted: Observed, rounding: Rounding) -> Verdict | None:
    """Return a verdict if logits or scores of a step differ by more than rounding."""
    if step >= len(assisted.logits):
        return None
    raw = plain.logits[step][index]
    bound = rounding.bound(raw)
    apart = _apart(assisted.logits[step][index], raw)
    if not apart <= bound:
        return _logits_differ("logits", index, step, plain, assisted, apart, bound)
    # Processors may enlarge what rounding did, such as a temperature below 1.
    scores, own = plain.scores[step][index], assisted.scores[step][index]
    both = scores.isfinite() & own.isfinite()
    enlarged = max(1.0, _largest(scores.abs()) / max(_largest(raw.abs()), 1e-9)) * 2 * bound
    apart = _largest((scores - own)[both].abs())
    if apart > enlarged:
        return _logits_differ("processed scores", index, step, plain, assisted, apart, enlarged)
    # A cutoff may take or leave what is at its edge: the lowest of the scores that are kept.
    either = scores.isfinite() ^ own.isfinite()
    if either.any() and both.any():
        edge = _largest(torch.where(scores.isfinite(), scores, own)[either]) - float(scores[both].min())
        if edge > enlarged:
            return _logits_differ("the tokens that processors leave", index, step, plain, assisted, edge, enlarged)
    return None


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference; infinite or NaN if one has an infinity or NaN where the other has not."""
    same = (one == other) | (one.isnan() & other.isnan())  # infinities too
    return float(torch.where(same, 0.0, (one - other).abs()).max())


def _logits_differ(
    what: str, index: int, step: int, plain: Observed, assisted: Observed, apart: float, bound: float
) -> Verdict:
    tokens = int(plain.ids[index, step]), int(assisted.ids[index, step])
    alike = "the same token was chosen" if tokens[0] == tokens[1] else f"token {tokens[0]} became {tokens[1]}"
    detail = (
        f"{what} of new token {step}{_which(index, plain)} are {apart:.3g} apart, rounding explains {bound:.3g} "
        f"({alike})"
    )
    return Verdict(BUG, detail, step, *tokens, apart, bound)


def _of_choice(
    index: int,
    step: int,
    plain: Observed,
    assisted: Observed,
    rounding: Rounding,
    noise: Sequence[torch.Tensor] | None,
) -> Verdict:
    """Judge the first different token of a sequence by the scores of ordinary decoding."""
    theirs, mine = int(plain.ids[index, step]), int(assisted.ids[index, step])
    raw, scores = plain.logits[step][index], plain.scores[step][index]
    values = scores if noise is None else scores - noise[step][index].log()
    margin = float(values[theirs] - values[mine])
    enlarged = max(1.0, _largest(scores.abs()) / max(_largest(raw.abs()), 1e-9))
    bound = enlarged * rounding.margin(raw)
    detail = f"new token {step}{_which(index, plain)}: {theirs} became {mine}"
    if step < len(assisted.scores):
        own = assisted.scores[step][index]
        if bool(scores[mine].isfinite()) != bool(own[mine].isfinite()) or bool(scores[theirs].isfinite()) != bool(
            own[theirs].isfinite()
        ):
            # The scores agree up to rounding (see `_of_step`), but a cutoff has drawn its line elsewhere.
            return Verdict(NEAR_TIE, f"{detail}, at the edge of a cutoff", step, theirs, mine, 0.0, bound)
    detail += f", scores {margin:.3g} apart, rounding explains {bound:.3g}"
    return Verdict(NEAR_TIE if margin <= bound else BUG, detail, step, theirs, mine, margin, bound)


def _which(index: int, plain: Observed) -> str:
    return f" of sequence {index}" if len(plain.ids) > 1 else ""


def _first_call(plain: list, assisted: list) -> str:
    for number, (theirs, mine) in enumerate(zip(plain, assisted, strict=False)):
        if theirs != mine:
            return f"call {number} of the callbacks was {mine} instead of {theirs}"
    return f"the callbacks were called {len(assisted)} times instead of {len(plain)}"
