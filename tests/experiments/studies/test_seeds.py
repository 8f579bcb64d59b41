"""Numbers over seeds: means, spreads, and when two differ."""

import numpy as np
import pytest

from experiments.studies.seeds import Estimate, estimate, over_seeds, ratio


def test_an_estimate_is_the_mean_and_the_range():
    assert estimate([1.0, 2.0, 6.0]) == Estimate(3.0, 5.0, 3)


@pytest.mark.parametrize("values", [[], [1.0, np.nan], [np.inf]])
def test_what_is_no_number_gives_no_estimate(values):
    assert estimate(values) is None


def test_only_ranges_that_lie_apart_differ():
    wide = Estimate(1.0, 0.4, 3)
    assert not wide.differs(Estimate(1.2, 0.1, 3))
    assert wide.differs(Estimate(1.3, 0.1, 3))


def test_a_ratio_has_the_spread_of_both():
    found = ratio(Estimate(4.0, 0.4, 3), Estimate(2.0, 0.0, 3))
    assert found.mean == 2.0
    assert found.spread == pytest.approx(0.2)
    assert ratio(None, Estimate(1.0, 0.0, 3)) is None


def test_rows_are_chosen_by_their_settings():
    rows = [
        {"cell": {"system": s, "seed": i}, "metrics": {"x": i + 10 * (s == "ft")}}
        for s in ("ft", "vllm")
        for i in range(3)
    ]
    assert over_seeds(rows, lambda m: m["x"], system="vllm") == Estimate(1.0, 2.0, 3)
    assert over_seeds(rows, lambda m: m["x"], system="none") is None
