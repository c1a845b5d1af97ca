"""Costs in plain steps: what rounds beside each other tell, however fast the machine happens to be."""

import math
import random

import pytest

from eagle3_hf.decoding.draft.costs import DraftCosts, VerifyCosts


def expected(nodes: int) -> float:
    return 1.0 + 0.02 * nodes


def true(nodes: int) -> float:
    """Dearer than expected, most of all the first nodes."""
    return 1.0 + (0.4 if nodes else 0.0) + 0.05 * nodes


def speeds(rng: random.Random):
    """A machine that is slower by another factor for a while, again and again."""
    while True:
        factor = math.exp(rng.uniform(-1.5, 1.5))
        for _ in range(rng.randint(5, 60)):
            yield factor


def test_what_is_not_measured_is_as_expected():
    costs = VerifyCosts(expected)
    assert not costs.is_known
    assert [costs.of(nodes) for nodes in (0, 1, 63)] == [expected(nodes) for nodes in (0, 1, 63)]
    costs.add(0, 7.0)
    assert costs.is_known
    assert costs.of(9) == expected(9), "one round alone tells no ratio"


def test_one_pair_tells_most():
    costs = VerifyCosts(expected)
    costs.add(0, 2.0)
    costs.add(7, 2.0 * true(7))
    assert costs.of(7) == pytest.approx(true(7), rel=0.15)
    assert costs.of(6) > 1.3 * expected(6), "neighbours are like it"
    assert costs.of(0) == 1.0, "the unit"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_machine_that_changes_speed_misleads_nobody(noise, seed):
    rng = random.Random(seed)
    costs = VerifyCosts(expected)
    for speed, _ in zip(speeds(rng), range(300), strict=False):
        nodes = rng.choice([0, 1, 2, 3, 5, 7, 11, 15, 23, 31])
        disturbed = rng.uniform(2, 8) if rng.random() < 0.05 else 1.0
        costs.add(nodes, speed * true(nodes) * disturbed * math.exp(rng.gauss(0, noise)))
    for nodes in (1, 3, 7, 15, 31):
        assert costs.of(nodes) == pytest.approx(true(nodes), rel=0.05 + 3 * noise)


def test_costs_that_change_are_learnt_anew():
    costs = VerifyCosts(expected)
    for cost in (true, expected):
        for _ in range(40):
            for nodes in (0, 7, 3):
                costs.add(nodes, cost(nodes))
        assert costs.of(7) == pytest.approx(cost(7), rel=0.03)


def test_a_copy_begins_with_what_is_known_and_is_its_own():
    costs = VerifyCosts(expected)
    for _ in range(20):
        for nodes in (0, 7, 3):
            costs.add(nodes, true(nodes))
    copy = costs.like()
    assert copy.is_known
    assert copy.of(7) == pytest.approx(costs.of(7), rel=1e-3)
    before = costs.of(7)
    for _ in range(60):
        for nodes in (0, 7):
            copy.add(nodes, expected(nodes))
    assert copy.of(7) == pytest.approx(expected(7), rel=0.05)
    assert costs.of(7) == before


@pytest.mark.parametrize("state", [[], [0.0] * 6, [0.1] * 7, [0.0] + [9.0] * 6, [0.0] + [math.nan] * 6, "abc", None])
def test_a_damaged_state_is_rejected(state):
    with pytest.raises((ValueError, TypeError)):
        VerifyCosts(expected).restore(state)


def test_a_further_level_costs_what_the_last_rounds_tell():
    costs = DraftCosts(0.3, 0.2)
    assert (costs.another(0), costs.another(4)) == (0.3, 0.2), "nothing is measured yet"
    costs.add(1, 0.6)
    assert costs.another(0) == pytest.approx(0.6)
    assert costs.another(1) == pytest.approx(0.4), "in the proportion that is expected"
    for _ in range(6):
        for levels in (1, 3, 4):
            costs.add(levels, 0.5 + 0.1 * (levels - 1))
    assert costs.another(0) == pytest.approx(0.5)
    assert costs.another(2) == pytest.approx(0.1)
    costs.add(8, 20.0)
    assert costs.another(2) == pytest.approx(0.1, rel=0.05), "one disturbed round"


def test_costs_of_drafting_are_restored_as_what_is_expected():
    costs, other = DraftCosts(0.3, 0.2), DraftCosts(0.3, 0.2)
    assert costs.state() == []
    other.restore([])
    assert other.another(0) == 0.3
    costs.add(1, 0.6)
    other.restore(costs.state())
    assert [other.another(level) for level in (0, 1)] == pytest.approx([0.6, 0.4])
    for damaged in ([1.0], [0.0, 1.0], [-1.0, 0.1], [1.0, math.nan], "ab"):
        with pytest.raises((ValueError, TypeError)):
            other.restore(damaged)
