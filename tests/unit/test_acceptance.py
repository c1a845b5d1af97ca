"""Counters of speculative decoding against counting by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_hf.acceptance import SpeculationStats, simulated_acceptance_length


ROUNDS = st.lists(
    st.integers(0, 6).flatmap(lambda depth: st.tuples(st.integers(0, depth), st.just(depth))), max_size=30
)


def test_nothing_recorded():
    stats = SpeculationStats()
    assert stats.tau == 0.0
    assert stats.mean_accepted == 0.0
    assert stats.per_depth == []
    assert stats.histogram == [0]
    assert "0 rounds" in str(stats)


def test_known_rounds():
    stats = SpeculationStats()
    stats.record(accepted=2, depth=3, emitted=3)
    stats.record(accepted=0, depth=3, emitted=1)
    stats.record(accepted=3, depth=3, emitted=4)
    stats.record(accepted=1, depth=1, emitted=2)
    assert stats.rounds == 4
    assert stats.emitted == 10
    assert stats.tau == 2.5
    assert stats.mean_accepted == 1.5
    assert stats.reached == [4, 2, 2]
    assert stats.accepted == [3, 2, 1]
    assert stats.per_depth == [0.75, 1.0, 0.5]
    assert stats.histogram == [1, 1, 1, 1]


def test_text_that_ends_inside_a_round():
    stats = SpeculationStats()
    stats.record(accepted=2, depth=4, emitted=2)
    assert stats.tau == 2.0
    assert stats.mean_accepted == 2.0


@given(ROUNDS)
def test_counters_equal_a_recount(rounds):
    stats = SpeculationStats()
    for accepted, depth in rounds:
        stats.record(accepted, depth, accepted + 1)
    deepest = max((depth for _, depth in rounds), default=0)
    assert stats.reached == [
        sum(depth >= d and accepted >= d - 1 for accepted, depth in rounds) for d in range(1, deepest + 1)
    ]
    assert stats.accepted == [sum(accepted >= d for accepted, _ in rounds) for d in range(1, deepest + 1)]
    assert stats.histogram == [sum(accepted == k for accepted, _ in rounds) for k in range(deepest + 1)]
    assert stats.emitted == sum(stats.accepted) + stats.rounds
    assert all(0.0 <= share <= 1.0 for share in stats.per_depth)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4, 3, 5), r"0 to 3 accepted tokens.*got 4"), ((-1, 3, 0), "got -1"), ((1, 3, -2), "got -2")],
)
def test_impossible_rounds_are_refused(arguments, message):
    stats = SpeculationStats()
    with pytest.raises(ValueError, match=message):
        stats.record(*arguments)
    assert stats == SpeculationStats()


def test_as_dict_is_json_and_independent():
    stats = SpeculationStats(draft_seconds=0.5)
    stats.record(1, 2, 2)
    plain = json.loads(json.dumps(stats.as_dict()))
    assert plain["tau"] == 2.0
    assert plain["per_depth"] == [1.0, 0.0]
    assert plain["draft_seconds"] == 0.5
    stats.as_dict()["reached"].append(7)
    assert stats.reached == [1, 1]


def test_a_readable_summary():
    stats = SpeculationStats(prefill_seconds=0.5, draft_seconds=1.25, verify_seconds=2.5, drafted=8, from_head=1)
    stats.record(1, 2, 2)
    assert str(stats).splitlines() == [
        "mean acceptance length (tau) 2.00: 2 tokens in 1 rounds",
        "acceptance by depth: 1.00 0.00",
        "drafts in a round: 8.0, of which 1.00 accepted (1 by the head)",
        "seconds: prefill 0.50, draft 1.25, verify 2.50, other 0.00",
    ]


@pytest.mark.parametrize(
    ("accuracy", "length"), [([], 1.0), ([0.0, 1.0], 1.0), ([0.5, 0.5, 0.5], 1.875), ([1.0] * 7, 8.0)]
)
def test_simulated_acceptance_length(accuracy, length):
    assert simulated_acceptance_length(accuracy) == pytest.approx(length)
