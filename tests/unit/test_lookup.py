"""The lookup source: matches against an obvious search, rewinding, learnt rates, cost at long texts."""

import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_hf.decoding.draft.lookup import LONGEST_MATCH, Lookup, Match, MatchRates, TextIndex


def searched(ids: list[int], tail: list[int], occurrences: int = 8) -> Match:
    """The obvious way: compare the tail with the tokens before every place, the newest first."""
    found: list[tuple[int, int]] = []
    pairs = 0
    for place in range(len(ids), 0, -1):
        length = 0
        while length < min(len(tail), place) and ids[place - 1 - length] == tail[-1 - length]:
            length += 1
        pairs += length > 1
        if length and place < len(ids) and (length == 1 or pairs <= occurrences):
            found.append((length, ids[place]))
    longest = max((length for length, _ in found), default=0)
    if not longest:
        return Match(0, ())
    if longest == 1:  # only the last three places of a single token are looked at, the end of the text among them
        places = [place for place in range(1, len(ids) + 1) if ids[place - 1] == tail[-1]][-3:]
        best = [ids[place] for place in reversed(places) if place < len(ids)][:2]
    else:
        best = [token for length, token in found if length == longest][:2]
    return Match(longest, tuple(dict.fromkeys(best)))


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(TEXTS, st.lists(st.integers(0, 3), max_size=6))
@settings(max_examples=300, deadline=None)
def test_matches_are_those_of_a_search(ids, path):
    index = TextIndex(ids)
    tail = (ids + path)[-LONGEST_MATCH:]
    assert index.match(tail) == searched(ids, tail)


@given(TEXTS, TEXTS, st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_a_truncated_index_is_that_of_the_shorter_text(ids, more, kept):
    kept = min(kept, len(ids))
    index = TextIndex(ids)
    index.truncate(kept)
    for token in more:
        index.append(token)
    fresh = TextIndex(ids[:kept] + more)
    assert len(index) == len(fresh)
    assert index.tail == fresh.tail
    assert index.match(index.tail) == fresh.match(fresh.tail)
    index.truncate(0)
    assert not index.match([more[0]]).length


def test_the_most_recent_of_equally_long_matches_comes_first():
    index = TextIndex([1, 2, 7, 1, 2, 8, 1, 2])
    assert index.match([1, 2]) == Match(2, (8, 7))
    assert index.match([9, 2]) == Match(1, (8, 7))  # the end of the text itself is no occurrence
    assert index.match([5]) == Match(0, ())
    # A longer match precedes a more recent one.
    assert TextIndex([4, 1, 2, 7, 5, 1, 2, 8]).match([4, 1, 2]) == Match(3, (7,))


def test_rates_start_from_the_prior_and_follow_what_was_right():
    rates, match = MatchRates(), Match(3, (7,))
    assert rates.of(match) == [pytest.approx(0.64)]
    assert rates.of(Match(0, ())) == []
    for _ in range(200):
        rates.learn(match, 9)
    assert rates.of(match)[0] < 0.03
    assert rates.of(Match(2, (7,))) == [pytest.approx(0.51)]  # other lengths are not touched
    first, second = rates.of(Match(2, (7, 8)))
    for _ in range(200):
        rates.learn(Match(2, (7, 8)), 8)
    assert rates.of(Match(2, (7, 8)))[0] < first < second + 1
    assert rates.of(Match(2, (7, 8)))[1] > 0.8


def test_a_sequence_learns_each_token_once_and_can_be_rewound():
    lookup = Lookup([[1, 2, 3, 1], [5]], excluded=[3])
    assert lookup.guesses(0, lookup.indices[0].tail) == [(2, pytest.approx(0.18))]
    lookup.extend(0, [2])
    learnt = lookup.guesses(0, [1])[0][1]
    assert learnt == pytest.approx((8 * 0.18 + 1) / 9)
    lookup.extend(0, [2])  # nothing new
    assert lookup.guesses(0, [1])[0][1] == learnt
    assert lookup.guesses(0, lookup.indices[0].tail) == []  # 3 followed, which is excluded
    lookup.extend(0, [2, 4])
    lookup.rewind(0, 1)
    lookup.extend(0, [2, 9])
    assert lookup.indices[0].tail == (1, 2, 3, 1, 2, 9)
    assert lookup.indices[1].tail == (5,)


def test_the_work_of_a_match_does_not_grow_with_the_text():
    def lines_run(length: int) -> int:
        """Lines of code that a match and an appended token execute: exact, where seconds are noisy."""
        random.seed(0)
        index, count = TextIndex(random.choices(range(10), k=length)), 0

        def trace(frame, event, argument):
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for token in range(10):
                index.match(index.tail)
                index.append(token)
        finally:
            sys.settrace(before)
        return count

    assert lines_run(32_000) < 1.5 * lines_run(2_000)
