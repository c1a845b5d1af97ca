"""The lookup source: what followed earlier occurrences of the newest tokens, in the prompt or in the text itself.

Prompt lookup (Saxena, "prompt-lookup-decoding", 2023) copies such a continuation. Here it gives single candidates at
any node of a draft tree, each with the probability that it is right. This probability depends on the length of the
match and is learnt in the call: how often the guess for a committed token was right, shrunk towards a prior.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


# Tokens of the longest match looked at. Longer ones are hardly more reliable.
LONGEST_MATCH = 8
# Occurrences that are compared, the newest first; more of them add no accepted tokens.
_OCCURRENCES = 8
# How often the most recent occurrence of the longest match was right, by its length 1 to 8 (3,607 tokens of
# SmolLM2-135M-Instruct on questions of five tasks), and the number of tokens that this prior counts for.
_PRIOR_HITS = (0.18, 0.51, 0.64, 0.71, 0.80, 0.80, 0.80, 0.90)
_PRIOR_WEIGHT = 8.0
# What a second, different guess of equal length is believed to be, where the first one was wrong. Not measured: rounds
# learn it soon.
_PRIOR_SECOND = 0.15


class Match(NamedTuple):
    """The longest match of a suffix.

    Attributes:
        length: Number of equal tokens, at most `LONGEST_MATCH`; 0 if there is no match.
        tokens: What followed it: the tokens of the two most recent occurrences, one if they are equal.
    """

    length: int
    tokens: tuple[int, ...]


NO_MATCH = Match(0, ())


class TextIndex:
    """The places of all tokens and pairs of tokens in the text of one sequence.

    Appending a token and finding a match take constant time, however long the text is.

    Args:
        ids: Tokens of the prompt.
    """

    def __init__(self, ids: Iterable[int] = ()):
        self._ids: list[int] = []
        # Token, or pair of tokens -> the index behind each of its occurrences, ascending.
        self._behind: dict[int, list[int]] = {}
        self._behind_pair: dict[tuple[int, int], list[int]] = {}
        for token in ids:
            self.append(token)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def tail(self) -> tuple[int, ...]:
        """The newest `LONGEST_MATCH` tokens."""
        return tuple(self._ids[-LONGEST_MATCH:])

    def append(self, token: int) -> None:
        ids = self._ids
        ids.append(token)
        self._behind.setdefault(token, []).append(len(ids))
        if len(ids) > 1:
            self._behind_pair.setdefault((ids[-2], token), []).append(len(ids))

    def truncate(self, length: int) -> None:
        """Remove all tokens from index `length` on."""
        ids = self._ids
        while len(ids) > length:
            if len(ids) > 1:
                _remove_last(self._behind_pair, (ids[-2], ids[-1]))
            _remove_last(self._behind, ids[-1])
            ids.pop()

    def match(self, tail: Sequence[int]) -> Match:
        """Return the longest match of a suffix of `tail`, which is the end of the text, or goes on behind it.

        Args:
            tail: The newest tokens, at most `LONGEST_MATCH` of them.
        """
        if not tail:
            return NO_MATCH
        ids, end = self._ids, len(self._ids)
        places = self._behind_pair.get((tail[-2], tail[-1])) if len(tail) > 1 else None
        longest, found = 0, []
        for place in reversed(places[-_OCCURRENCES:] if places else ()):
            if place == end:  # the end of the text itself, behind which nothing is known
                continue
            length, most = 2, min(len(tail), place)
            while length < most and ids[place - 1 - length] == tail[-1 - length]:
                length += 1
            if length > longest:
                longest, found = length, [ids[place]]
            elif length == longest and len(found) < 2:
                found.append(ids[place])
        if not found:
            longest = 1
            recent = self._behind.get(tail[-1], ())[-3:]
            found = [ids[place] for place in reversed(recent) if place != end][:2]
        if not found:
            return NO_MATCH
        return Match(longest, (found[0],) if len(found) == 1 or found[0] == found[1] else (found[0], found[1]))


def _remove_last(places, key) -> None:
    places[key].pop()
    if not places[key]:
        del places[key]


class MatchRates:
    """How often guesses are right, by the length of their match."""

    def __init__(self) -> None:
        self._hits = [_PRIOR_WEIGHT * share for share in (0.0, *_PRIOR_HITS)]
        self._tries = [_PRIOR_WEIGHT] * len(self._hits)
        self._second_hits, self._second_tries = _PRIOR_WEIGHT * _PRIOR_SECOND, _PRIOR_WEIGHT

    def learn(self, match: Match, token: int) -> None:
        """Count what a match had guessed for a token that is known now."""
        if not match.length:
            return
        right = match.tokens[0] == token
        self._tries[match.length] += 1
        self._hits[match.length] += right
        if not right and len(match.tokens) > 1:
            self._second_tries += 1
            self._second_hits += match.tokens[1] == token

    def of(self, match: Match) -> list[float]:
        """Return the probability that each token of a match is right."""
        if not match.length:
            return []
        first = self._hits[match.length] / self._tries[match.length]
        if len(match.tokens) == 1:
            return [first]
        return [first, (1 - first) * self._second_hits / self._second_tries]


class Lookup:
    """The lookup source of one `generate` call.

    Args:
        prompts: The tokens of each sequence's prompt, without padding.
        excluded: Tokens that must not be drafted, such as the placeholders of images.
    """

    def __init__(self, prompts: Iterable[Iterable[int]], excluded: Iterable[int] = ()):
        self.indices = [TextIndex(prompt) for prompt in prompts]
        self.rates = MatchRates()
        self._prompt_lens = [len(index) for index in self.indices]
        self._excluded = frozenset(excluded)

    def extend(self, index: int, tokens: Sequence[int]) -> None:
        """Append what a sequence has emitted since the last call, and learn from it.

        Args:
            index: Index of the sequence.
            tokens: All tokens that the sequence has emitted.
        """
        text = self.indices[index]
        for token in tokens[len(text) - self._prompt_lens[index] :]:
            self.rates.learn(text.match(text.tail), token)
            text.append(token)

    def rewind(self, index: int, step: int) -> None:
        """Remove the tokens of a sequence from `step` on, where 0 is its first emitted token."""
        self.indices[index].truncate(self._prompt_lens[index] + step)

    def guesses(self, index: int, tail: Sequence[int]) -> list[tuple[int, float]]:
        """Return (token, probability that it is right) of the guesses behind `tail`, see [`TextIndex.match`]."""
        match = self.indices[index].match(tail)
        guesses = zip(match.tokens, self.rates.of(match), strict=True)
        if self._excluded:
            return [(token, right) for token, right in guesses if token not in self._excluded]
        return list(guesses)
