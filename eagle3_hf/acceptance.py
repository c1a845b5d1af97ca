"""How well a draft foresees its target: one definition for decoding, training and evaluation.

- `tau`: tokens emitted per target forward pass after the prefill, the bonus token of each pass included (1.0 = nothing
  was accepted, the speed of plain decoding).
- per-depth acceptance ("n-alpha" for a chain, EAGLE-3, arXiv 2503.01840, figure 7): of the rounds that got as far as
  depth d, the share whose token at depth d was accepted.

In a batch one forward pass verifies a tree of each row, and each row that still has text to write counts as a round of
its own: tau stays what one row gains, and batches of any size compare.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpeculationStats:
    """
    Counters of speculative decoding; a round is one target forward pass over a draft tree, in a batch once for each
    row that is not finished (and does not wait for others).

    Args:
        rounds (`int`): target forward passes after the prefill, times such rows.
        emitted (`int`): tokens emitted by these rounds, bonus tokens included. The first token of a row, which the
            prefill gives, is not counted, nor are pad tokens and what was emitted behind the end of the text.
        reached (`list[int]`): `reached[d - 1]` rounds could try depth d: the tree had it, and all shallower tokens
            were accepted.
        accepted (`list[int]`): `accepted[d - 1]` rounds accepted a token at depth d. Where rows of a batch go in step,
            a right token counts though another row's wrong one ended the round: it says how good the head is.
        draft_seconds, verify_seconds, other_seconds (`float`): wall time in the draft, in the target, and elsewhere.
    """

    rounds: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    def record(self, accepted: int, depth: int, emitted: int) -> None:
        """
        Count one round.

        Args:
            accepted (`int`): drafted tokens accepted.
            depth (`int`): depth of the tree, the most that could have been accepted.
            emitted (`int`): tokens emitted; `accepted + 1` unless the text ended inside the round.

        Raises:
            `ValueError`: more tokens accepted than the tree is deep, or a negative count.
        """
        if not 0 <= accepted <= depth:
            raise ValueError(f"a round accepts 0 to {depth} tokens, the depth of its tree; got {accepted}")
        if emitted < 0:
            raise ValueError(f"a round cannot emit {emitted} tokens")
        self.rounds += 1
        self.emitted += emitted
        missing = depth - len(self.reached)
        if missing > 0:
            self.reached.extend([0] * missing)
            self.accepted.extend([0] * missing)
        for level in range(min(accepted + 1, depth)):
            self.reached[level] += 1
        for level in range(accepted):
            self.accepted[level] += 1

    @property
    def tau(self) -> float:
        """Tokens emitted per round; 0.0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per round; 0.0 before the first round."""
        return sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def per_depth(self) -> list[float]:
        """Share of the rounds that could try depth d and accepted a token there; 0.0 where none could."""
        return [hit / tried if tried else 0.0 for hit, tried in zip(self.accepted, self.reached, strict=True)]

    @property
    def histogram(self) -> list[int]:
        """`histogram[k]`: rounds that accepted exactly k drafted tokens, k from 0 to the greatest depth tried."""
        at_least = [self.rounds, *self.accepted, 0]
        return [at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)]

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived values as plain numbers and lists, for logs and JSON."""
        return {
            "rounds": self.rounds,
            "emitted": self.emitted,
            "tau": self.tau,
            "mean_accepted": self.mean_accepted,
            "per_depth": self.per_depth,
            "histogram": self.histogram,
            "reached": list(self.reached),
            "accepted": list(self.accepted),
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
        }

    def __str__(self) -> str:
        depths = " ".join(f"{share:.2f}" for share in self.per_depth) or "none"
        return (
            f"{self.emitted} tokens in {self.rounds} rounds, tau {self.tau:.2f}, acceptance by depth {depths}; "
            f"draft {self.draft_seconds:.2f} s, verify {self.verify_seconds:.2f} s, other {self.other_seconds:.2f} s"
        )


def simulated_acceptance_length(per_step_accuracy: Sequence[float]) -> float:
    """
    Expected tokens a round of a chain, `1 + a0 + a0 * a1 + ...`, given the accuracy of each drafted token where all
    before it were right.

    Args:
        per_step_accuracy (`Sequence[float]`): shares in 0..1, first drafted token first.
    """
    length, reach = 1.0, 1.0
    for accuracy in per_step_accuracy:
        reach *= accuracy
        length += reach
    return length
