"""Arrays of a new state: each a buffer of its own, so that all of it can be donated.

They are made on the host. `jnp.zeros` would compile a program for each shape, and an
engine's state has dozens.
"""

import jax
import numpy as np


def zeros(shape: int | tuple[int, ...], dtype: type = np.int32) -> jax.Array:
    """Returns zeros on the device."""
    return jax.device_put(np.zeros(shape, dtype))


def full(
    shape: int | tuple[int, ...], value: float, dtype: type = np.int32
) -> jax.Array:
    """Returns an array of one value on the device."""
    return jax.device_put(np.full(shape, value, dtype))


def on_device(values: np.ndarray) -> jax.Array:
    """Returns a copy on the device: `values` may change afterwards.

    On CPU, `device_put` alone uses the memory of an array that lies at a multiple of 64
    bytes, even with `may_alias=False`, and copies any other. Donating the first kind is
    safe, and costs a copy in the first call.
    """
    return jax.device_put(values.copy())
