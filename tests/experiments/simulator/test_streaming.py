"""Traces that are too long to be held: memory does not grow with them."""

import tracemalloc

import numpy as np
import pytest
from simulations import draw_trace, run, small

from experiments.simulator.request_times import Latencies, RequestTimes
from experiments.simulator.trace import Trace


def stream(count, size=512):
    """Yields tiny requests, drawn as they are wanted."""
    for start in range(0, count, size):
        numbers = np.arange(start, min(start + size, count))
        ones = np.ones(len(numbers), np.int64)
        yield Trace(numbers * 0.25, 3 * ones, ones[:, None])


def peak(count, **options):
    """Returns the most bytes of Python's and numpy's that a simulation had at once."""
    config = small(max_requests=512)
    tracemalloc.start()
    found = run(config, stream(count), **options)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.latencies.count == count and found.rejected == 0
    return most, found


def test_memory_does_not_grow_with_the_trace():
    peak(1000)  # compiles
    short, long = 4_000, 32_000
    kept = peak(long)[0] - peak(short)[0]
    (most, found), (before, _) = (
        peak(count, keep_requests=False) for count in (long, short)
    )
    assert kept > 32 * (long - short) > 20 * (most - before)
    assert len(found.ended) == 0
    assert found.latencies.mean("total") == pytest.approx(1.375, abs=1e-3)


def test_sums_and_histograms_agree_with_the_columns():
    found = run(small(), draw_trace(60, seed=3, rate=0.3))
    latency = found.ended - found.arrival
    expected = {
        "normalized": latency / found.output_len,
        "first_token": found.first_token - found.arrival,
        "total": latency,
    }
    assert found.latencies.count == 60
    for name, values in expected.items():
        assert found.latencies.mean(name) == pytest.approx(values.mean())
        for share in (0.0, 0.5, 0.99, 1.0):
            exact = np.quantile(values, share, method="inverted_cdf")
            assert found.latencies.quantile(name, share) == pytest.approx(
                exact, rel=0.0101
            )


def test_rejected_requests_are_in_no_mean():
    latencies = Latencies()
    assert np.isnan(latencies.mean("total")) and np.isnan(
        latencies.quantile("total", 1)
    )
    nan = np.nan
    latencies.add(
        np.array([1.0, 2.0]),
        np.array([nan, 3.0]),
        np.array([nan, 6.0]),
        np.array([2, 2]),
    )
    assert latencies.count == 1 and latencies.mean("normalized") == 2.0


def test_columns_grow():
    times = RequestTimes()
    for numbers in ([5, 0], range(1024, 2048), [4000], []):
        numbers = np.array(numbers, np.int64)
        times.add(numbers, *(numbers * scale for scale in (1.0, 2.0, 3.0, 4.0)))
    np.testing.assert_array_equal(times.columns[:, 4000], [4000, 8000, 12000, 16000])
    np.testing.assert_array_equal(times.columns[2, [0, 5, 2047]], [0, 15, 6141])
    assert np.isnan(times.columns[0, 7])
