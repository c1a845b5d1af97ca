"""Covering designs: of all combinations of several factors' levels, few in which all that matters still occurs.

Strength 1 (each choice): every level occurs. Strength 2 (pairwise): every two levels meet.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(cases: Sequence[Mapping[str, Hashable]], strength: int) -> list[int]:
    """The places of some of the cases, in which every combination of levels occurs that occurs in any of the cases.

    The design is greedy: each time the case with most combinations that have not occurred yet, the first one of
    several. With strength 1 these are many, and the first is taken whose levels have occurred least, so that all have
    their turn. The same cases always give the same design, and of as many factors as the strength, or fewer, nothing
    is left out.

    Args:
        cases: a level of each factor, by the factor's name.
        strength: of how many factors' levels all combinations are to occur.
    """
    combined = [_combinations(case, strength) for case in cases]
    missing = set().union(*combined)
    used: Counter = Counter()
    chosen = []
    while missing:
        gains = [len(added & missing) for added in combined]
        best_of = [place for place, gain in enumerate(gains) if gain == max(gains)]
        best = min(best_of, key=lambda place: sum(used[level] for level in cases[place].items()) * (strength == 1))
        missing -= combined[best]
        used.update(cases[best].items())
        chosen.append(best)
    return sorted(chosen)


def _combinations(case: Mapping[str, Hashable], strength: int) -> set[Hashable]:
    return set(combinations(sorted(case.items()), min(strength, len(case))))
