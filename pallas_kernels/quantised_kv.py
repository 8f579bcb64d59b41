"""Keys and values in 8 bits, with a scale for each slot and KV head.

A key, or a value, is a vector of D numbers. It is stored as `vector / scale`, rounded
to int8 or to e4m3, and its float32 scale lies in an array of its own, f32[L, P, K, B]
beside [L, P, B, K, D]: of one head, the scales of a block lie side by side. What a slot
holds depends on its own token alone, so that keys and values are the same in any batch,
and blocks are shared, copied and moved like any other.

e4m3 is stored as its bits, uint8: XLA's CPU backend has no floats of 8 bits, and would
widen the whole cache to write to some of its slots.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

INT8 = jnp.dtype(jnp.int8)
E4M3 = jnp.dtype(jnp.float8_e4m3fn)
# What numbers of each dtype are stored as.
STORED = {INT8: jnp.dtype(jnp.int8), E4M3: jnp.dtype(jnp.uint8)}
_NUMBERS = {stored: dtype for dtype, stored in STORED.items()}
# The largest number that is used: e4m3 has no larger one, and int8 does without -128,
# so that a vector and its negative are stored alike.
_LARGEST = {INT8: 127.0, E4M3: 448.0}
# Of a vector of zeros: kernels divide by scales. Vectors of numbers far below it become
# zeros.
LEAST_SCALE = 2.0**-40


class Quantised(NamedTuple):
    """Vectors of D numbers in 8 bits.

    Attributes:
        values: int8[..., D], or uint8[..., D], the bits of e4m3.
        scales: f32[...], what the numbers are multiples of.
    """

    values: jax.Array
    scales: jax.Array


def stored_dtype(dtype: Any) -> jnp.dtype:
    """Returns the dtype of a cache of numbers of `dtype`; uint8 for e4m3."""
    return STORED.get(jnp.dtype(dtype), jnp.dtype(dtype))


def number_dtype(stored: Any) -> jnp.dtype:
    """Returns what a cache of that dtype holds: e4m3 for uint8."""
    return _NUMBERS.get(jnp.dtype(stored), jnp.dtype(stored))


def is_quantised(dtype: Any) -> bool:
    """Whether a cache of such numbers, or of that dtype, has scales."""
    return number_dtype(dtype) in STORED


def quantised_dtype(stored: Any) -> jnp.dtype | None:
    """Returns what a cache of that dtype holds in 8 bits; None if it does not."""
    return number_dtype(stored) if is_quantised(stored) else None


def multiplied_dtype(stored: Any) -> jnp.dtype:
    """Returns what kernels with 16-bit products multiply: bfloat16 for 8 bits.

    It holds every number of both dtypes, and weights times scales of any magnitude.
    """
    return jnp.dtype(jnp.bfloat16 if is_quantised(stored) else stored)


def quantise(x: jax.Array, dtype: Any) -> Quantised:
    """Rounds vectors to 8 bits, each with the scale that its largest number asks for.

    Of int8, numbers change by half a scale at most, 1/253 of the vector's largest; of
    e4m3 by 1/16 of themselves, or 2**-10 scales if that is more. Rounding what has been
    rounded changes nothing.

    Args:
        x: float[..., D].
        dtype: int8 or float8_e4m3fn, or what it is stored as.

    Returns:
        The values and scales. Of a vector with a number that is not finite the scale
        is NaN and the values are 0: all of it reads as NaN, and nothing else does.
    """
    numbers = number_dtype(dtype)
    x = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(x), axis=-1)
    finite = jnp.isfinite(top)
    # Not divided by: XLA turns some divisions into products, depending on shapes.
    scales = jnp.maximum(top * (1 / _LARGEST[numbers]), LEAST_SCALE)
    # To bfloat16: then a kernel that multiplies weights of 16 bits with scales loses
    # nothing of a weight of 1. The nearest will do: no number then rounds to more than
    # the largest.
    scales = lax.reduce_precision(scales, exponent_bits=8, mantissa_bits=7)
    values = jnp.where(finite[..., None], x * (1 / scales)[..., None], 0.0)
    if numbers == INT8:
        values = jnp.round(values)
    values = values.astype(numbers)
    if numbers == E4M3:
        values = lax.bitcast_convert_type(values, STORED[E4M3])
    return Quantised(values, jnp.where(finite, scales, jnp.nan))


def as_numbers(values: jax.Array) -> jax.Array:
    """Returns a cache as what it holds: what is uint8 as float8_e4m3fn."""
    if number_dtype(values.dtype) == E4M3:
        return lax.bitcast_convert_type(values, E4M3)
    return values


def widen(values: jax.Array) -> jax.Array:
    """Returns the numbers of a cache as float32, of a quantised one without scales."""
    return as_numbers(values).astype(jnp.float32)


def dequantise(quantised: Quantised) -> jax.Array:
    """Returns f32[..., D], the numbers that values and scales stand for."""
    return widen(quantised.values) * quantised.scales[..., None]


def scale_shape(cache_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns [L, P, K, B], the shape of the scales of values [L, P, B, K, D]."""
    layers, blocks, block_size, kv_heads, _ = cache_shape
    return layers, blocks, kv_heads, block_size


def bytes_per_vector(head_dim: int, dtype: Any) -> int:
    """Returns the bytes of a key, or of a value, in a cache of numbers of `dtype`."""
    scale = 4 if is_quantised(dtype) else 0
    return head_dim * stored_dtype(dtype).itemsize + scale


def check_scales(
    cache: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None
) -> None:
    """Raises where scales do not go with a cache [L, P, B, K, D] of keys, or of values.

    Raises:
        ValueError: a quantised cache without both scales, scales of another cache, or
            of another shape or dtype. One line.
    """
    given = {"k_scales": k_scales, "v_scales": v_scales}
    there = {name: x for name, x in given.items() if x is not None}
    quantised = is_quantised(cache.dtype)
    if len(there) != 2 * quantised:
        needs = "needs k_scales and v_scales" if quantised else "has no scales"
        got = " and ".join(there) or "neither"
        raise ValueError(f"A cache of {cache.dtype} {needs}, got {got}.")
    shape = scale_shape(cache.shape)
    for name, scales in there.items():
        if scales.shape != shape or scales.dtype != jnp.float32:
            raise ValueError(
                f"{name} must be float32{shape}, [L, P, K, B], got "
                f"{scales.dtype}{scales.shape}."
            )
