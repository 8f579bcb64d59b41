"""The virtual clock: points in time that stay exact over days of small steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.new_arrays import on_device

# Later than all else, in whole seconds.
NEVER = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Time:
    """Points in time: one float32 would stop counting milliseconds after three hours.

    Attributes:
      whole: i32[...]. Seconds since the start.
      part: f32[...]. What remains, from 0 to below 1.
    """

    whole: jax.Array
    part: jax.Array

    def __getitem__(self, index) -> "Time":
        """Returns some of the points."""
        return jax.tree.map(lambda x: x[index], self)

    def put(self, index: jax.Array, value: "Time") -> "Time":
        """Returns the points with those at an index replaced."""
        return jax.tree.map(lambda x, v: x.at[index].set(v), self, value)


def make_times(seconds: np.ndarray | float) -> Time:
    """Returns the points so many seconds after the start, f64[...], 0 or more."""
    seconds = np.asarray(seconds, np.float64)
    whole = np.floor(seconds)
    # Rounded to float32, the rest may become 1.
    part = np.minimum(np.float32(seconds - whole), np.nextafter(np.float32(1), 0))
    return Time(on_device(whole.astype(np.int32)), on_device(part.astype(np.float32)))


def to_seconds(times: Time) -> np.ndarray:
    """Returns seconds since the start, f64[...]; reads the device."""
    whole, part = jax.device_get((times.whole, times.part))
    return np.asarray(whole, np.float64) + np.asarray(part, np.float64)


def advance(time: Time, seconds: jax.Array) -> Time:
    """Returns a point that is later by `seconds` f32[], 0 or more."""
    part = time.part + seconds
    carry = jnp.floor(part)
    return Time(time.whole + carry.astype(jnp.int32), part - carry)


def not_after(a: Time, b: Time) -> jax.Array:
    """Returns whether `a` is `b` or before it, bool[...]."""
    return (a.whole < b.whole) | ((a.whole == b.whole) & (a.part <= b.part))


def later(a: Time, b: Time) -> Time:
    """Returns the later of two points."""
    a_first = not_after(a, b)
    return jax.tree.map(lambda x, y: jnp.where(a_first, y, x), a, b)
