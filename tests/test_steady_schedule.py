"""The steady state in which scheduling is timed."""

import pytest

from paged_jax.steady_schedule import steady_config, time_steady_schedule

pytestmark = pytest.mark.newest(
    reason="times the scheduler, which other tests check on each jax"
)


def test_everything_that_scheduling_does_is_in_the_trace():
    config = steady_config(8, 80)
    timed = time_steady_schedule(config, iterations=60, repeats=3)
    assert len(timed.seconds) == 3 and min(timed.seconds) > 0
    assert set(timed.events) == {"admitted", "retired", "grown", "copied"}
    assert min(timed.events.values()) > 0
    # Each request that is admitted copies the prefix's last block, once.
    assert timed.events["copied"] == timed.events["admitted"]
    assert 4 < timed.running <= 8
    # A running sequence fills one of a block's 16 slots in each iteration.
    assert 0.5 < timed.events["grown"] / (timed.running / 16) < 2


def test_a_trace_in_which_something_is_missing_is_refused():
    with pytest.raises(
        RuntimeError, match="a trace of 1 iterations has no .*; give it"
    ):
        time_steady_schedule(steady_config(8, 80), iterations=1, repeats=1)
