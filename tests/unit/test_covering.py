"""The designs by which big products of parameters are thinned: every level occurs, or every two meet, in few cases."""

from collections import Counter
from itertools import combinations, product

import pytest

from support.covering import covering


def all_cases(*sizes: int) -> list[dict[str, int]]:
    return [{f"factor {i}": level for i, level in enumerate(levels)} for levels in product(*map(range, sizes))]


def pairs_of(cases) -> set:
    return {pair for case in cases for pair in combinations(sorted(case.items()), 2)}


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((9, 2, 3), 27), ((4, 2, 3, 2), 12), ((4, 2, 4, 3), 17), ((2, 2, 2, 2, 2), 8), ((3, 3, 3), 11), ((4, 2, 10), 40)],
)
def test_every_pair_of_levels_occurs_in_few_cases(sizes, most):
    cases = all_cases(*sizes)
    chosen = [cases[place] for place in covering(cases, 2)]
    assert pairs_of(chosen) == pairs_of(cases)
    assert len(chosen) <= most


@pytest.mark.parametrize("sizes", [(4, 2), (9, 2, 3), (2, 2, 2), (5, 4, 3, 2)])
def test_every_level_occurs_in_as_few_cases_as_can_be_and_about_as_often(sizes):
    cases = all_cases(*sizes)
    chosen = [cases[place] for place in covering(cases, 1)]
    assert len(chosen) == max(sizes)
    for factor, levels in enumerate(sizes):
        counts = Counter(case[f"factor {factor}"] for case in chosen)
        assert len(counts) == levels
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(("sizes", "strength"), [((7,), 1), ((7,), 2), ((3, 4), 2)])
def test_no_more_factors_than_the_strength_are_kept_whole(sizes, strength):
    assert covering(all_cases(*sizes), strength) == list(range(len(all_cases(*sizes))))


def test_only_pairs_that_can_occur_are_asked_for():
    """Some combinations may be missing, as where a mark has deselected them."""
    cases = [case for case in all_cases(3, 3, 3) if len(set(case.values())) > 1]
    chosen = [cases[place] for place in covering(cases, 2)]
    assert pairs_of(chosen) == pairs_of(cases)


def test_the_same_cases_give_the_same_design():
    assert covering(all_cases(4, 3, 2), 2) == covering(all_cases(4, 3, 2), 2)


def test_no_cases():
    assert covering([], 1) == covering([], 2) == []
