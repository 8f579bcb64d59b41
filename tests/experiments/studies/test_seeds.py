"""Numbers over seeds: means, spreads, and when two differ."""

import numpy as np
import pytest

from experiments.studies.seeds import (
    Comparison,
    Estimate,
    compare,
    estimate,
    exact,
    over_seeds,
)


def test_an_estimate_is_the_mean_and_the_range():
    found = estimate([1.0, 2.0, 6.0])
    assert found == Estimate(3.0, 5.0, 3, 1.0, 6.0)
    assert found.reach == (2.0, 3.0)
    assert Estimate(3.0, 5.0, 3).reach == (2.5, 2.5)
    # The mean of these is above all of them.
    assert min(estimate([0.1, 0.1, 0.1]).reach) == 0.0


@pytest.mark.parametrize("values", [[], [1.0, np.nan], [np.inf]])
def test_what_is_no_number_gives_no_estimate(values):
    assert estimate(values) is None


def test_means_differ_that_are_further_apart_than_half_of_both_spreads():
    wide = Estimate(1.0, 0.4, 3)
    assert not wide.differs(Estimate(1.2, 0.1, 3))
    assert wide.differs(Estimate(1.3, 0.1, 3))


def test_a_comparison_has_the_spread_of_both():
    found = compare(Estimate(4.0, 0.4, 3), Estimate(2.0, 0.0, 3))
    assert found.ratio.mean == 2.0 and found.difference.mean == 2.0
    assert found.ratio.spread == pytest.approx(0.2)
    assert found.difference.spread == pytest.approx(0.4)
    assert found.ratio.count == found.difference.count == 3
    # A tenth of either is about 1.4 tenths of the ratio.
    both = compare(Estimate(4.0, 0.4, 3), Estimate(2.0, 0.2, 3)).ratio
    assert both.spread / both.mean == pytest.approx(0.1 * np.sqrt(2))


def test_a_comparison_says_if_the_difference_exceeds_the_spread():
    def words(*numbers):
        return compare(*numbers).words

    wide, near, far = (Estimate(m, s, 3) for m, s in ((1, 0.4), (1.2, 0.1), (1.3, 0.1)))
    assert words(wide, far) == "the difference exceeds the spread over 3 seeds"
    assert words(wide, near) == "the difference is within the spread over 3 seeds"
    # What is random in neither has nothing to say; one seed does not suffice.
    assert words(exact(1), exact(2)) == ""
    assert words(exact(1), far) == "the difference exceeds the spread over 3 seeds"
    assert "is not known" in words(far, Estimate(9.0, 0.0, 1))


def test_what_is_missing_or_zero_gives_no_ratio():
    one, none = Estimate(1.0, 0.5, 3), Estimate(0.0, 0.0, 3)
    assert compare(None, one) == compare(one, None) == Comparison(None, None, "")
    assert compare(one, none).ratio is None
    assert compare(one, none).difference == Estimate(1.0, 0.5, 3)
    assert compare(none, one).ratio == Estimate(0.0, 0.0, 3)


def test_rows_are_chosen_by_their_settings():
    rows = [
        {"cell": {"system": s, "seed": i}, "metrics": {"x": i + 10 * (s == "ft")}}
        for s in ("ft", "vllm")
        for i in range(3)
    ]
    assert over_seeds(rows, lambda m: m["x"], system="vllm") == (
        Estimate(1.0, 2.0, 3, 0.0, 2.0)
    )
    assert over_seeds(rows, lambda m: m["x"], system="none") is None


def test_rows_without_a_seed_depend_on_nothing_random():
    rows = [{"cell": {"what": "model"}, "metrics": {"x": 2.0}}]
    found = over_seeds(rows, lambda m: m["x"])
    assert found == exact(2.0)._replace(low=2.0, high=2.0)
