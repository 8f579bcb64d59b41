"""What differs between the versions of JAX that are supported, in one place."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# For `jax.jit(..., compiler_options=...)` and `lowered.compile(...)` of programs that
# hold a `BuddyPool`. XLA of jax 0.10 drops optimization barriers before it fuses, and
# then copies the allocator's arrays, which only the barriers keep in place.
COMPILER_OPTIONS: dict[str, str] = (
    {}
    if jax.__version_info__ >= (0, 11)
    else {"xla_disable_hlo_passes": "cse_barrier_expander"}
)


def compiler_options(prefix_caching: bool) -> dict[str, str]:
    """Returns the options for a serving loop, with or without a prefix cache.

    XLA of jax 0.10 cannot compile all loops with a prefix cache if the barriers stay;
    without them it makes copies of the pool's arrays (not of keys and values).
    """
    return {} if prefix_caching else COMPILER_OPTIONS


def read_first(values: Any) -> Any:
    """Returns a tree as it is, all of it read before what follows writes to it.

    XLA may else copy what is read. On jax 0.10 nothing is said, since its XLA fails at
    barriers in loops that are small enough to become a single kernel.
    """
    if jax.__version_info__ < (0, 11):
        return values
    return jax.lax.optimization_barrier(values)


def host_memory() -> NamedSharding | None:
    """Returns the sharding of arrays in the host's memory; None where that is all.

    Pinned memory, which a compiled program of an accelerator reads and writes in place.
    A mesh of one device, since only a `NamedSharding` makes the kind of memory a part
    of an argument's type when a program is compiled ahead of time.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return None
    mesh = Mesh(np.array([device]), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns what a program is compiled for: shape, dtype and kind of memory."""
    here = jax.typeof(x).memory_space == jax.memory.Space.Device
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=None if here else x.sharding)


def to_memory_of(goal: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` in the kind of memory that `goal` is in, under `jit`."""
    space = jax.typeof(goal).memory_space
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)
