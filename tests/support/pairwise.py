"""Pairwise designs: of all combinations of several factors' levels, few in which every two levels still meet."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def pairwise(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """The places of some of the cases, in which every pair of levels occurs that occurs in any of the cases.

    The design is greedy: each time the case with most pairs that have not occurred yet, the first one of several. So
    the same cases always give the same design, and of a single factor, or of two, nothing is left out.

    Args:
        cases: a level of each factor, by the factor's name.
    """
    pairs = [_pairs(case) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(pairs[place] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)


def _pairs(case: Mapping[str, Hashable]) -> set[Hashable]:
    return set(combinations(sorted(case.items()), 2)) or set(case.items())
