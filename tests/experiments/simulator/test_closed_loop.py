"""Clients that send a request when their last one is done."""

import numpy as np
import pytest
from simulations import PerToken, draw_trace, run, small

from experiments.errors import UserError
from experiments.simulator.plain import simulate_plain
from experiments.simulator.run import simulator_config
from experiments.simulator.trace import Trace, pieces

COSTS = PerToken()


def most_at_once(found):
    """Returns the most requests that were in the system at one time."""
    moments = np.concatenate([found.arrival, found.ended])
    change = np.repeat([1, -1], len(found.arrival))
    # At one moment, first those that leave.
    order = np.lexsort((change, moments))
    return np.cumsum(change[order]).max()


@pytest.mark.parametrize("think_s", [0.0, 2.5])
@pytest.mark.parametrize("clients", [1, 5, 9, 500])
def test_a_simulation_in_plain_python_gives_the_same(clients, think_s):
    trace = draw_trace(120, seed=7)
    config = small(preemption="recompute", token_budget=24, max_requests=128)
    found = run(config, trace, COSTS, clients=clients, think_s=think_s)
    first, ended, steps = simulate_plain(
        simulator_config(config),
        trace,
        lambda tokens, rows: 0.5 + 0.125 * tokens,
        min(clients, 120),
        think_s,
    )
    np.testing.assert_allclose(found.first_token, first, atol=1e-3)
    np.testing.assert_allclose(found.ended, ended, atol=1e-3)
    assert found.steps == steps
    assert most_at_once(found) == min(clients, 120)
    if clients == 9:
        assert found.means["preemptions"] > 0


def test_a_client_thinks_before_it_sends_the_next_one():
    trace = Trace(np.array([7.0, 3.0, 5.0]), np.full(3, 4), np.array([[3], [1], [2]]))
    found = run(small(), trace, clients=1, think_s=10.0)
    np.testing.assert_array_equal(found.arrival, [0, 3 + 10, 3 + 10 + 1 + 10])
    np.testing.assert_array_equal(found.ended, found.arrival + [3, 1, 2])


@pytest.mark.parametrize("n, clients, slots", [(1, 8, 9), (1, 8, 40), (3, 4, 30)])
def test_a_ring_of_slots_gives_what_one_run_gives(n, clients, slots):
    trace = draw_trace(90 // n, n, seed=5)
    options = dict(clients=clients, think_s=0.5)
    whole = run(small(max_requests=128, max_n=n), trace, COSTS, **options)
    config = small(max_requests=slots, max_n=n)
    streamed = run(config, pieces(trace, 7), COSTS, **options)
    for name in ("arrival", "first_token", "ended", "output_len"):
        np.testing.assert_array_equal(getattr(streamed, name), getattr(whole, name))
    assert streamed.steps == whole.steps
    assert most_at_once(whole) == clients


def test_a_batch_that_comes_back_as_one_is_followed_by_the_next():
    config = small(batching="static", memory="max", num_blocks=48)
    trace = draw_trace(12, seed=1)
    found = run(config, trace, COSTS, together=True, clients=3)
    assert most_at_once(found) == 3
    ends = found.ended.reshape(4, 3)
    assert (ends == ends[:, :1]).all(), "batches of three, each over at once"
    np.testing.assert_array_equal(found.arrival[3:], found.ended[:-3])


@pytest.mark.parametrize(
    "changes, n, options, message",
    [
        ({}, 1, {"clients": -1}, "clients is -1"),
        ({}, 1, {"clients": 2, "think_s": -1.0}, "think_s is -1.0"),
        ({}, 1, {"clients": 2, "think_s": np.nan}, "think_s is nan"),
        ({"max_n": 2, "sharing": False}, 2, {"clients": 2}, "must share"),
        ({"max_requests": 8}, 1, {"clients": 9}, "max_requests is 8"),
    ],
)
def test_what_cannot_be_served_is_refused(changes, n, options, message):
    with pytest.raises(UserError, match=message):
        run(small(**changes), draw_trace(20, n), **options)
