"""Rounding keys and values to 8 bits: its bounds, and what is special."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.quantised_kv import (
    LEAST_SCALE,
    Quantised,
    bytes_per_vector,
    dequantise,
    is_quantised,
    quantise,
    scale_shape,
    stored_dtype,
)

INT8, E4M3 = jnp.int8, jnp.float8_e4m3fn
on_both = pytest.mark.parametrize("dtype", [INT8, E4M3])


def vectors(seed, spread=0.0, shape=(20, 3, 16)):
    """Vectors of numbers; with a spread, each of a magnitude of its own."""
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal(shape)
        * np.exp(spread * rng.standard_normal(shape[:-1]))[..., None]
    )
    return jnp.asarray(x, jnp.float32)


@on_both
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 4))
def test_the_error_is_within_the_bound(dtype, seed, spread):
    x = vectors(seed, spread)
    quantised = quantise(x, dtype)
    assert quantised.values.shape == x.shape
    assert quantised.scales.shape == x.shape[:-1]
    error = np.abs(np.asarray(dequantise(quantised), np.float64) - np.asarray(x))
    scales = np.asarray(quantised.scales, np.float64)[..., None]
    slack = 1 + 1e-5
    if dtype == INT8:
        bound = scales / 2
        top = np.abs(x).max(-1, keepdims=True)
        np.testing.assert_array_less(bound, top / 253)
    else:
        bound = np.maximum(np.abs(x) / 16, scales * 2**-10)
    assert (error <= bound * slack).all()


@on_both
@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_rounding_again_changes_nothing(dtype, spread):
    once = quantise(vectors(0, spread), dtype)
    again = quantise(dequantise(once), dtype)
    np.testing.assert_array_equal(again.values, once.values)
    np.testing.assert_array_equal(again.scales, once.scales)


@on_both
def test_the_largest_number_and_its_negative_are_kept(dtype):
    x = vectors(1).at[0, 0, 3].set(7.0).at[0, 0, 4].set(-7.0)
    numbers = dequantise(quantise(x, dtype))
    np.testing.assert_allclose(numbers[0, 0, 3:5], [7, -7], rtol=2**-8)
    np.testing.assert_array_equal(dequantise(quantise(-x, dtype)), -numbers)


@on_both
def test_scales_have_no_more_digits_than_bfloat16(dtype):
    scales = quantise(vectors(0, 8.0), dtype).scales
    assert scales.dtype == jnp.float32
    np.testing.assert_array_equal(scales.astype(jnp.bfloat16), scales)


@on_both
def test_a_vector_of_zeros_is_zeros_and_can_be_divided_by(dtype):
    x = vectors(2).at[4, 1].set(0.0)
    quantised = quantise(x, dtype)
    assert quantised.scales[4, 1] == LEAST_SCALE
    assert not np.asarray(dequantise(quantised))[4, 1].any()


@on_both
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_vector(dtype, bad):
    x = vectors(3)
    clean = np.asarray(dequantise(quantise(x, dtype)))
    got = quantise(x.at[5, 2, 7].set(bad), dtype)
    numbers = np.asarray(dequantise(got))
    assert np.isnan(numbers[5, 2]).all()
    assert not np.asarray(got.values)[5, 2].any()
    kept = np.ones(x.shape[:2], bool)
    kept[5, 2] = False
    np.testing.assert_array_equal(numbers[kept], clean[kept])


@on_both
def test_a_vector_is_the_same_in_any_batch(dtype):
    x = vectors(4, 3.0)
    together, alone = quantise(x, dtype), quantise(x[7:8, 1:2], dtype)
    np.testing.assert_array_equal(together.values[7:8, 1:2], alone.values)
    np.testing.assert_array_equal(together.scales[7:8, 1:2], alone.scales)


def test_every_pattern_of_e4m3_is_a_number_or_nan():
    bits = jnp.arange(256, dtype=jnp.uint8)[None]
    numbers = np.asarray(dequantise(Quantised(bits, jnp.ones(1))))[0]
    assert np.isnan(numbers[[0x7F, 0xFF]]).all()
    assert np.nanmax(numbers) == 448 and np.nanmin(np.abs(numbers[1:128])) == 2**-9
    assert len(np.unique(numbers[~np.isnan(numbers)])) == 253  # one 0


def test_what_a_cache_of_each_dtype_takes():
    assert stored_dtype("float8_e4m3fn") == jnp.uint8
    assert [bytes_per_vector(64, d) for d in ("float32", "bfloat16", "int8", E4M3)] == [
        256,
        128,
        68,
        68,
    ]
    assert [is_quantised(d) for d in ("int8", E4M3, jnp.uint8, "float16")] == [
        1,
        1,
        1,
        0,
    ]
    assert scale_shape((2, 5, 16, 3, 64)) == (2, 5, 3, 16)
