"""Acceptance of drafted tokens: the definitions used in decoding, training and evaluation.

- `tau`, the mean acceptance length: tokens emitted per target forward pass after the prefill, including the bonus
  token of each pass. 1.0 means that nothing was accepted, as in ordinary decoding.
- Acceptance by depth ("n-alpha" for a chain, EAGLE-3, arXiv 2503.01840, figure 7): among the rounds that reached depth
  d, the share whose token at depth d was accepted.

In a batch one forward pass verifies a tree for each sequence, and counts as one round for each sequence that is not
finished. So tau is the gain of one sequence, and batches of different sizes can be compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any


@dataclass
class SpeculationStats:
    """Counters of speculative decoding.

    A round is one target forward pass over a draft tree. In a batch it counts once for each sequence that is not
    finished and does not wait for others.

    Attributes:
        rounds: Target forward passes after the prefill, times such sequences.
        emitted: Tokens emitted by these rounds, bonus tokens included. The first token of a sequence, which the
            prefill gives, is not counted, nor are pad tokens and tokens behind the end of the text.
        reached: `reached[d - 1]` rounds could try depth d: the tree had that depth, and all tokens above it were
            accepted.
        accepted: `accepted[d - 1]` rounds accepted a token at depth d. Where the sequences of a batch proceed in
            lock-step, a correct token counts even if a wrong one of another sequence ended the round, since this
            tells how good the head is.
        drafted: Drafted nodes that were verified.
        predicted: How many of them were expected to be accepted; not counted where the head alone drafts trees of a
            fixed size.
        from_head: Accepted drafts that only the head had proposed, ...
        from_lookup: ... only the lookup source, ...
        from_both: ... or both. A draft that is accepted as the last token of a text is not among them.
        levels: Levels that the head has grown, one forward of the head each.
        plain_rounds: Rounds in which nothing was drafted.
        headless_rounds: Rounds without the head, because it did not pay, or no level was left.
        prefill_seconds: Wall time of the target's pass over the prompt.
        draft_seconds: Wall time in the draft.
        verify_seconds: Wall time in the target, after the prefill.
        other_seconds: Wall time elsewhere.
    """

    rounds: int = 0
    emitted: int = 0
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: int = 0
    predicted: float = 0.0
    from_head: int = 0
    from_lookup: int = 0
    from_both: int = 0
    levels: int = 0
    plain_rounds: int = 0
    headless_rounds: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    def record(self, accepted: int, depth: int, emitted: int) -> None:
        """Count one round.

        Args:
            accepted: Number of drafted tokens that were accepted.
            depth: Depth of the tree, which is the largest possible number.
            emitted: Number of tokens emitted: `accepted + 1` unless the text ended inside the round.

        Raises:
            ValueError: more tokens were accepted than the tree is deep, or a count is negative.
        """
        if not 0 <= accepted <= depth:
            raise ValueError(f"expected 0 to {depth} accepted tokens, the depth of the tree, got {accepted}")
        if emitted < 0:
            raise ValueError(f"expected a number of emitted tokens of at least 0, got {emitted}")
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

    @classmethod
    def total(cls, parts: Iterable["SpeculationStats"]) -> "SpeculationStats":
        """Return the counters of several calls as those of one."""
        listed = list(parts)
        sums: dict[str, Any] = {}
        for each in fields(cls):
            values = [getattr(part, each.name) for part in listed]
            if each.name in ("reached", "accepted"):
                sums[each.name] = [sum(at_depth) for at_depth in zip_longest(*values, fillvalue=0)]
            else:
                sums[each.name] = sum(values)
        return cls(**sums)

    @property
    def tau(self) -> float:
        """Mean acceptance length, the tokens emitted per round; 0.0 before the first round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per round; 0.0 before the first round."""
        return sum(self.accepted) / self.rounds if self.rounds else 0.0

    @property
    def per_depth(self) -> list[float]:
        """Among the rounds that could try depth d, the share that accepted a token there; 0.0 if there was none."""
        return [hit / tried if tried else 0.0 for hit, tried in zip(self.accepted, self.reached, strict=True)]

    @property
    def histogram(self) -> list[int]:
        """Number of rounds that accepted exactly k drafted tokens, for k from 0 to the greatest depth tried."""
        at_least = [self.rounds, *self.accepted, 0]
        return [at_least[k] - at_least[k + 1] for k in range(len(at_least) - 1)]

    def as_dict(self) -> dict[str, Any]:
        """Return counters and derived values as plain numbers and lists, for logs and JSON."""
        return {
            "rounds": self.rounds,
            "emitted": self.emitted,
            "tau": self.tau,
            "mean_accepted": self.mean_accepted,
            "per_depth": self.per_depth,
            "histogram": self.histogram,
            "reached": list(self.reached),
            "accepted": list(self.accepted),
            "drafted": self.drafted,
            "predicted": self.predicted,
            "from_head": self.from_head,
            "from_lookup": self.from_lookup,
            "from_both": self.from_both,
            "levels": self.levels,
            "plain_rounds": self.plain_rounds,
            "headless_rounds": self.headless_rounds,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "other_seconds": self.other_seconds,
        }

    def __str__(self) -> str:
        lines = [f"mean acceptance length (tau) {self.tau:.2f}: {self.emitted} tokens in {self.rounds} rounds"]
        if self.accepted:
            lines.append(f"acceptance by depth: {' '.join(f'{share:.2f}' for share in self.per_depth)}")
        if self.rounds and self.drafted:
            sources = {"the head": self.from_head, "lookup": self.from_lookup, "both": self.from_both}
            found = ", ".join(f"{count} by {name}" for name, count in sources.items() if count)
            lines.append(
                f"drafts in a round: {self.drafted / self.rounds:.1f}, of which {self.mean_accepted:.2f} accepted"
                + (f" ({found})" if found else "")
            )
        lines.append(
            f"seconds: prefill {self.prefill_seconds:.2f}, draft {self.draft_seconds:.2f}, "
            f"verify {self.verify_seconds:.2f}, other {self.other_seconds:.2f}"
        )
        return "\n".join(lines)


def simulated_acceptance_length(per_step_accuracy: Sequence[float]) -> float:
    """Return the expected tokens per round of a chain, `1 + a0 + a0 * a1 + ...`.

    Args:
        per_step_accuracy: For each drafted token in order, the share of rounds in which it is right, among those in
            which all tokens before it are.
    """
    length, reach = 1.0, 1.0
    for accuracy in per_step_accuracy:
        reach *= accuracy
        length += reach
    return length
