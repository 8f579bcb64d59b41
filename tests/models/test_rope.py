import jax.numpy as jnp
import numpy as np

from paged_jax.models.rope import (
    inverse_frequencies,
    linear_divisors,
    llama3_divisors,
    rotate,
    rotation,
)

D = 8


def test_frequencies_are_a_geometric_series():
    expected = [1.0, 10.0**-1, 10.0**-2, 10.0**-3]
    np.testing.assert_allclose(inverse_frequencies(D, 1e4), expected, rtol=1e-6)


def test_a_pair_turns_by_position_times_frequency():
    frequencies = inverse_frequencies(D, 1e4)
    positions = np.array([0, 3, 1000])
    x = np.random.default_rng(0).standard_normal((3, 2, D)).astype(np.float32)
    turned = np.asarray(rotate(jnp.asarray(x), rotation(positions, frequencies)))
    # As complex numbers, element i is the real part and element i + D / 2 the other.
    before, after = (a[..., : D // 2] + 1j * a[..., D // 2 :] for a in (x, turned))
    angle = positions[:, None, None] * frequencies.astype(np.float64)
    np.testing.assert_allclose(after, before * np.exp(1j * angle), atol=2e-4)
    np.testing.assert_array_equal(turned[0], x[0])


def test_scores_depend_on_the_distance_only():
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, D)).astype(np.float32)
    frequencies = inverse_frequencies(D, 1e4)

    def score(at_q, at_k):
        turn_q, turn_k = (rotation(np.array([p]), frequencies) for p in (at_q, at_k))
        return float(jnp.sum(rotate(jnp.asarray(q), turn_q) * rotate(k, turn_k)))

    np.testing.assert_allclose(score(17, 5), score(112, 100), rtol=1e-4)


def test_linear_scaling_stretches_every_position():
    plain = inverse_frequencies(D, 1e4)
    scaled = inverse_frequencies(D, 1e4, linear_divisors(D, 4.0))
    np.testing.assert_allclose(scaled, plain / 4, rtol=1e-6)


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones():
    divisors = llama3_divisors(
        64,
        500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    turns = 8192 * inverse_frequencies(64, 500000.0) / (2 * np.pi)
    fast, slow = turns > 4, turns < 1
    assert fast.any() and slow.any() and (~fast & ~slow).any()
    divisors = np.array(divisors)
    assert (divisors[fast] == 1).all() and (divisors[slow] == 8).all()
    between = divisors[~fast & ~slow]
    assert ((between > 1) & (between < 8)).all()
    assert (np.diff(divisors) >= 0).all()


def test_bfloat16_heads_are_rotated_in_float32():
    x = jnp.ones((1, 1, D), jnp.bfloat16)
    turns = rotation(np.array([5]), inverse_frequencies(D, 1e4))
    turned = rotate(x, turns)
    assert turned.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), turns)
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))
