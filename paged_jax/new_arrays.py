"""Arrays of a new state: each a buffer of its own, so that all of it can be donated.

They are made on the host. `jnp.zeros` would compile a program for each shape, and an
engine's state has dozens.
"""

import jax
import numpy as np


def zeros(shape: int | tuple[int, ...], dtype: type = np.int32) -> jax.Array:
    """Returns zeros on the device."""
    return on_device(np.zeros(shape, dtype))


def full(
    shape: int | tuple[int, ...], value: float, dtype: type = np.int32
) -> jax.Array:
    """Returns an array of one value on the device."""
    return on_device(np.full(shape, value, dtype))


def on_device(values: np.ndarray) -> jax.Array:
    """Returns a copy on the device, whose memory is not the host's array's.

    It may be made later: `values` must not change afterwards.
    """
    return jax.device_put(values, may_alias=False)
