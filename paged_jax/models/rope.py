"""Rotary position embedding, and the scalings of its frequencies."""

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(
    head_dim: int, theta: float, divisors: tuple[float, ...] = ()
) -> np.ndarray:
    """Returns f32[D / 2]: radians per position of each rotary pair.

    Args:
        head_dim: D.
        theta: base of the geometric series.
        divisors: D / 2 divisors of the frequencies, from `linear_divisors`,
            `llama3_divisors` or a checkpoint; empty for none.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if divisors:
        frequencies = frequencies / np.asarray(divisors, np.float32)
    return frequencies


def linear_divisors(head_dim: int, factor: float) -> tuple[float, ...]:
    """Divides all frequencies by one factor ("position interpolation")."""
    return (float(factor),) * (head_dim // 2)


def llama3_divisors(
    head_dim: int,
    theta: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> tuple[float, ...]:
    """Llama 3.1's scaling: slow pairs are slowed by `factor`, fast ones kept.

    A pair that turns fewer than `low_freq_factor` times over the original context is
    slow, one that turns more than `high_freq_factor` times is fast, and those between
    are interpolated in frequency.

    Args:
        head_dim: D.
        theta: base of the frequencies.
        factor: how much longer the context became.
        low_freq_factor: turns below which a pair is slow.
        high_freq_factor: turns above which a pair is fast.
        original_max_positions: tokens of the original context.

    Returns:
        D / 2 divisors.
    """
    frequencies = inverse_frequencies(head_dim, theta).astype(np.float64)
    turns = original_max_positions * frequencies / (2 * np.pi)
    kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    # frequency * (kept + (1 - kept) / factor), as a divisor
    return tuple((1.0 / (kept + (1.0 - kept) / factor)).tolist())


def rotation(
    positions: jax.Array, frequencies: np.ndarray
) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines f32[N, 1, D / 2] of each token's rotation.

    Args:
        positions: i32[N], position of each token in its sequence.
        frequencies: f32[D / 2], from `inverse_frequencies`.
    """
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates heads by position; element `i` pairs with `i + D / 2` (the HF layout).

    Args:
        x: dtype[N, heads, D], queries or keys.
        rotation: cosines and sines, f32[N, 1, D / 2].

    Returns:
        dtype[N, heads, D]; computed in float32.
    """
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
    return turned.astype(x.dtype)
