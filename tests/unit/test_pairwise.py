"""The design by which big products of parameters are thinned: every two levels meet, in few cases."""

from itertools import combinations, product

import pytest

from support.pairwise import pairwise


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
    chosen = [cases[place] for place in pairwise(cases)]
    assert pairs_of(chosen) == pairs_of(cases)
    assert len(chosen) <= most


@pytest.mark.parametrize("sizes", [(7,), (3, 4)])
def test_one_factor_or_two_are_kept_whole(sizes):
    assert pairwise(all_cases(*sizes)) == list(range(len(all_cases(*sizes))))


def test_only_pairs_that_can_occur_are_asked_for():
    """Some combinations may be missing, as where a mark has deselected them."""
    cases = [case for case in all_cases(3, 3, 3) if len(set(case.values())) > 1]
    chosen = [cases[place] for place in pairwise(cases)]
    assert pairs_of(chosen) == pairs_of(cases)


def test_the_same_cases_give_the_same_design():
    assert pairwise(all_cases(4, 3, 2)) == pairwise(all_cases(4, 3, 2))


def test_no_cases():
    assert pairwise([]) == []
