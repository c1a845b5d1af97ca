"""What a trace holds: the rounds of one call, their trees, and what the target chose."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...acceptance import SpeculationStats
from ..misses import Cause


ROOT, HEAD, LOOKUP, BOTH = "root", "head", "lookup", "both"


@dataclass(frozen=True)
class TracedNode:
    """A node of a round's tree.

    Attributes:
        token: Its token.
        parent: Index of its parent; -1 for the root.
        depth: Its level; 0 for the root.
        source: Where it came from: `"head"`, `"lookup"`, `"both"`, or `"root"`.
        value: The chance that the node and all its ancestors are accepted, as the draft sees it. In coupled sampling
            the draft knows the coming random numbers.
        head_probability: The head's probability of the token behind its parent; `None` if the head has not proposed
            it there.
        target_probability: The target's probability of it there, before processors.
        is_accepted: Whether the target chose it.
    """

    token: int
    parent: int
    depth: int
    source: str
    value: float
    head_probability: float | None
    target_probability: float
    is_accepted: bool


@dataclass(frozen=True)
class TracedRound:
    """A round: a tree, and the target's choices along one of its paths.

    Attributes:
        start: Number of new tokens before the round. The root is the last of them.
        nodes: The tree's nodes, parents before their children.
        emitted: The new tokens of the round. All are accepted drafts except for the last one, unless the text ended
            at a draft.
        num_accepted: Number of accepted drafts.
        choice_probability: The target's probability of the last emitted token, before processors.
        cause: Why the last token was not drafted; `None` if it was, or if nothing was guessed at its place: the path
            reached the deepest level, or the round drafted nothing.
        pruned_value: If it was a candidate that was pruned: the chance that the draft gave it; otherwise `None`.
        num_candidates: Number of candidates, of which the tree keeps the best.
        levels: Levels that the head has grown.
        draft_seconds, verify_seconds, other_seconds: Wall times.
    """

    start: int
    nodes: tuple[TracedNode, ...]
    emitted: tuple[int, ...]
    num_accepted: int
    choice_probability: float
    cause: Cause | None
    pruned_value: float | None
    num_candidates: int
    levels: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float

    @property
    def seconds(self) -> float:
        """Wall time of the round."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds

    @property
    def path(self) -> tuple[int, ...]:
        """The root and the accepted nodes."""
        return tuple(index for index, node in enumerate(self.nodes) if node.is_accepted or node.parent < 0)

    @property
    def has_choice(self) -> bool:
        """Whether the last emitted token is the target's own, behind the accepted drafts."""
        return len(self.emitted) > self.num_accepted


@dataclass
class Trace:
    """The rounds of one call; `str()` returns a summary.

    Attributes:
        target, head: Names of the models.
        prompt: Ids of the prompt.
        tokens: Ids of the new tokens. The first of them comes from the prefill, before the first round.
        rounds: The rounds.
        stats: Statistics of the call.
        options: Arguments of `generate`.
        decode: Turns ids into text; `None` without a tokenizer.
    """

    target: str
    head: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: tuple[TracedRound, ...]
    stats: SpeculationStats
    options: dict[str, Any] = field(default_factory=dict)
    decode: Callable[[list[int]], str] | None = field(default=None, repr=False)

    @property
    def causes(self) -> dict[Cause, int]:
        """How often each cause ended a round, all causes in the order of their definition."""
        counts = Counter(each.cause for each in self.rounds)
        return {cause: counts[cause] for cause in Cause}

    def to_html(self) -> str:
        """Return a page that steps through the rounds and needs no other file."""
        from .page import to_html

        return to_html(self)

    def save(self, path: str | os.PathLike) -> None:
        """Write the page.

        Args:
            path: The file, which is replaced if it exists.
        """
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"{self.head} for {self.target}: {len(self.prompt)} tokens of prompt, {len(self.tokens)} new ones"]
        lines.append(str(self.stats))
        missed = sum(self.causes.values())
        if missed:
            shares = (f"{count} {cause.words}" for cause, count in self.causes.items() if count)
            lines.append(
                f"of {len(self.rounds)} rounds {missed} ended with a miss; the token was: {'; '.join(shares)}"
            )
        return "\n".join(lines)
