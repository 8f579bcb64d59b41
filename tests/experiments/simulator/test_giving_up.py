"""Given up is a run whose latency comes out above the threshold, and no other."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.simulator.costs import CostTerms
from experiments.simulator.evaluate import normalized_latency
from experiments.simulator.giving_up import all_fit, least_latency
from experiments.simulator.run import make_program, simulate
from experiments.simulator.trace import Trace, pieces
from paged_jax import EngineConfig

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=24,
    max_model_len=48,
    max_seqs=6,
    max_requests=6000,
    max_prefixes=0,
    token_budget=16,
    spare_blocks=0,
)


@functools.cache
def make_trace():
    """Returns requests for three pieces of steps; more than can be served in time."""
    rng = np.random.default_rng(0)
    arrival = np.cumsum(rng.exponential(1.5, CONFIG.max_requests))
    lengths = rng.integers(1, 20, (2, CONFIG.max_requests))
    return Trace(arrival, lengths[0], lengths[1][:, None])


def run(trace, **settings):
    nothing = CostTerms(*[0.0] * 11)
    program = make_program(CONFIG, dataclasses.replace(nothing, step_s=1.0))
    return simulate(CONFIG, trace, program, **settings)


@functools.cache
def in_full():
    return run(make_trace())


@pytest.mark.parametrize("share", [0.02, 0.5, 0.999, 1.0, 1.001, 10.0])
def test_the_verdict_is_that_of_the_full_run(share):
    full = in_full()
    latency = normalized_latency(full)
    threshold = share * latency
    found = run(make_trace(), give_up_above=threshold)
    assert not full.gave_up
    assert (normalized_latency(found) > threshold) == (latency > threshold)
    if share >= 1:
        assert not found.gave_up
        np.testing.assert_array_equal(found.ended, full.ended)
    if share < 0.1:
        assert found.gave_up and found.steps < full.steps / 2
        assert found.seconds < full.seconds
        over = np.isfinite(found.ended)
        np.testing.assert_array_equal(found.ended[over], full.ended[over])
        assert 0 < over.sum() < len(over)


def test_pieces_of_unknown_number_are_run_in_full():
    trace = make_trace().part(0, 300)
    assert not run(pieces(trace, 7), give_up_above=1e-6).gave_up


requests = st.tuples(st.floats(0, 100), st.integers(1, 50), st.floats(0.01, 100))


@given(st.lists(requests, min_size=1, max_size=10), st.floats(0, 200), st.floats(0, 9))
def test_the_bound_rises_to_the_mean(rows, now, more):
    arrival, output_len, latency = (np.array(column) for column in zip(*rows))
    ended = arrival + latency

    order = np.argsort(arrival)
    trace = Trace(arrival[order], output_len[order], output_len[order, None])

    def bound(now):
        seen = np.where(ended <= now, ended, np.inf)[order]
        return least_latency(trace, seen[trace.arrival <= now], now)

    mean = np.mean(latency / output_len)
    assert bound(now) <= bound(now + more) * (1 + 1e-12) <= mean * (1 + 1e-9)
    assert bound(ended.max()) == pytest.approx(mean)


@pytest.mark.parametrize(
    "changes, fits",
    [
        ({}, True),
        ({"max_n": 2}, True),
        ({"max_n": 3}, False),
        ({"max_n": 2, "max_prefixes": 1}, False),
        ({"memory": "max", "num_blocks": 31}, True),
        ({"memory": "max", "num_blocks": 31, "max_n": 2}, False),
    ],
)
def test_a_request_may_be_too_large_for_the_pool(changes, fits):
    assert all_fit(dataclasses.replace(CONFIG, **changes)) == fits
