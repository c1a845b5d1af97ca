"""Whether the draft vocabulary has the tokens that are needed, and whether its map leads to the right ones."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


_BLOCK = 16  # positions
_LEAST_GAIN = 0.15  # of the share of hits, over the present map ...
_LEAST_LEAD = 0.1  # ... and over what the token before alone tells
_FEWEST = 5  # draft ids that are mapped elsewhere


@dataclass(frozen=True)
class Coverage:
    """How much of what is to be drafted a head can say.

    Attributes:
        size: Number of tokens of the draft vocabulary.
        of_choices: Share of the target's choices that are in it.
        of_text: Share of the answers' tokens that are in it.
        best: Share of the choices that the most frequent tokens of these texts would cover, as many as the vocabulary
            has. The same texts choose and count, so that this is an upper bound.
        missing: The most frequent choices that are not in it, with their number.
    """

    size: int
    of_choices: float
    of_text: float
    best: float
    missing: list[tuple[int, int]]


def coverage(choices: np.ndarray, tokens: np.ndarray, known: np.ndarray, shown: int = 10) -> Coverage:
    """Count what a draft vocabulary covers.

    Args:
        choices: (n,) the target's choices.
        tokens: (n,) the tokens of the texts there.
        known: (V,) bool, the draft vocabulary.
        shown: Number of missing tokens to list.
    """
    counts = Counter(choices.tolist())
    covered = sum(number for token, number in counts.items() if known[token])
    best = sum(number for _, number in counts.most_common(int(known.sum())))
    missing = [(token, number) for token, number in counts.most_common() if not known[token]]
    total = max(1, len(choices))
    return Coverage(
        int(known.sum()),
        covered / total,
        float(known[tokens].mean()) if len(tokens) else 1.0,
        best / total,
        missing[:shown],
    )


@dataclass(frozen=True)
class MapCheck:
    """The map from draft ids to tokens, against one that is learnt from the texts.

    The learnt map sends each draft id to the token that the target chose most often where the head said this id. It
    is learnt on half of the positions and counted on the other half, and the other way round. With a right map it is
    no better; with a wrong one, a trained head hits with it, and misses without.

    Attributes:
        present: Share of hits of the present map, where the learnt map has an entry.
        learnt: Share of hits of the learnt map there.
        by_last_token: Share of hits of a map from the text's last token, learnt in the same way: what no head is
            needed for.
        moved: Number of draft ids that the learnt map sends elsewhere.
    """

    present: float
    learnt: float
    by_last_token: float
    moved: int

    @property
    def is_wrong(self) -> bool:
        """Whether the present map leads to the wrong tokens."""
        gains = self.learnt - self.present >= _LEAST_GAIN and self.learnt >= 2 * self.present
        return gains and self.learnt - self.by_last_token >= _LEAST_LEAD and self.moved >= _FEWEST


def check_map(
    first: Sequence[np.ndarray],
    mapped: Sequence[np.ndarray],
    choices: Sequence[np.ndarray],
    last: Sequence[np.ndarray],
) -> MapCheck:
    """Compare a head's map with a learnt one.

    Args:
        first: (n,) draft ids of the head's first choices in each text.
        mapped: (n,) the tokens that they stand for.
        choices: (n,) the target's choices.
        last: (n,) the token before each choice.
    """
    half = np.concatenate([np.arange(len(own)) // _BLOCK % 2 for own in first])
    ids, tokens, wanted, before = (np.concatenate(list(part)) for part in (first, mapped, choices, last))
    known = present = learnt = by_last = 0
    moved: set[int] = set()
    for own in (0, 1):
        table, bigrams = (
            _most_frequent(ids[half == own], wanted[half == own]),
            _most_frequent(before[half == own], wanted[half == own]),
        )
        for at in np.flatnonzero(half != own).tolist():
            if (guess := table.get(int(ids[at]))) is None:
                continue
            known += 1
            present += int(tokens[at] == wanted[at])
            learnt += int(guess == wanted[at])
            by_last += int(bigrams.get(int(before[at])) == wanted[at])
            if guess != tokens[at] and guess == wanted[at]:
                moved.add(int(ids[at]))
    total = max(1, known)
    return MapCheck(present / total, learnt / total, by_last / total, len(moved))


def _most_frequent(keys: np.ndarray, values: np.ndarray) -> dict[int, int]:
    """Return for each key the value that most often goes with it."""
    counts: dict[int, Counter[int]] = {}
    for key, value in zip(keys.tolist(), values.tolist(), strict=True):
        counts.setdefault(key, Counter())[value] += 1
    return {key: found.most_common(1)[0][0] for key, found in counts.items()}


__all__ = ["Coverage", "MapCheck", "check_map", "coverage"]
