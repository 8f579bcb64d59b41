"""The search for a capacity brackets it, whatever the curve."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.errors import UserError
from experiments.simulator.capacity import crossing, find_capacity

THRESHOLD = 0.5
rates = st.floats(1e-2, 1e3)


@given(
    truth=rates,
    low=rates,
    width=st.floats(1.001, 100),
    steepness=st.floats(0.1, 50),
    tolerance=st.floats(0.001, 0.5),
    saturated=st.booleans(),
)
def test_the_crossing_of_a_rising_curve_is_bracketed(
    truth, low, width, steepness, tolerance, saturated
):
    def latency_at(rate):
        if saturated and rate > truth:
            return math.inf
        return THRESHOLD * min((rate / truth) ** steepness, 1e30)

    found = find_capacity(latency_at, THRESHOLD, low, low * width, tolerance)
    assert latency_at(found.low) <= THRESHOLD < latency_at(found.high)
    assert found.low <= found.rate <= found.high <= found.low * (1 + tolerance)
    # Rounding: exactly at the truth the curve may be on either side of it.
    assert found.low * (1 - 1e-9) <= truth <= found.high * (1 + 1e-9)
    tried = [probe.rate for probe in found.probes]
    assert tried == sorted(set(tried)) and {found.low, found.high} <= set(tried)
    assert all(latency_at(rate) == latency for rate, latency in found.probes)
    # Halving logarithms: as many tries as the ends' distances in doublings, and then
    # as the bracket's in tolerances.
    far = max(abs(math.log2(truth / low)), abs(math.log2(truth / (low * width))))
    inside = max(math.log2(width), 1) / math.log2(1 + tolerance)
    assert len(tried) <= 2 + far + 1 + math.log2(inside) + 2


def test_noise_gives_one_of_the_crossings():
    wobbly = {1.0: 0.1, 2.0: 0.6, math.sqrt(2): 0.7}
    found = find_capacity(wobbly.__getitem__, THRESHOLD, 1.0, 2.0, 0.5)
    assert (found.low, found.high) == (1.0, math.sqrt(2))


@pytest.mark.parametrize(
    "latency, changes, message",
    [
        (0.1, {}, "no capacity"),
        (0.9, {}, "no capacity"),
        (math.nan, {}, "no latency at 1 requests"),
        (0.1, {"low": 3.0}, "bracket is from 3.0 to 2.0"),
        (0.1, {"low": 0.0}, "above 0"),
        (0.1, {"high": math.inf}, "bracket"),
        (0.1, {"tolerance": 0.0}, "tolerance is 0.0"),
    ],
)
def test_what_has_no_capacity_is_said(latency, changes, message):
    arguments = dict(threshold=THRESHOLD, low=1.0, high=2.0) | changes
    with pytest.raises(UserError, match=message):
        find_capacity(lambda rate: latency, **arguments)


# Fig 12a of the paper: two points of each drawn line, around 0.5 s/token, and where it
# crosses that. The upper point of most is where the line leaves the plot.
@pytest.mark.parametrize(
    "before, after, capacity",
    [
        ((0.2, 0.2805), (0.25, 0.6371), 0.231),
        ((0.5, 0.0823), (0.591, 1.6188), 0.525),
        ((0.75, 0.1168), (0.843, 1.6188), 0.774),
        ((1.0, 0.1923), (1.1, 0.5016), 1.099),
        ((1.9, 0.2397), (2.046, 1.6188), 1.929),
    ],
    ids=["FasterTransformer", "Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM"],
)
def test_the_papers_lines_cross_where_they_were_read(before, after, capacity):
    points = [(0.0, 0.02), before, after]
    assert crossing(points, THRESHOLD) == pytest.approx(capacity, abs=2e-3)


def test_the_first_crossing_counts():
    points = [(1, 0.1), (2, 0.9), (3, 0.2), (3, 0.3), (4, 1.0)]
    assert crossing(points, THRESHOLD) == pytest.approx(1.5)
    assert crossing(points[2:], THRESHOLD) == pytest.approx(3 + 0.2 / 0.7)
    assert crossing([(1, 0.4), (2, math.inf)], THRESHOLD) == 1
    assert crossing([(1, 0.1), (2, 0.5)], THRESHOLD) is None
    assert crossing([(1, 0.7), (2, 0.9)], THRESHOLD) is None
    assert crossing([], THRESHOLD) is None
    with pytest.raises(UserError, match="rate 1 follows 2"):
        crossing([(2, 0.1), (1, 0.2)], THRESHOLD)


@given(st.lists(st.floats(0.01, 0.49), min_size=1, max_size=5), st.floats(0.51, 5))
def test_a_straight_line_is_crossed_where_it_says(below, above):
    points = [*enumerate(sorted(below)), (len(below), above)]
    found = crossing(points, THRESHOLD)
    assert found is not None
    x0, y0 = points[-2]
    assert y0 + (found - x0) * (above - y0) == pytest.approx(THRESHOLD)
