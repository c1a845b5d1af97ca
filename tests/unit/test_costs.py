"""Seconds by size: medians, and what is believed between and beyond the measured sizes."""

import pytest

from eagle3_hf.decoding.draft.costs import Curve, LevelCosts


def test_nothing_is_known_before_the_first_measurement():
    curve = Curve(lambda size: 1.0 + size)
    assert not curve.is_known
    with pytest.raises(ValueError, match="no measurement"):
        curve.seconds(3)
    assert Curve(lambda size: 1.0 + size, scale=2.0).seconds(3) == 8.0


def test_one_measurement_scales_the_shape():
    curve = Curve(lambda size: 1.0 + size)
    curve.add(1, 20.0)
    assert curve.is_known
    assert [curve.seconds(size) for size in (0, 1, 9)] == pytest.approx([10.0, 20.0, 100.0])


def test_a_disturbed_measurement_is_ignored():
    curve = Curve(lambda size: 1.0)
    for seconds in (1.0, 9.0, 1.1):
        curve.add(4, seconds)
    assert curve.seconds(4) == pytest.approx(1.1)
    assert curve.count(4) == 3


def test_nearby_measurements_count_more():
    curve = Curve(lambda size: 1.0)
    for _ in range(7):
        curve.add(0, 1.0)
        curve.add(31, 3.0)
    estimates = [curve.seconds(size) for size in (0, 1, 7, 15, 31, 63)]
    assert estimates[:-1] == sorted(estimates[:-1])
    assert estimates[0] == 1.0
    assert estimates[-2] == 3.0
    assert estimates[-1] > 2.9


def test_old_measurements_are_forgotten_and_a_copy_keeps_one_of_each():
    curve = Curve(lambda size: 1.0)
    for seconds in [5.0] * 7 + [2.0] * 7:
        curve.add(3, seconds)
    assert curve.seconds(3) == pytest.approx(2.0)
    copy = curve.like()
    assert copy.count(3) == 1
    assert copy.seconds(3) == pytest.approx(2.0)
    copy.add(3, 8.0)
    assert curve.seconds(3) == pytest.approx(2.0), "the copy is its own"


def test_a_further_level_costs_what_neighbours_tell():
    costs = LevelCosts(3.0, 2.0)
    assert costs.another(0, 2.0) == 6.0, "nothing is measured yet"
    assert costs.another(4, 2.0) == 4.0
    costs.add(1, 30.0)
    assert costs.another(0, 2.0) == pytest.approx(30.0)
    assert costs.another(1, 2.0) == pytest.approx(20.0), "in the proportion that is expected"
    costs.add(3, 80.0)
    assert costs.another(1, 2.0) == pytest.approx(25.0)
    assert costs.another(5, 2.0) == pytest.approx(25.0)
    costs.add(4, 100.0)
    assert costs.another(3, 2.0) == pytest.approx(20.0)
    assert costs.another(0, 2.0) == pytest.approx(30.0)
