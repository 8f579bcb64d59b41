"""The clock loses nothing, whatever a step takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.simulator.clock import (
    advance,
    later,
    make_times,
    not_after,
    to_seconds,
)


def test_a_day_of_small_steps_is_a_day():
    steps = 1_000_000
    end = jax.jit(
        lambda t: jax.lax.fori_loop(
            0, steps, lambda _, t: advance(t, jnp.float32(0.0864)), t
        )
    )(make_times(0.0))
    # float32(0.0864) is off by 2e-9; a float32 sum would be off by hundreds of seconds.
    assert to_seconds(end) == pytest.approx(86400, abs=0.05)


def test_points_survive_the_way_to_the_device_and_back():
    seconds = np.array([0.0, 0.999999999, 3600.25, 1e6 + 1 / 3])
    np.testing.assert_allclose(to_seconds(make_times(seconds)), seconds, atol=1e-7)
    assert (np.asarray(make_times(seconds).part) < 1).all()


@pytest.mark.parametrize("seconds", [0.25, 1.0, 7.75, 100.5])
def test_a_step_may_be_longer_than_a_second(seconds):
    end = advance(make_times(3.5), jnp.float32(seconds))
    assert to_seconds(end) == 3.5 + seconds
    assert 0 <= float(end.part) < 1


def test_order():
    points = [0.0, 0.5, 1.25, 1.5, 2.0]
    for a in points:
        for b in points:
            x, y = make_times(a), make_times(b)
            assert bool(not_after(x, y)) == (a <= b)
            assert to_seconds(later(x, y)) == max(a, b)
